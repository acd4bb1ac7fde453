#pragma once

// No exception may leave a C function: what f throws becomes the text of its caller, or a line of the log.

#include "llama-impl.h"

#include <cstdio>
#include <exception>
#include <string>

inline void llama_sparse_write_text(const std::string & s, char * buf, size_t n) {
    if (buf && n > 0) {
        snprintf(buf, n, "%s", s.c_str());
    }
}

// what f gives, a number; -1 if it throws, and err says why
template <typename F> auto llama_sparse_guarded(char * err, size_t n_err, F f) -> decltype(f()) {
    try {
        return f();
    } catch (const std::exception & e) {
        llama_sparse_write_text(e.what(), err, n_err);
        return -1;
    }
}

// writes the text that f gives, or that of what it throws; the length, or -1
template <typename F> int32_t llama_sparse_guarded_text(char * buf, size_t n, F f) {
    return llama_sparse_guarded(buf, n, [&] {
        const std::string s = f();
        llama_sparse_write_text(s, buf, n);
        return (int32_t) s.size();
    });
}

// what f gives, or `otherwise` if it throws
template <typename T, typename F> T llama_sparse_logged(const char * who, T otherwise, F f) {
    try {
        return f();
    } catch (const std::exception & e) {
        LLAMA_LOG_ERROR("%s: %s\n", who, e.what());
        return otherwise;
    }
}
