"""Measures how to choose what the tokens of a prompt read, which `prompt=sparse` rests on.

    python bench/prompt_choice.py --model FILE --text BOOKS [--positions 4096,8192]

The last 512 tokens of a text choose, in each query head, among the positions before them, until the
choice thinks that a share p of their attention is there. Ways to choose, where `their own mass`
means that the scores which order also say when it is enough:

    blocks, pooled        64 tokens x 64 positions, mean query times mean key (as block-sparse
                          MInference and others begin)
    blocks, antidiagonal  the same blocks, sums along antidiagonals of 16 x 16 (XAttention)
    last queries          single positions for all 512 tokens, by the attention of the last 64 (the
                          vertical lines of MInference)
    mean queries          single positions for all 512 tokens, by that of mean queries of 64 tokens
    mean, sampled         the same order, but 16 sampled queries say when it is enough: this is
                          `prompt=sparse`
    mean, sampled, scan   the same with mean queries that read a quarter of the components of K in 4
                          bits, as a scan of the shadow would
    oracle                single positions by the true attention of all 512 tokens

For each: the share of the positions that is read, and the error |y - y'| / |y| of the tokens'
outputs, with the mean of V for what is left out. First blocks and the last 512 positions are always
read. It writes prompt_choice.jsonl and prompt_choice.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import capture
import commands
import numpy as np
from capture import Heads

from pyorch.bench.records import Record
from pyorch.cli import run as run_command
from pyorch.progress import progress_bar
from pyorch.table import markdown

BENCH = "prompt_choice"
N_TOKEN, POOL, BLOCK, STRIDE, N_SAMPLE = 512, 64, 64, 16, 16
SHARES = (0.9, 0.95, 0.99)
HEADS = 2  # query heads of each KV head that are measured


@dataclass(frozen=True)
class Case(capture.Case):
    shares: tuple[float, ...] = SHARES

    @property
    def n_last(self) -> int:
        return N_TOKEN


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return np.asarray(e / e.sum(axis=-1, keepdims=True))


@dataclass(frozen=True)
class Head:
    """One query head: q (512, d) times the scale, k and v (S, d); p (512, S) is its attention."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    bias: np.ndarray
    p: np.ndarray

    @property
    def n_before(self) -> int:
        return len(self.k) - N_TOKEN

    def means(self, k: np.ndarray | None = None, q: np.ndarray | None = None) -> np.ndarray:
        """The attention of the mean queries of each pool, (8, S)."""
        q = self.q if q is None else q
        q = q.reshape(-1, POOL, q.shape[1]).mean(axis=1)
        return softmax(q @ (self.k if k is None else k).T + self.bias[::POOL])


def head_of(layer: Heads, h: int, g: int) -> Head:
    q, k, v = layer.q[:, h, g] * layer.scale, layer.k[h], layer.v[h]
    last = len(k) - N_TOKEN + np.arange(N_TOKEN)
    bias = np.where(np.arange(len(k)) > last[:, None], -np.inf, 0)
    return Head(q, k, v, bias, softmax(q @ k.T + bias))


# ---- ways to choose: masks (rows of tokens, S) of what is read; each row stands for 512/rows ----


def until(order: np.ndarray, mass: np.ndarray, p: float, n_before: int) -> np.ndarray:
    """Positions in the order of `order` until they and the fixed ones have p of `mass` (S,)."""
    read = np.ones(len(mass), bool)
    read[BLOCK:n_before] = False
    free = np.arange(BLOCK, n_before)
    free = free[np.argsort(-order[free], kind="stable")]
    n = np.searchsorted(np.cumsum(mass[free]), p * mass.sum() - mass[read].sum()) + 1
    read[free[: n if p * mass.sum() > mass[read].sum() else 0]] = True
    return read


def blocks(h: Head, scores: np.ndarray, p: float) -> np.ndarray:
    """Blocks of each pool by their scores, (8, S/64), which are shares of the attention."""
    rows = []
    for score in scores:
        each = np.repeat(score / BLOCK, BLOCK)
        rows.append(until(each, each, p, h.n_before))
    return np.stack(rows)


def pooled(h: Head, p: float) -> np.ndarray:
    k = h.k.reshape(-1, BLOCK, h.k.shape[1]).mean(axis=1)
    q = h.q.reshape(-1, POOL, h.q.shape[1]).mean(axis=1)
    return blocks(h, softmax(q @ k.T + h.bias[::POOL, ::BLOCK]), p)


def antidiagonal(h: Head, p: float) -> np.ndarray:
    d = h.k.shape[1]
    q, k = h.q.reshape(-1, STRIDE, d), h.k.reshape(-1, STRIDE, d)[:, ::-1]
    sums = np.einsum("ird,jrd->ij", q, k, optimize=True) / STRIDE + h.bias[::STRIDE, ::STRIDE]
    shares = softmax(sums).reshape(len(h.q) // POOL, POOL // STRIDE, -1, BLOCK // STRIDE)
    return blocks(h, shares.sum(axis=3).mean(axis=1), p)


def last_queries(h: Head, p: float) -> np.ndarray:
    mass = h.p[-POOL:].mean(axis=0)
    return until(mass, mass, p, h.n_before)[None]


def mean_queries(h: Head, p: float) -> np.ndarray:
    mass = h.means().sum(axis=0)
    return until(mass, mass, p, h.n_before)[None]


def sampled(h: Head, p: float) -> np.ndarray:
    at = np.arange(POOL // 4, N_TOKEN, N_TOKEN // N_SAMPLE)
    return until(h.means().sum(axis=0), h.p[at].sum(axis=0), p, h.n_before)[None]


def scanned(h: Head, p: float) -> np.ndarray:
    at = np.arange(POOL // 4, N_TOKEN, N_TOKEN // N_SAMPLE)
    spread = np.abs(h.q).mean(axis=0) * h.k.std(axis=0)
    best = np.argsort(-spread)[: h.k.shape[1] // 4]
    low, high = h.k[:, best].min(axis=0), h.k[:, best].max(axis=0)
    step = np.maximum(high - low, 1e-12) / 15
    k = np.rint((h.k[:, best] - low) / step) * step
    return until(h.means(k, h.q[:, best]).sum(axis=0), h.p[at].sum(axis=0), p, h.n_before)[None]


def oracle(h: Head, p: float) -> np.ndarray:
    mass = h.p.sum(axis=0)
    return until(mass, mass, p, h.n_before)[None]


WAYS: dict[str, Callable[[Head, float], np.ndarray]] = {
    "blocks, pooled": pooled,
    "blocks, antidiagonal": antidiagonal,
    "last queries": last_queries,
    "mean queries": mean_queries,
    "mean, sampled": sampled,
    "mean, sampled, scan": scanned,
    "oracle": oracle,
}


def quality(h: Head, read: np.ndarray) -> tuple[float, np.ndarray]:
    """The share of the positions before that is read, and the error of each token."""
    errors = []
    exact = h.p @ h.v
    for rows, mask in zip(np.split(np.arange(N_TOKEN), len(read)), read, strict=True):
        p, out = h.p[rows], ~mask
        rest = p[:, out].sum(axis=1).mean()  # what samples tell, or their own mass
        y = p[:, mask] @ h.v[mask]
        if out.any():
            y = y + p[:, mask].sum(axis=1, keepdims=True) * rest / (1 - rest) * h.v[out].mean(
                axis=0
            )
        total = p[:, mask].sum(axis=1, keepdims=True) / (1 - rest)
        error = np.linalg.norm(y / total - exact[rows], axis=1)
        errors.append(error / np.linalg.norm(exact[rows], axis=1))
    return float(read[:, BLOCK : h.n_before].mean()), np.concatenate(errors)


def samples_of(contexts: Iterator[list[Heads]], case: Case) -> list[dict[str, Any]]:
    """One sample per context, layer and head."""
    found = []
    for layers in contexts:
        for il, layer in enumerate(layers):
            for kv in range(layer.q.shape[1]):
                for g in np.linspace(0, layer.q.shape[2] - 1, HEADS).round().astype(int):
                    h = head_of(layer, kv, int(g))
                    ways = {}
                    for name, way in WAYS.items():
                        for p in case.shares:
                            share, errors = quality(h, way(h, p))
                            ways[f"{name}, {p}"] = {
                                "read": round(share, 5),
                                "error": round(float(errors.mean()), 5),
                                "p99": round(float(np.quantile(errors, 0.99)), 5),
                                "most": round(float(errors.max()), 5),
                            }
                    found.append({"layer": il, "head": [kv, int(g)], "ways": ways})
    return found


def table(recs: Sequence[Record]) -> str:
    parts = []
    for rec in recs:
        samples = rec["samples"]
        rows = []
        for name in WAYS:
            for p in rec["case"]["shares"]:
                of = [s["ways"][f"{name}, {p}"] for s in samples]
                mean = {x: float(np.mean([o[x] for o in of])) for x in of[0]}
                worst = max(o["error"] for o in of)
                rows.append(
                    [name, p, *(f"{mean[x]:.3f}" for x in ("read", "error", "p99")), f"{worst:.2f}"]
                )
        case = rec["case"]
        head = [
            "way to choose",
            "share p",
            "positions read",
            "error",
            "99th percentile",
            "worst head",
        ]
        parts.append(
            f"{rec['model_name']}, {case['task']}, {case['n_pos']} positions, {case['n_context']} "
            f"contexts, {len(samples)} heads: means over the heads, and the worst head's mean error"
            "\n\n" + markdown(head, rows)
        )
    return "\n\n".join(parts)


@commands.measurement(
    *capture.SIZES[:2],
    capture.SIZES[3],
)
def command(
    model: Path, texts: Sequence[Path], threads: int, folder: Path, force: bool, **sizes: Any
) -> None:
    """What a choice of positions for the tokens of a prompt reads, and what it loses."""
    file = folder / f"{BENCH}.jsonl"
    with progress_bar("choices") as progress:
        found = capture.measured(
            BENCH,
            Case,
            samples_of,
            model,
            texts,
            file,
            progress,
            tasks=("prose",),
            n_threads=threads,
            force=force,
            **sizes,
        )
    commands.show(table(found), file)


if __name__ == "__main__":
    run_command(command)
