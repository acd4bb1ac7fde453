"""Times llama-server with many users at once: llama.cpp's two attentions and ours, in turns.

    python -m bench serving -m MODEL --text BOOK [--slots 8] [-p 4096] [-n 64]

One server of each kind is started, stock's from the stock library. Each slot reads a piece of the
book, and its time to the first token is taken while all slots read theirs. Then, in rounds and in
turns, all slots of one server reply at once to the prompts that they hold. Ours that does not
count a sparse call for every token and layer fails the run.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from bench.options import model_name, tables
from bench.users import llama_server
from bench.users.llama_server import Server, ServerCase, ServerOptions, Times
from pyorch.cli.bench.measurement import BOTH, Done, Measurement, Row, same
from pyorch.errors import SparqError
from pyorch.measure import records
from pyorch.measure.records import Record, Result
from pyorch.measure.turns import sides
from pyorch.models.content import content_hash
from pyorch.table import markdown

FILE = "serving.jsonl"
PERCENTILES = (50, 95, 99)


def groups(o: ServerOptions) -> list[list[ServerCase]]:
    """All servers in one group."""
    shared = same(o, ServerCase) | {"model": content_hash(o.model)}
    return [[ServerCase(**shared, **side) for side in sides((False, True), "f16", o.attn)]]


def measure(o: ServerOptions, group: Sequence[ServerCase], done: Done) -> list[Result]:
    """The result of each kind: medians over the rounds, and percentiles over single tokens.

    Raises:
        SparqError: the book is too short, a server failed, or a reply of ours was not sparse.
    """
    results: list[dict[str, Any]] = [{"samples": [], "first_s": [], "between_s": []} for _ in group]
    case, n_steps = group[0], len(group) * (group[0].n_rounds + 1)
    with ExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        running = []
        for i, c in enumerate(group):
            port = stack.enter_context(llama_server.running(c, o.model, logs / str(i)))
            running.append(Server(c, port, llama_server.prompts(port, o.text, c)))
            replies = running[-1].all_slots(2)
            results[i]["first_s"] = [times[0] for times, _ in replies]
            done((i + 1) / n_steps)
        for turn in range(case.n_rounds):
            for i in range(len(group))[:: -1 if turn % 2 else 1]:
                replies = running[i].all_slots(case.n_gen)
                llama_server.check(group[i], [timings for _, timings in replies])
                results[i]["samples"].append(tokens_per_s([times for times, _ in replies]))
                for times, _ in replies:
                    results[i]["between_s"] += np.diff(times).tolist()
                done((len(group) * (turn + 1) + i + 1) / n_steps)
    return [
        {
            "model_name": model_name(o.model),
            "samples": r["samples"],  # tokens per second of each round
            "first_s": r["first_s"],
            "between_s": {str(p): float(np.percentile(r["between_s"], p)) for p in PERCENTILES},
        }
        for r in results
    ]


def tokens_per_s(replies: Sequence[Times]) -> float:
    """Tokens of all replies per second, while all of them are being written: from the moment the
    last of them began to the moment the first of them ended.

    Raises:
        SparqError: there is no such time.
    """
    begin, end = max(times[0] for times in replies), min(times[-1] for times in replies)
    if begin >= end:
        raise SparqError("a reply ended before the last one began", "longer replies: -n 256")
    return sum(begin < t <= end for times in replies for t in times) / (end - begin)


def rows(recs: Sequence[Record]) -> list[Row]:
    """A row for each kind of server of one run."""
    results = [(records.read_case(ServerCase, r), r) for r in recs]
    rate = {c.name: records.spread(r["samples"]) for c, r in results}
    best = max(x[0] for name, x in rate.items() if name.startswith("llama.cpp"))
    out = []
    for c, r in results:
        mid, low, high = rate[c.name]
        out.append(
            {
                "attention": c.name,
                "tokens_per_s": mid,
                "tokens_per_s_low": low,
                "tokens_per_s_high": high,
                "speedup": mid / best,
                **{f"between_ms_p{p}": 1e3 * r["between_s"][str(p)] for p in PERCENTILES},
                "first_s_median": float(np.median(r["first_s"])),
                "first_s_max": max(r["first_s"]),
            }
        )
    return out


@tables
def table(recs: Sequence[Record]) -> str:
    """That of a run, which has its own model and sizes."""
    case = records.read_case(ServerCase, recs[0])
    head = ["attention", "tokens/s of all slots", "against the best stock"]
    head += ["ms between tokens, p50 / p95 / p99", "s to the first token, median / maximum"]
    body = [
        [
            r["attention"],
            f"{r['tokens_per_s']:.1f} ({r['tokens_per_s_low']:.1f}-{r['tokens_per_s_high']:.1f})",
            f"{r['speedup']:.2f}x",
            " / ".join(f"{r[f'between_ms_p{p}']:.0f}" for p in PERCENTILES),
            f"{r['first_s_median']:.1f} / {r['first_s_max']:.1f}",
        ]
        for r in rows(recs)
    ]
    about = (
        f"{case.n_slot} slots, each with a prompt of {case.n_prompt} tokens, which all read at "
        f"once, and {case.n_gen} tokens of reply; {recs[0]['model_name']}, {case.n_threads} "
        f"threads, {records.about(recs)}; medians of {case.n_rounds} rounds in turns, in "
        "brackets the 10th and 90th percentile."
    )
    return f"{about}\n\n{markdown(head, body)}"


MEASUREMENT = Measurement("serving", ServerOptions, ServerCase, groups, measure, table, BOTH)
