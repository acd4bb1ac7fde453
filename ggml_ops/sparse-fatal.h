#pragma once

// A program that dies by a signal says so, in one line on stderr and a hint. It runs no Python then, so C must do it.
//
// It is part of ggml-base, which has no instructions but those of every CPU of its kind, and so also tells of a CPU that cannot
// run the rest of the library.

#include "ggml.h"

#ifdef __cplusplus
extern "C" {
#endif

// From now on SIGILL, SIGSEGV, SIGBUS, SIGFPE and SIGABRT are reported before the process dies of them, as it would without
// this: the exit status and the core dump are the same. A signal that has a handler already is left alone.
// hint: printed behind "hint: "; it must stay alive
GGML_API void ggml_sparse_report_fatal_signals(const char * hint);

#ifdef __cplusplus
}
#endif
