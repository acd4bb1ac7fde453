"""A file appears under its name only when it is finished."""

from __future__ import annotations

from pathlib import Path

import pytest

from pyorch.errors import SparqError
from pyorch.models import new_file


def test_new_file(tmp_path: Path) -> None:
    path = tmp_path / "f"
    with new_file.new_file(path) as (partial, _):
        partial.write_text("a")
        assert not path.exists()
        with pytest.raises(SparqError, match="another process"), new_file.new_file(path):
            pass
        assert partial.read_text() == "a"
    assert path.read_text() == "a" and not partial.exists()
    with pytest.raises(ZeroDivisionError), new_file.new_file(path, force=True) as (partial, _):
        partial.write_text("b")
        _ = 1 / 0
    assert path.read_text() == "a" and not partial.exists()
    (tmp_path / "link").symlink_to(path)
    with new_file.new_file(tmp_path / "link", force=True) as (partial, _):
        partial.write_text("c")
    assert (tmp_path / "link").is_symlink() and path.read_text() == "c"
    for bad, why in ((tmp_path, "not a plain file"), (tmp_path / "x" / "y", "no folder")):
        with pytest.raises(SparqError, match=why), new_file.new_file(bad, force=True):
            pass
    with (
        pytest.raises(SparqError, match="exists already"),
        new_file.new_file(tmp_path / "g") as (p, _),
    ):
        p.write_text("mine")
        (tmp_path / "g").write_text("another's")  # came meanwhile
    assert (tmp_path / "g").read_text() == "another's"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["f", "g", "link"]
