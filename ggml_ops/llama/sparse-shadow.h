#pragma once

// What we keep beside a KV cache: the transposed copy of K and the sums of V ("the shadow"), which groups of cells they are true for, and what
// tokens the cells hold.
//
// A group of cells is sealed, or it is not:
//
//   not sealed -> sealed    seal(), which two places call: the inputs of a graph that runs SEAL (sparse-input.cpp), for groups that are complete;
//                           and llama_sparse_seal() (sparse-seal.cpp), before a token, after a restore, when SparQ is switched on, or when asked
//   sealed -> not sealed    invalidate(), when llama.cpp writes K or V of a cell, which each place that does so tells us by a hook
//                           (llama-sparse-hooks.h): a batch, a restored state, a shift, a copied stream, a cleared cache; and for groups past the
//                           view of a graph, in which no cell is in use. rollback(), when the graph that was to seal it failed
//
// llama.cpp also tells of cells that it only tries to find room for. Their groups are then sealed once more, which costs time and nothing else.
// Switching sparse attention off keeps the tensors: switching it on again seals only what has changed.

#include "sparse-cache.h"
#include "sparse-pages.h"

#include "llama-sparse-hooks.h"

#include "ggml-cpp.h"
#include "ggml-sparse.h"

#include <algorithm>
#include <map>

// The layers that SPARQ_KV_IN_MEMORY lists, whether the model has them or not. Throws std::runtime_error, in one line
std::vector<uint32_t> llama_sparse_kv_in_memory();

// Is the context that this thread makes one of a draft, whose layers are not those that the variables of the environment are written for?
bool llama_sparse_makes_draft();

// the cache of a context that has the tensors of a shadow; nullptr: none has
llama_kv_cache * llama_sparse_find_shadowed(llama_memory_i * memory);

struct llama_sparse_shadow {
    llama_sparse_shadow(uint32_t n_stream, uint32_t n_cell);

    // ---- the tensors: none until they are made

    struct layer {
        ggml_tensor * k_t     = nullptr; // [n_pos, n_embd_k_gqa, n_stream] f16, or codes
        ggml_tensor * k_range = nullptr; // [2, n_grp and more, n_embd_k_gqa, n_stream] f16: scale and zero of the codes; only with codes
        ggml_tensor * v_sum   = nullptr; // [n_embd_v_gqa, n_sum, n_stream] f32; only with mean_v
        std::string   reason;            // why there is no k_t

        // the tensors that `spec` needs for layer ikv of the cache, without memory
        static layer make(ggml_context * ctx, const llama_kv_cache & kv, const llama_sparse_spec & spec, size_t ikv);

        // sets src.k_t, k_range and v_sum, as the ops see them, of as many streams as src.k has, from s0 on
        void view(ggml_context * ctx, uint32_t s0, ggml_sparse_src & src) const;

        // the same, and SEAL of them, whose result becomes src.k_t. src: the other tensors that SEAL reads
        ggml_tensor * seal(ggml_context * ctx, uint32_t s0, ggml_sparse_src & src, ggml_sparse_seal_params params) const;
    };

    // Those that `spec` needs, where K lies; keeps those that are there, if they will do. Throws std::runtime_error: no memory
    void make_tensors(llama_kv_cache & kv, const llama_sparse_spec & spec);

    bool          has_tensors() const { return !layers.empty(); }
    const layer & at(int32_t ikv) const { return layers[ikv]; } // k_t == nullptr: this layer of the cache has no shadow
    int32_t       n_bit() const { return bits; }
    std::map<ggml_backend_dev_t, size_t> bytes() const; // of each device that holds some

    // ---- the sealed groups: their part of the tensors equals K and V

    const std::vector<uint8_t> & sealed(uint32_t stream) const { return flags[stream]; } // [n_grp]

    void invalidate();
    void invalidate(uint32_t stream, uint32_t from_group = 0);
    void invalidate(uint32_t stream, const std::vector<uint32_t> & cells);

    // A graph is about to run that seals the groups that seal() names. They count as sealed at once, so that its other nodes read them. If the
    // graph fails, rollback() takes that back. Nobody tells us that a graph is through, so the next one begins with commit()
    void seal(uint32_t stream, uint32_t group);
    void commit() { pending.clear(); }
    void rollback();

    // calls f(group) for the complete groups below n_kv, ascending, that are not sealed, until it returns false
    template <typename F>
    void for_sealable(const llama_kv_cells & cells, uint32_t stream, uint32_t n_kv, F f) const {
        const uint32_t n_full = std::min(n_kv, cells.used_max_p1())/GGML_SPARSE_GROUP;
        for (uint32_t g = 0; g < n_full; ++g) {
            bool full = !flags[stream][g];
            for (uint32_t i = 0; i < GGML_SPARSE_GROUP && full; ++i) {
                full = !cells.is_empty(g*GGML_SPARSE_GROUP + i);
            }
            if (full && !f((int32_t) g)) {
                return;
            }
        }
    }

    // ---- the cells: was the token that was written last evaluated without being asked for its logits?

    bool is_prompt (uint32_t stream, uint32_t cell) const { return prompt[stream][cell] != 0; }
    void set_prompt(uint32_t stream, const std::vector<uint32_t> & cells, const int8_t * output); // nullptr: it is not known, so no
    void copy_prompt(uint32_t from, uint32_t to) { prompt[to] = prompt[from]; }

    llama_sparse_pages pages; // of documents, where K and V lie

private:
    std::vector<layer> layers; // by layer of the cache
    int32_t            bits      = 16;
    bool               has_v_sum = false;
    bool               was_asked = false; // by gpu_min_mb

    std::vector<ggml_context_ptr>        ctxs;
    std::vector<ggml_backend_buffer_ptr> bufs;

    std::vector<std::vector<uint8_t>> flags;  // [n_stream][n_grp]
    std::vector<std::vector<uint8_t>> prompt; // [n_stream][n_cell]

    std::vector<std::pair<uint32_t, uint32_t>> pending; // (stream, group) that the graph at hand seals
};
