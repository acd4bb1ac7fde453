#pragma once

// What POSIX and Windows do in different ways: files that are read and written at an offset, and the pages of memory.

#include <cstddef>
#include <cstdint>

// To read, by its path in UTF-8. < 0: it cannot be opened
int  llama_sparse_file_open(const char * path);
void llama_sparse_file_close(int fd);

int64_t llama_sparse_file_size(int fd); // < 0: unknown

// Some of n bytes at an offset, wherever others read. Returns how many; 0 at the end of the file; < 0: errno says why
int64_t llama_sparse_file_read (int fd, char       * data, uint64_t n, uint64_t offset);
int64_t llama_sparse_file_write(int fd, const char * data, uint64_t n, uint64_t offset);

// All of n bytes at an offset. 0: the file ends before; < 0: errno says why
int llama_sparse_file_read_all(int fd, char * data, uint64_t n, uint64_t offset);

size_t llama_sparse_page_size();

// Other pages take the place of those at `at`, where one begins: private ones of a file, or empty ones. False: the system refuses. Windows always
// does: only memory that was reserved for it could change its pages there, and that of K and V comes from the C library
bool llama_sparse_map_file(char * at, size_t n, int fd, uint64_t offset);
bool llama_sparse_map_empty(char * at, size_t n);

// Whole pages get new, empty memory when they are next touched. False: the system refuses, or would not fill them with zeros
bool llama_sparse_drop_pages(char * at, size_t n);

// Rows of K and V, gathered, lie in a page each: without huge pages address translation takes longer than the bytes
void llama_sparse_huge_pages(char * at, size_t n);

// Has a signal asked this program to end? Of llama-server alone
bool llama_sparse_is_ending();

// Lets threads that begin from here on have a stack of a gigabyte, of which pages that are not touched cost nothing. Returns what they have;
// SIZE_MAX: it does not matter, because only std::regex of GNU's library takes so much
size_t llama_sparse_deep_stacks();
