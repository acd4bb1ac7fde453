"""Tokens on a CUDA device: SparQ beside llama.cpp's attention of the same library, in turns.

    python -m bench gpu_tokens                          # Fig. 10: Llama-2-7B's geometry in f16
    python -m bench gpu_tokens --like llama3-8b -d 131072 --layers 8

The model is synthetic and all of it lies on the device; K and V are random. Dense attention is
`off` of our library, which is llama.cpp's own code with -fa 1, the faster one on a GPU: a build of
stock would take as long again. A model with fewer layers keeps the whole output head. Each turn
times some tokens of each attention, each token at the next position. Figure `gpu_end_to_end` shows
those of Llama-2-7B. The slowest token is shown too: one of 128 seals a group in every layer.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench import plot
from bench.options import number_option, specs_option
from pyorch import engine
from pyorch.attention.cost import GROUP
from pyorch.attention.spec import AttentionSpec, parse_spec
from pyorch.cli.bench.measurement import Column, Done, Measurement, same
from pyorch.cli.groups import option, several
from pyorch.cli.types import LAYERS, Numbers
from pyorch.errors import SparqError
from pyorch.measure import records, state
from pyorch.measure.records import Record, Result, optional
from pyorch.measure.room import Synthetic
from pyorch.measure.turns import OFF
from pyorch.models import synth
from pyorch.table import columns, number

FILE = "gpu_tokens.jsonl"
NEEDS = "python -m bench gpu_tokens"


@dataclass(frozen=True, kw_only=True)
class TokenOptions:
    like: str = option("--like", default="llama2-7b", show_default=True, help="Shape of the model.")
    n_layer: int | None = option("--layers", type=LAYERS, help="[default: all]")
    quant: str = option("--quant", default="f16", show_default=True, help="Of its weights.")
    n_depth: list[int] = several(
        "-d", "--n-depth", of=Numbers(1, 1 << 20), default="8192,16384,32768,46080"
    )
    n_gen: int = number_option("-n", "--n-gen", default=160)  # a group is sealed meanwhile
    repetitions: int = number_option("-r", "--repetitions", default=3)
    attn: tuple[AttentionSpec, ...] = specs_option(
        "sparq,ratio=1/8,gpu_min_mb=0", "sparq,ratio=1/8,shadow=f16,gpu_min_mb=0"
    )


@dataclass(frozen=True, kw_only=True)
class TokenCase:
    like: str
    n_layer: int
    quant: str
    n_depth: int
    n_gen: int
    repetitions: int = optional(0)  # older records do not say
    spec: AttentionSpec
    library: str = "sparq"


def groups(o: TokenOptions) -> list[list[TokenCase]]:
    """Dense and all settings at a depth."""
    n_layer = synth.shape_like(o.like, n_layer=o.n_layer).n_layer
    of, specs = same(o, TokenCase) | {"n_layer": n_layer}, dict.fromkeys((OFF, *o.attn))
    return [[TokenCase(**of | {"n_depth": n}, spec=spec) for spec in specs] for n in o.n_depth]


def timed(s: engine.Session, tokens: Sequence[int]) -> tuple[list[int], Any]:
    """The nanoseconds of each token but the first, and the counters of these. The session is as
    before."""
    samples, n_pos = [], len(s.tokens)
    for i, token in enumerate(tokens):
        if i == 1:
            engine.reset_counters(s)
        started = time.perf_counter_ns()
        engine.decode(s, token)
        samples.append(time.perf_counter_ns() - started)
    counters = dict(engine.info(s).counters)
    engine.rewind(s, n_pos)
    return samples[1:], counters


def random_tokens(n: int, seed: int) -> list[int]:
    return (3 + np.random.default_rng(seed).integers(0, 200, n)).tolist()


def measure(_: TokenOptions, cases: Sequence[TokenCase], __: Done) -> list[Result]:
    """The samples of the cases of one depth, in nanoseconds per token.

    Raises:
        SparqError: a layer was dense in a sparse case.
    """
    first = cases[0]
    model = Synthetic(first.like, first.n_layer, first.quant, whole_head=True).written()
    n_ctx = -(-(first.n_depth + first.n_gen + 2) // 256) * 256
    results: list[Result] = [{"samples_ns": [], "counters": {}} for _ in cases]
    with engine.load(model, n_ctx=n_ctx, n_threads=4, flash_attn=True, n_gpu_layers=99) as s:
        state.fill(s, first.n_depth)
        for turn in range(-1, first.repetitions):  # the first one warms up
            for case, result in [*zip(cases, results, strict=True)][:: -1 if turn % 2 else 1]:
                engine.set_attention(s, case.spec)
                tokens = random_tokens(first.n_gen + 3, turn + 1)
                timed(s, tokens[:3])  # graphs are captured
                samples, counted = timed(s, tokens[: first.n_gen + 1])
                if case.spec.sparse and counted["calls_sparse"] != first.n_gen * first.n_layer:
                    raise SparqError(f"{case.spec}: not every layer was sparse: {counted}")
                if case.spec.sparse and first.n_gen > GROUP and not counted["groups_sealed"]:
                    raise SparqError(f"{case.spec}: no group was sealed: {counted}")
                if turn >= 0:
                    result["samples_ns"] += samples
                    result["counters"] = counted
    return results


def _in_turns(recs: Sequence[Record]) -> list[tuple[list[Record], float]]:
    """The records that were measured in turns, and the median of their `off` in nanoseconds, nan
    without one. They are those of a run or, of records from before there were runs, those whose
    cases differ in the attention alone."""
    runs: dict[str, list[Record]] = {}
    for rec in recs:
        runs.setdefault(rec.get("run") or str({**rec["case"], "spec": ""}), []).append(rec)
    offs = [[r for r in some if r["case"]["spec"] == str(OFF)] for some in runs.values()]
    dense = (records.spread(off[-1]["samples_ns"])[0] if off else math.nan for off in offs)
    return [*zip(runs.values(), dense, strict=True)]


def rows(recs: Sequence[Record]) -> list[plot.Row]:
    """A row for each record; `speedup` is over the `off` of its turns."""
    out = []
    for some, dense in _in_turns(recs):
        for rec in some:
            case, (ns, low, high) = rec["case"], records.spread(rec["samples_ns"])
            spec = parse_spec(case["spec"])
            out.append(
                {
                    "device": rec["env"]["machine"].get("gpu", ""),
                    "positions": case["n_depth"],
                    "attention": "dense" if spec == OFF else plot.name_of(spec),
                    **{x: case[x] for x in ("like", "quant", "spec", "n_layer")},
                    "token_ms": ns / 1e6,
                    "token_ms_low": low / 1e6,
                    "token_ms_high": high / 1e6,
                    "worst_ms": max(rec["samples_ns"]) / 1e6,
                    "speedup": dense / ns,
                    "speedup_low": dense / high,
                    "speedup_high": dense / low,
                }
            )
    return out


def table(recs: Sequence[Record]) -> str:
    shown: dict[str, Column] = {
        "model": lambda r: f"{r['like']} {r['quant']}",
        "layers": lambda r: r["n_layer"],
        "positions": lambda r: r["positions"],
        "attention": lambda r: f"`{r['spec']}`",
        "ms per token (p10-p90)": lambda r: (
            f"{r['token_ms']:.3f} ({r['token_ms_low']:.3f}-{r['token_ms_high']:.3f})"
        ),
        "worst": lambda r: f"{r['worst_ms']:.2f}",
        "of `off`": lambda r: number(r["speedup"], "{:.2f}x"),
    }
    return columns(shown, rows(recs), left=("model", "attention"))


def data(folder: Path) -> list[plot.Row]:
    """A row for each length and attention of all of Llama-2-7B in f16, the last that were measured
    in turns with `off`."""
    shape = {"like": "llama2-7b", "quant": "f16", "n_layer": synth.shape_like("llama2-7b").n_layer}
    of_shape = [r for r in rows(records.load_all(folder / FILE)) if r.items() >= shape.items()]
    last = {(r["positions"], r["spec"]): r for r in of_shape if not math.isnan(r["speedup"])}
    plot.need([*last], "decoded tokens of llama2-7b f16 on a GPU", NEEDS)
    hidden = {"like", "quant", "spec", "token_ms_low", "token_ms_high", "worst_ms"}
    return [{k: x for k, x in r.items() if k not in hidden} for _, r in sorted(last.items())]


def draw(rows: Sequence[plot.Row]) -> Any:
    ours = list(dict.fromkeys(r["attention"] for r in rows if r["attention"] != "dense"))
    title = f"llama2-7b f16, {max(r['n_layer'] for r in rows)} layers, {rows[0]['device']}"
    return plot.over_positions(
        rows,
        "speedup",
        plot.colours(ours),
        "speedup_low",
        "speedup_high",
        published=plot.points("gpu_end_to_end", "H100: speed-up"),
        ylabel="times faster than dense",
        title=title,
    )


FIGURE = plot.Figure(
    name="gpu_end_to_end",
    title="End-to-end speed-up on a GPU (Fig. 10)",
    caption="Time of one decoded token against llama.cpp's flash attention of the same library, in "
    "turns, medians; bars are the 10th to 90th percentile. Grey: the paper, on an H100 PCIe with "
    "gpt-fast as the dense program.",
    needs=NEEDS,
    file=FILE,
    data=data,
    draw=draw,
)


MEASUREMENT = Measurement("gpu_tokens", TokenOptions, TokenCase, groups, measure, table)
