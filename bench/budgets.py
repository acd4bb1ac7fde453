"""Measures how to spread bytes over layers: KL to dense of uniform, ramps, calibrated and top-p.

    python bench/budgets.py --text UNSEEN_BOOK [--text ..] [--model FILE] [--calibrate-text FILE]

For each ratio the model is calibrated on one text (`sparq-cpp calibrate`, by default the demo's),
and all budgets are measured on others by the same real decode steps: contexts of `--ctx` positions,
half of them prose, half with a repeated passage. KL(dense || sparse) is in nats, as the mean over a
context's decoded tokens; the library counts the bytes. The top-k paper's Fig. 8 does the same for
exact top-k: score over k, uniform and adaptive.

It writes budgets.jsonl and budgets.md; `make figures` draws them.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import click
import commands
import numpy as np
import plot

from pyorch import engine, native, paths
from pyorch.attention import saved
from pyorch.attention.spec import AttentionSpec, parse_spec, ratio_text
from pyorch.bench import records
from pyorch.bench.records import Record
from pyorch.calibrate import search
from pyorch.calibrate.meter import Meter, contexts
from pyorch.cli import run as run_command
from pyorch.cli.types import Number
from pyorch.evals import stats, texts
from pyorch.models.content import content_hash
from pyorch.progress import progress_bar
from pyorch.table import markdown as table

BENCH = "budgets"
RATIOS = (1 / 4, 1 / 8, 1 / 12, 1 / 16, 1 / 24)
SEARCH_CONTEXTS = 8
MEAN_V = "uniform, mean of V"
LINES = ("uniform", MEAN_V, "ramp", "ramp-down", "calibrated", "top-p")

FILE = "budgets.jsonl"
NEEDS = "python bench/budgets.py --text BOOKS"
COLOURS = dict(
    zip(
        LINES,
        (plot.STOCK, plot.STOCK_2, plot.PAPER, "#ae3ec9", plot.OURS, plot.OURS_3),
        strict=True,
    )
)


@dataclass(frozen=True)
class Case:
    """All budgets at one ratio in the same contexts. `model` and the texts are hashes."""

    model: str
    text: str
    calibrate_text: str
    ratio: float
    n_pos: int
    n_contexts: int
    n_tokens: int
    seed: int


def specs(result: saved.Result) -> dict[str, AttentionSpec]:
    """The settings of each line, from the results of a calibration."""
    tried = {c["name"]: parse_spec(c["spec"]) for c in result["candidates"]}
    base = tried["uniform"]
    calibrated = saved.applied(result["calibrated"], base)
    top_p = saved.applied(result["top-p"], base)
    with_mean = next(s for n, s in tried.items() if n.startswith("uniform, "))
    lines = {"uniform": base, MEAN_V: with_mean, "ramp": tried["ramp"]}
    return {**lines, "ramp-down": tried["ramp-down"], "calibrated": calibrated, "top-p": top_p}


def run(
    model: Path,
    books: Sequence[Path],
    calibrate_text: Path,
    file: Path,
    bar: search.Bar,
    *,
    ratios: Sequence[float] = RATIOS,
    n_pos: int = 2048,
    n_contexts: int = 24,
    n_tokens: int = 64,
    n_threads: int = 1,
    seed: int = 7,
    force: bool = False,
) -> list[Record]:
    """Measure what `file` lacks, add it there, and return all records of these ratios.

    Raises:
        SparqError: a text is too short, or no layer can be sparse.
    """
    env = records.environment({"sparq": native.built()})
    stamp = env["stamps"]["sparq"]
    found_texts = texts.read_texts(books)
    other = search.joined([calibrate_text])
    case = Case(
        model=content_hash(model),
        text=_hash("\0".join(found_texts)),
        calibrate_text=_hash(other),
        ratio=0,
        n_pos=n_pos,
        n_contexts=n_contexts,
        n_tokens=n_tokens,
        seed=seed,
    )
    cases = [replace(case, ratio=r) for r in ratios]
    keys = {case: records.key(BENCH, asdict(case), stamp) for case in cases}
    done = {} if force else records.load(file)
    todo = [case for case in cases if keys[case] not in done]
    if not todo:
        return [done[key] for key in keys.values()]
    n_sequences = max(n_contexts, SEARCH_CONTEXTS)
    with engine.load(model, n_ctx=n_pos, n_threads=n_threads, n_sequences=n_sequences) as session:
        made = [contexts(session, text, n_contexts, n_pos, n_tokens, seed + i)
                for i, text in enumerate(found_texts)]  # fmt: skip
        # each book in turn, in pairs: prose, and a repeated passage
        chosen = [made[i // 2 % len(made)][i] for i in range(n_contexts)]
        results = [
            search.run(
                session, other, ratio=c.ratio, n_pos=n_pos, n_contexts=SEARCH_CONTEXTS, bar=bar
            )
            for c in todo
        ]
        work = {**asdict(cases[0]), "ratio": 0, "n_contexts": 0, "stamp": stamp}
        partial = paths.cache() / "calibrated" / f"{_hash(repr(work))}.jsonl"
        meter = Meter(session, chosen, partial)  # an interrupted run continues
        samples = _measured(meter, [specs(result) for result in results])
        for case, result, found in zip(todo, results, samples, strict=True):
            about = {"model_name": model.name, "calibration": result, "env": env}
            rec = records.record(BENCH, asdict(case), stamp, samples=found, **about)
            records.append(file, rec)
            done[rec["key"]] = rec
    return [done[key] for key in keys.values()]


def _measured(meter: Meter, lines: Sequence[dict[str, AttentionSpec]]) -> list[list[Any]]:
    """The samples of each case, from the settings of its lines."""
    which = range(len(meter.contexts))
    with progress_bar("budgets") as progress:
        meter.measure([s for line in lines for s in line.values()], which, progress)
    return [
        [
            {"line": n, "spec": str(s), "kl": m.kl.tolist(), "share": m.share.tolist()}
            for n, s in line.items()
            for m in meter.measure([s], which, lambda *_: None)
        ]
        for line in lines
    ]


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


# ---- numbers ----


def curves(recs: Sequence[Record], which: Callable[[int], bool] = lambda _: True) -> dict[str, Any]:
    """line -> (share (n_ratio,), kl (n_ratio, n_context)), by falling ratio."""
    recs = sorted(recs, key=lambda r: -r["case"]["ratio"])
    out = {}
    for name in LINES:
        rows = [next(s for s in r["samples"] if s["line"] == name) for r in recs]
        kl = np.array([[x for n, x in enumerate(r["kl"]) if which(n)] for r in rows])
        out[name] = np.array([np.mean(r["share"]) for r in rows]), kl
    return out


def bytes_at(kl: np.ndarray, share: np.ndarray, level: float) -> float:
    """The bytes at which a line reaches a KL, interpolated between logarithms; inf if never."""
    order = np.argsort(share)
    x, y = np.log(share[order]), np.log(np.minimum.accumulate(kl[order]))
    if not y[-1] <= np.log(level) <= y[0]:
        return math.inf if np.log(level) < y[-1] else float(share.min())
    return float(np.exp(np.interp(-np.log(level), -y, x)))


@dataclass(frozen=True)
class Needed:
    """The bytes for uniform's KL, over uniform's bytes, with a 95 % interval. Infinite if the line
    never reaches it, and without an upper bound if it does not once a context is left out.

    at_most: the value is an upper bound: even the fewest bytes measured have a lower KL.
    """

    share: float
    low: float
    high: float
    at_most: bool

    def __str__(self) -> str:
        if self.at_most:
            return f"at most {100 * self.share:.0f} %"
        if math.isinf(self.share):
            return "never"
        if math.isinf(self.high):
            return f"{100 * self.share:.0f} % (not in all contexts)"
        if math.isnan(self.high):
            return f"{100 * self.share:.0f} %"
        return f"{100 * self.share:.0f} % ({100 * self.low:.0f}-{100 * self.high:.0f})"


def needed(
    recs: Sequence[Record], line: str, ratio: float, which: Callable[[int], bool] = lambda _: True
) -> Needed:
    """The bytes that `line` needs against uniform at `ratio`, in the contexts `which`."""
    found = curves(recs, which)
    at = sorted((r["case"]["ratio"] for r in recs), reverse=True).index(ratio)
    (share, kl), (base_share, base) = found[line], found["uniform"]

    def bytes_over_uniform(i: np.ndarray) -> float:
        return bytes_at(kl[:, i].mean(1), share, base[at, i].mean()) / float(base_share[at])

    x, low, high = stats.jackknife(bytes_over_uniform, kl.shape[1])
    least = bool(x * base_share[at] <= share.min() * (1 + 1e-9))
    return Needed(x, low, high, least and line != "uniform")


def markdown(recs: Sequence[Record]) -> str:
    recs = sorted(recs, key=lambda r: -r["case"]["ratio"])
    case = recs[0]["case"]
    head = ["ratio", *LINES, "calibrated: bytes for uniform's KL", "prose", "repeated passages"]
    head.append("top-p: bytes for uniform's KL")
    lines = []
    found = curves(recs)
    for i, rec in enumerate(recs):
        cells = [ratio_text(rec["case"]["ratio"])]
        for name in LINES:
            share, kl = found[name]
            mean, (low, high) = kl[i].mean(), stats.mean(kl[i])
            cells.append(f"{mean:.4f} ({low:.4f}-{high:.4f}), {100 * share[i]:.1f} %")
        for which in (lambda _: True, lambda n: n % 2 == 0, lambda n: n % 2 == 1):
            cells.append(str(needed(recs, "calibrated", rec["case"]["ratio"], which)))
        cells.append(str(needed(recs, "top-p", rec["case"]["ratio"])))
        lines.append(cells)
    text = (
        f"KL(dense, sparse) in nats (95 % CI over contexts) and bytes as a share of dense's: "
        f"{case['n_contexts']} contexts of {case['n_pos']} positions, {case['n_tokens']} decoded "
        f"tokens each, {recs[0]['model_name']}; calibrated on another text. Last columns: bytes "
        "with which the budget has the KL of uniform at this ratio, over uniform's; in all "
        "contexts, in those that are prose, in those that repeat a passage of themselves."
    )
    return table(head, lines, left=()) + "\n\n" + text


# ---- figure ----


def data(folder: Path) -> list[plot.Row]:
    recs = list(records.load(folder / FILE).values())
    plot.need(recs, "budgets", NEEDS)
    last = recs[-1]["case"]
    recs = [r for r in recs if {**r["case"], "ratio": 0} == {**last, "ratio": 0}]
    recs = list({r["case"]["ratio"]: r for r in recs}.values())
    ratios = sorted((r["case"]["ratio"] for r in recs), reverse=True)
    rows: list[plot.Row] = []
    for name, (share, kl) in curves(recs).items():
        for i, ratio in enumerate(ratios):
            mean, (low, high) = float(kl[i].mean()), stats.mean(kl[i])
            x = needed(recs, name, ratio)
            rows.append({"what": "kl", "line": name, "ratio": ratio, "share": share[i], "kl": mean,
                         "low": low, "high": high, "needed": x.share, "needed_low": x.low,
                         "needed_high": x.high, "at_most": int(x.at_most)})  # fmt: skip
    for rec in recs:
        found = specs(rec["calibration"])["calibrated"]
        ks = found.k_layers or ()
        for il in rec["calibration"]["layers"] if ks else []:
            k = ks[il].k
            rows.append({"what": "k", "line": il, "ratio": rec["case"]["ratio"], "share": k})
    return rows


def draw(rows: Sequence[plot.Row]) -> Any:
    figure, (left, middle, right) = plot.panels(3, width=3.7)
    lines = plot.Names()
    for name, colour in COLOURS.items():
        line = sorted((r for r in rows if r["line"] == name), key=lambda r: r["share"])
        x, y = [100 * r["share"] for r in line], [r["kl"] for r in line]
        left.plot(x, y, "o-", color=colour, markersize=4)
        left.fill_between(x, [r["low"] for r in line], [r["high"] for r in line], color=colour,
                          alpha=0.12, linewidth=0)  # fmt: skip
        lines.at(left, name, x[-1], y[-1], colour)
        line = [r for r in line if not r["at_most"]]
        if name != "uniform":
            right.plot([100 * r["ratio"] for r in line], [100 * r["needed"] for r in line], "o-",
                       color=colour, markersize=4)  # fmt: skip
    left.set(yscale="log", xscale="log", xlabel="bytes, % of dense", ylabel="KL to dense (nats)")
    plot.x_ticks(left, [5, 8, 14, 25], ["5", "8", "14", "25"])
    left.set_title("quality over bytes")
    right.axhline(100, color=COLOURS["uniform"], linewidth=1)
    right.axhline(70, color=plot.PAPER, linewidth=1, linestyle=":")
    right.set(xscale="log", xlabel="uniform's ratio, %", ylabel="bytes at uniform's KL, %")
    plot.x_ticks(right, [5, 8, 14, 25], ["5", "8", "14", "25"])
    right.set_title("bytes for the same KL")
    ks = [r for r in rows if r["what"] == "k"]
    names = sorted({r["ratio"] for r in ks}, reverse=True)
    for ratio, colour in zip(
        names, (plot.OURS, plot.OURS_2, plot.OURS_3, plot.PAPER, plot.STOCK), strict=False
    ):
        line = sorted((r for r in ks if r["ratio"] == ratio), key=lambda r: int(r["line"]))
        middle.plot([r["line"] for r in line], [100 * r["share"] for r in line], "o-",
                    color=colour, markersize=4, label=ratio_text(ratio))  # fmt: skip
    middle.set(yscale="log", xlabel="layer", ylabel="k, % of the positions", title="calibrated k")
    middle.legend(fontsize=7, frameon=False)
    lines.write(figure)
    return figure


FIGURE = plot.Figure(
    name="budgets",
    title="KL to dense over bytes, by budget",
    caption="Demo model, unseen books; a ratio is calibrated on another text. Left: all budgets, "
    "with 95 % intervals over contexts. Middle: k of each layer as calibrated, as a "
    "share of the positions. Right: bytes at which a budget reaches uniform's KL, if fewer bytes "
    "were measured.",
    needs=NEEDS,
    file=FILE,
    data=data,
    draw=draw,
)


@commands.measurement(
    click.option(
        "--calibrate-text",
        metavar="FILE",
        help="Text to calibrate on.  [default: the demo's document]",
    ),
    click.option("--ctx", "n_pos", type=Number(int, 512), default=2048, show_default=True),
    click.option("--contexts", "n_contexts", type=Number(int, 2), default=24, show_default=True),
    click.option("--tokens", "n_tokens", type=Number(int, 1), default=64, show_default=True),
)
def command(
    model: Path,
    texts: list[Path],
    folder: Path,
    calibrate_text: str | None,
    threads: int,
    **sizes: Any,
) -> None:
    """KL to dense over bytes: uniform, ramps, calibrated, top-p."""
    other = Path(calibrate_text or paths.data("models") / "demo" / "document.txt")
    file = folder / FILE
    found = run(model, texts, other, file, progress_bar, n_threads=threads, **sizes)
    commands.show(markdown(found), file)


if __name__ == "__main__":
    run_command(command)
