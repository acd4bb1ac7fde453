#include "sparse-input.h"

#include "sparse-compat.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <iterator>

using access = llama_sparse_access;

//
// replies
//

// did the token before this position ask for its logits too? What is not known did; a first token has none before it
static bool follows_reply(llama_kv_cache & kv, llama_seq_id seq, llama_pos at) {
    const uint32_t stream = access::stream_of(kv, seq);
    const auto & pos    = sparse_positions_of(access::cells(kv, stream), seq, 0);
    const auto & shadow = access::shadow(kv);
    const auto   next   = pos.lower_bound({ at, 0 });
    return next != pos.begin() && !(shadow && shadow->is_prompt(stream, std::prev(next)->second));
}

void llama_sparse_find_replies(llama_sparse_state & state, llama_kv_cache * kv, const llama_batch & batch) {
    std::array<uint32_t, LLAMA_MAX_SEQ> n_tok = {};
    for (int32_t i = 0; i < batch.n_tokens; ++i) {
        for (int32_t j = 0; j < batch.n_seq_id[i]; ++j) {
            n_tok[batch.seq_id[i][j]]++;
        }
    }
    std::bitset<LLAMA_MAX_SEQ> seen, & replying = state.replying;
    replying.reset();
    state.verifying.reset();
    for (int32_t i = 0; i < batch.n_tokens; ++i) {
        const llama_seq_id seq = batch.seq_id[i][0];
        const auto & own = state.sequences[seq];
        const bool is_draft = state.spec_of(seq).verifies_alone() && own.draft_from <= batch.pos[i] && batch.pos[i] < own.draft_to;
        const bool goes_on  = seen[seq] ? replying[seq] : !kv || follows_reply(*kv, seq, batch.pos[i]);
        seen[seq]     = true;
        replying[seq] = goes_on && batch.logits[i] && (n_tok[seq] == 1 || is_draft);
        state.verifying[seq] = replying[seq] && n_tok[seq] > 1;
    }
}

static llm_graph_input_sparse::tokens find_tokens(const llama_sparse_state & state, const llama_kv_cache_context * mctx, const llama_ubatch & ubatch) {
    // a graph that measures stands for a step of one token per sequence, or for a prompt
    const bool is_reserve = access::is_reserve(*mctx);
    const bool is_step    = ubatch.n_tokens == ubatch.n_seqs_unq;
    llm_graph_input_sparse::tokens res = { ubatch.n_tokens, 0, ubatch.n_tokens, 0, !is_reserve, false, {} };
    for (uint32_t i = 0; i < ubatch.n_tokens; ++i) {
        const llama_seq_id seq = is_reserve ? 0 : ubatch.seq_id[i][0];
        res.is_stock = res.is_stock && state.spec_of(seq).is_off();
        if (!(is_reserve ? is_step : state.replying[seq])) {
            continue;
        }
        res.n_reply++;
        res.lo = std::min(res.lo, i);
        res.hi = i + 1;
        const auto & own = state.sequences[seq].own;
        if (is_reserve || !own) {
            res.has_common = true;
        } else {
            const auto at = std::lower_bound(res.own.begin(), res.own.end(), own);
            if (at == res.own.end() || *at != own) {
                res.own.insert(at, own);
            }
        }
    }
    if (res.n_reply == 0) {
        res.lo = 0;
    } else if (access::kv(*mctx).get_n_stream() > 1) {
        res.lo = 0;
        res.hi = res.n;
    }
    return res;
}

bool llm_graph_input_sparse::tokens::same_graph(const tokens & other) const {
    return n == other.n && lo == other.lo && hi == other.hi && n_reply == other.n_reply && is_stock == other.is_stock &&
            has_common == other.has_common && own == other.own;
}

//
// the graph
//

llm_graph_input_sparse * llm_graph_input_sparse::input_of(const llm_graph_context & g) {
    for (auto & input : g.res->inputs) {
        if (auto * inp = dynamic_cast<llm_graph_input_sparse *>(input.get())) {
            return inp;
        }
    }
    auto inp = std::make_unique<llm_graph_input_sparse>(g, llama_sparse_find_cache(g.mctx));
    return static_cast<llm_graph_input_sparse *>(g.res->add_input(std::move(inp)));
}

llm_graph_input_sparse::llm_graph_input_sparse(const llm_graph_context & g, const llama_kv_cache_context * mctx) :
    state(g.cparams.sparse), mctx(mctx), tok(find_tokens(*state, mctx, g.ubatch)), n_kv(mctx->get_n_kv()),
    n_stream(access::sinfo(*mctx).s1 - access::sinfo(*mctx).s0 + 1) {
    const auto add = [&](const std::shared_ptr<const llama_sparse_spec> & own) {
        const auto & spec = own ? *own : state->spec;
        settings.push_back({ own, spec, llama_sparse_score_shares(kv(), spec, state->n_layer) });
    };
    if (tok.has_common || tok.own.empty()) {
        add(nullptr);
    }
    std::for_each(tok.own.begin(), tok.own.end(), add);
}

bool llm_graph_input_sparse::reads_all(const setting & x, int32_t il) const {
    return !x.spec.is_sparse() || x.spec.is_dense() || x.spec.is_short(n_kv) || (uint32_t) topk_for(x, il) >= n_kv;
}

bool llm_graph_input_sparse::is_exact(const setting & x, int32_t il, uint32_t n_pos) const {
    // as if the other sequences were not there, nor the tokens that come after it
    const uint32_t n_alone = std::min((n_pos + 255)/256*256, kv().get_size());
    return reads_all(x, il) || x.spec.is_short(n_pos) || (uint32_t) x.spec.topk_for(il, n_alone, x.score_shares) >= n_alone;
}

int32_t llm_graph_input_sparse::rank_for(const setting & x, int32_t il) const {
    return x.spec.rank_for(il, access::hparams(kv()).n_embd_head_k(il), llama_sparse_f16_bytes(kv(), il));
}

const llm_graph_input_sparse::setting & llm_graph_input_sparse::setting_of(llama_seq_id seq) const {
    const auto is_of = [&](const setting & x) { return x.own == state->sequences[seq].own; };
    return *std::find_if(settings.begin(), settings.end(), is_of);
}

static ggml_tensor * new_input(const llm_graph_context & g, const char * name, int64_t ne0, int64_t ne1, int64_t ne2 = 1, int64_t ne3 = 1,
        ggml_type type = GGML_TYPE_I32) {
    ggml_tensor * t = ggml_new_tensor_4d(g.ctx0, type, ne0, ne1, ne2, ne3);
    ggml_set_input(t);
    g.cb(t, name, -1);
    return t;
}

void llm_graph_input_sparse::need_seal(const llm_graph_context & g) {
    if (sealed) {
        return;
    }
    sealed = new_input(g, "sparse_sealed", ggml_sparse_n_groups(n_kv), n_stream);
    if (seals()) {
        const int64_t n_written = tok.n/n_stream/GGML_SPARSE_GROUP + 2;
        list = new_input(g, "sparse_list", std::max(n_written, n_waiting()), n_stream);
    }
}

void llm_graph_input_sparse::need_wanted(const llm_graph_context & g) {
    if (wanted) {
        return;
    }
    int32_t n_sinks = 0;
    for (const auto & x : settings) {
        for (int32_t il = 0; il < state->n_layer; ++il) {
            if (!reads_all(x, il)) { // else they may be as many as a user likes
                n_local_max = std::max(n_local_max, x.spec.local_for(topk_for(x, il)));
                n_sinks     = std::max(n_sinks, x.spec.sinks);
            }
        }
    }
    const int64_t n_tok = (tok.hi - tok.lo)/n_stream;
    wanted = new_input(g, "sparse_wanted", i_forced() + std::max(n_local_max + n_sinks, 1), n_tok, 1, n_stream);
}

void llm_graph_input_sparse::need_hide(const llm_graph_context & g) {
    if (!hide_prompts) {
        const int64_t n_tok = (tok.hi - tok.lo)/n_stream;
        hide_prompts = new_input(g, "sparse_hide_prompts", 1, n_tok, 1, n_stream, GGML_TYPE_F32);
        hide_replies = new_input(g, "sparse_hide_replies", 1, n_tok, 1, n_stream, GGML_TYPE_F32);
    }
}

void llm_graph_input_sparse::need_keep(const llm_graph_context & g) {
    if (!keep_prompts) {
        keep_prompts = new_input(g, "sparse_keep_prompts", 1, tok.hi - tok.lo, 1, 1, GGML_TYPE_F32);
    }
}

bool llm_graph_input_sparse::can_reuse(const llm_graph_params & params) {
    const auto * next = llama_sparse_find_cache(params.mctx);
    const tokens now  = find_tokens(*state, next, params.ubatch);
    if (!now.same_graph(tok)) {
        return false;
    }
    tok = now;
    mctx = next;
    if (n_kv != mctx->get_n_kv() || (sealed && seals() != (list != nullptr))) {
        return false;
    }
    return !list || n_waiting() <= list->ne[0]; // all are sealed: a position that is not is scored from K, again and again
}

bool llm_graph_input_sparse::seals() const {
    return access::is_reserve(*mctx) || has_stages() || n_waiting() > 0;
}

const std::vector<uint32_t> & llm_graph_input_sparse::written(uint32_t stream) const {
    static const std::vector<uint32_t> none;
    const auto & sinfo = access::sinfo(*mctx);
    const auto it = std::find(sinfo.strm.begin(), sinfo.strm.end(), (llama_seq_id) stream);
    return it == sinfo.strm.end() ? none : sinfo.idxs[it - sinfo.strm.begin()];
}

int64_t llm_graph_input_sparse::n_waiting() const {
    const auto & sinfo = access::sinfo(*mctx);
    int64_t n = 0;
    for (uint32_t s = sinfo.s0; s <= sinfo.s1; ++s) {
        int64_t n_group = 0;
        shadow().for_sealable(access::cells(kv(), s), s, n_kv, [&](int32_t g) {
            n_group += has_stages() || written(s).empty() || written(s)[0]/GGML_SPARSE_GROUP != (uint32_t) g;
            return true;
        });
        n = std::max(n, n_group);
    }
    return n;
}

//
// values
//

// an input without memory was made for nodes that are in no graph, since their device refused one of them
static bool is_used(const ggml_tensor * t) {
    return t && t->data;
}

// Seals complete groups of one stream, as many as the list has room for: every cell in use. SEAL runs after K and V of the layer are written, so they may
// be of this ubatch; a token reads those from the shadow that were complete before it, as it would alone
void llm_graph_input_sparse::set_seal(uint32_t s, uint32_t stream) {
    // cells past the last one in use were removed
    shadow().invalidate(stream, std::min(n_kv, access::cells(kv(), stream).used_max_p1())/GGML_SPARSE_GROUP);

    int32_t * group = list ? (int32_t *) list->data + s*list->ne[0] : nullptr, * end = list ? group + list->ne[0] : nullptr;
    std::fill(group, end, -1);
    shadow().for_sealable(access::cells(kv(), stream), stream, n_kv, [&](int32_t g) {
        if (group == end) {
            return false;
        }
        *group++ = g;
        shadow().seal(stream, g);
        return true;
    });
    if (!is_used(sealed)) {
        return;
    }
    int32_t * first = (int32_t *) sealed->data + s*sealed->ne[0];
    std::copy_n(shadow().sealed(stream).begin(), sealed->ne[0], first);
    const auto & cells = written(stream);
    for (int32_t i = 0; i < (int32_t) cells.size(); ++i) {
        int32_t & x = first[cells[i]/GGML_SPARSE_GROUP];
        x = x ? std::max(1, i + 2 - (int32_t) tok.lo) : 0; // the token after this one
    }
}

// The local window and the sinks are the newest and the oldest positions of the token's own sequence: found by position, since cells are
// in no particular order.
void llm_graph_input_sparse::set_wanted(const llama_ubatch * ubatch) {
    const int64_t n_tok = tok.hi - tok.lo;

    for (int64_t i = 0; i < n_tok; ++i) {
        int32_t * kl     = (int32_t *) wanted->data + i*wanted->ne[0];
        int32_t * forced = kl + i_forced();
        std::fill(kl, forced, 0);
        std::fill(forced, kl + wanted->ne[0], -1);
        const uint32_t     t   = tok.lo + i;
        const llama_seq_id seq = ubatch->seq_id[t][0];
        if (!state->replying[seq]) {
            continue;
        }
        const auto & x    = setting_of(seq);
        const auto & spec = x.spec;
        const auto & pos  = sparse_positions_of(access::cells(kv(), access::stream_of(kv(), seq)), seq, 0);

        const auto end = pos.upper_bound({ ubatch->pos[t], UINT32_MAX }); // the first after the token itself
        const int32_t n_pos = n_seen(seq, ubatch->pos[t]);

        auto it = end;
        for (int32_t j = 0; j < n_local_max && it != pos.begin(); ++j) {
            forced[j] = (--it)->second;
        }
        auto first = pos.begin();
        const int64_t n_forced = std::min<int64_t>(n_local_max + (int64_t) spec.sinks, wanted->ne[0] - i_forced());
        for (int64_t j = n_local_max; j < n_forced && first != end; ++j, ++first) {
            forced[j] = first->second;
        }

        int32_t * rank = kl + i_rank(0);
        for (int32_t il = 0; il < state->n_layer; ++il, kl += 2) {
            if (is_exact(x, il, n_pos)) {
                kl[0] = -1; // beside tokens that read a selection
                continue;
            }
            const int32_t k = spec.topk_for(il, n_pos, x.score_shares);
            kl[0] = spec.cap_for(k, n_pos);
            kl[1] = std::min(spec.local_for(k), n_local_max);
        }
        for (const auto & layer : layers) {
            if (has_ranks() && layer.reason.empty() && !layer.uses_stock) {
                rank[layer.il] = rank_for(x, layer.il);
            }
        }
    }
}

int32_t llm_graph_input_sparse::n_seen(llama_seq_id seq, llama_pos at) const {
    const auto & pos = sparse_positions_of(access::cells(kv(), access::stream_of(kv(), seq)), seq, 0);
    return pos.size() - std::distance(pos.upper_bound({ at, UINT32_MAX }), pos.end()); // most often nothing comes after
}

// As the settings order it. The ops count for all sequences together, and what they count differs a little: hidden cells of other sequences lie among
// those that a scan passes
void llm_graph_input_sparse::account(const llama_ubatch * ubatch) {
    const auto & hparams = access::hparams(kv());
    for (uint32_t t = tok.lo; t < tok.hi; ++t) {
        const llama_seq_id seq = ubatch->seq_id[t][0];
        if (!state->replying[seq]) {
            continue;
        }
        const setting & x     = setting_of(seq);
        const int64_t   n_pos = n_seen(seq, ubatch->pos[t]);
        auto & sum = state->sequences[seq];
        sum.n_steps++;
        sum.n_verified += state->verifying[seq];
        state->n_verified += state->verifying[seq];
        for (const auto & [il, reason, uses_stock, _, reads_exactly] : layers) {
            if (uses_stock || !(reason.empty() || reads_exactly)) {
                continue;
            }
            const int64_t n_head = hparams.n_head_kv(il);
            const bool    exact  = reads_exactly || is_exact(x, il, n_pos);
            const int64_t n_read = exact ? n_pos : x.spec.cap_for(x.spec.topk_for(il, n_pos, x.score_shares), n_pos);
            const double  row    = llama_sparse_row_bytes(kv(), il);
            const int64_t n_code = x.spec.has_shadow() ? n_pos/GGML_SPARSE_GROUP*GGML_SPARSE_GROUP : 0; // scored from the shadow, the others from K
            const double  score  = x.score_shares[il]*llama_sparse_f16_bytes(kv(), il)*n_code +
                    ggml_row_size(access::type_k(kv(), il), hparams.n_embd_head_k(il))*(n_pos - n_code);
            (exact ? sum.n_dense : sum.n_sparse)++;
            sum.n_visible   += n_pos*n_head;
            sum.n_read      += n_read*n_head;
            sum.bytes_dense += row*n_pos*n_head;
            sum.bytes_read  += (row*n_read + (exact ? 0.0 : score))*n_head;
        }
    }
}

void llm_graph_input_sparse::set_input(const llama_ubatch * ubatch) {
    if (sealed) {
        shadow().commit();
        for (uint32_t s = 0; s < n_stream; ++s) {
            set_seal(s, stream0() + s);
        }
    }
    if (is_used(wanted)) {
        set_wanted(ubatch);
    }
    const auto mark = [&](ggml_tensor * t, float reply, float prompt) {
        for (uint32_t i = 0; is_used(t) && i < tok.hi - tok.lo; ++i) {
            ((float *) t->data)[i] = state->replying[ubatch->seq_id[tok.lo + i][0]] ? reply : prompt;
        }
    };
    mark(hide_prompts, 0.0f, -INFINITY);
    mark(hide_replies, -INFINITY, 0.0f);
    mark(keep_prompts, 0.0f, 1.0f);

    state->n_steps += tok.n_reply;
    account(ubatch);
    const bool tells = tok.n_reply > 0 && !tok.is_stock;
    if (tells && state->layers.size() != layers.size()) {
        state->layers.clear(); // else the same ones, whose entries are written again: nothing is allocated
    }
    for (const auto & [il, reason, uses_stock, prompt_uses_stock, reads_exactly] : layers) {
        if (tells) {
            state->layers[il] = reason;
        }
        if (uses_stock) {
            state->n_stock[reason] += tok.n;
        } else if (prompt_uses_stock && tok.has_prompt()) {
            state->n_stock["prefill"] += tok.n - tok.n_reply;
        } else if (!reason.empty() && !reads_exactly && tells) {
            state->n_stock[reason] += tok.n_reply; // beside prompts that are ours
        }
    }
}
