#include "sparse-document-state.h"

#include "llama-hparams.h"
#include "llama-io.h"
#include "llama-kv-cache-iswa.h"
#include "llama-memory-hybrid-iswa.h"
#include "llama-memory-hybrid.h"

#include "sparse-access.h"
#include "sparse-cache.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

namespace {

using access = llama_sparse_access;

struct writer : llama_io_write_i {
    std::vector<char> state;

    void write(const void * src, size_t n) override { state.insert(state.end(), (const char *) src, (const char *) src + n); }

    void write_tensor(ggml_tensor * t, size_t offset, size_t n) override {
        state.resize(state.size() + n);
        ggml_backend_tensor_get(t, &state[state.size() - n], offset, n);
    }

    size_t n_bytes() override { return state.size(); }
};

struct reader : llama_io_read_i {
    const std::vector<char> & state;
    size_t                    at = 0;

    explicit reader(const std::vector<char> & state) : state(state) {}

    const char * take(size_t n) {
        if (n > state.size() - at) {
            throw std::runtime_error("the state of the document ends early");
        }
        at += n;
        return &state[at - n];
    }

    void read(void * dst, size_t n) override { memcpy(dst, take(n), n); }
    void read_tensor(ggml_tensor * t, size_t offset, size_t n) override { ggml_backend_tensor_set(t, take(n), offset, n); }

    size_t n_bytes() override { return at; }
};

// throws std::runtime_error: no document can be kept of this cache
void check_cache(const llama_kv_cache & kv) {
    if (const std::string why = llama_sparse_why_not(kv); !why.empty()) {
        throw std::runtime_error("no document can be kept of this cache: " + why);
    }
    for (const auto & layer : access::layers(kv)) {
        if (!layer.k || !layer.v) {
            throw std::runtime_error("no document can be kept of this cache: a layer has no K or no V");
        }
    }
}

// the bytes that llama_memory_recurrent::state_write() makes of one sequence
uint64_t recurrent_bytes(const llama_memory_recurrent & m) {
    uint64_t res = 5*sizeof(uint32_t); // cells, the position and the number of sequences of one, two about the rows
    for (const auto * tensors : { &m.r_l, &m.s_l }) {
        for (const ggml_tensor * t : *tensors) {
            res += t ? sizeof(int32_t) + sizeof(uint64_t) + ggml_row_size(t->type, t->ne[0]) : 0;
        }
    }
    return res;
}

// ---- windows ----

// What stands before the rows of the windows. They are given their old cells where the cache is as large, since sums over positions in another order
// have other bits; so all that llama.cpp holds by default is kept, the window and a batch
struct windows_head {
    uint32_t n_row; // positions, up to the last one
    uint32_t size;  // cells of the cache
};

uint32_t most_rows(const llama_kv_cache & kv) { return GGML_PAD(access::hparams(kv).n_swa + 512, 256); }

uint64_t windows_bytes(const llama_kv_cache & kv) {
    uint64_t res = 0;
    for (const auto & layer : access::layers(kv)) {
        res += ggml_row_size(layer.k->type, layer.k->ne[0]) + ggml_row_size(layer.v->type, layer.v->ne[0]);
    }
    return sizeof(windows_head) + most_rows(kv)*(sizeof(uint32_t) + res);
}

// f(tensor, offset of a row, its bytes) for K and V of these cells in all layers
template <typename F>
void for_rows(const llama_kv_cache & kv, uint32_t stream, const std::vector<uint32_t> & cells, F f) {
    for (const auto & layer : access::layers(kv)) {
        for (ggml_tensor * t : { layer.k, layer.v }) {
            for (const uint32_t cell : cells) {
                f(t, stream*t->nb[2] + cell*t->nb[1], ggml_row_size(t->type, t->ne[0]));
            }
        }
    }
}

void write_windows(const llama_kv_cache & kv, llama_seq_id seq_id, uint32_t n_pos, writer & to) {
    const uint32_t stream = access::stream_of(kv, seq_id), n_most = std::min(n_pos, most_rows(kv));
    const auto &   cells  = access::cells(kv, stream);
    std::vector<uint32_t> at(n_most, UINT32_MAX); // the cell of each of the last positions
    for (uint32_t i = 0; i < cells.size(); ++i) {
        if (!cells.is_empty(i) && cells.seq_has(i, seq_id)) {
            if (const uint32_t back = n_pos - 1 - cells.pos_get(i); back < n_most) {
                at[n_most - 1 - back] = i;
            }
        }
    }
    at.erase(at.begin(), std::find(at.rbegin(), at.rend(), UINT32_MAX).base()); // before a gap nothing is whole
    if (at.size() < std::min(n_pos, access::hparams(kv).n_swa)) {
        throw std::runtime_error("layers with a window have forgotten the end of the document\n"
                                 "keep it before anything else is read, as sparq-cpp read does");
    }
    const size_t end = to.state.size() + windows_bytes(kv);
    const windows_head head = { (uint32_t) at.size(), kv.get_size() };
    to.write(&head, sizeof(head));
    to.write(at.data(), at.size()*sizeof(at[0]));
    for_rows(kv, stream, at, [&](ggml_tensor * t, size_t offset, size_t n) { to.write_tensor(t, offset, n); });
    to.state.resize(end);
}

void read_windows(llama_kv_cache & kv, llama_seq_id seq_id, uint32_t n_pos, reader & from) {
    const size_t end = from.at + windows_bytes(kv);
    windows_head head;
    from.read(&head, sizeof(head));
    if (head.n_row == 0 || head.n_row > std::min(n_pos, most_rows(kv))) {
        throw std::runtime_error("the windows of the document are damaged");
    }
    std::vector<uint32_t> old(head.n_row);
    from.read(old.data(), old.size()*sizeof(old[0]));

    const uint32_t stream = access::stream_of(kv, seq_id);
    const auto &   cells  = access::cells(kv, stream);
    const bool as_it_was = cells.get_used() == 0 && head.size == kv.get_size() && *std::max_element(old.begin(), old.end()) < head.size;
    // otherwise as many of the newest as there is room for
    const uint32_t n_room = kv.get_size() - cells.get_used(), n = std::min(head.n_row, n_room), first = head.n_row - n;
    if (n < std::min(n_pos, access::hparams(kv).n_swa)) {
        throw std::runtime_error("the layers with a window have no room beside other sequences\ntake --no-kv-unified");
    }
    llama_batch_allocr allocr(access::hparams(kv).n_pos_per_embd());
    llama_ubatch ubatch = allocr.ubatch_reserve(n, 1);
    for (uint32_t i = 0; i < n; ++i) {
        ubatch.pos[i]      = n_pos - n + i;
        ubatch.n_seq_id[i] = 1;
        ubatch.seq_id[i]   = &seq_id;
    }
    ubatch.seq_id_unq[0] = seq_id;
    const llama_kv_cache::slot_info to =
            as_it_was ? llama_kv_cache::slot_info { stream, stream, { (llama_seq_id) stream }, { old } } : kv.find_slot(ubatch, false);
    if (to.empty()) {
        throw std::runtime_error("llama.cpp finds no cells for the windows of the document");
    }
    kv.apply_ubatch(to, ubatch);
    const auto & at = to.idxs[0];
    size_t i = 0;
    for_rows(kv, stream, at, [&](ggml_tensor * t, size_t offset, size_t n_byte) {
        if (i++ % n == 0) {
            from.take(first*n_byte);
        }
        from.read_tensor(t, offset, n_byte);
    });
    from.at = end;
}

} // namespace

llama_sparse_memory llama_sparse_memory_of(llama_context & ctx) {
    auto * all = ctx.get_memory();
    llama_sparse_memory res = { llama_sparse_find_cache(all), nullptr, nullptr };
    if (!res.kv) {
        throw std::runtime_error("documents need a model with layers of attention, whose K and V they keep");
    }
    auto * iswa        = dynamic_cast<llama_kv_cache_iswa *>(all);
    auto * hybrid      = dynamic_cast<llama_memory_hybrid *>(all);
    auto * hybrid_iswa = dynamic_cast<llama_memory_hybrid_iswa *>(all);
    res.recurrent = hybrid ? hybrid->get_mem_recr() : hybrid_iswa ? hybrid_iswa->get_mem_recr() : nullptr;
    if (hybrid_iswa) {
        iswa = hybrid_iswa->get_mem_attn();
    }
    check_cache(*res.kv);
    if (iswa && !access::layers(*iswa->get_swa()).empty()) {
        res.windows = iswa->get_swa();
        check_cache(*res.windows);
    }
    return res;
}

uint64_t llama_sparse_memory::state_bytes() const { return (windows ? windows_bytes(*windows) : 0) + (recurrent ? recurrent_bytes(*recurrent) : 0); }

std::vector<char> llama_sparse_memory::state(llama_seq_id seq_id, uint32_t n_pos) const {
    writer out;
    if (windows) {
        write_windows(*windows, seq_id, n_pos, out);
    }
    if (recurrent) {
        if (recurrent->seq_pos_max(seq_id) != (llama_pos) n_pos - 1) {
            throw std::runtime_error("the recurrent layers are beyond the end of the document\n"
                                     "keep it before anything else is read, as sparq-cpp read does");
        }
        recurrent->state_write(out, seq_id, 0);
    }
    if (out.state.size() != state_bytes()) {
        throw std::runtime_error("the state of the recurrent layers is not of one sequence");
    }
    return std::move(out.state);
}

void llama_sparse_memory::set_state(llama_seq_id seq_id, uint32_t n_pos, const std::vector<char> & state) const {
    reader in(state);
    if (windows) {
        read_windows(*windows, seq_id, n_pos, in);
    }
    if (recurrent) {
        recurrent->state_read(in, seq_id, 0);
    }
}
