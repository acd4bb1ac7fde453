// Documents: what a sequence has read, in a file. Opening one maps the file's pages to where K and V lie, so that no row is read before a token
// reads it; the shadow, a small part of the bytes, is copied. The file around this image, its header and its tokens, is the program's: here it is a
// descriptor and an offset.
//
// What layers that forget know of a text (sparse-document-state.h) can not be cut: the image has their state at its end.

#include "sparse-document-state.h"
#include "sparse-guarded.h"
#include "sparse-seal.h"
#include "sparse-system.h"

#include "llama-impl.h"
#include "llama-model.h"

#include "sparse-codes.h"
#include "sparse-layout.h"

#include <atomic>
#include <cerrno>
#include <cstring>
#include <future>
#include <locale>
#include <numeric>
#include <sstream>
#include <stdexcept>

namespace {

// Parts of the image begin on a page of any system that we know
constexpr uint64_t ALIGN = 64*1024;

// Only what lies in buffers of this size and more is mapped: a smaller one is copied in no time
constexpr size_t MIN_MAPPED = 64 << 20;

// A document begins at a cell where a sum block begins
constexpr uint32_t CELLS = GGML_SPARSE_GROUP*GGML_SPARSE_SUM;

uint64_t aligned(uint64_t n) { return (n + ALIGN - 1)/ALIGN*ALIGN; }

// n_row rows of row_bytes each: in a tensor every nb bytes from `at` on, and one after another in the image
struct tensor_rows {
    ggml_tensor * t;
    size_t   at, nb, row_bytes, n_row;
    uint64_t offset;
};

struct image {
    std::vector<tensor_rows> rows;   // K and V of all positions, in their order
    std::vector<tensor_rows> shadow; // of the groups that they complete
    uint64_t          states = 0; // where two states begin: while one is written, the other is whole
    uint64_t          bytes = 0;
};

// where a document of n_pos positions lies in a cache
struct place {
    uint32_t stream;
    uint32_t cell; // the first one
    uint32_t n_pos;

    uint32_t group()   const { return cell/GGML_SPARSE_GROUP; }
    uint32_t n_group() const { return n_pos/GGML_SPARSE_GROUP; } // complete ones
};

// in the cache of a sequence, of which 0 is always there. Throws std::runtime_error: such a document can not be
place place_of(const llama_context & ctx, const llama_kv_cache & kv, llama_seq_id seq, uint32_t n_pos) {
    if (n_pos == 0) {
        throw std::runtime_error("a document has at least one position");
    }
    llama_sparse_check_seq(ctx, seq);
    return { llama_sparse_access::stream_of(kv, seq), 0, n_pos };
}

// what stands before a state in the image
struct state_head {
    uint64_t n_pos; // that are read
    uint64_t hash;
};

uint64_t hash_of(uint64_t n_pos, const std::vector<char> & state) { // FNV-1a, of eight bytes at a time: windows may have gigabytes
    uint64_t res = 14695981039346656037u ^ n_pos;
    for (size_t i = 0; i < state.size(); i += 8) {
        uint64_t x = 0;
        memcpy(&x, &state[i], std::min<size_t>(8, state.size() - i));
        res = (res ^ x)*1099511628211u;
        res ^= res >> 32; // or the highest bits would move nothing
    }
    return res;
}

// the first layer of a cache that has a shadow; nullptr: none has
const llama_sparse_shadow::layer * shadowed_layer(llama_kv_cache & kv) {
    const auto & shadow = llama_sparse_access::shadow(kv);
    for (size_t ikv = 0; shadow && shadow->has_tensors() && ikv < llama_sparse_access::layers(kv).size(); ++ikv) {
        if (shadow->at(ikv).k_t) {
            return &shadow->at(ikv);
        }
    }
    return nullptr;
}

// What K and V are, beside the weights: types, Hadamard rotations, RoPE, which of its two tables a model takes for a context of this length, and whether
// tokens see what comes after them. What else could change them (adapters, control vectors, other metadata) no document is made with, and llama-server
// uses none with it
std::string kind_of_rows(const llama_context & ctx, const llama_sparse_memory & m) {
    const auto & c     = ctx.get_cparams();
    const auto & layer = llama_sparse_access::layers(*m.kv).front();
    const auto & table = ctx.get_model().layers[layer.il];
    std::ostringstream res;
    res.imbue(std::locale::classic()); // whatever the program writes for a decimal point
    res.precision(9);
    res << ggml_type_name(layer.k->type) << "/" << ggml_type_name(layer.v->type) << ",rotated=" << llama_sparse_n_rot(*m.kv);
    if (ggml_is_quantized(layer.v->type)) { // no other V is rotated
        res << (llama_sparse_access::attn_rot_v(*m.kv) ? "/v" : "/-");
    }
    res << ",rope=" << c.rope_freq_base << "/" << c.rope_freq_scale << "/" << c.n_ctx_orig_yarn << "/" << c.yarn_ext_factor << "/"
        << c.yarn_attn_factor << "/" << c.yarn_beta_fast << "/" << c.yarn_beta_slow << (c.causal_attn ? "" : ",not causal");
    if (table.rope_long) {
        res << (ctx.get_model().get_rope_factors(c, layer.il) == table.rope_long ? ",long" : ",short");
    }
    if (m.has_state()) {
        res << ",state=" << m.state_bytes();
    }
    return res.str();
}

// what the shadow is: its type, sums of V, layers, which a GPU may have without, and what its bytes mean; "": there is none
std::string kind_of_shadow(llama_kv_cache & kv) {
    const auto * first = shadowed_layer(kv);
    if (!first) {
        return "";
    }
    const auto & shadow = llama_sparse_access::shadow(kv);
    std::string res = ggml_sparse_shadow_name(shadow->n_bit()) + std::string(first->v_sum ? ",mean_v" : "") + ",layers=";
    for (size_t ikv = 0; ikv < llama_sparse_access::layers(kv).size(); ++ikv) {
        res += shadow->at(ikv).k_t ? 'x' : '-';
    }
    return res + ",layout=" + std::to_string(ggml_sparse_layout());
}

image image_of(const llama_sparse_memory & m, const place & p) {
    auto & kv = *m.kv;
    image res;
    const auto add = [&](std::vector<tensor_rows> & parts, ggml_tensor * t, size_t at, size_t nb, size_t row_bytes, size_t n_row) {
        parts.push_back({ t, at, nb, row_bytes, n_row, res.bytes });
        res.bytes += aligned(row_bytes*n_row);
    };
    for (const auto & layer : llama_sparse_access::layers(kv)) {
        for (ggml_tensor * t : { layer.k, layer.v }) {
            add(res.rows, t, p.stream*t->nb[2] + p.cell*t->nb[1], t->nb[1], ggml_row_size(t->type, t->ne[0]), p.n_pos);
        }
    }
    if (m.has_state()) {
        res.states = res.bytes;
        res.bytes += 2*aligned(sizeof(state_head) + m.state_bytes());
    }
    const auto & shadow = llama_sparse_access::shadow(kv);
    if (!shadowed_layer(kv) || p.n_group() == 0) {
        return res;
    }
    const size_t size = ggml_sparse_shadow_bytes(GGML_SPARSE_GROUP, shadow->n_bit());
    for (size_t ikv = 0; ikv < llama_sparse_access::layers(kv).size(); ++ikv) {
        const auto & l = shadow->at(ikv);
        if (!l.k_t) {
            continue;
        }
        add(res.shadow, l.k_t, p.stream*l.k_t->nb[2] + p.group()*size, l.k_t->nb[1], p.n_group()*size, l.k_t->ne[1]);
        if (const ggml_tensor * r = l.k_range) {
            add(res.shadow, l.k_range, p.stream*r->nb[3] + p.group()*r->nb[1], r->nb[2], p.n_group()*r->nb[1], r->ne[2]);
        }
        if (const ggml_tensor * s = l.v_sum) {
            // without the total of a sum block that is not complete, which nobody reads
            add(res.shadow, l.v_sum, p.stream*s->nb[2] + ggml_sparse_sum_row(p.group())*s->nb[1], s->nb[1], s->nb[1], ggml_sparse_sum_row(p.n_group()));
        }
    }
    return res;
}

// The cell of the first position of a sequence that holds [0, n_read), in their order. Throws std::runtime_error
uint32_t first_cell(llama_kv_cache & kv, llama_seq_id seq, uint32_t stream, uint32_t n_read) {
    const auto & cells = llama_sparse_access::cells(kv, stream);
    uint32_t first = 0;
    while (first < cells.size() && (cells.is_empty(first) || !cells.seq_has(first, seq))) {
        ++first;
    }
    for (uint32_t i = 0; i < n_read; ++i) {
        const uint32_t cell = first + i;
        if (cell >= cells.size() || cells.is_empty(cell) || !cells.seq_has(cell, seq) || cells.pos_get(cell) != (llama_pos) i) {
            throw std::runtime_error("the positions of the sequence do not lie one after another in the cache\nread the document into an empty one");
        }
    }
    if (first % CELLS != 0) {
        throw std::runtime_error("the sequence does not begin where a document can\nread the document into an empty cache");
    }
    return first;
}

// throws std::runtime_error: the disk is full, say
void write_all(int fd, const char * data, uint64_t n, uint64_t offset) {
    while (n > 0) {
        const int64_t done = llama_sparse_file_write(fd, data, n, offset);
        if (done <= 0) {
            throw std::runtime_error(std::string("cannot write: ") + strerror(done < 0 ? errno : ENOSPC));
        }
        data   += done;
        offset += done;
        n      -= done;
    }
}

constexpr size_t PIECE = 4 << 20; // bytes at a time

// rows [from, to) of a part, to the file
void write_rows(int fd, uint64_t offset, const tensor_rows & p, size_t from, size_t to) {
    const size_t n_rows = std::max<size_t>(1, PIECE/p.row_bytes);
    std::vector<char> piece;
    for (size_t i = from; i < to; i += n_rows) {
        const size_t n = std::min(n_rows, to - i);
        piece.resize(n*p.row_bytes);
        for (size_t j = 0; j < n; ++j) {
            if (p.nb == p.row_bytes) {
                ggml_backend_tensor_get(p.t, piece.data(), p.at + i*p.nb, piece.size());
                break;
            }
            ggml_backend_tensor_get(p.t, &piece[j*p.row_bytes], p.at + (i + j)*p.nb, p.row_bytes);
        }
        write_all(fd, piece.data(), piece.size(), offset + p.offset + i*p.row_bytes);
    }
}

// throws std::runtime_error
void read_all(int fd, char * data, uint64_t n, uint64_t offset) {
    const int done = llama_sparse_file_read_all(fd, data, n, offset);
    if (done <= 0) {
        throw std::runtime_error(done < 0 ? std::string("cannot read the document: ") + strerror(errno) : "the document ends early");
    }
}

// rows [from, to) of a part, from the file
void read_rows(int fd, uint64_t offset, const tensor_rows & p, size_t from, size_t to) {
    const bool   is_host = ggml_backend_buffer_is_host(p.t->buffer);
    const size_t n_rows  = p.nb == p.row_bytes ? std::max<size_t>(1, PIECE/p.row_bytes) : 1;
    std::vector<char> piece(is_host ? 0 : n_rows*p.row_bytes);
    for (size_t i = from; i < to; i += n_rows) {
        const size_t n  = std::min(n_rows, to - i)*p.row_bytes, at = p.at + i*p.nb;
        char *       dst = is_host ? (char *) p.t->data + at : piece.data();
        read_all(fd, dst, n, offset + p.offset + i*p.row_bytes);
        if (!is_host) {
            ggml_backend_tensor_set(p.t, dst, at, n);
        }
    }
}

// where the state after n_pos positions is, in the file: the place of two that has it, or else the first
uint64_t state_at(int fd, uint64_t offset, const llama_sparse_memory & m, const image & im, uint64_t n_pos) {
    const uint64_t second = im.states + aligned(sizeof(state_head) + m.state_bytes());
    state_head head = {};
    llama_sparse_file_read(fd, (char *) &head, sizeof(head), offset + second); // nothing, while the file has not grown to it
    return offset + (head.n_pos == n_pos ? second : im.states);
}

// The state after `to` positions, to the file, beside that after `from`, with which an interrupted reading goes on. Throws std::runtime_error
void write_state(int fd, uint64_t offset, const llama_sparse_memory & m, const image & im, llama_seq_id seq_id, uint64_t from, uint64_t to) {
    const std::vector<char> state = m.state(seq_id, to);
    const uint64_t first = offset + im.states, second = first + aligned(sizeof(state_head) + m.state_bytes());
    const uint64_t at    = from > 0 && state_at(fd, offset, m, im, from) == first ? second : first;
    const state_head none = {}, head = { to, hash_of(to, state) };
    write_all(fd, (const char *) &none, sizeof(none), at); // until it is whole
    write_all(fd, state.data(), state.size(), at + sizeof(head));
    write_all(fd, (const char *) &head, sizeof(head), at);
}

// throws std::runtime_error
std::vector<char> read_state(int fd, uint64_t offset, const llama_sparse_memory & m, const image & im, uint64_t n_pos) {
    state_head head;
    std::vector<char> res(m.state_bytes());
    const uint64_t at = state_at(fd, offset, m, im, n_pos);
    read_all(fd, (char *) &head, sizeof(head), at);
    read_all(fd, res.data(), res.size(), at + sizeof(head));
    if (head.n_pos != n_pos || head.hash != hash_of(n_pos, res)) {
        throw std::runtime_error("the document has no state of its windows or recurrent layers after " + std::to_string(n_pos) + " positions\nread it again");
    }
    return res;
}

// All rows of these parts, by several threads, since each copies and touches its pages for the first time. Throws std::runtime_error
void read_parts(int fd, uint64_t offset, const std::vector<tensor_rows> & parts, int n_threads) {
    constexpr size_t ROWS = 64; // at a time
    std::vector<std::pair<const tensor_rows *, size_t>> jobs;
    for (const tensor_rows & p : parts) {
        for (size_t i = 0; i < p.n_row; i += ROWS) {
            jobs.emplace_back(&p, i);
        }
    }
    std::atomic<size_t> next(0);
    std::vector<std::future<void>> threads;
    for (int t = 0; t < std::max(n_threads, 1); ++t) {
        threads.push_back(std::async(std::launch::async, [&] {
            for (size_t i; (i = next++) < jobs.size();) {
                const auto & [p, row] = jobs[i];
                read_rows(fd, offset, *p, row, std::min(row + ROWS, p->n_row));
            }
        }));
    }
    for (auto & thread : threads) {
        thread.get(); // throws what it threw, once the others are through
    }
}

// The first n_row rows of K or V: whole pages of the file take the place of those of the cache, and the rest is read. Returns the bytes that
// were mapped
size_t map_rows(llama_sparse_shadow & shadow, int fd, uint64_t offset, const tensor_rows & p, size_t n_row) {
    const size_t page = llama_sparse_page_size(), n = n_row*p.row_bytes, n_page = n/page*page;
    const bool is_host = ggml_backend_buffer_is_host(p.t->buffer) && p.nb == p.row_bytes;
    char * base = is_host ? (char *) p.t->data + p.at : nullptr;
    if (!is_host || ggml_backend_buffer_get_size(p.t->buffer) < MIN_MAPPED || (uintptr_t) base % page != 0 || (offset + p.offset) % page != 0 ||
            !shadow.pages.map(base, n_page, fd, offset + p.offset)) {
        read_rows(fd, offset, p, 0, n_row);
        return 0;
    }
    read_all(fd, base + n_page, n - n_page, offset + p.offset + n_page);
    return n_page;
}

// Where a document of this kind may be opened, up to position n_read. Throws std::runtime_error: nowhere
place place_to_open(llama_context & ctx, const llama_sparse_memory & m, llama_seq_id seq_id, uint32_t n_pos, uint32_t n_read, const std::string & kind) {
    place p = place_of(ctx, *m.kv, seq_id, n_pos);
    const auto & cells = llama_sparse_access::cells(*m.kv, p.stream);
    p.cell = (cells.used_max_p1() + CELLS - 1)/CELLS*CELLS;
    if (m.kv->seq_pos_max(seq_id) >= 0) {
        throw std::runtime_error("the sequence holds something already");
    }
    if (n_read == 0 || n_read > n_pos) {
        throw std::runtime_error("a document of " + std::to_string(n_pos) + " positions cannot be opened up to position " + std::to_string(n_read));
    }
    if ((uint64_t) p.cell + n_read > cells.size()) {
        throw std::runtime_error("the document has " + std::to_string(n_read) + " positions, and the context room for " +
                std::to_string(cells.size() - std::min(p.cell, cells.size())) + "\ntake a larger context");
    }
    if (kind != kind_of_rows(ctx, m)) {
        throw std::runtime_error("the document has K and V in " + kind + ", the context in " + kind_of_rows(ctx, m) +
                "\ntake the cache types, the rotations (--rope-*) and about the context that it was read with");
    }
    return p;
}

int64_t open_document(llama_context & ctx, llama_seq_id seq_id, int fd, uint64_t offset, uint32_t n_pos, uint32_t n_read, const std::string & kind) {
    ctx.synchronize();
    ctx.memory_update(false); // copies of whole sequences that wait for the next decode(): they would overwrite the document, or copy it
    const llama_sparse_memory m = llama_sparse_memory_of(ctx);
    auto & kv = *m.kv;
    const std::string rows_kind = kind.substr(0, kind.find('\n'));
    const place p = place_to_open(ctx, m, seq_id, n_pos, n_read, rows_kind);
    auto & shadow = llama_sparse_access::shadow(kv);
    if (!shadow) {
        shadow = std::make_shared<llama_sparse_shadow>(kv.get_n_stream(), kv.get_size());
    }
    const std::string shadow_kind = kind_of_shadow(kv);
    const bool has_shadow = n_read == n_pos && !shadow_kind.empty() && kind == rows_kind + "\n" + shadow_kind;

    const image im = image_of(m, p);
    const bool is_shadow_last = has_shadow && !im.shadow.empty();
    const tensor_rows & last = is_shadow_last ? im.shadow.back() : im.rows.back();
    const uint64_t need = last.offset + last.row_bytes*(is_shadow_last ? last.n_row : n_read);
    if (const int64_t size = llama_sparse_file_size(fd); size < 0 || (uint64_t) size < offset + need) {
        throw std::runtime_error("the document is shorter than its header says");
    }
    const std::vector<char> state = m.has_state() ? read_state(fd, offset, m, im, n_read) : std::vector<char>();
    std::vector<uint32_t> own(n_read);
    std::iota(own.begin(), own.end(), p.cell);
    shadow->invalidate(p.stream, own);
    int64_t mapped = 0;
    for (const tensor_rows & rows : im.rows) {
        mapped += map_rows(*shadow, fd, offset, rows, n_read);
    }
    if (has_shadow) {
        read_parts(fd, offset, im.shadow, ctx.get_cparams().n_threads_batch);
    }
    shadow->set_prompt(p.stream, own, std::vector<int8_t>(n_read, 0).data());
    try {
        auto & cells = llama_sparse_access::cells(kv, p.stream);
        for (uint32_t i = 0; i < n_read; ++i) {
            cells.pos_set(own[i], i);
            cells.seq_add(own[i], seq_id);
        }
        m.set_state(seq_id, n_read, state);
        if (has_shadow) {
            shadow->commit();
            for (uint32_t g = 0; g < p.n_group(); ++g) {
                shadow->seal(p.stream, p.group() + g);
            }
            shadow->commit();
        }
    } catch (...) {
        ctx.get_memory()->seq_rm(seq_id, -1, -1); // as it was
        throw;
    }
    if (llama_sparse_attn_seal(&ctx) < 0) {
        LLAMA_LOG_WARN("%s: the next token will transpose K\n", __func__);
    }
    return mapped;
}

} // namespace

int64_t llama_sparse_document_bytes(llama_context * ctx, uint32_t n_pos, char * err, size_t n_err) {
    return llama_sparse_guarded(err, n_err, [&] {
        const llama_sparse_memory m = llama_sparse_memory_of(*ctx);
        return (int64_t) image_of(m, place_of(*ctx, *m.kv, 0, n_pos)).bytes;
    });
}

int64_t llama_sparse_document_kind(llama_context * ctx, char * buf, size_t n_buf) {
    return llama_sparse_guarded_text(buf, n_buf, [&] {
        const llama_sparse_memory m = llama_sparse_memory_of(*ctx);
        return kind_of_rows(*ctx, m) + "\n" + kind_of_shadow(*m.kv);
    });
}

int64_t llama_sparse_document_write(
        llama_context * ctx, llama_seq_id seq_id, int fd, uint64_t offset, uint32_t n_pos, uint32_t from, uint32_t to, char * err, size_t n_err) {
    return llama_sparse_guarded(err, n_err, [&] {
        ctx->synchronize();
        const llama_sparse_memory m = llama_sparse_memory_of(*ctx);
        auto & kv = *m.kv;
        place p = place_of(*ctx, kv, seq_id, n_pos);
        if (from > to || to > n_pos) {
            throw std::runtime_error("a document of " + std::to_string(n_pos) + " positions has no positions " + std::to_string(from) + " to " +
                    std::to_string(to));
        }
        if (from == to) {
            return int64_t(0); // an empty sequence has no first cell
        }
        p.cell = first_cell(kv, seq_id, p.stream, to);
        const image im = image_of(m, p);
        for (const tensor_rows & rows : im.rows) {
            write_rows(fd, offset, rows, from, to);
        }
        if (m.has_state()) {
            write_state(fd, offset, m, im, seq_id, from, to);
        }
        return int64_t(0);
    });
}

int64_t llama_sparse_document_write_shadow(llama_context * ctx, llama_seq_id seq_id, int fd, uint64_t offset, uint32_t n_pos, char * err, size_t n_err) {
    return llama_sparse_guarded(err, n_err, [&] {
        ctx->synchronize();
        const llama_sparse_memory m = llama_sparse_memory_of(*ctx);
        auto & kv = *m.kv;
        place p = place_of(*ctx, kv, seq_id, n_pos);
        p.cell = first_cell(kv, seq_id, p.stream, n_pos);
        llama_sparse_seal(*ctx, SIZE_MAX, p.cell + n_pos);
        for (const tensor_rows & rows : image_of(m, p).shadow) {
            write_rows(fd, offset, rows, 0, rows.n_row);
        }
        return int64_t(0);
    });
}

int64_t llama_sparse_document_open(
        llama_context * ctx, llama_seq_id seq_id, int fd, uint64_t offset, uint32_t n_pos, uint32_t n_read, const char * kind, char * err, size_t n_err) {
    return llama_sparse_guarded(err, n_err, [&] { return open_document(*ctx, seq_id, fd, offset, n_pos, n_read, kind ? kind : ""); });
}
