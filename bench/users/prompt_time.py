"""Times how long a prompt takes to read, by depth: llama.cpp's two attentions and ours, in turns.

    python -m bench prompt_time -m MODEL --text BOOKS [-d 0,2048,8192,16384,32000]

At each depth 512 tokens of a book are read, again and again, by each attention in turn. Those of
`prompt=sparse` choose among the positions of the book itself, which it has read up to there. What
the others take does not depend on the positions before, so llama.cpp's has random K and V there:
it would take hours to read them. llama.cpp's attention is `off` of our library, which is its own
code. The time of a whole prompt is the sum over the depths between, on straight lines. With
--no-repack llama.cpp does not rearrange weights. On an EPYC with AVX-512 that is the faster way to
read a prompt in Q4_K_M, and the slower one in Q4_0.

Figure `prompt_time` shows the last run that has both of llama.cpp's attentions.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench import plot
from pyorch import engine
from pyorch.attention.spec import PROMPTS, AttentionSpec, parse_spec
from pyorch.cli import options as opt
from pyorch.cli.bench.measurement import (
    BookOptions,
    Done,
    Measurement,
    model_name,
    number_option,
    same,
    tables,
    text_hash,
)
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
READER = parse_spec("dense,prompt=sparse")
STOCK = "llama.cpp"
COUNTERS = ("calls_prefill", "blocks_fast", "prompt_visible", "prompt_read")
OURS = tuple(f"dense,prompt={x}" for x in PROMPTS)
SIDES = (  # attention, and whether flash attention is on
    (OFF, False),
    (OFF, True),
    *((parse_spec(line), True) for line in OURS),
)


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


def groups(o: PromptOptions) -> list[list[PromptCase]]:
    """All cases in one group, since all attentions take turns."""
    shared = same(o, PromptCase) | {
        "model": content_hash(o.model),
        "text": text_hash(o.text),
        "repack": not o.no_repack,
        "rope": str(o.rope.settings() or ""),
    }
    return [
        [
            PromptCase(**shared | {"n_depth": n, "flash_attn": flash_attn, "spec": spec})
            for n in sorted(o.n_depth)
            for spec, flash_attn in SIDES
        ]
    ]


def measure(o: PromptOptions, cases: Sequence[PromptCase], done: Done) -> list[Result]:
    """The samples of all cases, those of a depth in turns.

    Raises:
        SparqError: the book is too short, or as `refuse_idle`.
    """
    depths = sorted({c.n_depth for c in cases})
    n_ctx = -(-(depths[-1] + CHUNK) // 256) * 256
    first = cases[0]
    results: dict[PromptCase, dict[str, Any]] = {
        c: {"samples_ns": [], "counters": {}} for c in cases
    }
    with engine.load_model(o.model, repack=first.repack) as loaded:
        tokens = engine.tokenize(loaded, o.text)
        if len(tokens) < depths[-1] + CHUNK:
            raise SparqError(
                f"the text has {len(tokens)} tokens", f"{depths[-1] + CHUNK} are needed", 2
            )

        def session(flash_attn: bool, spec: AttentionSpec) -> engine.Session:
            return loaded.session(
                n_ctx=n_ctx,
                n_threads=first.n_threads,
                flash_attn=flash_attn,
                rope=engine.Rope.parse(first.rope),
                attention=str(spec),
            )

        ours = session(True, READER)
        stock = {fa: session(fa, spec) for spec, fa in SIDES if spec == OFF}
        for depth in depths:
            engine.set_attention(ours, READER)
            n = len(ours.tokens)
            engine.prefill(
                ours,
                tokens[n:depth],
                progress=lambda i, _, n=n: done((n + i) / (depths[-1] + CHUNK)),  # type: ignore[misc]
            )
            for s in stock.values():
                if depth:
                    state.fill(s, depth)
            of_depth = [c for c in cases if c.n_depth == depth]
            for turn in range(of_depth[0].n_samples):
                for case in of_depth[:: -1 if turn % 2 else 1]:
                    s = ours if case.spec != OFF else stock[case.flash_attn]
                    _time(s, case, tokens[depth : depth + CHUNK], results[case])
        for s in (ours, *stock.values()):
            s.close()
    refuse_idle(results)
    return [result | {"model_name": model_name(o.model)} for result in results.values()]


def refuse_idle(results: Mapping[PromptCase, Result]) -> None:
    """Raises:
    SparqError: our attention did not read a prompt as a case says, or read none sparsely.
    """
    for c, r in results.items():
        if c.spec == OFF:
            continue
        if not r["counters"]["calls_prefill"]:
            raise SparqError(f"{c.spec}: our attention did not read the prompt")
        if c.spec.prompt == "fast" and c.n_depth and not r["counters"]["blocks_fast"]:
            hint = "this CPU has neither VNNI nor NEON's dot product"
            raise SparqError(f"{c.spec} was not fast after {c.n_depth} positions", hint)
    chosen = [r["counters"] for c, r in results.items() if c.spec.prompt == "sparse"]
    if chosen and not any(c["prompt_read"] < c["prompt_visible"] for c in chosen):
        raise SparqError("no prompt was sparse", "a greater depth: short contexts are read exactly")


def _time(
    s: engine.Session, case: PromptCase, tokens: Sequence[int], results: dict[str, Any]
) -> None:
    engine.set_attention(s, case.spec)
    engine.prefill(s, tokens[:WARM])
    engine.rewind(s, case.n_depth)
    engine.reset_counters(s)
    started = time.perf_counter_ns()
    engine.prefill(s, tokens)
    results["samples_ns"].append(time.perf_counter_ns() - started)
    counters = engine.info(s).counters  # llama.cpp's attention counts nothing
    results["counters"] = {x: int(counters.get(x, 0)) for x in COUNTERS}
    engine.rewind(s, case.n_depth)


@dataclass(frozen=True)
class Line:
    """The times of one attention by depth, in seconds for CHUNK tokens."""

    name: str
    depths: tuple[int, ...]
    seconds: tuple[float, ...]

    @property
    def is_stock(self) -> bool:
        return self.name.startswith(STOCK)

    def whole(self, n: int) -> float:
        """The seconds that a prompt takes which ends at the n-th of the depths."""
        d, s = self.depths, self.seconds
        return sum((d[i + 1] - d[i]) / CHUNK * (s[i] + s[i + 1]) / 2 for i in range(n))


def best_of(lines: Sequence[Line], n: int) -> float:
    """The seconds of the faster of llama.cpp's two, as `Line.whole`."""
    return min(x.whole(n) for x in lines if x.is_stock)


def lines(recs: Sequence[Record]) -> list[Line]:
    results: dict[tuple[Any, ...], list[tuple[int, float]]] = {}
    for rec in recs:
        case = records.read_case(PromptCase, rec)
        at = results.setdefault((case.spec, case.flash_attn), [])
        at.append((case.n_depth, records.spread(rec["samples_ns"])[0] / 1e9))
    return [
        Line(name_of(spec, fa), *map(tuple, zip(*sorted(points), strict=True)))
        for (spec, fa), points in results.items()
    ]


def name_of(spec: AttentionSpec, flash_attn: bool) -> str:
    return f"{STOCK} -fa {int(flash_attn)}" if spec == OFF else f"ours, {spec.prompt}"


@tables
def table(recs: Sequence[Record]) -> str:
    """Seconds of 512 tokens at each depth, and of whole prompts beside llama.cpp's faster one."""
    all_lines = lines(recs)
    depths = all_lines[0].depths
    best = [best_of(all_lines, i) for i in range(len(depths))]
    chunk = [[x.name, *(f"{s:.2f}" for s in x.seconds)] for x in all_lines]
    shares = dict.fromkeys(depths, "1")
    for r in recs:
        c = r["counters"]
        if "prompt=sparse" in r["case"]["spec"] and c["prompt_visible"]:
            shares[r["case"]["n_depth"]] = f"{c['prompt_read'] / c['prompt_visible']:.3f}"
    chunk.append(["positions that sparse reads, of those to choose from", *shares.values()])
    whole = []
    for x in all_lines:
        seconds = [x.whole(i) for i in range(1, len(depths))]
        cells = (f"{s:.0f} ({b / s:.2f}x)" for s, b in zip(seconds, best[1:], strict=True))
        whole.append([x.name, *cells])
    case, env = records.read_case(PromptCase, recs[0]), recs[0]["env"]
    about = (
        f"{recs[0]['model_name']}, weights {'rearranged' if case.repack else 'as in the file'}, "
        f"K in f16, V in f16, {case.n_threads} threads, "
        f"{env['machine']['cpu']}; medians of {case.n_samples}."
    )
    if case.rope:
        about += f" RoPE: {case.rope}."
    return "\n\n".join(
        [
            f"Seconds for {CHUNK} tokens after so many positions. {about}",
            markdown(["attention", *map(str, depths)], chunk),
            "Seconds for a prompt of so many tokens; in brackets how many times faster than the "
            "faster of llama.cpp's.",
            markdown(["attention", *map(str, depths[1:])], whole),
        ]
    )


NEEDS = "python -m bench prompt_time -m MODEL.gguf --text BOOK"


def data(folder: Path) -> list[plot.Row]:
    """A row for each length and attention, of the last run that has all of `SIDES`."""
    runs = [
        run
        for run in records.by_run(records.load_all(folder / FILE))
        if len(lines([*run.values()])) == len(SIDES)
    ]
    plot.need(runs, "the time of prompts", NEEDS)
    recs = list(runs[-1].values())
    results = lines(recs)
    return [
        {
            "model": recs[0]["model_name"],
            "threads": recs[0]["case"]["n_threads"],
            "tokens": depth,
            "attention": x.name,
            "seconds": x.whole(i),
            "speedup": best_of(results, i) / x.whole(i),
        }
        for x in results
        for i, depth in enumerate(x.depths)
        if depth
    ]


def draw(rows: Sequence[plot.Row]) -> Any:
    colours = (plot.STOCK, plot.STOCK_2, plot.OURS_3, plot.OURS_2, plot.OURS)
    named = dict(zip(dict.fromkeys(r["attention"] for r in rows), colours, strict=True))
    title = f"{rows[0]['model']}, {rows[0]['threads']} threads"
    labels: dict[str, Any] = {"xlabel": "tokens of the prompt", "ylabel": "seconds", "title": title}
    return plot.over_positions(rows, "seconds", named, x="tokens", **labels)


FIGURE = plot.Figure(
    name="prompt_time",
    title="Time to the first token over the length of the prompt",
    caption="Seconds to read a prompt of a book, from medians for 512 tokens at each depth, "
    "llama.cpp's two attentions and ours in turns.",
    needs=NEEDS,
    file=FILE,
    data=data,
    draw=draw,
)


MEASUREMENT = Measurement(
    name="prompt_time",
    about="Time of the prompt: 512 tokens at each depth, llama.cpp's attention and ours in turns.",
    options=PromptOptions,
    case=PromptCase,
    groups=groups,
    measure=measure,
    table=table,
)
