"""The web page: made once by npm from the pinned source, then shown by serve."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from fakes import write

from pyorch.errors import SparqError
from pyorch.native import page

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="npm is a shell script here")

NPM = """#!/bin/sh
echo "$*" >>"$0.calls"
[ "$FAKE_NPM" = fails ] && { echo "ERROR: no network" >&2; exit 1; }
[ "$1" = run ] && mkdir dist && cp package.json dist/index.html && cp "$5" dist/licenses.md
exit 0
"""


@pytest.fixture
def npm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    sdist, path = tmp_path / "sdist", tmp_path / "bin" / "npm"
    write(sdist / "vendor/llama.cpp", {"CMakeLists.txt": "", "tools/ui/package.json": "a page"})
    write(tmp_path, {"sdist/llama_cpp/x": "", "bin/npm": NPM})
    path.chmod(0o755)
    monkeypatch.setenv("SPARQ_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("SPARQ_LLAMA_SOURCE", str(sdist))
    monkeypatch.setenv("PATH", f"{path.parent}:/usr/bin:/bin")
    return path


def test_it_is_made_once(npm: Path) -> None:
    assert page.find() is None
    folder = page.build()
    assert page.build() == folder == page.find()
    assert (folder / "index.html").read_text() == "a page"
    assert "license" in (folder / "licenses.md").read_text()
    assert len(npm.with_name("npm.calls").read_text().splitlines()) == 2


def test_a_failure_leaves_nothing(npm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_NPM", "fails")
    with pytest.raises(SparqError, match="no network") as e:
        page.build()
    assert "Node.js" in e.value.hint and page.find() is None
    assert [x.name for x in (npm.parents[1] / "cache" / "page").iterdir()] == ["lock"]
    npm.unlink()
    monkeypatch.setenv("PATH", str(npm.parent))
    with pytest.raises(SparqError, match="npm") as e:
        page.build()
    assert "Node.js" in e.value.hint
