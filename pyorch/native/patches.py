"""The patch series, read and applied strictly, in Python because a user may have no git."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path

from pyorch import paths
from pyorch.errors import SparqError
from pyorch.native.source import digest_of

# what a hook patch must not do: files of ours are added by ggml_ops/attach.cmake
_NO_HOOK = (b"new file", b"deleted file", b"rename ", b"copy ", b"GIT binary", b"old mode")
TRAILERS = ("Upstream-Status", "Calls", "Gate")


@dataclass
class Change:
    """The change of one file. A line is (tag, text), with b" ", b"-" or b"+" as its tag."""

    path: str
    hunks: list[list[tuple[bytes, bytes]]] = field(default_factory=list)

    def count(self, tag: bytes) -> int:
        return sum(line[0] == tag for hunk in self.hunks for line in hunk)


@dataclass(frozen=True)
class Patch:
    name: str
    trailers: dict[str, str]
    changes: list[Change]


def series(patch_dir: Path | None = None) -> list[Path]:
    """The patches in the order in which they apply."""
    return sorted((patch_dir or paths.data("patches")).glob("*.patch"))


def digest(patch_dir: Path | None = None) -> str:
    """The hash of the series: names and bytes, in order."""
    return digest_of({patch.name: patch for patch in series(patch_dir)})


def parse(file: Path) -> Patch:
    """Read one `git format-patch` file.

    Raises:
        SparqError: it does something other than edit lines.
    """
    lines = BytesIO(file.read_bytes()).readlines()  # at \n only
    first = next((i for i, line in enumerate(lines) if line.startswith(b"diff --git ")), len(lines))
    header = b"".join(lines[:first]).decode("utf-8")
    trailers = dict(re.findall(rf"^({'|'.join(TRAILERS)}): *(.*?) *$", header, re.M))
    changes: list[Change] = []
    hunk: list[tuple[bytes, bytes]] | None = None
    for line in lines[first:]:
        tag, text = line[:1], line[1:]
        if line.startswith(b"diff --git "):
            changes.append(Change(line.rsplit(b" b/", 1)[1].strip().decode("utf-8")))
            hunk = None
        elif line.startswith(b"@@ "):
            hunk = []
            changes[-1].hunks.append(hunk)
        elif hunk is not None and tag in (b" ", b"-", b"+"):
            hunk.append((tag, text))
        elif hunk and tag == b"\\":  # "No newline at end of file" is about the line before
            hunk[-1] = (hunk[-1][0], hunk[-1][1].rstrip(b"\n"))
        elif (hunk is not None and line.strip()) or line.startswith(_NO_HOOK):
            what = line.decode("utf-8", "replace").strip()
            raise SparqError(f"{file.name}: '{what}' is not for a hook patch", "only edit lines")
    return Patch(file.name, trailers, changes)


def apply(file: Path, tree: Path) -> None:
    """Apply one patch: the lines of a hunk must stand in the file at exactly one place.

    The numbers in the hunk headers are not read, so lines that upstream adds elsewhere do no harm.

    Raises:
        SparqError: the lines of a hunk are not in the tree, or at more than one place.
    """
    for change in parse(file).changes:
        target = tree / change.path
        if not target.is_file():
            raise SparqError(f"{file.name} does not apply: {change.path} is missing", HINT)
        before = BytesIO(target.read_bytes()).readlines()
        after: list[bytes] = []
        for hunk in change.hunks:
            old = [text for tag, text in hunk if tag != b"+"]
            places = [i for i in range(len(before) + 1) if before[i : i + len(old)] == old]
            if len(places) != 1:
                what = "is at more than one place" if places else "is not there"
                line = next((text for tag, text in hunk if tag == b"+"), old[0])
                shown = line.decode("utf-8", "replace").strip()
                raise SparqError(
                    f"{file.name} does not apply: the place for '{shown}' in {change.path} {what}",
                    HINT,
                )
            after += before[: places[0]] + [text for tag, text in hunk if tag != b"-"]
            before = before[places[0] + len(old) :]
        target.write_bytes(b"".join(after + before))


HINT = "the series fits the sources in patches/UPSTREAM: unset SPARQ_LLAMA_SOURCE"


def apply_series(tree: Path, patch_dir: Path | None = None) -> None:
    """Apply all patches to an untouched source tree."""
    for patch in series(patch_dir):
        apply(patch, tree)
