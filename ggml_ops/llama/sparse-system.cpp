#include "sparse-system.h"

#include "llama-sparse-tools.h"

#include "ggml-sparse.h"

#include <algorithm>
#include <atomic>
#include <cerrno>

static constexpr uint64_t MOST = 1 << 30; // bytes of a call

static std::atomic<bool> ending{ false };

#ifdef _WIN32

#include <windows.h>

#include <fcntl.h>
#include <io.h>

#include <filesystem>

int llama_sparse_file_open(const char * path) {
    return _wopen(std::filesystem::u8path(path).c_str(), _O_RDONLY | _O_BINARY | _O_NOINHERIT);
}

void llama_sparse_file_close(int fd) {
    _close(fd);
}

int64_t llama_sparse_file_size(int fd) {
    return _filelengthi64(fd);
}

// done: ReadFile or WriteFile, which take the offset with them
template <typename Data, typename F> static int64_t at_offset(F f, int fd, Data data, uint64_t n, uint64_t offset) {
    OVERLAPPED where = {};
    where.Offset     = (DWORD) offset;
    where.OffsetHigh = (DWORD) (offset >> 32);
    DWORD done = 0;
    if (!f((HANDLE) _get_osfhandle(fd), data, (DWORD) std::min(n, MOST), &done, &where) && GetLastError() != ERROR_HANDLE_EOF) {
        errno = GetLastError() == ERROR_DISK_FULL ? ENOSPC : EIO;
        return -1;
    }
    return done;
}

int64_t llama_sparse_file_read(int fd, char * data, uint64_t n, uint64_t offset) {
    return at_offset(ReadFile, fd, data, n, offset);
}

int64_t llama_sparse_file_write(int fd, const char * data, uint64_t n, uint64_t offset) {
    return at_offset(WriteFile, fd, data, n, offset);
}

size_t llama_sparse_page_size() {
    SYSTEM_INFO info;
    GetSystemInfo(&info);
    return info.dwPageSize;
}

bool llama_sparse_map_file(char *, size_t, int, uint64_t) {
    return false;
}

bool llama_sparse_map_empty(char *, size_t) {
    return false;
}

#else

#include <dirent.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <set>
#include <system_error>
#include <thread>

int llama_sparse_file_open(const char * path) {
    return open(path, O_RDONLY | O_CLOEXEC);
}

void llama_sparse_file_close(int fd) {
    close(fd);
}

int64_t llama_sparse_file_size(int fd) {
    struct stat file;
    return fstat(fd, &file) == 0 ? (int64_t) file.st_size : -1;
}

// what f returns, once no signal has interrupted it
template <typename F> static int64_t uninterrupted(F f) {
    int64_t done;
    do {
        done = f();
    } while (done < 0 && errno == EINTR);
    return done;
}

int64_t llama_sparse_file_read(int fd, char * data, uint64_t n, uint64_t offset) {
    return uninterrupted([&] { return pread(fd, data, std::min(n, MOST), (off_t) offset); });
}

int64_t llama_sparse_file_write(int fd, const char * data, uint64_t n, uint64_t offset) {
    return uninterrupted([&] { return pwrite(fd, data, std::min(n, MOST), (off_t) offset); });
}

size_t llama_sparse_page_size() {
    return sysconf(_SC_PAGESIZE);
}

bool llama_sparse_map_file(char * at, size_t n, int fd, uint64_t offset) {
    return mmap(at, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE, fd, (off_t) offset) != MAP_FAILED;
}

bool llama_sparse_map_empty(char * at, size_t n) {
    return mmap(at, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED | MAP_ANONYMOUS, -1, 0) != MAP_FAILED;
}

// The end of a pipe that a handler writes to, which is about all that a handler may do; a thread reads at the other end
static int signal_pipe = -1;

static void on_signal(int signal) {
    const int     err  = errno;
    const uint8_t byte = (uint8_t) signal;
    while (write(signal_pipe, &byte, 1) < 0 && errno == EINTR) {
    }
    errno = err;
}

// Ends the connections to the ports that this process listens on, or did in an earlier call. A client who waits for a reply that will not come is
// told so, and the thread that serves it goes on
static void hang_up(std::set<uint16_t> & ports) {
    DIR * folder = opendir("/dev/fd");
    while (const dirent * entry = folder ? readdir(folder) : nullptr) {
        const int    fd      = atoi(entry->d_name);
        int          listens = 0;
        sockaddr_in6 where   = {}; // of IPv4 it has the port in the same place
        socklen_t    n = sizeof(where), n_listens = sizeof(listens);
        if (getsockname(fd, (sockaddr *) &where, &n) != 0 || (where.sin6_family != AF_INET && where.sin6_family != AF_INET6)) {
            continue;
        }
        getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listens, &n_listens);
        if (listens) {
            ports.insert(where.sin6_port);
        } else if (ports.count(where.sin6_port) > 0) {
            shutdown(fd, SHUT_RDWR);
        }
    }
    if (folder) {
        closedir(folder);
    }
}

void llama_sparse_signals(void (*handler)(int)) {
    int ends[2];
    if (pipe(ends) != 0) {
        return;
    }
    fcntl(ends[0], F_SETFD, FD_CLOEXEC);
    fcntl(ends[1], F_SETFD, FD_CLOEXEC);
    try {
        std::thread([handler, fd = ends[0]] {
            std::set<uint16_t> ports;
            pollfd waiting = { fd, POLLIN, 0 };
            for (int n, delay = -1; (n = poll(&waiting, 1, delay)) >= 0 || errno == EINTR;) {
                uint8_t byte;
                if (n == 0) {
                    hang_up(ports);
                } else if (n > 0 && read(fd, &byte, 1) == 1) {
                    ending = true;
                    hang_up(ports); // while it listens: then the ports are known
                    handler(byte);
                    delay = 100; // ms: a connection may have been taken meanwhile
                }
            }
        }).detach();
    } catch (const std::system_error &) {
        close(ends[0]);
        close(ends[1]);
        return; // no more threads
    }
    signal_pipe = ends[1];
    struct sigaction action = {};
    action.sa_handler = on_signal;
    sigaction(SIGINT,  &action, nullptr);
    sigaction(SIGTERM, &action, nullptr);
}

#endif

bool llama_sparse_drop_pages(char * at, size_t n) {
#if defined(__linux__)
    return madvise(at, n, MADV_DONTNEED) == 0; // refused for pages that are locked
#else
    (void) at;
    (void) n;
    return false;
#endif
}

void llama_sparse_huge_pages(char * at, size_t n) {
#if defined(__linux__)
    constexpr uintptr_t PAGE = GGML_SPARSE_HUGE_PAGE;
    const uintptr_t first = ((uintptr_t) at + PAGE - 1)/PAGE*PAGE, last = ((uintptr_t) at + n)/PAGE*PAGE;
    if (last >= first + 2*PAGE) {
        madvise((void *) first, last - first, MADV_HUGEPAGE); // a wish: where the kernel refuses, nothing is lost
    }
#else
    (void) at;
    (void) n;
#endif
}

bool llama_sparse_is_ending() {
    return ending;
}

size_t llama_sparse_deep_stacks() {
    size_t size = SIZE_MAX;
#if defined(__GLIBC__)
    pthread_attr_t attr;
    pthread_getattr_default_np(&attr);
    rlimit space = {};
    getrlimit(RLIMIT_AS, &space);
    const uint64_t memory = (uint64_t) sysconf(_SC_PHYS_PAGES)*sysconf(_SC_PAGESIZE), n_threads = 64;
    size = std::min<uint64_t>(1 << 30, memory/4) & ~(uint64_t) 0xffff;
    // where the system counts what nobody touches, it refuses so much
    void * room = mmap(nullptr, n_threads*size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (room != MAP_FAILED && munmap(room, n_threads*size) == 0 && space.rlim_cur == RLIM_INFINITY) {
        pthread_attr_setstacksize(&attr, size);
        pthread_setattr_default_np(&attr);
    }
    pthread_attr_getstacksize(&attr, &size);
#endif
    return size;
}

int llama_sparse_file_read_all(int fd, char * data, uint64_t n, uint64_t offset) {
    while (n > 0) {
        const int64_t done = llama_sparse_file_read(fd, data, n, offset);
        if (done <= 0) {
            return (int) done;
        }
        data   += done;
        offset += done;
        n      -= done;
    }
    return 1;
}
