"""llama-server's web page: npm makes it from the pinned source, or it came with the wheel."""

from __future__ import annotations

import shutil
from pathlib import Path

from pyorch import children, paths, system
from pyorch.errors import SparqError
from pyorch.native import carried, source
from pyorch.progress import say

LICENSES = "licenses.md"  # of the packages that are in the page; vite writes it
_NEEDS = "Node.js 20.19 or newer, and npm's registry"
_CONFIG = f"""\
import base from './vite.config';
import {{ mergeConfig }} from 'vite';
const more = {{ build: {{ license: {{ fileName: '{LICENSES}' }} }} }};
export default (env) => mergeConfig(base(env), more);
"""
_STEPS = (
    ("fetching what makes the page", ("ci", "--ignore-scripts", "--no-audit", "--no-fund")),
    ("making the page", ("run", "build", "--", "--config", "sparq.config.ts")),
)


def _folder() -> Path:
    return paths.cache() / "page" / source.locate(source.read_pin()).key[:12]


def find() -> Path | None:
    """The folder of the page; None if nobody has made it, and none came with a wheel."""
    folders = (_folder(), carried.FOLDER / "page")
    return next((folder for folder in folders if (folder / LICENSES).is_file()), None)


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
            raise SparqError("there is no npm, which makes the page", _NEEDS)
        where = source.locate(pin)
        source.fetch(pin, where)
        source.unpack(where, f"{pin.folder}/tools/ui", work)
        (work / "sparq.config.ts").write_text(_CONFIG, "utf-8")
        try:
            for what, arguments in _STEPS:
                say(what)
                done = children.run([npm, *arguments], cwd=work, **system.inherit(lock))
                if done.returncode:
                    raise SparqError(f"{what} failed: {children.reason(done)}", _NEEDS)
            shutil.rmtree(folder, ignore_errors=True)  # an earlier one, without licences
            (work / "dist").rename(folder)
        finally:
            shutil.rmtree(work, ignore_errors=True)

    paths.once(folder.parent, (folder / LICENSES).is_file, make)
    return folder
