#include "sparse-rpc.h"

#include "ggml-backend.h"
#include "sparse-layout.h"

#include <map>
#include <mutex>

#ifndef _WIN32
#  include <netinet/in.h>
#  include <netinet/tcp.h>
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

void ggml_sparse_rpc_keep_alive(int socket) {
#ifdef _WIN32
    (void) socket;
#else
    const auto set = [&](int level, int name, int value) { setsockopt(socket, level, name, &value, sizeof(value)); };
    set(SOL_SOCKET, SO_KEEPALIVE, 1);
#  ifdef __linux__
    set(IPPROTO_TCP, TCP_KEEPIDLE, 5);         // s without a word until the first question ..
    set(IPPROTO_TCP, TCP_KEEPINTVL, 5);        // .. and to the next
    set(IPPROTO_TCP, TCP_KEEPCNT, 3);          // questions
    set(IPPROTO_TCP, TCP_USER_TIMEOUT, 20000); // ms until what was sent must have arrived
#  endif
#endif
}
