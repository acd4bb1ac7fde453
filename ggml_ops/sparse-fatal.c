#include "sparse-fatal.h"

#ifdef _WIN32

void ggml_sparse_report_fatal_signals(const char * hint) {
    GGML_UNUSED(hint);
}

#else

#include <signal.h>
#include <stddef.h>
#include <string.h>
#include <unistd.h>

static const struct {
    int number;
    const char * text;
    const char * hint; // NULL: the program's
} FATAL[] = {
    { SIGILL, "SIGILL (illegal instruction)" },
    { SIGSEGV, "SIGSEGV (segmentation fault)" },
    { SIGBUS, "SIGBUS (bus error)", "a model or a document was made shorter while it was in use, or its disk failed: get the file again" },
    { SIGFPE, "SIGFPE (floating point exception)" },
    { SIGABRT, "SIGABRT (aborted)" },
};
enum { N_FATAL = sizeof(FATAL) / sizeof(FATAL[0]) };

static const char * last_hint = "";

static void put(const char * text) {
    if (write(STDERR_FILENO, text, strlen(text)) < 0) {
        return; // nobody reads it
    }
}

// only what POSIX allows in a handler
static void on_fatal(int number) {
    put("\nerror: this program died of "); // something else may be on the line
    for (int i = 0; i < N_FATAL; i++) {
        if (FATAL[i].number == number) {
            put(FATAL[i].text);
            put("\nhint: ");
            put(FATAL[i].hint ? FATAL[i].hint : last_hint);
            put("\n");
        }
    }
    raise(number); // it is held back until we return, and then has its default action
}

void ggml_sparse_report_fatal_signals(const char * hint) {
    last_hint = hint;
    for (int i = 0; i < N_FATAL; i++) {
        struct sigaction before;
        if (sigaction(FATAL[i].number, NULL, &before) == 0 && before.sa_handler == SIG_DFL) {
            struct sigaction ours = { .sa_handler = on_fatal, .sa_flags = SA_RESETHAND | SA_ONSTACK };
            sigemptyset(&ours.sa_mask);
            sigaction(FATAL[i].number, &ours, NULL);
        }
    }
}

#endif
