"""The web page of llama-server: made by npm from the pinned source, once, and built into the
program.

llama.cpp keeps the page's sources, but not the page. It would download it, or make it with npm,
while it compiles; here that is a step of its own, since few who serve a model have Node.js, and
since npm brings several hundred MB that are needed only for minutes.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from pyorch import paths
from pyorch.errors import SparqError
from pyorch.native import cmake, source
from pyorch.progress import Progress, Say

# The name among the tools that a build has. It is a file of that name beside llama-server.
NAME = "web-page"
PROGRAM = "llama-server"
_STEPS = ("running npm ci", "running npm run build", "building client", "building ssr")
_NODE = "install Node.js 20.19 or newer with npm; or build without --web-page"


def folder() -> Path:
    """Where the page of the pinned source is, once it is made."""
    return paths.cache() / NAME / source.locate(source.read_pin()).key[:12]


def find_npm() -> str | None:
    return shutil.which("npm")


def check() -> None:
    """Refuse early where the page is not made yet and cannot be.

    Raises:
        SparqError: there is no npm.
    """
    if not folder().is_dir() and find_npm() is None:
        raise SparqError("the web page is made with npm, which is not here", _NODE)


def make(tree: Path, progress: Progress, note: Say, lock: int) -> None:
    """Make the page unless it is there.

    Args:
        tree: a work tree with the source in `src`; what npm says goes to its `build.log`.
        lock: as in `cmake.compile_tree`.

    Raises:
        SparqError: npm failed; the message names the log.
    """
    target = folder()
    if target.is_dir():
        return
    check()
    note("making the web page: npm downloads its tools, 700 MB on the disk, deleted afterwards")
    work = target.with_suffix(".partial")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    src, log = tree / "src", tree / "build.log"
    values = {
        "UI_SOURCE_DIR": src / "tools" / "ui",
        "UI_BINARY_DIR": work,
        "LLAMA_SOURCE_DIR": src,
        "LLAMA_BUILD_NUMBER": 0,
        "BUILD_UI": "ON",
        "HF_ENABLED": "OFF",
        "HF_VERSION": source.read_pin().commit[:9],
    }
    argv = [cmake.tool("cmake"), *(f"-D{name}={value}" for name, value in values.items())]
    argv += ["-P", str(src / "scripts" / "ui-assets.cmake")]
    log.write_text("", "utf-8")
    cmake.run(argv, dict(os.environ), tree, progress, lock, _step)
    if not (work / "dist" / "index.html").is_file():  # the script itself only warns
        raise SparqError("the web page could not be made by npm", f"{_NODE}; full log: {log}")
    (work / "dist").rename(target)
    shutil.rmtree(work)


def _step(line: str) -> tuple[int, int] | None:
    for i, step in enumerate(_STEPS):
        if re.search(rf"\b{step}\b", line):
            return i, len(_STEPS)
    return None


def place(tree: Path) -> bool:
    """Let llama-server of this work tree have the page, if it is made. Returns whether it is."""
    dist, made = tree / "src" / "tools" / "ui" / "dist", folder()
    if made.is_dir() and not dist.exists():
        dist.unlink(missing_ok=True)  # a link to nowhere, if the cache was moved
        dist.symlink_to(made)
    return made.is_dir()
