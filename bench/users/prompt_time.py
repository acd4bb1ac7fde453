"""Times how long a prompt takes to read, by depth: llama.cpp's two attentions and ours, in turns.

    python -m bench prompt_time -m MODEL --text BOOKS [-d 0,2048,8192,16384,32000]

At each depth 512 tokens of a book are read by each attention in turn. The time does not depend on
what stands before them, which is random K and V: it would take hours to read it. The time
of a whole prompt is the sum over the depths between, on straight lines. With --no-repack llama.cpp
does not rearrange weights: on an EPYC with AVX-512 faster in Q4_K_M, and slower in Q4_0.

Figure `prompt_time` shows the last run that has both of llama.cpp's attentions.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

from bench import plot
from bench.options import BookOptions, model_name, number_option, tables
from pyorch import engine
from pyorch.attention.spec import PROMPTS, parse_spec
from pyorch.cli import options as opt
from pyorch.cli.bench.measurement import Done, Measurement, same, text_hash
from pyorch.cli.groups import several
from pyorch.cli.types import Numbers
from pyorch.errors import SparqError
from pyorch.measure import records, state
from pyorch.measure.records import Record, Result, optional
from pyorch.measure.turns import OFF, Side
from pyorch.models.content import content_hash
from pyorch.table import markdown

FILE = "prompt_time.jsonl"
CHUNK = 512  # tokens, those of a micro-batch
WARM = 64  # read before the clock starts, since llama.cpp plans its graphs anew for each attention
COUNTERS = ("calls_prefill", "blocks_fast")
OURS = [(parse_spec(f"dense,prompt={x}"), True) for x in PROMPTS]
SIDES = [(OFF, False), (OFF, True), *OURS]  # attention, and whether flash attention is on


@dataclass(frozen=True, kw_only=True)
class PromptOptions(BookOptions):
    n_depth: list[int] = several("-d", "--n-depth", of=Numbers(), default="0,2048,8192,16384,32000")
    n_samples: int = number_option("--samples", default=3)
    no_repack: bool = opt.repack_option()
    rope: opt.RopeOptions = field(default_factory=opt.RopeOptions)


@dataclass(frozen=True, kw_only=True)
class PromptCase(Side):
    """An attention at a depth. `model` and `text` are hashes."""

    model: str
    text: str
    n_depth: int
    n_threads: int
    n_samples: int
    library: str = "sparq"
    repack: bool = optional(True)
    rope: str = optional("")

    @property
    def name(self) -> str:
        is_stock = self.spec == OFF
        return f"llama.cpp -fa {int(self.flash_attn)}" if is_stock else f"ours, {self.spec.prompt}"


def groups(o: PromptOptions) -> list[list[PromptCase]]:
    """All cases in one group, since all attentions take turns."""
    shared = same(o, PromptCase) | {
        "model": content_hash(o.model),
        "text": text_hash(o.text),
        "repack": not o.no_repack,
        "rope": str(o.rope.settings() or ""),
    }
    sides = [
        {"n_depth": n, "spec": x, "flash_attn": fa} for n in sorted(o.n_depth) for x, fa in SIDES
    ]
    return [[PromptCase(**shared | side) for side in sides]]


def measure(o: PromptOptions, cases: Sequence[PromptCase], done: Done) -> list[Result]:
    """The samples of all cases, those of a depth in turns.

    Raises:
        SparqError: the book is too short, or ours did not read a prompt as its case says.
    """
    first, need = cases[0], cases[-1].n_depth + CHUNK
    results: list[Result] = [{"samples_ns": [], "model_name": model_name(o.model)} for _ in cases]

    with engine.load_model(o.model, repack=first.repack) as loaded, ExitStack() as opened:
        tokens = engine.tokenize(loaded, o.text)
        if len(tokens) < CHUNK:
            raise SparqError(f"the text has {len(tokens)} tokens", f"{CHUNK} are needed", 2)
        sessions = {
            # ours share one
            (is_off, flash_attn): opened.enter_context(
                loaded.session(
                    n_ctx=-(-need // 256) * 256,
                    n_threads=first.n_threads,
                    flash_attn=flash_attn,
                    rope=engine.Rope.parse(first.rope),
                    attention=str(OFF),
                )
            )
            for is_off, flash_attn in dict.fromkeys((c.spec == OFF, c.flash_attn) for c in cases)
        }
        for depth in sorted({c.n_depth for c in cases}):
            for s in sessions.values():
                if depth:
                    state.fill(s, depth)
            done(depth / need)
            turns = [x for x in zip(cases, results, strict=True) if x[0].n_depth == depth]
            for turn in range(first.n_samples):
                for case, result in turns[:: -1 if turn % 2 else 1]:
                    s = sessions[case.spec == OFF, case.flash_attn]
                    engine.set_attention(s, case.spec)
                    engine.prefill(s, tokens[:WARM])
                    engine.rewind(s, depth)
                    engine.reset_counters(s)
                    started = time.perf_counter_ns()
                    engine.prefill(s, tokens[:CHUNK])
                    result["samples_ns"].append(time.perf_counter_ns() - started)
                    counters = engine.info(s).counters  # llama.cpp's attention counts nothing
                    result["counters"] = {x: int(counters.get(x, 0)) for x in COUNTERS}
                    engine.rewind(s, depth)
    refuse_idle(cases, [r["counters"] for r in results])
    return results


def refuse_idle(cases: Sequence[PromptCase], counters: Sequence[dict[str, int]]) -> None:
    """Raises:
    SparqError: our attention did not read a prompt as a case says.
    """
    ours = [(c, n) for c, n in zip(cases, counters, strict=True) if c.spec != OFF]
    for c, n in ours:
        if not n["calls_prefill"]:
            raise SparqError(f"{c.spec}: our attention did not read the prompt")
        if c.spec.prompt == "fast" and c.n_depth and not n["blocks_fast"]:
            hint = "this CPU has neither VNNI nor NEON's dot product"
            raise SparqError(f"{c.spec} was not fast after {c.n_depth} positions", hint)


def whole(points: Sequence[tuple[int, float]]) -> list[float]:
    """The seconds of the prompts that end at each depth, from (depth, seconds of CHUNK tokens)."""
    parts = ((b - a) / CHUNK * (s + t) / 2 for (a, s), (b, t) in pairwise(points))
    return list(accumulate(parts, initial=0.0))


def rows(recs: Sequence[Record]) -> list[plot.Row]:
    """A row for each attention and depth of one run; `speedup` is over llama.cpp's faster one."""
    lines: dict[str, list[tuple[int, float]]] = {}
    for rec in recs:
        case, ns = records.read_case(PromptCase, rec), records.spread(rec["samples_ns"])[0]
        lines.setdefault(case.name, []).append((case.n_depth, ns / 1e9))
    sums = {name: whole(sorted(points)) for name, points in lines.items()}
    best = [min(x) for x in zip(*(s for n, s in sums.items() if "llama" in n), strict=True)]
    return [
        {
            "tokens": depth,
            "attention": name,
            "seconds": total,
            "speedup": fastest / total if total else math.nan,
            "chunk_s": chunk,
        }
        for name, points in lines.items()
        for (depth, chunk), total, fastest in zip(sorted(points), sums[name], best, strict=True)
    ]


@tables
def table(recs: Sequence[Record]) -> str:
    """Seconds of 512 tokens at each depth, and of whole prompts beside llama.cpp's faster one."""
    lines: dict[str, list[plot.Row]] = {}
    for r in rows(recs):
        lines.setdefault(r["attention"], []).append(r)
    chunk = [[name, *(f"{r['chunk_s']:.2f}" for r in of)] for name, of in lines.items()]
    total = [
        [name, *(f"{r['seconds']:.0f} ({r['speedup']:.2f}x)" for r in of[1:])]
        for name, of in lines.items()
    ]
    depths = [r["tokens"] for r in next(iter(lines.values()))]
    case = records.read_case(PromptCase, recs[0])
    rope = f" RoPE: {case.rope}." if case.rope else ""
    about = (
        f"Seconds for {CHUNK} tokens after so many positions. {recs[0]['model_name']}, weights "
        f"{'rearranged' if case.repack else 'as in the file'}, K in f16, V in f16, "
        f"{case.n_threads} threads, {records.about(recs)}; medians of {case.n_samples}.{rope}"
    )
    of_whole = (
        "Seconds for a prompt of so many tokens; in brackets how many times faster than the "
        "faster of llama.cpp's."
    )
    parts = [about, markdown(["attention", *map(str, depths)], chunk)]
    return "\n\n".join([*parts, of_whole, markdown(["attention", *map(str, depths[1:])], total)])


MEASUREMENT = Measurement("prompt_time", PromptOptions, PromptCase, groups, measure, table)
