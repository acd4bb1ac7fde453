"""Records of `sparq-cpp eval` whose figures are known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.papers import ablations, topk
from pyorch import policies
from pyorch.evals import series

ENV = {
    "machine": {"cpu": "A CPU", "cores": 2},
    "commit": "0123456789",
    "stamps": {"stock": "a", "sparq": "b"},
    "pin": "a pin",
    "dirty": False,
}
WOBBLE = 1 + 0.1 * np.linspace(-1, 1, 8)  # of contexts


def scored(
    setting: str,
    case: dict[str, Any],
    method: policies.Method,
    scores: np.ndarray,
    counters: dict[str, int],
    about: Sequence[Mapping[str, Any]] = (),
) -> series.Series:
    n = len(scores)
    ones, about = np.ones(n), about or [{}] * n
    numbers = np.arange(n)
    return series.Series(setting, case, ENV, 1, method, numbers, n, scores, ones, counters, about)


def add_ablations(folder: Path) -> None:
    """The score falls with each method in turn; each reads an eighth of the bytes."""
    counters = {"steps": 1, "bytes_read": 1, "bytes_dense": 8, "calls_sparse": 1}
    model = {"name": "demo.gguf", "hash": "m"}
    about = {"type_k": "f16", "type_v": "f16", "threads": 1, "model": model}
    for task, (ctx, _) in ablations.TASKS.items():
        case = {"task": task, "ctx": ctx, **about}
        found = [
            scored(task, case, spec, WOBBLE / (i + 1), counters)
            for i, (*_, spec) in enumerate(ablations.points())
        ]
        series.pack(found, folder / "ablations")


def add_repetition(folder: Path) -> None:
    """SparQ recites all that dense does, the others a tenth of it."""
    counters = {"steps": 1, "bytes_read": 1, "bytes_dense": 8, "calls_sparse": 1}
    case = {"task": "repetition", "model": {"name": "m"}, "ctx": 2336}
    sparq = "sparq,ratio=1/8,min_ctx=0,min_k=1"
    scores = {"off": 1, sparq: 1, "h2o,ratio=1/8": 0.1, "lm-infinite,ratio=1/8": 0.1}
    found = [
        scored("s", case, policies.parse(spec), 100 * x * WOBBLE, counters)
        for spec, x in scores.items()
    ]
    series.pack(found, folder / "eval")


def add_topk(folder: Path) -> None:
    """A score is k / 128, with k that grows half of it; a needle is found below 50 % depth."""
    counters = {"steps": 1, "bytes_read": 1, "bytes_dense": 8, "calls_sparse": 1}
    model = {"model": {"name": "m", "hash": "m"}}
    specs = {"off": 1.0}
    for k in (8, 64):
        specs |= {f"topk,topk={k}": k / 128, f"topk,topk={k},budget=ramp": k / 256}
    for task in topk.TASKS:
        case = {"task": task, "ctx": 4096, **model}
        found = [
            scored(task, case, policies.parse(spec), x * np.ones(4), counters)
            for spec, x in specs.items()
        ]
        series.pack(found, folder / topk.BY_K)
    about = [{"length": n, "depth": d} for n in (1024, 2048) for d in (0.0, 1.0)]
    found = [
        scored("n", {"task": "needle", "ctx": 2048, **model}, policies.parse(spec),
               np.array([a["depth"] < 0.5 for a in about], float), counters, about)
        for spec in ("off", "topk,topk=10", "streaming-llm,k=64")
    ]  # fmt: skip
    series.pack(found, folder / topk.NEEDLE)
