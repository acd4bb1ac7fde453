"""Measures the attention of real models: the figures that the methods rest on.

    python bench/attention_stats.py --text BOOKS --model FILE [--positions 2048,4096,8192]

It takes queries, keys and values of a real model over real text (`capture.py`): at S positions,
`n_query` queries among the last 64. For each layer and query head it measures:

    mass32      share of attention on the 32 highest-scoring positions    SparQ Fig. 4a, 4b
    kurtosis    of the components of q (Fisher: 0 is Gaussian), and the   SparQ Fig. 4c, 4d, E1
                share of them beyond 3 standard deviations over a Gaussian's 0.27 %
    mass32      also with positions chosen for all query heads of a KV    SparQ, section 4
    (shared)    head together, by the sum of their scores
    agreement   share of the k highest-scoring positions that approximate SparQ Fig. 4e, E2
                scores find, from r components of q: the largest, the first, or a random projection;
                `shared`: both of all query heads of a KV head together, as SparQ does
    coverage    share of attention on the 128 highest-scoring positions,  SparQ Fig. 4f
                and what approximate scores say of their own, by temperature
    eta         correlation ratio of V along each of its axes             SparQ Table 1
    near zero   share of scores below 1 % of the row's largest            ALISA Fig. 3
    mass 40 %   share of attention on the best 40 % of positions          Keyformer Fig. 3b
    mass 1 %    share of attention on the best 1 % of positions           top-k paper, A.1
    entropy     of a row in nats, and scores needed for 75 % of it        top-k paper, Figs. 3 and 5
    idle        share of the positions of a row whose weight is below     ours
                2^-24, 2^-16 or 2^-12 of the row's largest, for a query head and for all query
                heads of a KV head together. A sum in f32 has 24 bits: V of such a position changes
                no bit of it unless larger terms cancel. V is shared by the heads of a KV head, so
                the second is the share of V's rows that exact attention could leave unread

It writes attention_stats.jsonl, with the records of all models, and attention_stats.md;
`make figures` draws them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import capture
import click
import commands
import numpy as np
from recall import softmax

from pyorch.attention.bytes import GROUP
from pyorch.bench import records
from pyorch.bench.records import Record
from pyorch.cli import run as run_command
from pyorch.progress import progress_bar
from pyorch.table import markdown as table

BENCH = "attention_stats"
TOP, TOP_ALPHA = 32, 128  # positions of Fig. 4a and of Fig. 4f
TOPS = (8, 32, 128)  # k of Fig. E2
PARTS = (16, 8, 4, 2)  # r = d / part
CHOICES = ("largest", "first", "random")
SHARED = "shared"
TEMPERATURES = ("eq. 9", "sqrt(d)", "sqrt(r)")
ALPHA_PART = 4  # r = d / 4 for Fig. 4f
NEAR_ZERO = 0.01
IDLE_BITS = (24, 16, 12)
MASS_SHARES = {"mass1pct": 0.01, "mass40pct": 0.4}
MOST_MASS = 0.75
Z = 3.0
BINS = 40
N_COVERAGE = 1  # contexts whose coverage is kept by head
BY_CONTEXT = ("mass32", "mass32_shared", "near_zero", "entropy", "scores75", *MASS_SHARES)
GAUSS_TAIL = math.erfc(Z / math.sqrt(2))


# ---- one layer of one context; arrays (n_query, ..) of the query heads of a KV head ----


def top_mass(scores: np.ndarray, k: int) -> np.ndarray:
    """The sum of the k largest values on the last axis."""
    k = min(k, scores.shape[-1])
    return np.partition(scores, scores.shape[-1] - k)[..., -k:].sum(axis=-1)


def entropy(scores: np.ndarray) -> np.ndarray:
    """The entropy over the last axis in nats."""
    return -(scores * np.log(np.where(scores > 0, scores, 1))).sum(axis=-1)


def scores_for(scores: np.ndarray, mass: float) -> np.ndarray:
    """How many of the largest values on the last axis add up to `mass`."""
    ordered = -np.sort(-scores, axis=-1)
    return (np.cumsum(ordered, axis=-1) < mass).sum(axis=-1) + 1


def share_below(scores: np.ndarray, part: float, n_visible: np.ndarray) -> np.ndarray:
    """The share of visible positions below `part` of the row's largest. n_visible is per row."""
    small = scores < part * scores.max(axis=-1, keepdims=True)
    return (small.sum(axis=-1) - scores.shape[-1] + n_visible) / n_visible


def share_idle(scores: np.ndarray, part: float, n_visible: np.ndarray) -> np.ndarray:
    """The share of visible positions below `part` of the largest in the rows of all heads: scores
    (n_query, n_head, S), n_visible (n_query,)."""
    small = (scores < part * scores.max(axis=-1, keepdims=True)).all(axis=1)
    return (small.sum(axis=-1) - scores.shape[-1] + n_visible) / n_visible


def components(q: np.ndarray, r: int, choice: str) -> np.ndarray:
    """q (..., d) with all but r components zero: the largest, or the first."""
    if choice == "first":
        return np.where(np.arange(q.shape[-1]) < r, q, 0)
    order = np.argsort(-np.abs(q), axis=-1, kind="stable")[..., :r]
    kept = np.zeros_like(q)
    np.put_along_axis(kept, order, np.take_along_axis(q, order, -1), -1)
    return kept


def projected(q: np.ndarray, r: int, rng: np.random.Generator) -> np.ndarray:
    """q (..., d) projected to r random orthogonal directions."""
    basis = np.linalg.qr(rng.normal(size=(q.shape[-1], r)))[0].astype(np.float32)
    return q @ basis @ basis.T


def best(scores: np.ndarray, k: int) -> np.ndarray:
    """The places of the k largest values on the last axis, the largest first."""
    n = scores.shape[-1]
    found = np.argpartition(scores, n - k, axis=-1)[..., n - k :]
    order = np.argsort(-np.take_along_axis(scores, found, -1), axis=-1)
    return np.take_along_axis(found, order, -1)


def overlap(a: np.ndarray, b: np.ndarray, k: int) -> np.ndarray:
    """The share of the first k places of a that are among the first k of b, on the last axis."""
    return (a[..., :k, None] == b[..., None, :k]).any(axis=-1).sum(axis=-1) / k


def temperature(q: np.ndarray, r: int, name: str) -> np.ndarray:
    """tau of approximate scores for q (..., d) with its r largest components."""
    d = q.shape[-1]
    if name == "eq. 9":
        kept = np.abs(components(q, r, "largest")).sum(axis=-1)
        return np.sqrt(d * kept / np.abs(q).sum(axis=-1))
    return np.full(q.shape[:-1], math.sqrt(d if name == "sqrt(d)" else r))


def correlation_ratio(v: np.ndarray, axis: int) -> float:
    """The excess correlation ratio: how much of the spread of v the mean along an axis explains.

    sqrt(variance of the means / variance of v) less 1/sqrt(length), which is what noise gives.
    """
    v = v.astype(np.float64)
    return float(math.sqrt(v.mean(axis=axis).var() / v.var()) - v.shape[axis] ** -0.5)


# ---- a model ----


def measure(heads: capture.Heads, n_query: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """The values of a record for one layer in one context, by query head."""
    n_head_kv, n_pos, d = heads.k.shape
    pick = np.linspace(0, GROUP - 1, n_query).astype(int)
    n_visible = n_pos - GROUP + pick + 1
    hidden = (np.arange(n_pos) >= n_visible[:, None])[:, None]
    out: dict[str, list[np.ndarray]] = {}

    def add(name: str, values: np.ndarray) -> None:
        """(n_group_q, ..): Add the means over the queries."""
        out.setdefault(name, []).append(np.asarray(values))

    for h in range(n_head_kv):
        q, k = heads.q[pick, h], heads.k[h]

        def scores(x: np.ndarray, factor: Any, k: np.ndarray = k) -> np.ndarray:
            return softmax(np.where(hidden, -np.inf, (x @ k.T) * factor))

        true = scores(q, heads.scale)
        add("mass32", top_mass(true, TOP).mean(axis=0))
        for name, share in MASS_SHARES.items():
            add(name, top_mass(true, round(share * n_pos)).mean(axis=0))
        add("entropy", entropy(true).mean(axis=0))
        add("scores75", scores_for(true, MOST_MASS).mean(axis=0))
        add("near_zero", share_below(true, NEAR_ZERO, n_visible[:, None]).mean(axis=0))
        add("mass32_all", top_mass(true, TOP).T)
        for bits in IDLE_BITS:
            add(f"idle{bits}", share_below(true, 2.0**-bits, n_visible[:, None]).mean(axis=0))
            idle = share_idle(true, 2.0**-bits, n_visible)
            add(f"idle{bits}_shared", idle.mean(axis=0, keepdims=True))
        places, of_all = best(true, TOPS[-1]), best(true.sum(axis=1), TOPS[-1])
        shared = np.broadcast_to(of_all[:, None, :TOP], (*true.shape[:2], TOP))
        add("mass32_shared", np.take_along_axis(true, shared, -1).sum(axis=-1).mean(axis=0))
        for part in PARTS:
            r = d // part
            for choice in CHOICES:
                x = projected(q, r, rng) if choice == "random" else components(q, r, choice)
                guess = best(np.where(hidden, -np.inf, x @ k.T), TOPS[-1])
                found = [overlap(places, guess, k).mean() for k in TOPS]
                add(f"agreement_{choice}_{part}", np.array([found]))
            guess = best(shared_scores(q, k, r, heads.scale, hidden), TOPS[-1])
            found = [overlap(of_all, guess, k).mean() for k in TOPS]
            add(f"agreement_{SHARED}_{part}", np.array([found]))
        r = d // ALPHA_PART
        kept = components(q, r, "largest")
        coverage = [top_mass(true, TOP_ALPHA)]
        for name in TEMPERATURES:
            # scale is 1/sqrt(d) in the paper; other models differ
            factor = heads.scale * math.sqrt(d) / temperature(q, r, name)
            coverage.append(top_mass(scores(kept, factor[..., None]), TOP_ALPHA))
        add("coverage", np.stack([c[-1] for c in coverage], axis=1))  # the last query
    return {name: np.concatenate(parts) for name, parts in out.items()}


def shared_scores(
    q: np.ndarray, k: np.ndarray, r: int, scale: float, hidden: np.ndarray
) -> np.ndarray:
    """SparQ's approximate scores (n_query, S) of the query heads of a KV head, which share the r
    components with the largest sum of |q|: the sum of their softmaxes, each with its own tau.

    Args:
        q: (n_query, n_group_q, d), k: (S, d); scale: of q.k; hidden: (n_query, 1, S).
    """
    sizes = np.abs(q)
    chosen = best(sizes.sum(axis=1), r)[:, None]
    part = np.take_along_axis(sizes, chosen, -1).sum(axis=-1) / sizes.sum(axis=-1)
    kept = np.zeros_like(q)
    every = np.broadcast_to(chosen, (*q.shape[:2], r))
    np.put_along_axis(kept, every, np.take_along_axis(q, every, -1), -1)
    factor = scale / np.sqrt(part)  # scale is 1/sqrt(d) in the paper
    return softmax(np.where(hidden, -np.inf, kept @ k.T * factor[..., None])).sum(axis=1)


def query_tails(q: np.ndarray) -> dict[str, np.ndarray]:
    """The tails of q (n, n_head, d) by head, over all its components."""
    x = q.swapaxes(0, 1).reshape(q.shape[1], -1).astype(np.float64)
    z = (x - x.mean(axis=1, keepdims=True)) / x.std(axis=1, keepdims=True)
    tail = (np.abs(z) > Z).mean(axis=1) / GAUSS_TAIL
    return {"kurtosis": (z**4).mean(axis=1) - 3, "tail": tail, "z": z}


def v_ratios(v: np.ndarray) -> dict[str, float]:
    """Table 1, of V (context, position, layer, head, component)."""
    return {
        name: correlation_ratio(v, i) for i, name in enumerate(("B", "S", "Layer", "Head", "d"))
    }


class Samples:
    """Numbers by layer and query head, as means over the contexts that were added."""

    def __init__(self, n_query: int, seed: int) -> None:
        self.n_query, self.rng = n_query, np.random.default_rng(seed)
        self.found: list[list[dict[str, np.ndarray]]] = []  # by context and layer
        self.queries: list[list[np.ndarray]] = []
        self.values: list[np.ndarray] = []

    def add(self, layers: Sequence[capture.Heads]) -> None:
        """Add all layers of a context."""
        self.found.append([measure(h, self.n_query, self.rng) for h in layers])
        self.queries.append([h.q.reshape(len(h.q), -1, h.q.shape[3]) for h in layers])
        every = max(layers[0].v.shape[1] // 512, 1)  # 512 positions are enough for a spread
        self.values.append(np.stack([h.v[:, ::every].swapaxes(0, 1) for h in layers], axis=1))

    def _mean(self, name: str) -> list[Any]:
        """(n_layer, n_head, ..)"""
        return (
            np.array([[x[name] for x in one] for one in self.found]).mean(axis=0).round(4).tolist()
        )

    def _by_context(self, name: str) -> list[float]:
        """The mean over layers and heads of each context, for the spread between them."""
        found = [np.mean([x[name].mean() for x in one]) for one in self.found]
        return [round(float(x), 4) for x in found]

    def record(self) -> dict[str, Any]:
        n_layer = len(self.queries[0])
        tails = [query_tails(np.concatenate([c[i] for c in self.queries])) for i in range(n_layer)]
        middle, edges = tails[n_layer // 2]["z"].ravel(), np.linspace(-8, 8, 2 * BINS + 1)
        masses = np.concatenate([x["mass32_all"].ravel() for one in self.found for x in one])
        coverage = np.array([[x["coverage"] for x in one] for one in self.found])
        error = np.abs(coverage[..., 1:] - coverage[..., :1])
        return {
            **{n: self._mean(n) for n in BY_CONTEXT},
            # (n_layer, n_head or n_head_kv)
            "idle": {str(b): self._mean(f"idle{b}") for b in IDLE_BITS},
            "idle_shared": {str(b): self._mean(f"idle{b}_shared") for b in IDLE_BITS},
            "by_context": {n: self._by_context(n) for n in BY_CONTEXT},
            "mass32_histogram": np.histogram(masses, BINS, (0, 1))[0].tolist(),
            "agreement": {
                choice: {str(p): self._mean(f"agreement_{choice}_{p}") for p in PARTS}
                for choice in (*CHOICES, SHARED)
            },
            # (context, layer, head, true and by temperature)
            "coverage": coverage[:N_COVERAGE].round(3).tolist(),
            "coverage_error": error.mean(axis=(0, 1, 2)).round(4).tolist(),  # by temperature
            "kurtosis": [t["kurtosis"].round(2).tolist() for t in tails],
            "tail": [t["tail"].round(2).tolist() for t in tails],
            "z_histogram": np.histogram(middle, edges, density=True)[0].round(6).tolist(),
            "eta": {k: round(x, 4) for k, x in v_ratios(np.stack(self.values)).items()},
        }


# ---- records ----


def run(*args: Any, **options: Any) -> list[Record]:
    """Measure what a file lacks, with the arguments of `capture.measured`. Returns its records."""
    return capture.measured(BENCH, capture.Case, _samples, *args, **options)


def _samples(contexts: Iterator[list[capture.Heads]], case: capture.Case) -> dict[str, Any]:
    samples = Samples(case.n_query, case.seed)
    for layers in contexts:
        samples.add(layers)
    return samples.record()


def markdown(recs: Sequence[Record]) -> str:
    """A table with a line per model, length and kind of text, and one of approximate scores."""
    head = ["model", "positions", "text", "contexts", f"mass of the top {TOP}", "shared"]
    head += ["best 1 %", "best 40 %", "near zero", "by layer", "entropy (nats)"]
    head += ["scores to 75 %", "first layer", "by layer", "correlation with depth"]
    idle = ["model", "positions", "text"]
    idle += [f"below 2^-{b}{x}" for b in IDLE_BITS for x in ("", ", all heads of a KV head")]
    query = ["model", "positions", "text", "kurtosis of q", "heads above 0", "beyond 3 sigma"]
    query += [f"agreement, r=d/{p}{x}" for p in (8, 4, 2) for x in ("", " shared", " first")]
    query += [f"alpha off by, {name}" for name in TEMPERATURES]
    query += [f"eta {name}" for name in ("B", "S", "Layer", "Head", "d")]
    first, second, third = [], [], []
    for rec in recs:
        s, case = rec["samples"], rec["case"]
        name = [rec["model_name"], case["n_pos"], case["task"]]
        cells = [f"{np.mean(s[x]):.3f}" for x in ("mass32", "mass32_shared", *MASS_SHARES)]
        cells[0] += f" ({np.std(s['by_context']['mass32'], ddof=1):.3f})"
        zero = 100 * np.mean(s["near_zero"], axis=1)
        cells += [f"{zero.mean():.1f} %", f"{zero.min():.0f} to {zero.max():.1f} %"]
        needed = np.mean(s["scores75"], axis=1)
        cells += [f"{np.mean(s['entropy']):.2f}", f"{needed.mean():.0f}", f"{needed[0]:.0f}"]
        cells += [f"{needed.min():.0f} to {needed.max():.0f}"]
        cells += [f"{np.corrcoef(needed, rec['layers'])[0, 1]:.2f}"]
        first.append([*name, case["n_context"], *cells])
        shares = [s[x][str(b)] for b in IDLE_BITS for x in ("idle", "idle_shared")]
        second.append([*name, *(f"{100 * np.mean(x):.1f} %" for x in shares)])
        kurtosis = np.array(s["kurtosis"])
        cells = [f"{np.mean(kurtosis):.1f}", f"{100 * np.mean(kurtosis > 0):.0f} %"]
        cells += [f"{np.mean(s['tail']):.1f} (up to {np.max(s['tail']):.1f})"]
        for part in ("8", "4", "2"):
            cells += [f"{agreement(rec, x, part):.2f}" for x in ("largest", SHARED, "first")]
        cells += [f"{x:.3f}" for x in (*s["coverage_error"], *s["eta"].values())]
        third.append([*name, *cells])
    case = recs[0]["case"]
    text = (
        f"Means over layers, query heads and {case['n_query']} queries of each context; in "
        "brackets the standard deviation between contexts. Layers with a sliding window are left "
        "out; by layer: the least and the most of a layer's mean. "
        f"Shared: the {TOP} positions are chosen for all query heads of a KV head together. "
        f"Near zero: below {100 * NEAR_ZERO:.0f} % of the row's largest score."
    )
    of_idle = (
        "Share of positions whose weight is below that part of the row's largest, for a query head "
        "and for all query heads of a KV head at once, whose V is one."
    )
    of_query = (
        f"Beyond 3 sigma: times the share of a Gaussian. Agreement: share of the {TOP} "
        "highest-scoring positions found with the r largest components of q, by KV head (shared), "
        f"or with the first r. Alpha: of the top {TOP_ALPHA} with r=d/{ALPHA_PART}, mean absolute "
        "error by temperature. eta: excess correlation ratio of V along its axes, 0 for noise (the "
        "paper has 0.143 along B and 0.256 along S for Llama 2 7B, 0 along the others)."
    )
    left = ("model", "text")
    parts = [table(head, first, left=left), text, table(idle, second, left=left), of_idle]
    return "\n\n".join([*parts, table(query, third, left=left), of_query])


def ordered(recs: Iterable[Record]) -> list[Record]:
    """By the width of K, the smallest first, then by model, kind of text and length."""

    def rank(rec: Record) -> tuple[Any, ...]:
        case = rec["case"]
        return rec["n_head_kv"] * rec["head_dim"], rec["model_name"], case["task"], case["n_pos"]

    return sorted(recs, key=rank)


def agreement(rec: Record, choice: str, part: str, k: int = TOP) -> float:
    """The mean agreement over layers and heads."""
    return float(np.array(rec["samples"]["agreement"][choice][part])[..., TOPS.index(k)].mean())


@commands.measurement(
    *capture.SIZES,
    click.option(
        "--task",
        "tasks",
        type=click.Choice(capture.TASKS),
        multiple=True,
        default=capture.TASKS,
        show_default=True,
        help="Kind of text; it can be repeated.",
    ),
)
def command(model: Path, texts: list[Path], folder: Path, threads: int, **sizes: Any) -> None:
    """Measure the attention of a model: sparsity, tails of q, top-k agreement, spread of V."""
    file = folder / "attention_stats.jsonl"
    with progress_bar("attention") as progress:
        run(model, texts, file, progress, n_threads=threads, **sizes)
    found = ordered(records.load(file).values())
    commands.show(markdown(found) + records.about_old(found), file)


if __name__ == "__main__":
    run_command(command)
