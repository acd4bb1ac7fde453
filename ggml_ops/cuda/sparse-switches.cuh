#pragma once

// Experiments, off until a device has timed them. tests/cuda/test_races.py holds them to the same results
#define SPARQ_EARLY 0 // 1: what there is to see is read before the kernel in front is through, but in the first layer; 2: always
#define SPARQ_HEADS_8 0 // 1: with more than four query heads per KV head, codes and rows are read once for eight
#define SPARQ_SINGLE 0 // 1: a cluster of one block has the barriers of a block
#define SPARQ_FENCE 0 // 1: barriers that order shared memory alone do not wait for global memory (CUDA 12.8)
#define SPARQ_SMEM_KEYS 0 // 1: what is ranked, and the lists of what is selected, are in the shared memory of the block that owns them
#define SPARQ_DSMEM_FINISH 0 // 1: blocks read the others' states and sums of V from shared memory
#define SPARQ_PIPE_SCAN 0 // 1: codes are asked for before those in front of them are worked on, and ranges four at a time
#define SPARQ_PIPE_ROWS 0 // 1: rows are asked for before those in front of them are worked on
#define SPARQ_FORCED_EARLY 0 // 1: with one query head per KV head, forced cells are attended while a warp looks for the cut
#define SPARQ_MMA 0 // 1: with several query heads per KV head, codes of 4 bits are read once for all of a pass, and multiplied by tensor cores
