"""The developer's round trip of the patch series through git.

`make upstream`, `make patches-refresh` and `make patches-check` run this file.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path

from pyorch import children, paths
from pyorch.errors import SparqError
from pyorch.native import source
from pyorch.native.patches import HINT, TRAILERS, apply_series, parse, series
from pyorch.progress import say

# The series as a whole may touch this many lines of upstream files.
MAX_ADDED = 120
MAX_REMOVED = 8

STATUS = ("Inappropriate [sparq-specific]", "Submitted ", "Backport ", "Pending")
_EXPORT = ("--no-signature", "--no-numbered", "--zero-commit", "--full-index", "--no-stat", "-U1")


def _git(cwd: Path, *args: str, env: dict[str, str] | None = None) -> str:
    """Run git without the user's settings, which would change its exports. Returns its output."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    clean |= {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1", "LC_ALL": "C"}
    done = children.run(["git", *args], cwd=cwd, env=clean | (env or {}))
    if done.returncode != 0:
        raise SparqError(f"git {args[0]} failed: {children.reason(done)}")
    return done.stdout.strip()


def _checkout(folder: Path, patch_dir: Path) -> None:
    """Make a git work tree of the first pin: the untouched source plus the series."""
    pin = source.pins(patch_dir)[0]
    where = source.locate(pin)
    source.fetch(pin, where)
    source.unpack(where, pin.folder, folder)
    _git(folder, "init", "--quiet", "--initial-branch=series")
    _git(folder, "config", "user.name", "sparq-cpp authors")
    _git(folder, "config", "user.email", "sparq-cpp@example.invalid")
    _git(folder, "config", "core.autocrlf", "false")
    _git(folder, "add", "--all", "--force")
    fixed = "2026-01-01T00:00:00 +0000"
    message = f"{pin.repo} {pin.commit[:12]}, from {pin.filename}"
    dates = {"GIT_AUTHOR_DATE": fixed, "GIT_COMMITTER_DATE": fixed}
    _git(folder, "commit", "--quiet", "--no-verify", "-m", message, env=dates)
    _git(folder, "tag", "base")
    for patch in series(patch_dir):
        try:
            _git(folder, "am", "--quiet", "--keep-cr", str(patch.absolute()), env=dates)
        except SparqError as error:
            raise SparqError(f"{patch.name} does not apply: {error.message}", HINT) from None


def _export(folder: Path, into: Path) -> None:
    _git(folder, "format-patch", "--quiet", *_EXPORT, "-o", str(into.absolute()), "base")


def _same_series(left: Path, right: Path) -> list[str]:
    """Names of the patches that differ between two folders."""
    a, b = ({p.name: p.read_bytes() for p in series(folder)} for folder in (left, right))
    return sorted(name for name in a.keys() | b.keys() if a.get(name) != b.get(name))


def upstream(patch_dir: Path, folder: Path, force: bool = False) -> None:
    """Make the work tree in which hooks are edited: a commit per patch on top of the tag `base`."""
    if (folder / ".git").is_dir() and not force:
        with tempfile.TemporaryDirectory() as temp:
            _export(folder, Path(temp))
            differing = _same_series(patch_dir, Path(temp))
        dirty = _git(folder, "status", "--porcelain")
        if differing or dirty:
            what = ", ".join(differing) if differing else "uncommitted edits"
            raise SparqError(
                f"{folder} differs from the series: {what}",
                "export its commits: make patches-refresh; or drop them: make upstream FORCE=1",
            )
    fresh = folder.with_name(folder.name + ".new")
    _checkout(fresh, patch_dir)
    shutil.rmtree(folder, ignore_errors=True)
    fresh.rename(folder)
    say(f"{folder}: {len(series(patch_dir))} patches on top of the tag 'base'")


def refresh(patch_dir: Path, folder: Path) -> None:
    """Write the commits of the work tree back as the series."""
    if not (folder / ".git").is_dir():
        raise SparqError(f"{folder} is not there", "make upstream")
    if dirty := _git(folder, "status", "--porcelain"):
        raise SparqError(
            f"{folder} has uncommitted edits: {dirty.splitlines()[0].strip()}",
            "commit them; into a patch: git commit --fixup <id>; git rebase -i --autosquash base",
        )
    with tempfile.TemporaryDirectory() as temp:
        _export(folder, Path(temp))
        for old in series(patch_dir):
            old.unlink()
        for new in series(Path(temp)):
            shutil.copy(new, patch_dir / new.name)
    say(f"wrote {len(series(patch_dir))} patches")


def audit(patch_dir: Path) -> list[str]:
    """Returns the faults in the text of the series: trailers and budget. Empty if it has none."""
    wrong = []
    patches = [parse(file) for file in series(patch_dir)]
    for p in patches:
        for key in TRAILERS:
            if not p.trailers.get(key):
                wrong.append(f"{p.name}: no {key} line")
        status = p.trailers.get("Upstream-Status", "")
        if status and not status.startswith(STATUS):
            wrong.append(f"{p.name}: unknown Upstream-Status '{status}'")
    changes = [change for p in patches for change in p.changes]
    added, removed = (sum(x.count(tag) for x in changes) for tag in (b"+", b"-"))
    if added > MAX_ADDED or removed > MAX_REMOVED:
        budget = f"+{MAX_ADDED} -{MAX_REMOVED}"
        wrong.append(f"the series touches +{added} -{removed} lines; the budget is {budget}")
    return wrong


def check(patch_dir: Path) -> list[str]:
    """Returns the faults of the series in a fresh work tree. Empty if there are none."""
    wrong = audit(patch_dir)
    with tempfile.TemporaryDirectory() as temp:
        tree, exported = Path(temp) / "tree", Path(temp) / "exported"
        _checkout(tree, patch_dir)
        _export(tree, exported)
        wrong += [f"{name}: not as git exports it" for name in _same_series(patch_dir, exported)]
        # The build applies the series without git: it must give the same bytes.
        touched = {change.path for file in series(patch_dir) for change in parse(file).changes}
        with_git = {path: (tree / path).read_bytes() for path in touched}
        _git(tree, "checkout", "--quiet", "base")
        apply_series(tree, patch_dir)
        wrong += [
            f"{path}: git and the build apply it differently"
            for path, content in with_git.items()
            if (tree / path).read_bytes() != content
        ]
    for pin in source.pins(patch_dir)[1:]:
        where = source.locate(pin)
        if where.path.exists():
            tops = tuple({path.split("/")[0] for path in touched})
            with tempfile.TemporaryDirectory() as temp:
                source.unpack(where, pin.folder, tree := Path(temp) / "tree", only=tops)
                try:
                    apply_series(tree, patch_dir)
                except SparqError as error:
                    wrong.append(f"{pin.version}: {error.message}")
    return wrong


def main(argv: list[str]) -> None:
    """`python -m pyorch.native.upstream upstream [--force] | refresh | check`."""
    patch_dir = paths.REPOSITORY / "patches"
    folder = paths.REPOSITORY / ".upstream" / "llama.cpp"
    try:
        if argv[0] == "upstream":
            upstream(patch_dir, folder, force="--force" in argv)
        elif argv[0] == "refresh":
            refresh(patch_dir, folder)
        elif wrong := check(patch_dir):
            raise SparqError("; ".join(wrong), "make upstream, fix it, make patches-refresh")
    except SparqError as error:
        sys.exit(f"error: {error.message}\nhint: {error.hint}")


if __name__ == "__main__":
    main(sys.argv[1:])
