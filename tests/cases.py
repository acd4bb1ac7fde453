"""Shapes and data for the tests of the ops. Seeds are fixed: a failure prints its case and repeats.

Arrays have ggml's axes in numpy order (slowest first):

    q      (n_stream, n_tok, n_head, d)
    k      (n_stream, n_kv, n_head_kv, d)     v       (n_stream, n_kv, n_head_kv, d_v)
    mask   (n_stream, 1, n_tok, n_kv)         sealed  (n_stream, n_grp)
    forced (n_stream, 1, n_tok, n_forced)     kl      (n_stream, 1, n_tok, 2)
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import oracle
from gguf import GGMLQuantizationType, quants

GROUP = 128  # GGML_SPARSE_GROUP
SUM = 8  # GGML_SPARSE_SUM
BLOCKS = {"q8_0": GGMLQuantizationType.Q8_0, "q4_0": GGMLQuantizationType.Q4_0}
F16_MAX = 65504.0
ITEM = {"f16": 2, "bf16": 2, "f32": 4}

FACTORS: dict[str, tuple] = {
    "n_kv": (1, 2, 7, 31, 33, 501, 2042, 4097, 9000),
    "d": (64, 80, 96, 100, 128, 256),
    "heads": ((1, 1), (4, 4), (8, 2), (7, 1), (32, 8)),
    "rank": ("1", "16", "d-1", "d"),
    "topk": ("1", "64", "n-1", "n", "n+5"),
    "local": (0, 1, 32),
    "type_k": ("f16", "bf16", "f32"),
    "batch": ((1, 1), (3, 1), (1, 2), (2, 3)),
    "mask": ("open", "causal", "part", "hidden", "alibi"),
    "sealed": ("all", "none", "mixed"),
    "extra": ("plain", "softcap", "sinks", "mean_v", "mean_v+sinks"),
    "strided": (False, True),
}


@dataclass(frozen=True)
class Case:
    n_kv: int = 501
    d: int = 64
    heads: tuple[int, int] = (8, 2)  # n_head, n_head_kv
    rank: str = "16"
    topk: str = "64"
    local: int = 1
    type_k: str = "f16"
    batch: tuple[int, int] = (1, 1)  # n_tok, n_stream
    mask: str = "causal"
    sealed: str = "mixed"
    extra: str = "plain"
    strided: bool = False
    seed: int = 0

    def __str__(self) -> str:
        short = (f"{name}={getattr(self, name)}" for name in FACTORS)
        return " ".join(short).replace(", ", "/") + f" seed={self.seed}"

    @property
    def d_v(self) -> int:
        return {96: 64, 64: 96 if self.type_k in BLOCKS else 100}.get(self.d, self.d)

    @property
    def size(self) -> int:
        """Elements of K that all its tokens read: what a case costs."""
        n_tok, n_stream = self.batch
        return self.n_kv * self.d * self.heads[1] * n_tok * n_stream

    @property
    def rank_value(self) -> int:
        return {"d-1": self.d - 1, "d": self.d}.get(self.rank) or int(self.rank)

    @property
    def topk_value(self) -> int:
        named = {"n-1": max(1, self.n_kv - 1), "n": self.n_kv, "n+5": self.n_kv + 5}
        return named.get(self.topk) or int(self.topk)

    @property
    def softcap(self) -> float:
        return 2.0 if self.extra == "softcap" else 0.0

    @property
    def max_bias(self) -> float:
        return 8.0 if self.mask == "alibi" else 0.0

    @property
    def scale(self) -> float:
        # one size of head stands for the models whose scale is not 1/sqrt(d) (Gemma)
        return 0.09 if self.d == 96 else float(1 / np.sqrt(self.d))

    @property
    def mean_v(self) -> bool:
        return self.extra.startswith("mean_v")

    @property
    def top_p(self) -> float:
        return 0.6 if "top_p" in self.extra else 1.0

    @property
    def type_v(self) -> str:
        """Mostly the type of K; another one where the size of the group is odd."""
        other = {"f16": "f32", "q8_0": "q4_0", "q4_0": "f16"}
        return other.get(self.type_k, self.type_k) if self.heads == (7, 1) else self.type_k

    @property
    def n_rot(self) -> int:
        """q and K are rotated in blocks of so many: mostly where K is quantised."""
        return self.d & -self.d if self.type_k in BLOCKS and self.seed % 3 else 0


def pairwise(factors: dict[str, tuple], seed: int = 1) -> list[dict]:
    """Rows such that every pair of values of two factors occurs in one of them (greedy)."""
    rng = random.Random(seed)
    names = list(factors)
    todo = {
        ((a, i), (b, j))
        for a, b in itertools.combinations(names, 2)
        for i in range(len(factors[a]))
        for j in range(len(factors[b]))
    }
    rows = []
    while todo:
        row = dict(rng.choice(sorted(todo)))
        for name in rng.sample([n for n in names if n not in row], len(names) - 2):
            order = list(range(len(factors[name])))
            rng.shuffle(order)
            gains = {i: _new_pairs((name, i), row, todo) for i in order}
            row[name] = max(order, key=gains.__getitem__)
        todo -= {((a, row[a]), (b, row[b])) for a, b in itertools.combinations(names, 2)}
        rows.append({n: factors[n][i] for n, i in row.items()})
    return rows


def _new_pairs(item: tuple[str, int], row: dict[str, int], todo: set) -> int:
    pairs = [(item, other) for other in row.items()]
    return sum(p in todo or p[::-1] in todo for p in pairs)


def _limited(case: Case) -> Case:
    """Few tokens and streams where the cache is large: keeps one case below a second or so.

    Heads that blocks of 32 do not fill get another size.
    """
    if case.type_k in BLOCKS and case.d % 32:
        case = replace(case, d={80: 96, 100: 160}[case.d])
    return replace(case, batch=(1, 1)) if case.size > 1_500_000 else case


# pairs are not enough where three things must meet: an alpha well below 1 and the mean over a part
QUANTISED = [
    Case(501, 64, (8, 2), "16", "64", 1, "q8_0", (2, 1), "part", "mixed", "mean_v", False, 201),
    Case(700, 96, (4, 4), "16", "64", 0, "q4_0", (1, 2), "part", "none", "mean_v", True, 202),
    Case(2042, 128, (8, 2), "16", "64", 32, "q4_0", (1, 1), "part", "mixed", "plain", True, 203),
    Case(1100, 160, (7, 1), "16", "64", 0, "q8_0", (1, 1), "causal", "all", "sinks", False, 204),
    Case(300, 256, (2, 1), "d", "n", 0, "q4_0", (1, 1), "part", "mixed", "mean_v", False, 205),
    Case(900, 128, (7, 1), "16", "64", 0, "q8_0", (1, 1), "alibi", "mixed", "mean_v", True, 207),
]
TYPICAL = [
    Case(2042, 128, (4, 4), "16", "64", 32, "f16", (1, 1), "part", "mixed", "mean_v", True, 101),
    Case(n_kv=2042, type_k="bf16", batch=(3, 1), extra="mean_v+sinks", seed=102),
    Case(4097, 100, (7, 1), "16", "64", 32, "f32", (1, 2), "alibi", "all", "mean_v", False, 103),
    Case(501, 80, (4, 4), "16", "64", 0, "f16", (2, 3), "part", "none", "mean_v+sinks", True, 104),
    Case(9000, 128, (8, 2), "16", "64", 32, "f16", (1, 1), "causal", "all", "plain", True, 105),
]
ALL_OF_IT = "mean_v+sinks+top_p"
# fewer than k positions carry the mass in some of their heads, not in others
TOP_P = [
    Case(2042, 64, (4, 4), "16", "512", 8, "f16", (2, 1), "part", "mixed", "top_p", True, 301),
    Case(
        4097, topk="n-1", type_k="bf16", batch=(1, 2), sealed="all", extra="mean_v+top_p", seed=302
    ),
    Case(501, 80, (7, 1), "d", "n+5", 32, "f32", (3, 1), "hidden", "none", ALL_OF_IT, True, 303),
]


def quick_cases() -> list[Case]:
    rows = [Case(**row, seed=i) for i, row in enumerate(pairwise(FACTORS))]
    return [_limited(case) for case in rows + TYPICAL + QUANTISED + TOP_P]


def to_type(x: np.ndarray, kind: str) -> np.ndarray:
    """The values of x, rounded to `kind`, as f32."""
    x = x.astype(np.float32)
    if kind == "f16":
        with np.errstate(over="ignore"):
            return x.astype(np.float16).astype(np.float32)
    if kind == "bf16":
        return bf16_bits(x).astype(np.uint32).__lshift__(16).view(np.float32)
    if kind in BLOCKS:
        return quants.dequantize(quants.quantize(x, BLOCKS[kind]), BLOCKS[kind])
    return x


def to_blocks(x: np.ndarray, kind: str) -> np.ndarray:
    """The bytes of x (..., d), whose values `kind` holds exactly; NaN scales where x is poison."""
    poisoned = ~(np.isfinite(x) & (np.abs(x) < 1e6)).reshape(*x.shape[:-1], -1, 32).all(axis=-1)
    clean = np.where(np.repeat(poisoned, 32, axis=-1), 0, x).astype(np.float32)
    raw = quants.quantize(clean, BLOCKS[kind])
    assert np.array_equal(quants.dequantize(raw, BLOCKS[kind]), clean), f"not values of {kind}"
    blocks = raw.reshape(*poisoned.shape, -1)
    blocks[poisoned] = 0x7F  # as a scale, NaN
    return raw


def row_bytes(d: int, kind: str) -> int:
    """Bytes of d elements."""
    return d // 32 * {"q8_0": 34, "q4_0": 18}[kind] if kind in BLOCKS else d * ITEM[kind]


def bf16_bits(x: np.ndarray) -> np.ndarray:
    """Round to nearest even; NaN stays NaN."""
    bits = x.astype(np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(x), np.uint32(0x7FC0), rounded).astype(np.uint16)


def turn_back(x: np.ndarray, n_rot: int) -> np.ndarray:
    with np.errstate(invalid="ignore"):
        return oracle.hadamard(x, n_rot).astype(np.float32)


def visible_of(mask: np.ndarray) -> np.ndarray:
    """How many positions of each group a mask (..., n_kv) shows."""
    starts = np.arange(0, mask.shape[-1], GROUP)
    return np.add.reduceat(~np.isneginf(mask), starts, axis=-1, dtype=np.int32)


def sum_row(group):
    """Row of v_sum that holds the sum of the group (a number or an array)."""
    return group // SUM * (SUM + 1) + group % SUM


def poison(shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    return rng.choice(np.array([np.nan, np.inf, -np.inf, 1e9], np.float32), size=shape)


@dataclass
class Block:
    """One token and one KV head: the arguments of the oracle."""

    stream: int
    tok: int
    head: int  # of K and V
    q: np.ndarray
    k: np.ndarray
    q_score: np.ndarray  # what step 1 reads
    k_score: np.ndarray
    v: np.ndarray
    bias: np.ndarray
    sinks: np.ndarray | None
    forced: list[int]
    topk: int

    @property
    def index(self) -> tuple[int, int, int]:
        return self.stream, self.tok, self.head

    @property
    def size(self) -> float:
        """The largest |v| that the token sees."""
        return float(np.abs(self.v[oracle.visible_positions(self.bias)]).max(initial=0))

    def of(self, whole: np.ndarray) -> np.ndarray:
        """Its query heads in an array (n_stream, n_tok, n_head, ..)."""
        return whole[self.stream, self.tok, self.head * len(self.q) :][: len(self.q)]


@dataclass
class Data:
    case: Case
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    k_t: np.ndarray  # (n_stream, n_head_kv*d, n_pos_t)
    v_sum: np.ndarray  # (n_stream, n_sum_t, n_head_kv*d_v): SUM groups, their total, and so on
    sealed: np.ndarray
    mask: np.ndarray
    forced: np.ndarray
    kl: np.ndarray
    sinks: np.ndarray | None
    n_local_max: int
    topk_max: int
    # (n_stream, n_kv): no token of the stream sees the position
    hidden: np.ndarray = field(repr=False)

    @property
    def visible(self) -> np.ndarray:
        """(n_stream, 1, n_tok, n_grp), what VISIBLE gives."""
        return visible_of(self.mask)

    @property
    def k_score(self) -> np.ndarray:
        """The keys as step 1 reads them: rotated back, and sealed groups are stored as f16."""
        from_t = np.repeat(self.sealed != 0, GROUP, axis=1)[:, : self.case.n_kv, None, None]
        k = turn_back(self.k, self.case.n_rot)
        return np.where(
            from_t, np.clip(to_type(np.clip(k, -F16_MAX, F16_MAX), "f16"), -F16_MAX, F16_MAX), k
        )

    def blocks(self) -> Iterator[Block]:
        case = self.case
        n_head, n_head_kv = case.heads
        g = n_head // n_head_kv
        slopes = oracle.alibi_slopes(n_head, case.max_bias)
        q_score, k_score = turn_back(self.q, case.n_rot), self.k_score
        for s, t, h in itertools.product(
            range(len(self.q)), range(self.q.shape[1]), range(n_head_kv)
        ):
            rows = slice(h * g, (h + 1) * g)
            bias = oracle.make_bias(self.mask[s, 0, t].astype(np.float64), slopes[rows])
            k, local = (int(x) for x in self.kl[s, 0, t])
            cells = self.forced[s, 0, t]
            yield Block(
                s,
                t,
                h,
                self.q[s, t, rows],
                self.k[s, :, h],
                q_score[s, t, rows],
                k_score[s, :, h],
                self.v[s, :, h],
                bias,
                None if self.sinks is None else self.sinks[rows],
                oracle.forced_positions(
                    bias,
                    cells[: min(local, self.n_local_max)],
                    cells[self.n_local_max :],
                    self.topk_max,
                ),
                min(k, self.topk_max),
            )


def _mask(case: Case, rng: np.random.Generator) -> np.ndarray:
    n_tok, n_stream = case.batch
    mask = np.zeros((n_stream, 1, n_tok, case.n_kv), np.float32)
    cell = np.arange(case.n_kv)
    for s, t in itertools.product(range(n_stream), range(n_tok)):
        row = mask[s, 0, t]
        last = max(0, case.n_kv - n_tok + t - s)  # cell of the token itself
        if case.mask in ("causal", "alibi"):
            row[cell > last] = -np.inf
        if case.mask == "alibi":
            row[cell <= last] = -(last - cell[cell <= last])
        if case.mask == "part":
            row[rng.random(case.n_kv) < 0.4] = -np.inf
            row[rng.random(case.n_kv // GROUP + 1).repeat(GROUP)[: case.n_kv] < 0.3] = -np.inf
            row[rng.random(case.n_kv // GROUP + 1).repeat(GROUP)[: case.n_kv] < 0.3] = 0
        if case.mask == "hidden" and (s, t) == (0, 0):
            row[:] = -np.inf
    return to_type(mask, "f16")


def make(case: Case) -> Data:
    """Data of a case. What may not be read is poisoned: hidden positions, groups not sealed."""
    rng = np.random.default_rng(case.seed)
    n_tok, n_stream = case.batch
    n_head, n_head_kv = case.heads
    n_grp = -(-case.n_kv // GROUP)

    # heavy-tailed queries: what SparQ lives on. One query is zero where there are several tokens
    q = (
        rng.standard_normal((n_stream, n_tok, n_head, case.d))
        * 1.5
        * np.exp(0.7 * rng.standard_normal((n_stream, 1, 1, case.d)))
    ).astype(np.float32)
    if n_tok > 1:
        q[0, 1, 0] = 0
    q = oracle.hadamard(q, case.n_rot).astype(np.float32)
    shape = (n_stream, case.n_kv, n_head_kv)
    k = to_type(rng.standard_normal((*shape, case.d), np.float32), case.type_k)
    v = to_type(rng.standard_normal((*shape, case.d_v), np.float32) + 0.5, case.type_v)

    mask = _mask(case, rng)
    hidden = np.isneginf(mask).all(axis=(1, 2))
    k[hidden] = poison(k[hidden].shape, rng)
    v[hidden] = poison(v[hidden].shape, rng)

    sealed = {
        "all": np.ones((n_stream, n_grp)),
        "none": np.zeros((n_stream, n_grp)),
        "mixed": rng.random((n_stream, n_grp)) < 0.6,
    }[case.sealed].astype(np.int32)
    sealed[:, case.n_kv // GROUP :] = 0  # whole groups only

    n_pos_t = n_grp * GROUP + (GROUP if case.strided else 0)
    k_t = poison((n_stream, n_head_kv * case.d, n_pos_t), rng)
    n_sum = -(-n_pos_t // GROUP // SUM)
    v_sum = poison((n_stream, n_sum, SUM + 1, n_head_kv * case.d_v), rng)
    summed = np.zeros((n_stream, n_sum, SUM), bool)
    k_back = turn_back(k, case.n_rot)
    for s, i in zip(*np.nonzero(sealed), strict=True):
        cells = slice(i * GROUP, (i + 1) * GROUP)
        with np.errstate(invalid="ignore"):
            k_t[s, :, cells] = np.clip(k_back[s, cells].reshape(GROUP, -1).T, -F16_MAX, F16_MAX)
            v_sum[s, i // SUM, i % SUM] = (
                v[s, cells].reshape(GROUP, -1).astype(np.float64).sum(axis=0)
            )
        summed[s, i // SUM, i % SUM] = True
    with np.errstate(invalid="ignore"):
        totals = v_sum[:, :, :SUM].astype(np.float64).sum(axis=2)
    v_sum[:, :, SUM] = np.where(summed.all(axis=2)[..., None], totals, v_sum[:, :, SUM])
    v_sum = v_sum.reshape(n_stream, -1, n_head_kv * case.d_v)

    # forced cells: any visible ones, newest first; then sinks. With -1, hidden and repeated entries
    n_local_max, n_sinks = case.local, 4
    forced = np.full((n_stream, 1, n_tok, n_local_max + n_sinks), -1, np.int32)
    kl = np.empty((n_stream, 1, n_tok, 2), np.int32)
    for s, t in itertools.product(range(n_stream), range(n_tok)):
        cells = rng.permutation(case.n_kv)[: n_local_max + 2]
        forced[s, 0, t, : min(n_local_max, len(cells))] = cells[:n_local_max]
        forced[s, 0, t, n_local_max] = 0
        forced[s, 0, t, n_local_max + 1] = cells[-1]
        forced[s, 0, t, n_local_max + 2] = cells[0]
        kl[s, 0, t] = case.topk_value - (case.seed + t) % 2, max(0, n_local_max - t)
    kl[..., 0] = np.maximum(kl[..., 0], 1)

    return Data(
        case,
        q,
        k,
        v,
        k_t,
        v_sum,
        sealed,
        mask,
        forced,
        kl,
        rng.standard_normal(n_head).astype(np.float32) * 2 if "sinks" in case.extra else None,
        n_local_max,
        case.topk_value,
        hidden,
    )
