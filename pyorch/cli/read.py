"""`sparq-cpp read`: read a text once, and keep it for later questions."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pyorch import paths
from pyorch.attention.bytes import CELLS
from pyorch.attention.spec import AttentionSpec
from pyorch.cli import options as opt
from pyorch.cli.loading import note_if_weights_exceed, placement, ready, session_options
from pyorch.cli.templates import TemplateOptions, note_system, template_options
from pyorch.cli.terminal import note, print_json
from pyorch.errors import SparqError
from pyorch.progress import progress_bar, say
from pyorch.text import decoded, human_bytes, human_time

if TYPE_CHECKING:
    from pyorch.engine import Document


@click.command()
@click.argument("texts", nargs=-1, required=True, metavar="TEXT...")
@opt.model_options
@click.option(
    "-o", "--output", metavar="FILE", help="Where to write it.  [default: by name, in our folder]"
)
@click.option("--system", metavar="TEXT", default="", help="System message of the conversation.")
@click.option(
    "--plain",
    is_flag=True,
    help="Read it as it is, for generate, names of control tokens included; not for a chat.",
)
@click.option("--force", is_flag=True, help="Replace the file if it exists.")
@opt.context_options
@opt.load_options
@opt.attention_options
@template_options
@opt.json_option
@opt.verbose_option
def command(
    texts: tuple[str, ...],
    model: opt.ModelOptions,
    output: str | None,
    system: str,
    plain: bool,
    force: bool,
    context: opt.ContextOptions,
    load: opt.LoadOptions,
    attention: opt.AttentionOptions,
    chosen: TemplateOptions,
    as_json: bool,
) -> None:
    """Read a text once and keep it: chat and generate --document FILE then begin at once.

    TEXT is a file, a folder (all texts below it) or - for stdin; several are one document. An
    interrupted reading goes on where it stopped when the same command runs again. The context is as
    long as the text needs, and what sparse attention needs is kept as well, unless -a says
    otherwise.
    """
    from pyorch import engine
    from pyorch.models.new_file import check_target

    if plain and system:
        raise SparqError("--plain has no system message", "leave out --system", exit_code=2)
    if plain:
        chosen.check_unused("--plain reads the text as it is")
    name, text = _joined(texts)
    path = paths.expanded(output) if output else paths.documents() / f"{name}.kv"
    if output is None:
        path.parent.mkdir(parents=True, exist_ok=True)
    check_target(path, force)
    spec = attention.spec() or AttentionSpec("sparq")
    options = session_options(spec, context, load)
    file = ready(model.model, model.yes, options)
    note_if_weights_exceed(file, options, load)
    with (
        progress_bar("loading the model") as progress,
        engine.load_model(file, progress=progress, **placement(load)) as loaded,
    ):
        reading = engine.Reading(name, text, "plain" if plain else "chat", system)
        template = chosen.template(loaded, engine.begun(path, reading))
        note_system(template, reading.messages(""))
        n = len(reading.tokens(loaded, template))
        whole = -(-n // CELLS) * CELLS
        limit = loaded.geometry.n_ctx_train or whole
        options["n_ctx"] = context.ctx or max(n, min(whole, limit))
        with (
            loaded.session(**options) as session,
            progress_bar("reading", of="tokens", off_terminal=say) as progress,
        ):
            document = engine.read_document(
                session, path, reading, template, force=force, progress=progress
            )
            took = session.timings.prefill_s
    _say(document, took, as_json)


def _say(document: Document, took: float, as_json: bool) -> None:
    if as_json:
        about = {
            "path": str(document.path),
            "tokens": document.n_tokens,
            "bytes": document.n_bytes,
            "seconds": took,
        }
        print_json(about)
        return
    print(document.path)
    note(
        f"{document.n_tokens} tokens in {human_time(took)}, {human_bytes(document.n_bytes)}", "dim"
    )
    if sys.stderr.isatty():
        verb = "chat" if document.form == "chat" else "generate -p TEXT"
        note(f"next: sparq-cpp {verb} -m MODEL --document {document.path}", "dim")


def _joined(names: tuple[str, ...]) -> tuple[str, str]:
    """The name of a document of these texts, and its text. Of several, each has its name before it.

    Raises:
        SparqError: one cannot be read, or there is no text.
    """
    found = [pair for name in names for pair in _texts(name)]
    if not any(text.strip() for _, text in found):
        raise SparqError(f"{', '.join(names)}: there is no text", "a text file, a folder, or -")
    name = "stdin" if names[0] == "-" else paths.expanded(names[0]).resolve().stem
    if len(found) == 1:
        return name, found[0][1]
    return name, "\n\n".join(f"File: {path}\n\n{text}" for path, text in found)


def _texts(name: str) -> list[tuple[str, str]]:
    """The names and texts that one argument stands for."""
    if name == "-":
        return [("stdin", decoded(sys.stdin.buffer.read()))]
    path = paths.expanded(name)
    try:
        if not path.is_dir():
            return [(name, decoded(path.read_bytes()))]
        inside = sorted(p for p in path.rglob("*") if p.is_file() and not _hidden(p, path))
        texts = [(str(p.relative_to(path)), _text_or_none(p)) for p in inside]
    except OSError as e:
        raise SparqError(
            f"{e.filename}: {e.strerror or e}", "a text file, a folder, or -"
        ) from None
    return [(p, text) for p, text in texts if text is not None]


def _hidden(path: Path, below: Path) -> bool:
    return any(part.startswith(".") for part in path.relative_to(below).parts)


def _text_or_none(path: Path) -> str | None:
    """The text of a file, or None if it holds something else."""
    raw = path.read_bytes()
    return None if b"\0" in raw else decoded(raw)
