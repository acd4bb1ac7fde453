"""Times tokens after a document of whose K and V only a part may stay in memory.

    sparq-cpp read BOOK -m MODEL
    python bench/kv_memory.py -m MODEL --document BOOK [--share 1/2,1/4] [-a SPEC ...]

For each attention and each share, a new context opens the document with no page of it in memory,
reads a question, and decodes. Reported are the time from opening to the first token, what a token
takes once a few have shown what stays in memory, what it reads from the file, by our own account
and by the system's, and the share of the pages it wants that are there. Share 1 has no limit, so
the system decides, and memory is not short. The order turns from round to round.

It writes kv_memory.jsonl and .md.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click
import commands

from pyorch import engine
from pyorch.attention.bytes import cache_bytes
from pyorch.attention.spec import AttentionSpec, parse_spec, ratio_text
from pyorch.bench import records
from pyorch.bench.records import Record
from pyorch.cli import run as run_command
from pyorch.cli.types import Number, Ratio, Several
from pyorch.engine import document_file
from pyorch.engine.settings import cache_type
from pyorch.errors import SparqError
from pyorch.models.content import content_hash
from pyorch.table import markdown
from pyorch.text import human_bytes

BENCH = "kv_memory"
FILE = f"{BENCH}.jsonl"
SPECS = ("dense", "sparq,ratio=1/8", "sparq,ratio=1/32")
QUESTION = "\n\nWhat happens next? "
N_WARM = 16  # tokens before the clock starts


@dataclass(frozen=True)
class Case:
    """An attention, and the share of K and V that may stay in memory. `model` is a hash, `document`
    the checksum of its tokens."""

    model: str
    document: int
    n_tokens: int
    spec: AttentionSpec
    share: float
    n_gen: int
    n_threads: int
    n_rounds: int
    library: str = "sparq"


def from_disk() -> int:
    """Bytes that this process had read from disks."""
    found = re.search(r"^read_bytes: (\d+)", Path("/proc/self/io").read_text(), re.M)
    return int(found[1]) if found else 0


def one_round(loaded: engine.Model, of: engine.Document, case: Case) -> dict[str, Any]:
    """What is measured of one case in its turn.

    Raises:
        SparqError: the pages of the file do not lie in the cache, or sparse attention did not run.
    """
    type_k, type_v = of.types
    n_bytes = cache_bytes(loaded.geometry, of.n_tokens, cache_type(type_k), cache_type(type_v))
    with loaded.session(
        n_ctx=of.n_tokens + N_WARM + case.n_gen + 64,
        n_threads=case.n_threads,
        type_k=type_k,
        type_v=type_v,
        attention=case.spec,
        n_mapped=of.n_tokens,
        kv_memory=int(case.share * n_bytes) if case.share < 1 else None,
    ) as session:
        with of.path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        times = [time.perf_counter()]
        if engine.open_document(session, of) < 0.9 * n_bytes:
            raise SparqError("the document is not mapped", "a longer one: 64 MiB of K and V")
        question = engine.tokenize(session, QUESTION, add_special=False)
        pieces = engine.generate(
            session,
            [*session.tokens, *question],
            max_tokens=N_WARM + case.n_gen + 1,
            ignore_eog=True,
        )
        before = 0
        for i, _ in enumerate(pieces):
            times.append(time.perf_counter())
            if i == N_WARM:
                engine.reset_counters(session)
                before = from_disk()
        info, system = engine.info(session), from_disk() - before
        if case.spec.sparse and info.sparse_share < 1:
            raise SparqError(f"{case.spec}: {100 * info.sparse_share:.0f} % of calls were sparse")
        if not case.spec.sparse and not info.counter("calls_dense_op"):
            raise SparqError(f"{case.spec}: no attention of ours ran")
    seen = info.raw["documents"]
    if case.share < 1 and not seen["wanted"]:
        raise SparqError(f"{case.spec}: the limit was not watched")
    return {
        "first_s": times[1] - times[0],
        "tokens_s": [b - a for a, b in zip(times[N_WARM + 1 :], times[N_WARM + 2 :], strict=False)],
        "read": info.disk_bytes_per_token,
        "system": system / case.n_gen,
        "found": 1 - seen["read"] / seen["wanted"] if seen["wanted"] else 1.0,
        "held": seen["held"],
        "n_bytes": n_bytes,
    }


def measure(
    model: Path, of: engine.Document, cases: Sequence[Case], done: Callable[[float], None]
) -> list[dict[str, Any]]:
    """The samples of each case, one of each round."""
    found: list[list[dict[str, Any]]] = [[] for _ in cases]
    n_rounds = cases[0].n_rounds
    with engine.load_model(model) as loaded:
        for turn in range(n_rounds):
            for n, i in enumerate(range(len(cases))[:: -1 if turn % 2 else 1]):
                found[i].append(one_round(loaded, of, cases[i]))
                done((turn + (n + 1) / len(cases)) / n_rounds)
    return [{"samples": x} for x in found]


def table(recs: Sequence[Record]) -> str:
    first = records.read_case(Case, recs[0])
    head = ["attention", "of K and V in memory", "s to the first token", "ms per token", "p90"]
    head += ["read for a token", "by the system's account", "pages that were there"]
    body = []
    for rec in recs:
        case, samples = records.read_case(Case, rec), rec["samples"]
        names = [name for name in samples[0] if name != "tokens_s"]
        mid = {name: records.spread([s[name] for s in samples])[0] for name in names}
        ms = [1e3 * x for x in records.spread([t for s in samples for t in s["tokens_s"]])]
        body.append(
            [
                f"`{case.spec}`",
                ratio_text(case.share) if case.share < 1 else "all",
                f"{mid['first_s']:.2f}",
                f"{ms[0]:.1f}",
                f"{ms[2]:.1f}",
                human_bytes(mid["read"]) if case.share < 1 else "-",
                human_bytes(mid["system"]),
                f"{100 * mid['found']:.1f} %" if case.share < 1 else "-",
            ]
        )
    about = (
        f"{recs[0]['model_name']}, a document of {first.n_tokens:,} tokens, "
        f"{human_bytes(recs[0]['samples'][0]['n_bytes'])} of K and V, {first.n_threads} threads, "
        f"{recs[0]['env']['machine']['cpu']}; medians of {first.n_gen} tokens in each of "
        f"{first.n_rounds} rounds, each from a file that is not in memory."
    )
    return f"{about}\n\n{markdown(head, body, left=('attention',))}"


@commands.command(
    click.option("--model", "-m", metavar="FILE", required=True, help="GGUF model to measure."),
    click.option("--document", metavar="FILE", required=True, help="What it has read, or a name."),
    click.option("--attn", "-a", "specs", multiple=True, default=SPECS, show_default=True),
    click.option("--share", "shares", type=Several(Ratio()), default="1/2,1/4", show_default=True),
    click.option("--n-gen", "-n", type=Number(int, 1), default=32, show_default=True),
    click.option("--threads", "-t", type=Number(int, 1), help="[default: all cores]"),
    commands.samples(2),
    commands.OUT,
    commands.FORCE,
)
def command(
    model: str,
    document: str,
    specs: Sequence[str],
    shares: Sequence[float],
    n_gen: int,
    threads: int | None,
    samples: int,
    folder: Path,
    force: bool,
) -> None:
    """Tokens after a document that does not fit into the memory it may take."""
    path, of = Path(model), document_file.load(document_file.find(document))
    cases = [
        Case(
            content_hash(path),
            of.text_crc,
            of.n_tokens,
            parse_spec(spec),
            share,
            n_gen,
            threads or engine.usable_cores(),
            samples,
        )
        for spec in specs
        for share in (1.0, *shares)
    ]
    run = partial(measure, path, of)
    found = commands.recorded(BENCH, path, [cases], run, folder, force=force, libraries=("sparq",))
    commands.show(table(found), folder / FILE)


if __name__ == "__main__":
    run_command(command)
