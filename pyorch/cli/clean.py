"""`sparq-cpp clean`: what the cache holds, and its removal."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import click

from pyorch import paths
from pyorch.cli.options import json_option
from pyorch.cli.terminal import confirm_removal, note, print_freed, print_json
from pyorch.text import human_bytes

# kind -> (what it is, what of the cache it has); `old` and `builds` share theirs
KINDS: dict[str, tuple[str, tuple[str, ...]]] = {
    "old": ("builds of other sources or settings than the present ones", ()),
    "builds": ("the other builds, also those that came with a wheel", ()),
    "source": ("llama.cpp's, as it was downloaded", ("sdist",)),
    "bench": ("synthetic models, and what measures", ("bench",)),
    "converter": ("its environment", ("convert",)),
    "page": ("the web page of `serve`", ("page",)),
    "wheels": ("what `make wheels` has compiled", ("wheels",)),
    "other": ("small files", ("model_hashes.jsonl",)),
    "models": ("from the Python package index", ("models",)),
    "kept": (
        "what nobody can make again: texts, calibrations, what was typed",
        ("texts", "calibrated", "chat_history", "chat_last.json"),
    ),
}
ASKED_FOR = ("models", "kept")  # --all leaves them


@click.command()
@click.argument("what", type=click.Choice(list(KINDS)), nargs=-1, metavar="[WHAT]...")
@click.option("--all", "everything", is_flag=True, help="All but models and what is kept.")
@click.option("--yes", is_flag=True, help="Remove without asking.")
@json_option
def command(what: Sequence[str], everything: bool, yes: bool, as_json: bool) -> None:
    """Show what the cache holds (SPARQ_CACHE), and remove WHAT: kinds from that list.

    Without WHAT, and without --all, that is `old`: what another run would not use. Models and what
    nobody can make again go only if they are named. What is missing later is made or downloaded
    again. With --json nothing is removed without --yes.

    Models of the hub are in its own cache (sparq-cpp models), and documents in a folder of theirs
    (sparq-cpp documents).
    """
    by_kind = contents()
    sizes = {kind: sum(map(paths.size, held)) for kind, held in by_kind.items()}
    if not as_json:
        print(paths.cache())
        for kind, n_bytes in sizes.items():
            if n_bytes:
                print(f"  {kind:<12}{human_bytes(n_bytes):>9}  {KINDS[kind][0]}")
    chosen = [*what, *(kind for kind in KINDS if everything and kind not in ASKED_FOR)] or ["old"]
    kinds = [kind for kind in KINDS if kind in chosen and sizes[kind]]
    n_bytes = sum(sizes[kind] for kind in kinds)
    if not as_json and kinds:
        confirm_removal(", ".join(kinds), n_bytes, yes)
    if yes or not as_json:
        remove([path for kind in kinds for path in by_kind[kind]])
    if as_json:
        removed = n_bytes if yes else 0
        print_json({"path": str(paths.cache()), "bytes": sizes, "removed": removed})
    elif kinds:
        print_freed(n_bytes)
    else:
        note("nothing to remove")


def contents() -> dict[str, list[Path]]:
    """The files and folders of each of `KINDS`."""
    from pyorch.native import build

    root = paths.cache()
    by_kind = {
        kind: [p for n in names if (p := root / n).exists()] for kind, (_, names) in KINDS.items()
    }
    folders, used = build.made("lib", "build", "python"), build.used()
    by_kind["builds"] = [path for path in folders if path in used]
    by_kind["old"] = [path for path in folders if path not in used]
    return by_kind


def remove(chosen: Sequence[Path]) -> None:
    """Remove them, and wait for who builds, or downloads, in the cache at the moment."""
    inside = {lock.parent for p in chosen for form in ("lock", "*/lock") for lock in p.glob(form)}
    with ExitStack() as stack:
        for folder in [paths.cache(), *sorted(inside)] if chosen else []:
            stack.enter_context(paths.locked(folder))
        for path in chosen:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)  # another process may have made a build of it
