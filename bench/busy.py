"""Times tokens beside another program that keeps cores busy, for how long waiting threads spin.

    python bench/busy.py -m MODEL --text BOOK

Each sample is a process of its own, since OpenMP reads its settings once: it reads the beginning of
the text and decodes. The cases are stock and ours, the spins of GNU's OpenMP and those that
`native.waiting` sets, alone and beside as many busy threads as there are cores. The order turns
from round to round. It writes busy.jsonl and .md.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click
import commands

from pyorch import engine, native
from pyorch.bench import records
from pyorch.bench.records import Record
from pyorch.cli import run as run_command
from pyorch.cli.types import Number
from pyorch.errors import SparqError
from pyorch.models.content import content_hash
from pyorch.table import markdown

BENCH = "busy"
FILE = f"{BENCH}.jsonl"
SYSTEMS_OWN = 300_000  # the spins of GNU's OpenMP without a setting, as its manual has it
SPIN = "while True: pass"


@dataclass(frozen=True)
class Case:
    """`spec` is "off" for llama.cpp's own attention. `n_busy`: threads of another program."""

    model: str
    library: str
    spec: str
    spins: int
    n_busy: int
    n_prompt: int
    n_gen: int
    n_threads: int
    n_rounds: int


def child(model: str, text: str, case: Case) -> dict[str, float]:
    """The seconds of a prompt and of the tokens after it, in this process.

    Raises:
        SparqError: sparse attention was asked for and did not run.
    """
    ours = case.spec != "off"
    with engine.load(
        model,
        n_ctx=case.n_prompt + case.n_gen + 8,
        n_threads=case.n_threads,
        attention=case.spec if ours else None,
        stock=case.library == "stock",
    ) as session:
        tokens = engine.tokenize(session, Path(text).read_text("utf-8"))[: case.n_prompt]
        start, n = time.perf_counter(), case.n_gen + 1
        pieces = engine.generate(session, tokens, max_tokens=n, ignore_eog=True)
        times = [time.perf_counter() for _ in pieces]
        if ours and engine.info(session).sparse_share < 1:
            raise SparqError(f"{case.spec} did not run sparse")
    return {"prompt_s": times[0] - start, "token_s": (times[-1] - times[0]) / (len(times) - 1)}


def one_round(model: Path, text: Path, case: Case) -> dict[str, Any]:
    """What a process of its own measures, beside `n_busy` others."""
    line = [sys.executable, __file__, "--child", str(model), str(text), json.dumps(asdict(case))]
    env = {**os.environ, "GOMP_SPINCOUNT": str(case.spins)}
    others = [subprocess.Popen([sys.executable, "-c", SPIN]) for _ in range(case.n_busy)]
    try:
        done = subprocess.run(line, env=env, capture_output=True, text=True, check=False)
    finally:
        for other in others:
            other.kill()
            other.wait()
    if done.returncode:
        raise SparqError(f"{case.library}: {(done.stderr.strip().splitlines() or ['no word'])[-1]}")
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def measure(
    model: Path, text: Path, cases: Sequence[Case], done: Callable[[float], None]
) -> list[dict[str, Any]]:
    """The samples of each case, one of each round."""
    found: list[list[dict[str, Any]]] = [[] for _ in cases]
    n_rounds = cases[0].n_rounds
    for turn in range(n_rounds):
        for n, i in enumerate(range(len(cases))[:: -1 if turn % 2 else 1]):
            found[i].append(one_round(model, text, cases[i]))
            done((turn + (n + 1) / len(cases)) / n_rounds)
    return [{"samples": x} for x in found]


def table(recs: Sequence[Record]) -> str:
    head = ["attention", "busy threads", "spins", "tokens/s", "from - to", "s of the prompt"]
    body = []
    for rec in recs:
        case = records.read_case(Case, rec)
        speed = sorted(1 / s["token_s"] for s in rec["samples"])
        low, mid, high = speed[0], records.spread(speed)[0], speed[-1]
        prompt = records.spread([s["prompt_s"] for s in rec["samples"]])[0]
        who = "llama.cpp" if case.library == "stock" else f"`{case.spec}`"
        line = [who, str(case.n_busy), f"{case.spins:,}", f"{mid:.1f}"]
        body.append([*line, f"{low:.1f} - {high:.1f}", f"{prompt:.2f}"])
    first = records.read_case(Case, recs[0])
    about = (
        f"{recs[0]['model_name']}, {first.n_gen} tokens after {first.n_prompt}, "
        f"{first.n_threads} threads, {recs[0]['env']['machine']['cpu']}; medians and all of "
        f"{first.n_rounds} rounds in turns."
    )
    return f"{about}\n\n{markdown(head, body, left=('attention',))}"


@commands.command(
    click.option("--model", "-m", metavar="FILE", required=True, help="GGUF model to measure."),
    click.option("--text", metavar="FILE", required=True, help="A text to read the beginning of."),
    click.option("--n-prompt", "-p", type=Number(int, 1), default=1280, show_default=True),
    click.option("--n-gen", "-n", type=Number(int, 1), default=64, show_default=True),
    commands.samples(6),
    commands.OUT,
    commands.FORCE,
)
def command(
    model: str, text: str, n_prompt: int, n_gen: int, samples: int, folder: Path, force: bool
) -> None:
    """Tokens beside a busy program, by how long waiting threads spin."""
    path, n = Path(model), engine.usable_cores()
    ours = native.SPINS
    cases = [
        Case(content_hash(path), library, spec, spins, n_busy, n_prompt, n_gen, n, samples)
        for n_busy in (0, n)
        for library, spec in (("stock", "off"), ("sparq", "sparq,ratio=1/8"))
        for spins in (SYSTEMS_OWN, ours)
    ]
    run = partial(measure, path, Path(text))
    found = commands.recorded(BENCH, path, [cases], run, folder, force=force)
    commands.show(table(found), folder / FILE)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        print(json.dumps(child(sys.argv[2], sys.argv[3], Case(**json.loads(sys.argv[4])))))
    else:
        run_command(command)
