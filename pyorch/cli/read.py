"""`sparq-cpp read`: read a text once, and keep it for later questions."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import click

from pyorch import paths
from pyorch.attention.cost import CELLS
from pyorch.attention.spec import parse_spec
from pyorch.cli import options as opt
from pyorch.cli import streams
from pyorch.cli.loading import (
    REPLY_ROOM,
    note_if_weights_exceed,
    placement,
    prepare,
    session_options,
)
from pyorch.cli.templates import TemplateOptions, note_system, template_options
from pyorch.cli.terminal import note, print_json
from pyorch.cli.types import THREADS, File, Text
from pyorch.errors import SparqError
from pyorch.progress import progress_bar, say
from pyorch.text import human_bytes, human_time, printable
from pyorch.text_file import read_text

if TYPE_CHECKING:
    from pyorch.engine import Document

SHOWN = 8  # names of what a folder holds and is left out
_TAKES = "a text file, a folder, or -"


@click.command()
@click.argument("texts", type=File(), nargs=-1, required=True, metavar="TEXT...")
@opt.model_options
@click.option(
    "-o",
    "--out",
    type=File(),
    metavar="FILE",
    help="Where to write it.  [default: named after the text, where `sparq-cpp documents`"
    " finds it]",
)
@click.option("--system", type=Text(), metavar="TEXT", help="System message of the conversation.")
@click.option(
    "--plain",
    is_flag=True,
    help="Read the text without a chat template, for generate. Names of control tokens in it count"
    " as control tokens.",
)
@click.option("--force", is_flag=True, help="Replace the file if it exists.")
@click.option("--threads", "-t", type=THREADS, help="Number of threads.  [default: one per core]")
@opt.load_options
@click.option(
    *opt.SPEC_OPTION,
    "spec",
    metavar="SPEC",
    help="Keep what these settings of attention need.  [default: sparq]",
)
@template_options
@opt.json_option
@opt.verbose_option
def command(
    texts: tuple[str, ...],
    model: opt.ModelOptions,
    out: str | None,
    system: str | None,
    plain: bool,
    force: bool,
    threads: int | None,
    load: opt.LoadOptions,
    spec: str | None,
    templates: TemplateOptions,
    as_json: bool,
) -> None:
    """Read a text once and keep it: chat and generate --document FILE then begin at once.

    TEXT is a file, a folder (all texts below it) or - for stdin; several are one document. An
    interrupted reading goes on where it stopped when the same command runs again. The context has
    room for the text and a conversation, and what sparse attention needs is kept as well, unless
    -a says otherwise. The file contains the text itself, and only you can read it.
    """
    from pyorch import engine
    from pyorch.models.new_file import check_target

    if plain and system:
        raise SparqError("--plain has no system message", "leave out --system", exit_code=2)
    if plain:
        templates.check_unused("--plain reads the text as it is")
    name, text = _joined(texts)
    path = Path(out) if out else paths.private(paths.documents()) / f"{name}.kv"
    check_target(path, force)
    attention = parse_spec("sparq" if spec is None else spec)
    options = session_options(attention, opt.ContextOptions(threads=threads), load)
    file, settings = prepare(model.model, model.yes, options)
    note_if_weights_exceed(file, settings, load)
    with (
        progress_bar("loading the model") as progress,
        engine.load_model(file, progress=progress, **vars(placement(load))) as in_memory,
    ):
        reading = engine.Reading(name, text, "plain" if plain else "chat", system or "")
        template = templates.template(in_memory, engine.begun(path, reading))
        note_system(template, reading.messages(""))
        trained = in_memory.geometry.n_ctx_train
        most = 64 * trained if options.rope else trained  # no model is stretched as far
        n = engine.count_beyond(in_memory, text, most) if most else 0
        n = n or len(reading.tokens(in_memory, template))
        # the context that it will be opened in: some models rotate by another table in a long one
        whole = -(-max(n + REPLY_ROOM, engine.DEFAULT_CTX) // CELLS) * CELLS
        n_ctx = max(n, min(whole, trained or whole))
        with (
            in_memory.session(**{**vars(options), "n_ctx": n_ctx}) as session,
            progress_bar("reading", of="tokens", off_terminal=say) as progress,
        ):
            document = engine.read_document(
                session, path, reading, template, force=force, progress=progress
            )
            seconds = session.timings.prefill_s
    _report(document, seconds, as_json)


def _report(document: Document, seconds: float, as_json: bool) -> None:
    if as_json:
        about = {"path": str(document.path), "tokens": document.n_tokens}
        print_json({**about, "bytes": document.n_bytes, "seconds": seconds})
        return
    print(document.path)
    size = human_bytes(document.n_bytes)
    note(f"{document.n_tokens} tokens in {human_time(seconds)}, {size}", "dim")
    if sys.stderr.isatty():
        verb = "chat" if document.form == "chat" else "generate -p TEXT"
        note(f"next: sparq-cpp {verb} MODEL --document {document.path}", "dim")


def _joined(names: tuple[str, ...]) -> tuple[str, str]:
    """The name of a document of these texts, and its text: of several, each after its name."""
    texts = [pair for name in names for pair in _texts(name)]
    if not any(text.strip() for _, text in texts):
        raise SparqError(f"{', '.join(names)}: there is no text", _TAKES)
    first = Path(names[0])
    unnamed = "stdin" if names[0] == "-" else "pipe" * first.is_fifo()  # <(...) of a shell
    name = unnamed or first.resolve().stem
    if len(texts) == 1:
        return name, texts[0][1]
    return name, "\n\n".join(f"File: {printable(path)}\n\n{text}" for path, text in texts)


def _texts(name: str) -> list[tuple[str, str]]:
    """The names and texts that one argument stands for."""
    if name == "-":
        return [("stdin", streams.stdin_text())]
    path = Path(name)
    return _below(path) if path.is_dir() else [(name, read_text(path, _TAKES))]


def _below(folder: Path) -> list[tuple[str, str]]:
    """The names and texts of all files below a folder. What is left out is named."""
    texts: dict[Path, str] = {}
    others: list[Path] = []
    for at, folders, names in os.walk(folder, onerror=_refuse):
        # hidden ones, and links to folders
        others += [Path(at, n) for n in (*folders, *names) if n.startswith(".")]
        others += [p for n in folders if (p := Path(at, n)).is_symlink() and n[0] != "."]
        folders[:] = [n for n in folders if not n.startswith(".")]
        for path in (Path(at, n) for n in names if not n.startswith(".")):
            try:
                if path.is_file():
                    texts[path] = read_text(path)
                    continue
            except SparqError as error:
                if error.__cause__:
                    raise  # it is no binary: it cannot be read
            others.append(path)
    if others:
        some = ", ".join(printable(path.relative_to(folder)) for path in sorted(others)[:SHOWN])
        more = ", ..." * (len(others) > SHOWN)
        say(f"{printable(folder)}: {len(others)} that are no texts are left out: {some}{more}")
    return [(str(path.relative_to(folder)), texts[path]) for path in sorted(texts)]


def _refuse(error: OSError) -> NoReturn:
    raise error
