#include "sparq-ref.h"

#include <float.h>
#include <math.h>
#include <stdbool.h>
#include <stddef.h>

// k_t is stored as f16 and only ranks positions.
// DEVIATION: values beyond f16 are clamped, not turned into inf: one huge component must not rank as NaN (test_seal_clamps_to_f16)
#define K_T_MAX 65504.0f

#define NEG_INF ((double) -INFINITY)

static bool hidden(float bias) {
    return isinf(bias) && bias < 0;
}

static double cap(double logit, double softcap) {
    return softcap > 0 ? softcap*tanh(logit/softcap) : logit;
}

void sparq_ref_seal(
        float * k_t, float * v_sum, const float * k, const float * v,
        int64_t n, int64_t d_k, int64_t d_v, int64_t t_stride, int64_t k_pos, int64_t v_pos) {
    for (int64_t c = 0; c < d_k; c++) {
        for (int64_t t = 0; t < n; t++) {
            const float x = k[t*k_pos + c];
            k_t[c*t_stride + t] = x > K_T_MAX ? K_T_MAX : x < -K_T_MAX ? -K_T_MAX : x;
        }
    }
    for (int64_t c = 0; v_sum && c < d_v; c++) {
        double sum = 0;
        for (int64_t t = 0; t < n; t++) {
            sum += (double) v[t*v_pos + c];
        }
        v_sum[c] = (float) sum;
    }
}

// what component c of q counts in step 1. DEVIATION: with how far that component of K spreads (test_ref_scores_with_a_spread)
static double weight(float q, const float * spread, int64_t c) {
    return fabs((double) q)*(spread ? (double) spread[c] : 1);
}

void sparq_ref_components(int32_t * components, const float * q, const float * spread, int64_t g, int64_t d_k, int64_t rank) {
    int64_t n = 0;
    for (int64_t c = 0; c < d_k; c++) {
        // c is kept when fewer than rank components come before it
        int64_t before = 0;
        for (int64_t o = 0; o < d_k; o++) {
            double size_c = 0, size_o = 0; // sums over the query heads
            for (int64_t h = 0; h < g; h++) {
                size_c += weight(q[h*d_k + c], spread, c);
                size_o += weight(q[h*d_k + o], spread, o);
            }
            before += size_o > size_c || (size_o == size_c && o < c);
        }
        if (before < rank) {
            components[n++] = (int32_t) c;
        }
    }
}

void sparq_ref_score(
        float * logits, const float * q, const float * k, const float * bias, const int32_t * components, const float * spread,
        int64_t g, int64_t n, int64_t d_k, int64_t rank, int64_t k_pos, int64_t k_ch, double scale, double softcap) {
    for (int64_t h = 0; h < g; h++) {
        const float * qh = q + h*d_k;

        double kept = 0, all = 0; // |q_r|_1, |q|_1
        for (int64_t i = 0; i < rank; i++) {
            kept += weight(qh[components[i]], spread, components[i]);
        }
        for (int64_t c = 0; c < d_k; c++) {
            all += weight(qh[c], spread, c);
        }
        // 1/tau of eq. 9, for any scale. DEVIATION: written with the model's scale, which is not 1/sqrt(d_k) everywhere (test_steps_equal_oracle)
        const bool   counts  = kept > 0 && all <= (double) FLT_MAX;
        const double inv_tau = counts ? scale/sqrt(kept/all) : 0;

        for (int64_t t = 0; t < n; t++) {
            const float b = bias[h*n + t];
            if (hidden(b)) {
                logits[h*n + t] = -INFINITY;
                continue;
            }
            double dot = 0;
            for (int64_t i = 0; i < rank; i++) {
                const int32_t c = components[i];
                dot += (double) qh[c]*(double) k[t*k_pos + c*k_ch];
            }
            logits[h*n + t] = (float) (cap(counts ? dot*inv_tau : 0, softcap) + (double) b);
        }
    }
}

// a smaller share of the mass counts as nothing
#define MIN_LEFT 0x1p-18

// a logit as it is ranked: +inf is the largest number
static double finite_top(float logit) {
    return (double) (logit > FLT_MAX ? FLT_MAX : logit);
}

// largest logit of a row, and the sum of exp(logit - largest), both with the sink; the sum is NaN if there is a NaN
static void softmax_stats(double * top, double * total, const float * logits, int64_t n, const float * sink) {
    *top = sink ? (double) *sink : NEG_INF;
    for (int64_t t = 0; t < n; t++) {
        *top = fmax(*top, finite_top(logits[t]));
    }
    *total = sink ? exp((double) *sink - *top) : 0;
    for (int64_t t = 0; t < n; t++) {
        *total += hidden(logits[t]) ? 0 : exp(finite_top(logits[t]) - *top);
    }
}

// can position t be selected? Not where it is hidden, which the first head tells, nor where the logit of a head is NaN
static bool selectable(const float * logits, int64_t g, int64_t n, int64_t t) {
    for (int64_t h = 0; h < g; h++) {
        if (isnan(logits[h*n + t])) {
            return false;
        }
    }
    return !hidden(logits[t]);
}

// softmax(logits) of position t, mean over the heads that have one: not where a logit is NaN, nor where all are -inf
static double mean_mass(const float * logits, int64_t g, int64_t n, int64_t t) {
    double  sum    = 0;
    int64_t n_head = 0;
    for (int64_t h = 0; h < g; h++) {
        double top, total;
        softmax_stats(&top, &total, logits + h*n, n, NULL);
        if (total > 0) {
            sum += exp(finite_top(logits[h*n + t]) - top)/total;
            n_head++;
        }
    }
    return n_head > 0 ? sum/(double) n_head : 0;
}

int64_t sparq_ref_select(
        int32_t * sel, double * rest, const float * logits, const int32_t * forced, double * score,
        int64_t g, int64_t n, int64_t n_forced, int64_t k, int64_t k_max, double top_p) {
    double top, total;

    // a token of a prompt reads every visible position
    if (k < 0) {
        for (int64_t h = 0; h < g; h++) {
            rest[h] = NEG_INF;
        }
        return -1;
    }

    // what to rank by: softmaxed scores, summed over the query heads; with one query head the logit (same order, and no underflow)
    for (int64_t t = 0; t < n; t++) {
        score[t] = !selectable(logits, g, n, t) ? NEG_INF : g == 1 ? finite_top(logits[t]) : 0;
    }
    for (int64_t h = 0; h < g && g > 1; h++) {
        softmax_stats(&top, &total, logits + h*n, n, NULL);
        for (int64_t t = 0; t < n && total > 0; t++) { // else it has no softmax
            score[t] += score[t] == NEG_INF ? 0 : exp(finite_top(logits[h*n + t]) - top)/total;
        }
    }

    // DEVIATION: some positions are forced (attention sinks, local window), and k counts them (test_select_k_counts_forced)
    int64_t n_sel = 0;
    double mass = 0;
    for (int64_t i = 0; i < n_forced && n_sel < k_max; i++) {
        if (forced[i] >= 0 && score[forced[i]] != NEG_INF) {
            sel[n_sel++] = forced[i];
            mass += mean_mass(logits, g, n, forced[i]);
            score[forced[i]] = NEG_INF; // taken
        }
    }
    // DEVIATION: not the paper's: top_p < 1 stops early (test_select_top_p)
    while (n_sel < k && n_sel < k_max && !(top_p < 1 && mass >= top_p)) {
        int64_t best = -1;
        for (int64_t t = 0; t < n; t++) {
            // DEVIATION: the paper leaves ties open; here the lower position wins (test_select_ties)
            if (score[t] != NEG_INF && (best < 0 || score[t] > score[best])) {
                best = t;
            }
        }
        if (best < 0) {
            break; // fewer than k positions are visible
        }
        sel[n_sel++] = (int32_t) best;
        mass += top_p < 1 ? mean_mass(logits, g, n, best) : 0;
        score[best] = NEG_INF;
    }

    // ascending, by insertion
    for (int64_t i = 1; i < n_sel; i++) {
        const int32_t x = sel[i];
        int64_t j = i;
        for (; j > 0 && sel[j - 1] > x; j--) {
            sel[j] = sel[j - 1];
        }
        sel[j] = x;
    }

    // what is not selected, beside what is: ATTEND knows the exact logits of the selected positions, and so how far approximate ones are from
    // exact ones
    for (int64_t h = 0; h < g; h++) {
        softmax_stats(&top, &total, logits + h*n, n, NULL);
        double  sum = 0, root = 0;
        int64_t next = 0; // of the selected positions
        for (int64_t t = 0; t < n; t++) {
            const double x = finite_top(logits[h*n + t]) - top;
            if (next < n_sel && sel[next] == t) {
                root += exp(x/4);
                next++;
            } else {
                sum += hidden(logits[h*n + t]) ? 0 : exp(x);
            }
        }
        rest[h] = root > 0 && sum > MIN_LEFT*total ? log(sum) - 4*log(root) : NEG_INF;
    }
    return n_sel;
}

void sparq_ref_attend(
        float * y, const float * q, const float * k, const float * v, const float * bias,
        const int32_t * sel, const double * rest, const float * sinks, double * weight,
        int64_t g, int64_t n, int64_t n_sel, int64_t d_k, int64_t d_v, int64_t k_pos, int64_t v_pos, double scale, double softcap) {
    if (!sel || n_sel < 0) { // all positions
        sel  = NULL;
        rest = NULL;
    }
    const int64_t n_read = sel ? n_sel : n;

    for (int64_t h = 0; h < g; h++) {
        // exact logits of the positions read, then their softmax
        double top = sinks ? (double) sinks[h] : NEG_INF;
        for (int64_t i = 0; i < n_read; i++) {
            const int64_t t = sel ? sel[i] : i;
            weight[i] = NEG_INF;
            if (!hidden(bias[h*n + t])) {
                double dot = 0;
                for (int64_t c = 0; c < d_k; c++) {
                    dot += (double) q[h*d_k + c]*(double) k[t*k_pos + c];
                }
                weight[i] = cap(dot*scale, softcap) + (double) bias[h*n + t];
            }
            top = fmax(top, weight[i]);
        }
        double total = sinks ? exp((double) sinks[h] - top) : 0, root = 0;
        for (int64_t i = 0; i < n_read; i++) {
            root += weight[i] == NEG_INF ? 0 : exp((weight[i] - top)/4);
            weight[i] = weight[i] == NEG_INF ? 0 : exp(weight[i] - top);
            total += weight[i];
        }
        // DEVIATION: eq. 10 takes alpha from approximate scores alone (test_select_rest_is_the_mass_left_out, test_alpha_is_half_way). Here the
        // selected positions have their exact mass, and the others their approximate mass, raised as that of the selected is, by fourth roots;
        // and of what that gives, the root
        // DEVIATION: a learned sink takes mass but carries no value: its share stays with the selection (test_attn_sinks_mean_v)
        const double alpha = rest && root > 0 ? sqrt(total/(total + exp(rest[h] + 4*log(root)))) : 1;

        // weighted sum of v, and (eq. 10) the interpolation with the mean of v over all visible positions
        for (int64_t c = 0; c < d_v; c++) {
            double sum = 0, mean = 0;
            for (int64_t i = 0; i < n_read; i++) {
                const int64_t t = sel ? sel[i] : i;
                sum += weight[i] == 0 ? 0 : weight[i]*(double) v[t*v_pos + c]; // no 0*NaN from hidden positions
            }
            sum = total > 0 ? sum/total : 0;

            int64_t n_visible = 0;
            for (int64_t t = 0; t < n && rest; t++) {
                if (!hidden(bias[h*n + t])) {
                    mean += (double) v[t*v_pos + c];
                    n_visible++;
                }
            }
            y[h*d_v + c] = (float) (n_visible > 0 ? alpha*sum + (1 - alpha)*mean/(double) n_visible : sum);
        }
    }
}
