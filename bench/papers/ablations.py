"""SparQ's choices, one at a time: its Fig. 7, from the records of `sparq-cpp eval`.

    python -m bench ablations       prints the commands that measure it

All methods run on the same examples of two tasks, `fidelity` (KL to dense) and `repetition`, at
equal bytes or with the paper's own parameters r (rank) and k:

    7a  the largest components of q against a random low-rank projection and against the oracle
    7b  temperatures of the approximate softmax, which says how much the mean of V stands for
    7c  r x k
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from bench import plot
from pyorch import policies
from pyorch.attention.spec import BOUNDS
from pyorch.cli.bench import measurement
from pyorch.evals import series, table
from pyorch.evals.repetition import CHARS

NEEDS = "python -m bench ablations, which prints the commands"
RATIOS = ("1/2", "1/4", "1/8", "1/16", "1/32")
SCANS = {
    "oracle": "oracle",
    "SparQ f16": f"sparq,shadow=f16,{BOUNDS}",
    "SparQ q4": f"sparq,{BOUNDS}",
    "low-rank": "low-rank",
}
CONFIGS = ((16, 128), (8, 64), (4, 32))  # r, k
TAUS = {
    "eq. 9": "mean_v=on",
    "sqrt(d)": "mean_v=on,tau=sqrt-d",
    "sqrt(r)": "mean_v=on,tau=sqrt-r",
    "eq. 9, no mean of V": "mean_v=off",
    "sqrt(r), no mean of V": "mean_v=off,tau=sqrt-r",  # the gain from ranking shared heads
}
RANKS, KS = (4, 8, 16, 32), (16, 32, 64, 128, 256, 512)
TASKS = {"fidelity": (2048, 20), "repetition": (2336, 100)}  # positions, examples
FOLDER = "ablations"

_COLOURS = {
    **dict(zip(SCANS, (plot.PAPER, plot.OURS_2, plot.OURS, "#ae3ec9"), strict=True)),
    **dict(zip(TAUS, (plot.OURS, plot.OURS_2, plot.OURS_3, plot.PAPER, "#74b816"), strict=True)),
}
_LINES = (plot.OURS_3, plot.OURS, plot.OURS_2, plot.STOCK)  # the colours of RANKS


def points() -> list[tuple[str, str, str, policies.Method]]:
    """The points as (panel, line, point, spec)."""
    out = [("", "dense", "", "off")]
    out += [("a", n, r, f"{spec},ratio={r}") for n, spec in SCANS.items() for r in RATIOS]
    out += [
        ("b", name, f"r={r} k={k}", f"sparq-tau,rank={r},k={k},{more}")
        for name, more in TAUS.items()
        for r, k in CONFIGS
    ]
    out += [
        ("c", f"r = {r}", str(k), f"sparq,rank={r},topk={k},{BOUNDS}") for r in RANKS for k in KS
    ]
    return [(panel, line, at, policies.parse(spec)) for panel, line, at, spec in out]


def lines() -> str:
    """The lines that measure all points, with books that the model has not seen."""
    methods = " ".join(f"-a {spec}" for *_, spec in points())
    commands = [
        f"sparq-cpp eval {task} -m models/demo/demo.gguf --text BOOKS --ctx {n_pos} -n {n} -t 1 "
        f"{methods} --out DIR"
        for task, (n_pos, n) in TASKS.items()
    ]
    to = "bench/results/MACHINE/" + FOLDER
    commands += [f"sparq-cpp eval pack DIR {to}", f"sparq-cpp eval table {to} > {to}.md"]
    return "\n".join(commands)


@click.command("ablations", context_settings=measurement.SETTINGS)
def command() -> None:
    """Print the commands that measure SparQ's choices, one at a time."""
    print(lines())


# ---- figure ----


def data(folder: Path) -> list[plot.Row]:
    results = [s for task in TASKS for s in series.read(folder / FOLDER / f"{task}.jsonl")]
    plot.need(results, "ablations", NEEDS)
    out: list[plot.Row] = []
    for group in series.by_setting(results):
        rows = {r.method: r for r in table.rows(group)}
        for panel, line, point, spec in points():
            if r := rows.get(spec):
                out.append({"task": r.task, "panel": panel, "line": line, "point": point, "n": r.n,
                            "share": r.share_of_dense, "score": r.score, "low": r.score_low,
                            "high": r.score_high, "spec": str(spec)})  # fmt: skip
    return out


def draw(rows: Sequence[plot.Row]) -> Any:
    tasks = [t for t in TASKS if any(r["task"] == t for r in rows)]
    figure, axes = plot.panels(3, len(tasks), width=3.9, height=3.2)
    for i, task in enumerate(tasks):
        of_task = [r for r in rows if r["task"] == task]
        dense = next(r for r in of_task if r["line"] == "dense")
        left, middle, right = axes[3 * i : 3 * i + 3]
        for ax in (left, middle, right):
            if task == "fidelity":
                plot.decades(ax, [x for r in of_task if r["panel"] for x in (r["low"], r["high"])])
                ax.set_ylabel("KL to dense (nats)")
            else:
                ax.axhline(dense["score"], color=plot.PAPER, linewidth=1, linestyle="--")
                ax.axhspan(dense["low"], dense["high"], color=plot.PAPER, alpha=0.12)
                ax.set(ylabel="characters recited", ylim=(0, CHARS))
        at = sorted((r | {"bytes": 100 * r["share"]} for r in of_task), key=lambda r: r["bytes"])
        lines, ranks = plot.Names(), dict(zip((f"r = {r}" for r in RANKS), _LINES, strict=True))
        for ax, panel, colours in ((left, "a", _COLOURS), (right, "c", ranks)):
            rows_of = [r for r in at if r["panel"] == panel]
            bars = ("low", "high")
            lines.each(ax, rows_of, "bytes", "score", colours, *bars, by="line", band=True)
        recipe = [r for r in at if r["panel"] == "c" and r["point"] == "128"]
        more: dict[str, Any] = {"fmt": "D", "markersize": 8, "markerfacecolor": "none"}
        lines.each(right, recipe, "bytes", "score", ranks, by="line", named=False, **more)
        _temperatures(middle, of_task)
        if i == 0:
            middle.legend(frameon=False, fontsize=8)
        for ax, title in ((left, "what finds the positions"), (right, "rank x k")):
            ax.set(xscale="log", xlabel="bytes, % of dense", title=title)
            ticks = [3, 6, 12, 25, 50]
            plot.x_ticks(ax, ticks, [str(t) for t in ticks])
            ax.set_xlim(2, 60 if ax is left else 36)
        lines.write(figure)
    return figure


def _temperatures(ax: Any, rows: Sequence[plot.Row]) -> None:
    """A group of points for each configuration."""
    of_task = [r for r in rows if r["panel"] == "b"]
    groups = list(dict.fromkeys(r["point"] for r in of_task))
    for j, name in enumerate(TAUS):
        line = [r for r in of_task if r["line"] == name]
        x = [groups.index(r["point"]) + (j - 2) / 7 for r in line]
        bars = [[r["score"] - r["low"] for r in line], [r["high"] - r["score"] for r in line]]
        ax.errorbar(x, [r["score"] for r in line], bars, fmt="o", color=_COLOURS[name], label=name)
    ax.set_xticks(range(len(groups)), groups)
    ax.set(xlim=(-0.5, len(groups) - 0.5), title="temperature of the scores")


FIGURE = plot.Figure(
    name="ablations",
    title="SparQ's choices, one at a time (SparQ Fig. 7)",
    caption="Demo model (heads of 64), unseen books; bars and bands are 95 % intervals. Above: "
    "KL to dense attention, 2,048 positions; below: characters recited, 2,336. Left: what finds "
    "the positions, by bytes. Middle: the temperature of the approximate softmax. Right: r x k, "
    "transposed K in q4; points of a line are k; diamonds: k = 128, the paper's recipe.",
    needs=NEEDS,
    file=f"{FOLDER}/fidelity.jsonl",
    data=data,
    draw=draw,
)
