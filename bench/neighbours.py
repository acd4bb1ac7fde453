"""Times the reply of one slot of llama-server while another reads a prompt, and is restored.

    python bench/neighbours.py -m MODEL --text BOOK [-p 8192] [-b 512]

Both slots hold a prompt of so many tokens. One replies, by itself at first; then the other reads
its prompt anew, and is later restored from a file. Reported are the tokens that come meanwhile, how
long the reading takes, and the slowest token around a restore. The servers take turns.

It writes neighbours.jsonl and .md.
"""

from __future__ import annotations

import json
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import click
import commands
import numpy as np
import servers
from servers import Case, Server, name_of

from pyorch.attention.spec import AttentionSpec
from pyorch.bench import records
from pyorch.bench.records import Record
from pyorch.cli import run as run_command
from pyorch.cli.types import Number
from pyorch.errors import SparqError
from pyorch.table import markdown

BENCH = "neighbours"
FILE = f"{BENCH}.jsonl"
SAVED = "slot"  # the name of the file
N_BESIDE = 16  # tokens of the reply before and after a restore


def beside(server: Server, other: Callable[[], None], n_after: int) -> tuple[list[float], float]:
    """Slot 0 replies while `other` runs.

    Returns:
        The moments of its tokens from the beginning of `other` on, and when that was done, both in
        seconds from there on; `n_after` more tokens are waited for, then the reply is cancelled.

    Raises:
        SparqError: the reply ended first.
    """
    begun, ended = threading.Event(), threading.Event()
    span: list[float] = []
    left = n_after

    def go_on(times: Sequence[float]) -> bool:
        nonlocal left
        if len(times) == N_BESIDE:
            begun.set()
        left -= ended.is_set()
        return left > 0

    def run() -> None:
        begun.wait()
        span.append(time.perf_counter() - started)
        try:
            other()
        finally:
            span.append(time.perf_counter() - started)
            ended.set()

    started = time.perf_counter()
    thread = threading.Thread(target=run)
    thread.start()
    times, _ = server.ask(0, server.case.n_gen, go_on)
    begun.set()
    thread.join()
    if left > 0:
        raise SparqError("the reply ended while the other slot was busy", "longer replies: -n 1024")
    return [t - span[0] for t in times if t > span[0]], span[1] - span[0]


def one_round(server: Server) -> dict[str, Any]:
    """What is measured of one server in its turn."""
    case = server.case
    times, timings = server.ask(0, case.n_gen)
    servers.check(case, [timings])
    alone = np.diff(times)

    def slot(action: str) -> None:
        path = f"/slots/1?action={action}"
        with servers.request(server.port, path, {"filename": SAVED}) as answer:
            n = json.load(answer).get("n_restored", case.n_prompt)
        if n < case.n_prompt:
            raise SparqError(f"{n} of {case.n_prompt} positions were restored")

    slot("erase")
    meanwhile, read_s = beside(server, lambda: (server.ask(1, 1), None)[1], 1)
    n = sum(t <= read_s for t in meanwhile)
    slot("save")
    slot("erase")
    around, restore_s = beside(server, lambda: slot("restore"), N_BESIDE)
    return {
        "alone_s": float(np.median(alone)),
        "read_s": read_s,
        "read_tokens_per_s": n / read_s,
        "restore_s": restore_s,
        "slowest_s": float(np.diff([0.0, *around]).max()),
    }


def measure(
    model: Path, book: str, group: Sequence[Case], done: Callable[[float], None]
) -> list[dict[str, Any]]:
    """The samples of each kind by name, one of each round.

    Raises:
        SparqError: the book is too short, a server failed, or a reply of ours was not sparse.
    """
    found: list[dict[str, list[float]]] = [{} for _ in group]
    n_rounds = group[0].n_rounds
    n_steps = len(group) * (n_rounds + 1)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        running = []
        for i, case in enumerate(group):
            (folder / f"slots{i}").mkdir()
            more = ("--slot-save-path", folder / f"slots{i}")
            port = stack.enter_context(servers.running(case, model, folder / f"log{i}", *more))
            running.append(Server(case, port, servers.prompts(port, book, case)))
            running[-1].ask(0, 1)
            done((i + 1) / n_steps)
        for turn in range(n_rounds):
            for n, i in enumerate(range(len(group))[:: -1 if turn % 2 else 1]):
                for name, value in one_round(running[i]).items():
                    found[i].setdefault(name, []).append(value)
                done((len(group) * (turn + 1) + n + 1) / n_steps)
    return [{"samples": x} for x in found]


def table(recs: Sequence[Record]) -> str:
    case, env = records.read_case(Case, recs[0]), recs[0]["env"]
    head = ["attention", "-b", "ms per token alone", "s to read the prompt"]
    head += ["tokens/s of the reply meanwhile", "ms of the slowest token around a restore"]
    body = []
    for rec in recs:
        c = records.read_case(Case, rec)
        mid = {name: records.spread(values) for name, values in rec["samples"].items()}
        row = [name_of(c), f"{c.n_batch}", f"{1e3 * mid['alone_s'][0]:.1f}"]
        row += ["{:.1f} ({:.1f}-{:.1f})".format(*mid["read_s"])]
        row += ["{:.2f} ({:.2f}-{:.2f})".format(*mid["read_tokens_per_s"])]
        slow = [1e3 * x for x in mid["slowest_s"]]
        row += [
            "{:.0f} ({:.0f}-{:.0f}), ".format(*slow) + f"{slow[0] / 1e3 / mid['alone_s'][0]:.1f}x"
        ]
        body.append(row)
    about = (
        f"Two slots of {case.n_prompt} tokens: one replies while the other reads its prompt, and "
        f"is restored from a file; {recs[0]['model_name']}, {case.n_threads} threads, "
        f"{env['machine']['cpu']}; medians of {case.n_rounds} rounds in turns, in brackets the "
        "10th and 90th percentile."
    )
    return f"{about}\n\n{markdown(head, body)}"


@servers.measurement(
    8192,
    256,
    ("sparq,ratio=1/8",),
    click.option(
        "-b",
        "--n-batch",
        "batches",
        type=Number(int, 1),
        multiple=True,
        default=(2048, 512),
        show_default=True,
        help="Tokens that a slot reads between those of the others; ours runs with each, stock "
        "with the first.",
    ),
)
def command(
    path: Path,
    book: str,
    common: dict[str, Any],
    specs: Sequence[AttentionSpec],
    folder: Path,
    batches: Sequence[int],
    force: bool,
) -> None:
    """One slot replies while another reads a prompt, or is restored."""
    group = [
        case
        for i, n in enumerate(batches)
        for case in servers.cases(specs, n_slot=2, n_batch=n, n_ubatch=min(n, 512), **common)
        if i == 0 or case.library == "sparq"
    ]
    run = partial(measure, path, book)
    found = commands.recorded(BENCH, path, [group], run, folder, force=force)
    commands.show(table(found), folder / FILE)


if __name__ == "__main__":
    run_command(command)
