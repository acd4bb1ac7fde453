"""`sparq-cpp demo`: the embedded model recites from a long document, dense and sparse."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pyorch import paths
from pyorch.attention.spec import AttentionSpec
from pyorch.cli import options as opt
from pyorch.errors import SparqError
from pyorch.progress import progress_bar
from pyorch.text import human_bytes

if TYPE_CHECKING:
    from pyorch.engine import Session

RATIO = 1 / 8
# where in the document the passage is, as a share of its length: one of the places (seven of nine
# tried) whose passage the demo model recites at length. At 0.85 it fails, dense attention too
PLACE = 0.05
CUE_WORDS = 24  # words of the passage that the model is given


@click.command()
@click.option(
    "-n",
    "--tokens",
    type=opt.Number(int, 1),
    default=96,
    show_default=True,
    help="Tokens to recite.",
)
@click.option(
    "--ratio",
    type=opt.Ratio(),
    default=RATIO,
    help="Share of dense attention's bytes.  [default: 1/8]",
)
@click.option("--threads", "-t", type=opt.THREADS, help="Number of threads.  [default: all cores]")
@opt.json_option
@opt.verbose_option
def command(**options: Any) -> None:
    """Let the small bundled model recite a passage of a long document.

    The model reads the document once and gets the first words of a passage. It continues them
    twice: with llama.cpp's dense attention and with sparse attention. The command fails if no
    attention was sparse.
    """
    folder = paths.data("models") / "demo"
    document = _read(folder / "document.txt")
    cue, expected = passage(document)
    spec = AttentionSpec("sparq", ratio=options["ratio"])
    opt.note_if_busy()
    with opt.open_session({**options, "model": folder / "demo.gguf"}, spec) as session:
        report = _run(session, f"{document}\n\n{cue}", spec, options["tokens"])
    report["expected"] = expected[: max(len(run["text"]) for run in report["runs"].values())]
    if options["as_json"]:
        opt.print_json(report)
    else:
        _print(report, cue)
    calls = report["runs"]["sparse"]["attention"]["counters"]["calls_sparse"]
    if spec.sparse and calls == 0:
        raise SparqError("the demo ran without sparse attention: the counter of sparse calls is 0")


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError as e:
        raise SparqError(f"{path}: {e.strerror or e}", "reinstall, or restore the file") from None


def passage(document: str) -> tuple[str, str]:
    """The cue, and how the document goes on after it.

    The passage begins with the first paragraph after PLACE of the document.
    """
    start = document.find("\n\n", int(len(document) * PLACE))
    rest = document[start:].lstrip() if start >= 0 else document
    end = 0
    for word in rest.split()[:CUE_WORDS]:
        end = rest.index(word, end) + len(word)
    return rest[:end], rest[end:]


def _run(session: Session, prompt: str, spec: AttentionSpec, n_tokens: int) -> dict[str, Any]:
    from pyorch import engine

    tokens = engine.tokenize(session, prompt)
    with progress_bar("reading the document") as progress:
        engine.prefill(session, engine.align(session, tokens), progress=progress)
    prefill = session.timings
    runs = {"sparse": _continue(session, tokens, spec, n_tokens)}
    runs["dense"] = _continue(session, tokens, AttentionSpec("off"), n_tokens)
    differ = first_difference(runs["dense"]["tokens"], runs["sparse"]["tokens"])
    return {
        "spec": str(spec),
        "document_tokens": len(tokens),
        "prefill_s": round(prefill.prefill_s, 3),
        "first_difference": differ,
        "runs": runs,
    }


def _continue(session: Session, tokens: list[int], spec: AttentionSpec, n: int) -> dict[str, Any]:
    """Greedy continuation of what is already in the cache."""
    from pyorch import engine

    engine.set_attention(session, spec)
    engine.prefill(session, engine.align(session, tokens))
    engine.reset_counters(session)
    pieces = list(engine.generate(session, tokens, max_tokens=n))
    summary = opt.run_summary(session, opt.info_if_ours(session))
    return {"text": "".join(p.text for p in pieces), "tokens": [p.token for p in pieces], **summary}


def first_difference(a: list[int], b: list[int]) -> int | None:
    """Index of the first token that differs; None = the same."""
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return None if len(a) == len(b) else min(len(a), len(b))


def _print(r: dict[str, Any], cue: str) -> None:
    sparse, dense = r["runs"]["sparse"], r["runs"]["dense"]
    print(
        f"A document of {r['document_tokens']} tokens, read in {r['prefill_s']:.1f} s. "
        "Near its beginning is a passage that begins"
    )
    print(f"\n    {' '.join(cue.split())} ...\n")
    for label, run in (("dense (llama.cpp)", dense), (f"sparse ({r['spec']})", sparse)):
        print(f"{label}: {run['decode_tokens_per_s_median']:.0f} tokens/s (median)")
        print(f"\n    {' '.join(run['text'].split())}\n")
    print(f"the document: \n\n    {' '.join(r['expected'].split())}\n")
    n = r["first_difference"]
    n_tokens = len(dense["tokens"])
    if n is None:
        print(f"the two texts               the same, all {n_tokens} tokens")
    else:
        print(f"the two texts               first differ at token {n + 1} of {n_tokens}")
    read, full = sparse["attention_bytes_per_token"], sparse["attention_bytes_per_token_dense"]
    print(
        f"attention bytes per token   {human_bytes(read)} of {human_bytes(full)}"
        f" ({100 * read / max(full, 1):.1f} %)"
    )
    print(f"attention calls sparse      {100 * sparse['share_sparse']:.1f} %")
    sys.stdout.flush()
