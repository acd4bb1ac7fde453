#include "sparse-rpc.h"

#include "ggml-backend.h"
#include "sparse-layout.h"

#include <map>
#include <mutex>

#ifdef _WIN32
#  include <winsock2.h>
#else
#  include <cerrno>
#  include <netinet/in.h>
#  include <netinet/tcp.h>
#  include <poll.h>
#  include <sys/socket.h>
#endif

static constexpr uint8_t VERSION = 1 + ggml_sparse_layout() % 255;

uint8_t ggml_sparse_rpc_version(const std::vector<ggml_backend_t> & backends) {
    for (ggml_backend_t backend : backends) {
        if (ggml_backend_dev_type(ggml_backend_get_device(backend)) != GGML_BACKEND_DEVICE_TYPE_CPU) {
            return 0;
        }
    }
    return VERSION;
}

static std::mutex mutex;
static std::map<std::string, uint8_t> versions;

void ggml_sparse_rpc_greeted(const std::string & endpoint, uint8_t version) {
    const std::lock_guard<std::mutex> lock(mutex);
    versions[endpoint] = version;
}

bool ggml_sparse_rpc_runs(const std::string & endpoint) {
    const std::lock_guard<std::mutex> lock(mutex);
    const auto it = versions.find(endpoint);
    return it != versions.end() && it->second == VERSION;
}

uint8_t ggml_sparse_rpc_own_version() {
    return VERSION;
}

#ifndef _WIN32
static void set_option(int socket, int level, int name, int value) {
    setsockopt(socket, level, name, &value, sizeof(value));
}
#endif

#ifdef __linux__
static constexpr int ARRIVED_MS = 20000; // until what was sent must have arrived

// false: the worker has closed its side, so it will neither read nor answer
static bool wait_for_room(int socket) {
    pollfd room = { socket, POLLOUT | POLLRDHUP, 0 };
    while (poll(&room, 1, ARRIVED_MS/4) == 0) {
        tcp_info info = {};
        socklen_t size = sizeof(info);
        getsockopt(socket, IPPROTO_TCP, TCP_INFO, &info, &size);
        set_option(socket, IPPROTO_TCP, TCP_USER_TIMEOUT, info.tcpi_unacked == 0 ? 0 : ARRIVED_MS);
    }
    set_option(socket, IPPROTO_TCP, TCP_USER_TIMEOUT, ARRIVED_MS);
    return room.revents != POLLRDHUP;
}
#endif

void ggml_sparse_rpc_keep_alive(int socket) {
#ifdef _WIN32
    (void) socket;
#else
    set_option(socket, SOL_SOCKET, SO_KEEPALIVE, 1);
#  ifdef __linux__
    set_option(socket, IPPROTO_TCP, TCP_KEEPIDLE, 5);  // s without a word until the first question ..
    set_option(socket, IPPROTO_TCP, TCP_KEEPINTVL, 5); // .. and to the next
    set_option(socket, IPPROTO_TCP, TCP_KEEPCNT, 3);   // questions
    set_option(socket, IPPROTO_TCP, TCP_USER_TIMEOUT, ARRIVED_MS);
#  endif
#endif
}

int64_t ggml_sparse_rpc_send(int socket, const char * data, size_t size) {
#ifdef __linux__
    while (true) {
        const ssize_t n = send(socket, data, size, MSG_DONTWAIT);
        if (n >= 0 || (errno != EAGAIN && errno != EINTR) || !wait_for_room(socket)) {
            return n;
        }
    }
#else
    return send(socket, data, size, 0);
#endif
}
