"""llama-server's web page, which npm makes from the pinned source and `serve` shows."""

from __future__ import annotations

import shutil
from pathlib import Path

from pyorch import children, paths, system
from pyorch.errors import SparqError
from pyorch.native import source
from pyorch.progress import say

_START = "index.html"
_NEEDS = "Node.js 20.19 or newer, and npm's registry"
_STEPS = (
    ("fetching what makes the page", ("ci", "--ignore-scripts", "--no-audit", "--no-fund")),
    ("making the page", ("run", "build")),
)


def _folder() -> Path:
    return paths.cache() / "page" / source.locate(source.read_pin()).key[:12]


def find() -> Path | None:
    """The folder of the page; None if nobody has made it."""
    folder = _folder()
    return folder if (folder / _START).is_file() else None


def build() -> Path:
    """Make the page unless it is there. Returns its folder, which appears when all of it is done.

    Raises:
        SparqError: there is no npm, or it failed; or no source.
    """
    pin, folder = source.read_pin(), _folder()
    work = folder.with_name("work.partial")

    def make(lock: int) -> None:
        npm = shutil.which("npm")
        if npm is None:
            raise SparqError(
                "there is no npm, which makes the page", "install Node.js 20.19 or newer"
            )
        where = source.locate(pin)
        source.fetch(pin, where)
        source.unpack(where, f"{pin.folder}/tools/ui", work)
        try:
            for what, arguments in _STEPS:
                say(what)
                done = children.run([npm, *arguments], cwd=work, **system.inherit(lock))
                if done.returncode:
                    raise SparqError(f"{what} failed: {children.reason(done)}", _NEEDS)
            (work / "dist").rename(folder)
        finally:
            shutil.rmtree(work, ignore_errors=True)

    paths.once(folder.parent, (folder / _START).is_file, make)
    return folder
