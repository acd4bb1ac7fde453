"""`sparq-cpp demo`: the embedded model recites from a long document, dense and sparse."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pyorch import paths
from pyorch.attention.spec import AttentionSpec
from pyorch.cli.loading import open_session
from pyorch.cli.options import (
    ContextOptions,
    LoadOptions,
    ModelOptions,
    json_option,
    verbose_option,
)
from pyorch.cli.summary import Summary, summary_of
from pyorch.cli.terminal import note_if_busy, print_json
from pyorch.cli.types import THREADS, Number, Ratio
from pyorch.errors import SparqError
from pyorch.progress import progress_bar
from pyorch.text import human_bytes

if TYPE_CHECKING:
    from pyorch.engine import Session

RATIO = 1 / 8
# The place of the passage in the document, as a share of its length. The demo model recites at
# length at seven of nine places tried, of which this is one. At 0.85 even dense attention fails.
PLACE = 0.05
CUE_WORDS = 24  # words of the passage that the model is given


@click.command()
@click.option(
    "-n",
    "--tokens",
    type=Number(int, 1),
    default=96,
    show_default=True,
    help="Tokens to recite.",
)
@click.option(
    "--ratio",
    type=Ratio(),
    default=RATIO,
    help="Share of dense attention's bytes.  [default: 1/8]",
)
@click.option("--threads", "-t", type=THREADS, help="Number of threads.  [default: all cores]")
@json_option
@verbose_option
def command(tokens: int, ratio: float, threads: int | None, as_json: bool) -> None:
    """Let the small bundled model recite a passage of a long document.

    The model reads the document once and gets the first words of a passage. It continues them
    twice: with llama.cpp's dense attention and with sparse attention. The command fails if no
    attention was sparse.
    """
    folder = paths.data("models") / "demo"
    document = _read(folder / "document.txt")
    cue, rest = passage(document)
    spec = AttentionSpec("sparq", ratio=ratio)
    note_if_busy()
    model, context = ModelOptions(str(folder / "demo.gguf")), ContextOptions(threads=threads)
    with open_session(model, spec, context, LoadOptions()) as session:
        report = _run(session, f"{document}\n\n{cue}", spec, tokens)
    rest = rest[: max(len(run.text) for run in (report.sparse, report.dense))]
    if as_json:
        print_json({**report.json(), "expected": rest})
    else:
        _print(report, cue, rest)
    info = report.sparse.summary.info
    if spec.sparse and not (info and info.counter("calls_sparse")):
        raise SparqError("the demo ran without sparse attention: the counter of sparse calls is 0")


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError as e:
        raise SparqError(f"{path}: {e.strerror or e}", "reinstall, or restore the file") from None


def passage(document: str) -> tuple[str, str]:
    """Returns the cue, and the text of the document after it.

    The passage begins with the first paragraph after PLACE of the document.
    """
    start = document.find("\n\n", int(len(document) * PLACE))
    rest = document[start:].lstrip() if start >= 0 else document
    end = 0
    for word in rest.split()[:CUE_WORDS]:
        end = rest.index(word, end) + len(word)
    return rest[:end], rest[end:]


@dataclass(frozen=True)
class Run:
    """A continuation of the document."""

    text: str
    tokens: list[int]
    summary: Summary

    def json(self) -> dict[str, object]:
        return {"text": self.text, "tokens": self.tokens, **self.summary.json()}


@dataclass(frozen=True)
class Report:
    """Both continuations of a document, and its number of tokens."""

    spec: AttentionSpec
    document_tokens: int
    prefill_s: float
    sparse: Run
    dense: Run

    @property
    def first_difference(self) -> int | None:
        return first_difference(self.dense.tokens, self.sparse.tokens)

    def json(self) -> dict[str, object]:
        return {
            "spec": str(self.spec),
            "document_tokens": self.document_tokens,
            "prefill_s": round(self.prefill_s, 3),
            "first_difference": self.first_difference,
            "runs": {"sparse": self.sparse.json(), "dense": self.dense.json()},
        }


def _run(session: Session, prompt: str, spec: AttentionSpec, n_tokens: int) -> Report:
    from pyorch import engine

    tokens = engine.tokenize(session, prompt)
    with progress_bar("reading the document") as progress:
        engine.prefill(session, engine.align(session, tokens), progress=progress)
    prefill_s = session.timings.prefill_s
    sparse = _continue(session, tokens, spec, n_tokens)
    dense = _continue(session, tokens, AttentionSpec("off"), n_tokens)
    return Report(spec, len(tokens), prefill_s, sparse, dense)


def _continue(session: Session, tokens: list[int], spec: AttentionSpec, n: int) -> Run:
    """Greedy continuation of what is already in the cache."""
    from pyorch import engine

    engine.set_attention(session, spec)
    engine.prefill(session, engine.align(session, tokens))
    engine.reset_counters(session)
    pieces = list(engine.generate(session, tokens, max_tokens=n))
    text, chosen = "".join(p.text for p in pieces), [p.token for p in pieces]
    return Run(text, chosen, summary_of(session))


def first_difference(a: list[int], b: list[int]) -> int | None:
    """The index of the first token that differs; None = there is none."""
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return None if len(a) == len(b) else min(len(a), len(b))


def _print(r: Report, cue: str, expected: str) -> None:
    print(
        f"A document of {r.document_tokens} tokens, read in {r.prefill_s:.1f} s. "
        "Near its beginning is a passage that begins"
    )
    print(f"\n    {' '.join(cue.split())} ...\n")
    for label, run in (("dense (llama.cpp)", r.dense), (f"sparse ({r.spec})", r.sparse)):
        print(f"{label}: {run.summary.timings.decode_rate_median:.0f} tokens/s (median)")
        print(f"\n    {' '.join(run.text.split())}\n")
    print(f"the document: \n\n    {' '.join(expected.split())}\n")
    n, n_tokens = r.first_difference, len(r.dense.tokens)
    if n is None:
        print(f"the two texts               the same, all {n_tokens} tokens")
    else:
        print(f"the two texts               first differ at token {n + 1} of {n_tokens}")
    if info := r.sparse.summary.info:
        read, full = info.bytes_per_token
        print(
            f"attention bytes per token   {human_bytes(read)} of {human_bytes(full)}"
            f" ({100 * read / max(full, 1):.1f} %)"
        )
        print(f"attention calls sparse      {100 * info.sparse_share:.1f} %")
    sys.stdout.flush()
