"""The series applies strictly, round-trips through git, and keeps its budget."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from fakes import PATCH

from pyorch import paths
from pyorch.errors import SparqError
from pyorch.native import patches, upstream

needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "a.cpp").write_text("one\ntwo\nthree\n")
    return tmp_path


def write(tree: Path, diff: str, name: str = "0001-x.patch") -> Path:
    file = tree / name
    file.write_bytes(diff.encode())
    return file


def test_a_last_line_without_newline(tree: Path) -> None:
    diff = "diff --git a/src/a.cpp b/src/a.cpp\n--- a/src/a.cpp\n+++ b/src/a.cpp\n@@ -3 +3 @@\n"
    patches.apply(write(tree, diff + "-three\n+3\n\\ No newline at end of file\n"), tree)
    assert (tree / "src" / "a.cpp").read_bytes() == b"one\ntwo\n3"


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("one\nTWO\n", "is not there"),
        ("one\n", "is not there"),
        ("one\ntwo", "is not there"),  # no newline at the end
        ("one\ntwo\nthree\none\ntwo\n", "is at more than one place"),
    ],
)
def test_strict(tree: Path, content: str, why: str) -> None:
    target = tree / "src" / "a.cpp"
    target.write_text(content)
    with pytest.raises(SparqError, match=f"0001-x.patch .*'hook' in src/a.cpp {why}"):
        patches.apply(write(tree, PATCH), tree)
    assert target.read_text() == content


def test_lines_may_have_moved(tree: Path) -> None:
    """Hunks are found by their lines, each behind the one before it; \\r is no end of a line."""
    (tree / "src" / "a.cpp").write_bytes(b"ze\rro\none\ntwo\nthree\ntwo\none\nfour\n")
    diff = "--- a/src/a.cpp\n+++ b/src/a.cpp\n@@ -1,2 +1,3 @@\n two\n+hook\n three\n"
    diff = "diff --git a/src/a.cpp b/src/a.cpp\n" + diff + "@@ -9 +10 @@\n-one\n+1\n"
    patches.apply(write(tree, diff), tree)
    expected = b"ze\rro\none\ntwo\nhook\nthree\ntwo\n1\nfour\n"
    assert (tree / "src" / "a.cpp").read_bytes() == expected


@pytest.mark.parametrize(
    "line",
    ["new file mode 100644", "deleted file mode 100644", "rename from a", "GIT binary patch"],
)
def test_only_edits(tree: Path, line: str) -> None:
    with pytest.raises(SparqError, match="not for a hook patch"):
        patches.parse(write(tree, f"diff --git a/a b/a\n{line}\n"))


@pytest.mark.parametrize(
    ("old", "new", "wrong"),
    [
        ("Gate: none\n", "", "Gate"),
        ("Calls: none\n", "Calls:\n", "Calls"),
        ("Pending", "Perhaps", "Perhaps"),
        ("+1,3 @@\n one\n", "+1,123 @@\n one\n" + "+more\n" * 120, r"\+121 -0 lines"),
    ],
)
def test_audit(tree: Path, old: str, new: str, wrong: str) -> None:
    write(tree, PATCH)
    assert upstream.audit(tree) == []
    assert old in PATCH
    write(tree, PATCH.replace(old, new))
    assert any(re.search(wrong, line) for line in upstream.audit(tree))


@needs_git
def test_the_series(native_lib_dir: Path) -> None:
    """`make patches-check`; the fixture is here because it has fetched the source."""
    assert upstream.check(paths.data("patches")) == []


@needs_git
def test_round_trip_after_an_edit(
    world: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """upstream, commit, refresh, check; and work that is not exported is never thrown away."""
    patch_dir, folder = world / "patches", world / "up" / "llama.cpp"
    (world / "sdist" / "vendor" / "llama.cpp" / "src" / "a.cpp").write_text("one\ntwo\nthree\n")
    patch = patch_dir / "0001-hook.patch"
    header = "From 0000000000000000000000000000000000000000 Mon Sep 17 00:00:00 2001\n"
    header += "From: a <a@example.invalid>\nDate: Fri, 2 Jan 2026 00:00:00 +0000\n"
    patch.write_text(header + PATCH)
    with pytest.raises(SparqError, match="0001-hook.patch does not apply"):
        patch.write_text(patch.read_text().replace("\n two\n", "\n 2\n"))
        upstream.upstream(patch_dir, folder)
    patch.write_text(patch.read_text().replace("\n 2\n", "\n two\n"))
    folder.parent.mkdir(exist_ok=True)
    upstream.upstream(patch_dir, folder)
    assert (folder / "src" / "a.cpp").read_text() == "one\nhook\ntwo\nthree\n"

    (folder / "src" / "a.cpp").write_text("one\nhook\ntwo\nthree\nfour\n")
    with pytest.raises(SparqError, match="uncommitted edits"):
        upstream.refresh(patch_dir, folder)
    message = "llama : second\n\nUpstream-Status: Pending\nCalls: none\nGate: none\n"
    upstream._git(folder, "commit", "--quiet", "-am", message)
    with pytest.raises(SparqError, match="differs from the series"):
        upstream.upstream(patch_dir, folder)
    upstream.refresh(patch_dir, folder)
    assert [p.name for p in patches.series(patch_dir)] == [
        "0001-llama-hook.patch",
        "0002-llama-second.patch",
    ]
    upstream.upstream(patch_dir, folder)  # nothing is lost now
    assert upstream.check(patch_dir) == []
