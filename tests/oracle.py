"""The methods in numpy, written from the papers: what every implementation is compared with.

SparQ Attention, arXiv 2312.04985, sections 3-4 and appendix B; exact top-k, arXiv 2502.06766.
Everything here is for one token and one KV head; a model is loops around it. Shapes:

    q (g, d_k)     the g query heads that share the KV head
    k (n, d_k)     v (n, d_v)
    bias (g, n)    slope * mask; -inf hides a position
    sinks (g,)     learned extra logits, or None

Hidden positions are dropped before any arithmetic, so whatever k and v hold there cannot matter.
`dtype=np.float32` runs the same plain steps in that precision: its distance from float64 is the
scale of a fair error. Imports nothing of this project.
"""

from __future__ import annotations

from bisect import bisect_left

import numpy as np

F64 = np.float64
NEG_INF = -np.inf
FLT_MAX = float(np.finfo(np.float32).max)


def alibi_slopes(n_head: int, max_bias: float) -> np.ndarray:
    """ALiBi slope of each head (n_head,); ones when max_bias is 0: the mask is added as it is."""
    if max_bias <= 0:
        return np.ones(n_head)
    n = 2 ** int(np.floor(np.log2(n_head)))
    head = np.arange(n_head)
    return np.where(
        head < n,
        2.0 ** (-max_bias / n * (head + 1)),
        2.0 ** (-max_bias / 2 / n * (2 * (head - n) + 1)),
    )


def make_bias(mask: np.ndarray, slopes: np.ndarray) -> np.ndarray:
    """(n,) mask and (g,) slopes to (g, n); hidden stays hidden."""
    hidden = np.isneginf(mask)
    return np.where(hidden, NEG_INF, slopes[:, None] * np.where(hidden, 0.0, mask)[None, :])


def visible_positions(bias: np.ndarray) -> np.ndarray:
    return np.flatnonzero(~np.isneginf(bias[0]))


def hadamard(x: np.ndarray, n_rot: int) -> np.ndarray:
    """The last axis in blocks of n_rot, each times the Hadamard matrix over sqrt(n_rot); 0: x."""
    if n_rot == 0:
        return x
    i = np.arange(n_rot)
    odd = np.array([[bin(a & b).count("1") % 2 for a in i] for b in i])
    matrix = np.where(odd, -1.0, 1.0) / np.sqrt(n_rot)
    return (x.astype(F64).reshape(*x.shape[:-1], -1, n_rot) @ matrix).reshape(x.shape)


# ---- step 1: scores ----


def spread_of(ranges: np.ndarray, sealed: np.ndarray, n_kv: int, n_bit: int) -> np.ndarray:
    """How far each component of K spreads, by the ranges of eight of its groups (SCORE in
    ggml-sparse.h).

    ranges (n_grp, d, 2): scale and zero; sealed (n_grp,) -> (d,). Ones with 16 bits.
    """
    # the sealed groups come first, so the first that is not is found by halving
    n = bisect_left(range(n_kv // 128), True, key=lambda g: not sealed[g])
    groups = [j * n // 8 for j in range(8) if n and sealed[j * n // 8]]
    if n_bit == 16 or not groups:
        return np.ones(ranges.shape[1])
    scale, zero = np.moveaxis(ranges[groups].astype(F64), 2, 0)
    width = scale * (2**n_bit - 1)
    return np.sqrt(((width / 5.2) ** 2).mean(axis=0) + (zero + width / 2).var(axis=0))


def select_components(q: np.ndarray, rank: int, spread: np.ndarray | None = None) -> np.ndarray:
    """The `rank` components with the largest sum over the group of |q|*spread, ascending.

    Ties: the lowest. spread (d,); None: all alike, as in the paper.
    """
    size = np.abs(q.astype(F64)).sum(axis=0) * (1 if spread is None else spread)
    return np.sort(np.argsort(-size, kind="stable")[:rank])


def temperature_factor(
    q: np.ndarray, components: np.ndarray, dtype=F64, spread: np.ndarray | None = None
) -> np.ndarray:
    """sqrt(|p_r|_1 / |p|_1) per query head (g,), p = q*spread: tau of eq. 9 over sqrt(d_k).

    1 where q is zero, 0 where |p|_1 is beyond f32.
    """
    size = np.abs(q.astype(dtype)) * (1 if spread is None else spread.astype(dtype))
    total = size.sum(axis=1)
    kept = size[:, components].sum(axis=1)
    some = (total > 0) & (total <= FLT_MAX)
    share = np.where(some, kept, 0) / np.where(some, total, 1)
    return np.sqrt(np.where(total == 0, 1, share)).astype(dtype)


def logits_of(
    q, k, bias, scale, softcap=0.0, components=None, dtype=F64, chain=False, spread=None
) -> np.ndarray:
    """Logits (g, n), -inf where hidden. components=None: exact; otherwise approximate (eq. 7).

    scale is the model's (1/sqrt(d_k) in most); approximate logits are scale / sqrt(|q_r|_1/|q|_1) *
    (q_r . k_r). A head whose kept components are all zero, or whose |q|_1 is beyond f32, has logits
    0 (before the bias). With spread (d,) q counts times it in the temperature.

    chain: q times the factor first, then one product added after another, as in PREFILL, whose
    vectors hold queries. In f32 that errs more than sums side by side, as in ATTEND and BLAS.
    """
    out = np.full(bias.shape, NEG_INF, dtype)
    vis = visible_positions(bias)
    factor = dtype(scale) * np.ones(len(q), dtype)
    if components is not None:
        root = temperature_factor(q, components, dtype, spread)
        factor = np.where(root > 0, dtype(scale) / np.where(root > 0, root, 1), 0).astype(dtype)
        q, k = np.where(root[:, None] > 0, q[:, components], 0), k[:, components]
    q, k = q.astype(dtype), k[vis].astype(dtype)
    if chain:
        q = q * factor[:, None]
        raw = sum((q[:, c, None] * k[:, c] for c in range(q.shape[1])), np.zeros((), dtype))
    else:
        raw = q @ k.T * factor[:, None]
    if softcap > 0:
        raw = dtype(softcap) * np.tanh(raw / dtype(softcap))
    out[:, vis] = raw + bias[:, vis].astype(dtype)
    return out


def softmax(logits: np.ndarray, sinks: np.ndarray | None = None) -> np.ndarray:
    """Softmax of each row; a sink takes its share of the mass. Rows that see nothing give zeros."""
    top = logits.max(axis=1, initial=NEG_INF)
    if sinks is not None:
        top = np.maximum(top, sinks.astype(logits.dtype))
    top = np.where(np.isneginf(top), 0, top).astype(logits.dtype)
    e = np.exp(logits - top[:, None])
    total = e.sum(axis=1)
    if sinks is not None:
        total = total + np.exp(sinks.astype(logits.dtype) - top)
    return e / np.where(total > 0, total, 1)[:, None]


# ---- step 2: selection ----


def selectable(logits: np.ndarray) -> np.ndarray:
    """(n,): visible, which the first head tells, and no head's logit is NaN."""
    return ~np.isneginf(logits[0]) & ~np.isnan(logits).any(axis=0)


def softmax_of_heads(logits: np.ndarray) -> np.ndarray:
    """Softmax of the heads that have one: no logit is NaN, and not all are -inf.

    +inf is the largest number.
    """
    has_one = ~np.isnan(logits).any(axis=1) & ~np.isneginf(logits).all(axis=1)
    return softmax(np.minimum(logits[has_one], FLT_MAX))


def rank_scores(logits: np.ndarray) -> np.ndarray:
    """What positions are ranked by (n,): softmaxed scores summed over the group.

    With one head the logit itself: the same order, and no underflow.
    """
    one = len(logits) == 1
    return np.minimum(logits[0], FLT_MAX) if one else softmax_of_heads(logits).sum(axis=0)


def forced_positions(bias, local, sinks, k_max) -> list[int]:
    """Visible forced cells, each once: the local window newest first, then sinks."""
    hidden = np.isneginf(bias[0])
    cells = [int(c) for c in [*local, *sinks] if c >= 0 and not hidden[c]]
    return list(dict.fromkeys(cells))[:k_max]


def select(
    logits: np.ndarray, k: int, forced: list[int], k_max: int, top_p: float = 1.0
) -> np.ndarray:
    """The selected positions, ascending: the forced ones, then the best others up to k.

    Ties: the lower cell. NaN is never selected. top_p < 1: no more than carry that share of the
    softmaxed scores, mean over the group.
    """
    heads = softmax_of_heads(logits)
    mass = heads.sum(axis=0) / max(len(heads), 1)
    score, can = rank_scores(logits), selectable(logits)
    chosen = [c for c in forced if can[c]]
    n_sel = min(max(min(k, k_max), len(chosen)), int(can.sum()))
    taken = set(chosen)
    for cell in np.argsort(-score, kind="stable"):
        if len(chosen) >= n_sel or (top_p < 1 and mass[chosen].sum() >= top_p):
            break
        if int(cell) not in taken and can[cell]:
            chosen.append(int(cell))
    return np.sort(np.array(chosen, dtype=np.int64))


def mass_kept(
    logits: np.ndarray, selected: np.ndarray, sinks: np.ndarray | None = None
) -> np.ndarray:
    """(g,): 1 - the mass of the positions that were not selected; of approximate logits, eq. 10's
    alpha.

    Without learned sinks this is the paper's m_s . s. A learned sink carries no value, so its mass
    counts as kept. 1 where a head's logits hold NaN.
    """
    s = softmax(np.minimum(logits, FLT_MAX), sinks)
    rest = np.ones(logits.shape[1], bool)
    rest[selected] = False
    return np.where(np.isnan(logits).any(axis=1), 1, 1 - s[:, rest].sum(axis=1))


# ---- steps 2 and 3: attention ----


def attend(
    q, k, v, bias, scale, softcap=0.0, selected=None, sinks=None, dtype=F64, chain=False, rest=None
) -> np.ndarray:
    """Exact attention over the selected (None: all) visible positions: (g, d_v).

    chain: see logits_of. rest: what SELECT left out, where the mean of V stands in for it.
    """
    pos = visible_positions(bias) if selected is None else np.asarray(selected, dtype=np.int64)
    logits = logits_of(q, k[pos], bias[:, pos], scale, softcap, dtype=dtype, chain=chain)
    y = softmax(logits, sinks) @ v[pos].astype(dtype)
    if rest is not None:
        y = interpolate(y, kept(logits, rest.astype(dtype), sinks), v_mean(v, bias, dtype))
    return y


def few_bits(q, k, bias, block=64) -> tuple[np.ndarray, np.ndarray]:
    """q and k, each twice as wide, whose products are those of 8 bits (docs/numerics.md, 18).

    The first half has what is rounded: q, and k less its mean over a block of positions without a
    bias. The second half has what is not: q, and that mean, or k itself where a position is hidden,
    biased, or in no whole block.
    """
    q, k = q.astype(F64), k.astype(F64)
    rounded, exact = np.zeros_like(k), k.copy()
    for i in range(0, len(k) - block + 1, block):
        if (bias[:, i : i + block] == 0).all():
            part = slice(i, i + block)
            exact[part] = k[part].mean(axis=0)
            rounded[part] = _round_rows(k[part] - exact[part])
    return np.hstack([_round_rows(q), q]), np.hstack([rounded, exact])


def _round_rows(x: np.ndarray) -> np.ndarray:
    """To 8 bits with a scale per row, the largest magnitude being 127."""
    step = np.abs(x).max(axis=1, keepdims=True, initial=0) / 127
    return np.rint(np.divide(x, step, out=np.zeros_like(x), where=step > 0)) * step


def v_mean(v: np.ndarray, bias: np.ndarray, dtype=F64) -> np.ndarray:
    """Mean of v over the visible positions (d_v,); zeros when there are none."""
    vis = visible_positions(bias)
    return v[vis].astype(dtype).sum(axis=0) / dtype(max(len(vis), 1))


MIN_LEFT = 2.0**-18  # a smaller share of the mass counts as nothing


def rest(logits: np.ndarray, selected: np.ndarray) -> np.ndarray:
    """(g,): the mass that is not selected, as SELECT hands it to ATTEND, from approximate logits.

    Its ln, less that of the selected positions' mass as fourth roots tell it. -inf where no more
    than MIN_LEFT is left, nothing is selected, or logits hold NaN.
    """
    if len(selected) == 0:
        return np.full(len(logits), NEG_INF, logits.dtype)
    x = np.minimum(logits, FLT_MAX)
    with np.errstate(all="ignore"):
        x = x - x.max(axis=1, keepdims=True)
        mass = np.exp(x).sum(axis=1)
        left = mass - np.exp(x[:, selected]).sum(axis=1)
        value = np.log(left) - 4 * np.log(np.exp(x[:, selected] / 4).sum(axis=1))
        nothing = left <= MIN_LEFT * mass
    return np.where(np.isfinite(value) & ~nothing, value, -np.inf).astype(logits.dtype)


def kept(exact: np.ndarray, rest: np.ndarray, sinks: np.ndarray | None = None) -> np.ndarray:
    """alpha (g,): the root of the share of attention on the selected positions and learned sinks.

    exact: logits (g, n_sel) of the selected positions. What was left out has its approximate mass,
    times what the selected positions' exact mass is to their approximate one, by fourth roots.
    """
    if exact.shape[1] == 0:
        return np.ones(len(exact), exact.dtype)
    with np.errstate(all="ignore"):
        exact = np.minimum(exact, FLT_MAX)
        top = exact.max(axis=1)
        here = np.exp(exact - top[:, None]).sum(axis=1)
        if sinks is not None:
            here = here + np.exp(sinks.astype(exact.dtype) - top)
        there = rest + 4 * np.log(np.exp((exact - top[:, None]) / 4).sum(axis=1))
        alpha = np.sqrt(here / (here + np.exp(there)))
    return np.where(np.isneginf(rest), 1, alpha).astype(exact.dtype)


def interpolate(y: np.ndarray, alpha: np.ndarray, mean: np.ndarray) -> np.ndarray:
    """Eq. 10."""
    alpha = alpha.astype(y.dtype)[:, None]
    return alpha * y + (1 - alpha) * mean


# ---- the methods ----


def dense(q, k, v, bias, scale, softcap=0.0, sinks=None, dtype=F64) -> np.ndarray:
    return attend(q, k, v, bias, scale, softcap, None, sinks, dtype)


def sparse(
    q,
    k,
    v,
    bias,
    scale,
    topk,
    rank=None,
    local=(),
    first=(),
    softcap=0.0,
    sinks=None,
    mean_v=False,
    k_max=None,
    q_score=None,
    k_score=None,
    dtype=F64,
    top_p=1.0,
) -> np.ndarray:
    """SparQ attention (rank given) or exact top-k attention (rank None): (g, d_v).

    local, first: cells always in (newest first; attention sinks). q_score, k_score: what step 1
    reads, when that is in another basis or precision than q and k.
    """
    k_max = topk if k_max is None else k_max
    q_score, k_score = q if q_score is None else q_score, k if k_score is None else k_score
    components = None if rank is None else select_components(q_score, rank)
    logits = logits_of(q_score, k_score, bias, scale, softcap, components, dtype)
    chosen = select(logits, topk, forced_positions(bias, local, first, k_max), k_max, top_p)
    left = rest(logits, chosen) if mean_v else None
    return attend(q, k, v, bias, scale, softcap, chosen, sinks, dtype, rest=left)
