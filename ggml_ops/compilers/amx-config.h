// Included before amx/mmq.cpp of llama.cpp, and before no other file (compilers.cmake).
//
// The headers of GCC 11 and 12 say that ldtilecfg reads the first 8 of its 64 bytes. llama.cpp fills a local struct, so the
// compiler drops the stores of all rows and columns, and the first tile that is loaded kills the process with SIGILL. Here
// the instruction reads all 64. Clang needs no help, and with a later GCC this changes nothing.
#pragma once

#if defined(__AMX_TILE__) && defined(__GNUC__) && !defined(__clang__)
#include <immintrin.h>

static inline void sparq_tile_loadconfig(const void * config) {
    __asm__ volatile("ldtilecfg\t%0" : : "m"(*(const char (*)[64]) config));
}

#define _tile_loadconfig sparq_tile_loadconfig
#endif
