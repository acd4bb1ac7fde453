"""`sparq-cpp documents`: what was read and kept."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import click

from pyorch.cli.options import json_option
from pyorch.cli.terminal import confirm_removal, note, print_freed, print_json
from pyorch.cli.types import File
from pyorch.engine import document_file
from pyorch.engine.document_file import Document
from pyorch.errors import SparqError
from pyorch.progress import progress_bar
from pyorch.text import human_bytes

_FORMS = {
    "chat": "for a chat",
    "plain": "as it is, for generate",
    "saved": "a conversation, for chat --resume",
}


@click.group(invoke_without_command=True)
@click.pass_context
def command(ctx: click.Context) -> None:
    """List, show, check or remove what `sparq-cpp read` and /read of a chat have kept."""
    if ctx.invoked_subcommand is None:
        ctx.invoke(list_command, folder=None, as_json=False)


@command.command("list")
@click.argument("folder", type=File(), required=False)
@json_option
def list_command(folder: str | None, as_json: bool) -> None:
    """List the documents in our own folders, or in FOLDER."""
    if folder and not Path(folder).is_dir():
        raise SparqError(f"{folder}: no such folder")
    documents, broken = [], []
    places = [Path(folder)] if folder else document_file.folders()
    for path in document_file.documents_in(*places):
        try:
            documents.append(document_file.load(path, whole=False))
        except SparqError as error:
            broken.append(error.message)
    if as_json:
        print_json({"documents": [_about(d) for d in documents], "unreadable": broken})
        return
    names = [_name(d.path) for d in documents]
    width = max([len(n) for n in names] + [4]) + 2
    if documents:
        print(f"{'name':<{width}}{'tokens':>9}{'file':>10}  {'read':<12}{'model':<44}what")
    for name, d in zip(names, documents, strict=True):
        when = time.strftime("%Y-%m-%d", time.localtime(d.path.stat().st_mtime))
        when = when if d.is_whole else f"{100 * d.n_read // d.n_tokens} % of it"
        size = human_bytes(d.path.stat().st_size)
        print(f"{name:<{width}}{d.n_tokens:>9}{size:>10}  {when:<12}{d.model:<44}{d.name}")
    for message in broken:
        note(message, "yellow")
    if not documents and not broken:
        note("nothing is kept: sparq-cpp read TEXT -m MODEL reads a text once")


@command.command("show")
@click.argument("name", type=File(), metavar="NAME|FILE")
def show_command(name: str) -> None:
    """Show what a document is, and how it was read."""
    d = document_file.named(name)
    cache, _, shadow = d.kind.partition("\n")
    lines = {
        "what": d.name,
        "model": f"{d.model}, content {d.model_hash}",
        "tokens": str(d.n_tokens),
        "file": f"{human_bytes(d.n_bytes)}, {d.path}",
        "read": _FORMS[d.form],
        "system": d.system,
        "states the time": d.stated_time,
        "K and V": cache.partition(",")[0],
        "transposed K": shadow.partition(",layers")[0] or "none: sparse attention makes it",
        "rotations": d.rope,
        "attention": d.attention,
    }
    for key, value in lines.items():
        if value:
            print(f"{key:<16}{value}")


@command.command("verify")
@click.argument("names", type=File(), nargs=-1, required=True, metavar="NAME|FILE...")
def verify_command(names: Sequence[str]) -> None:
    """Compare every byte with the checksums that were written with it."""
    for name in names:
        d = document_file.named(name)
        with progress_bar(f"checking {d.path.name}") as progress:
            document_file.verify(d, progress)
        print(f"{d.path}: whole, {human_bytes(d.n_bytes)}")


@command.command("rm")
@click.argument("names", type=File(), nargs=-1, required=True, metavar="NAME|FILE...")
@click.option("--yes", is_flag=True, help="Remove without asking.")
def rm_command(names: Sequence[str], yes: bool) -> None:
    """Remove documents, finished or not."""
    files = [document_file.find(name) for name in names]
    for path in files:
        document_file.load(path, whole=False)  # nothing else is removed
    n_bytes = sum(path.stat().st_size for path in files)
    confirm_removal(", ".join(map(_name, files)), n_bytes, yes)
    for path in files:
        path.unlink()
    print_freed(n_bytes)


def _name(path: Path) -> str:
    """What `--document` takes for it."""
    at_home = path.parent in document_file.folders()
    return path.name.removesuffix(document_file.SUFFIX) if at_home else str(path)


def _about(d: Document) -> dict[str, object]:
    hidden = ("text_crc", "checksums_crc", "image_bytes")
    fields = {k: v for k, v in vars(d).items() if k not in hidden}
    return {**fields, "path": str(d.path), "n_bytes": d.n_bytes, "whole": d.is_whole}
