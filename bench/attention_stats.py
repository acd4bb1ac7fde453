"""Measures the attention of a real model: the figures that the methods rest on.

    python bench/attention_stats.py --text BOOKS [--model FILE] [--positions 1024,2048,4096]

It takes queries, keys and values of a real model over real text (`capture.py`): at S positions,
`n_query` queries among the last 64. For each layer and query head it measures:

    mass32      share of attention on the 32 highest-scoring positions    SparQ Fig. 4a, 4b
    kurtosis    of the components of q (Fisher: 0 is Gaussian), and the   SparQ Fig. 4c, 4d, E1
                share of them beyond 3 standard deviations over a Gaussian's 0.27 %
    agreement   share of the k highest-scoring positions that approximate SparQ Fig. 4e, E2
                scores find, from r components of q: the largest, the first, or a random projection
    coverage    share of attention on the 128 highest-scoring positions,  SparQ Fig. 4f
                and what approximate scores say of their own, by temperature
    eta         correlation ratio of V along each of its axes             SparQ Table 1
    near zero   share of scores below 1 % of the row's largest            ALISA Fig. 3
    entropy     of a row in nats, and scores needed for 75 % of it        top-k paper, Figs. 3 and 5

It writes attention_stats.jsonl and attention_stats.md; `make figures` draws them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import capture
import commands
import numpy as np
from recall import softmax

from pyorch.attention.bytes import GROUP
from pyorch.bench.records import Record
from pyorch.cli import run as run_command
from pyorch.progress import progress_bar
from pyorch.table import markdown as table

BENCH = "attention_stats"
TOP, TOP_ALPHA = 32, 128  # positions of Fig. 4a and of Fig. 4f
TOPS = (8, 32, 128)  # k of Fig. E2
PARTS = (16, 8, 4, 2)  # r = d / part
CHOICES = ("largest", "first", "random")
TEMPERATURES = ("eq. 9", "sqrt(d)", "sqrt(r)")
ALPHA_PART = 4  # r = d / 4 for Fig. 4f
NEAR_ZERO = 0.01
MOST_MASS = 0.75
Z = 3.0
BINS = 40
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


def near_zero(scores: np.ndarray, n_visible: np.ndarray) -> np.ndarray:
    """The share of visible positions below NEAR_ZERO of the row's largest. n_visible is per row."""
    small = scores < NEAR_ZERO * scores.max(axis=-1, keepdims=True)
    hidden = scores.shape[-1] - n_visible
    return (small.sum(axis=-1) - hidden) / n_visible


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


def overlap(a: np.ndarray, b: np.ndarray, k: int) -> np.ndarray:
    """The share of the k largest of a that are among the k largest of b, on the last axis."""
    best = [np.zeros(x.shape, bool) for x in (a, b)]
    for mark, x in zip(best, (a, b), strict=True):
        np.put_along_axis(mark, np.argpartition(-x, k - 1, axis=-1)[..., :k], True, -1)
    return (best[0] & best[1]).sum(axis=-1) / k


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
        add("entropy", entropy(true).mean(axis=0))
        add("scores75", scores_for(true, MOST_MASS).mean(axis=0))
        add("near_zero", near_zero(true, n_visible[:, None]).mean(axis=0))
        add("mass32_all", top_mass(true, TOP).T)
        for part in PARTS:
            r = d // part
            for choice in CHOICES:
                x = projected(q, r, rng) if choice == "random" else components(q, r, choice)
                guess = scores(x, heads.scale)
                found = [overlap(true, guess, k).mean(axis=0) for k in TOPS]
                add(f"agreement_{choice}_{part}", np.stack(found, axis=1))
        r = d // ALPHA_PART
        kept = components(q, r, "largest")
        coverage = [top_mass(true, TOP_ALPHA)]
        for name in TEMPERATURES:
            # scale is 1/sqrt(d) in the paper; other models differ
            factor = heads.scale * math.sqrt(d) / temperature(q, r, name)
            coverage.append(top_mass(scores(kept, factor[..., None]), TOP_ALPHA))
        add("coverage", np.stack([c[-1] for c in coverage], axis=1))  # the last query
    return {name: np.concatenate(parts) for name, parts in out.items()}


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

    def record(self) -> dict[str, Any]:
        n_layer = len(self.queries[0])
        tails = [query_tails(np.concatenate([c[i] for c in self.queries])) for i in range(n_layer)]
        middle, edges = tails[n_layer // 2]["z"].ravel(), np.linspace(-8, 8, 2 * BINS + 1)
        masses = np.concatenate([x["mass32_all"].ravel() for one in self.found for x in one])
        coverage = np.array([[x["coverage"] for x in one] for one in self.found])
        return {
            **{n: self._mean(n) for n in ("mass32", "entropy", "scores75", "near_zero")},
            "mass32_histogram": np.histogram(masses, BINS, (0, 1))[0].tolist(),
            "agreement": {
                choice: {str(p): self._mean(f"agreement_{choice}_{p}") for p in PARTS}
                for choice in CHOICES
            },
            "coverage": coverage.round(
                3
            ).tolist(),  # (context, layer, head, true and by temperature)
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
    """A table with a line per length and kind of text, and another by layer."""
    d, case = recs[0]["head_dim"], recs[0]["case"]
    head = ["positions", "text", f"mass of the top {TOP}", "near zero", "entropy (nats)"]
    head += ["scores to 75 %", "kurtosis of q", "beyond 3 sigma / Gaussian's"]
    head += [f"agreement, k={TOP}, r=d/{p}" for p in (8, 4)]
    head += [f"eta {name}" for name in ("B", "S", "Layer", "Head", "d")]
    lines = []
    for rec in recs:
        s = rec["samples"]
        cells = [rec["case"]["n_pos"], rec["case"]["task"]]
        cells += [f"{np.mean(s['mass32']):.3f}", f"{100 * np.mean(s['near_zero']):.1f} %"]
        cells += [f"{np.mean(s['entropy']):.2f}", f"{np.mean(s['scores75']):.0f}"]
        cells += [f"{np.mean(s['kurtosis']):.1f}", f"{np.mean(s['tail']):.1f}"]
        for part in ("8", "4"):
            both = [agreement(rec, choice, part) for choice in ("largest", "random")]
            cells.append(f"{both[0]:.2f} (random projection {both[1]:.2f})")
        cells += [f"{x:.3f}" for x in s["eta"].values()]
        lines.append(cells)
    text = (
        f"Means over layers, query heads, {case['n_query']} queries in each of "
        f"{case['n_context']} contexts of {recs[0]['model_name']} (heads of {d}). Near zero: below "
        f"{100 * NEAR_ZERO:.0f} % of the row's largest score. Agreement: share of the {TOP} "
        "highest-scoring positions found with the r largest components of q. eta: excess "
        "correlation ratio of V along its axes, 0 for noise (the paper has 0.143 along B and 0.256 "
        "along S for Llama 2 7B, 0 along the others)."
    )
    return table(head, lines, left=("text",)) + "\n\n" + text


def agreement(rec: Record, choice: str, part: str, k: int = TOP) -> float:
    """The mean agreement over layers and heads."""
    return float(np.array(rec["samples"]["agreement"][choice][part])[..., TOPS.index(k)].mean())


@commands.measurement(*capture.SIZES)
def command(model: Path, texts: list[Path], folder: Path, threads: int, **sizes: Any) -> None:
    """Measure the attention of a model: sparsity, tails of q, top-k agreement, spread of V."""
    file = folder / "attention_stats.jsonl"
    with progress_bar("attention") as progress:
        found = run(model, texts, file, progress, n_threads=threads, **sizes)
    commands.show(markdown(found), file)


if __name__ == "__main__":
    run_command(command)
