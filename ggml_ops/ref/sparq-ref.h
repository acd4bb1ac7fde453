#pragma once

// sparq-ref: the definition of the methods, in plain C. Read this first.
//
// One function per step of the paper (SparQ Attention, arXiv 2312.04985, appendix B), for ONE token and ONE KV head.
// f32 data, f64 arithmetic, no threads, no ggml, no allocation. Slow on purpose; the kernels are tested against it.
//
//   seal        keep a second, transposed copy of K ("store K twice"), and sums of V
//   components  the r components of q that count most                 step 1
//   score       approximate scores from these components              step 1
//   select      the top-k positions; the mass of all others           step 2
//   attend      exact attention over them, mean-value interpolation   steps 2 and 3
//
// Dense attention is attend over all positions; exact top-k is select and attend with scores of rank d_k.
//
// Sizes    g query heads share the KV head (1 without GQA); n positions; head sizes d_k, d_v
// Layouts  q [g][d_k], logits and bias [g][n], y [g][d_v], rows contiguous
//          k, v by strides: k of position t, component c is k[t*k_pos + c*k_ch], so that the transposed copy is only other strides
//          bias = slope(head)*mask; -inf hides a position: whatever k and v hold there must not matter

#include <stdint.h>

#ifdef _WIN32
#    define SPARQ_REF_API __declspec(dllexport)
#else
#    define SPARQ_REF_API __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

// SEAL: k_t[c*t_stride + t] = k of (t, c), v_sum[c] = sum over t of v; for the n positions of one group. v_sum may be NULL
SPARQ_REF_API void sparq_ref_seal(
        float * k_t, float * v_sum, const float * k, const float * v,
        int64_t n, int64_t d_k, int64_t d_v, int64_t t_stride, int64_t k_pos, int64_t v_pos);

// step 1: components [rank], ascending: those with the largest sum over the g query heads of |q|*spread; ties: the lowest
//   spread [d_k]        how far each component of K spreads; NULL: all alike, as in the paper
SPARQ_REF_API void sparq_ref_components(int32_t * components, const float * q, const float * spread, int64_t g, int64_t d_k, int64_t rank);

// step 1: logits [g][n]. rank = d_k gives exact scores. softcap 0: none
SPARQ_REF_API void sparq_ref_score(
        float * logits, const float * q, const float * k, const float * bias, const int32_t * components, const float * spread,
        int64_t g, int64_t n, int64_t d_k, int64_t rank, int64_t k_pos, int64_t k_ch, double scale, double softcap);

// step 2: returns the number of selected positions and writes them, ascending, to sel [k_max]; rest [g]
//   forced [n_forced]   the local window and the sinks, which are in anyway, most important first; hidden ones, repeats and < 0 are ignored
//   k                   counts these; k_max >= k is the capacity. k < 0: returns -1, for every visible position; rest is -inf
//   top_p               < 1: stops before k where the selected positions carry that share of the softmaxed scores (mean over the heads)
//   rest                ln(sum of exp(logit - m) over the positions that are not selected) - 4 ln(sum of exp((logit - m)/4) over those that are);
//                       m is the largest logit. -inf where less than 2^-18 of the mass is left
//   score [n]           scratch
SPARQ_REF_API int64_t sparq_ref_select(
        int32_t * sel, double * rest, const float * logits, const int32_t * forced, double * score,
        int64_t g, int64_t n, int64_t n_forced, int64_t k, int64_t k_max, double top_p);

// steps 2 and 3: y [g][d_v], zeros when nothing is visible. sel NULL, or n_sel < 0: all positions, and no interpolation; rest NULL: no
// interpolation with the mean of v
//   weight [n]          scratch
SPARQ_REF_API void sparq_ref_attend(
        float * y, const float * q, const float * k, const float * v, const float * bias,
        const int32_t * sel, const double * rest, const float * sinks, double * weight,
        int64_t g, int64_t n, int64_t n_sel, int64_t d_k, int64_t d_v, int64_t k_pos, int64_t v_pos, double scale, double softcap);

#ifdef __cplusplus
}
#endif
