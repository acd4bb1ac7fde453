"""The library that came with the wheel: which variant of it is used, and when."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fakes import edit, write

from pyorch import native
from pyorch.errors import SparqError
from pyorch.native import build, carried, probe, smoke

RANKED = {"zen4": 99, "haswell": 12, "x64": 1, "sapphirerapids": 0}


@pytest.fixture
def wheel(world: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel with four variants, of which this CPU can run three, and no compiler."""
    folder = world / "_built"
    files = {f"lib/libggml-cpu-{name}.so": name for name in RANKED}
    files |= {"lib/libllama.so": "llama", "lib/llama-server": "tool"}
    files |= {"python/llama_cpp/__init__.py": ""}
    stamp = {"stamp": "abc", "inputs": build.sources(build.Options()), "pin": "p", "compiler": "c"}
    write(folder, {**files, "stamp.json": json.dumps(stamp)})
    monkeypatch.setattr(carried, "FOLDER", folder)
    monkeypatch.setattr(carried, "scores", lambda: RANKED)
    monkeypatch.setattr(probe, "find_compiler", lambda: None)
    monkeypatch.setenv("SPARQ_CUDA", "0")
    return folder


def fails(monkeypatch: pytest.MonkeyPatch, *names: str) -> list[str]:
    """Let these variants not work. Returns a list to which each that is tried is added."""
    tried: list[str] = []

    def fault(folder: Path) -> smoke.Fault | None:
        tried.append((folder / "libggml-cpu.so").read_text())
        if tried[-1] not in names:
            return None
        if tried[-1] == "haswell":
            raise SparqError("it does not load")
        return smoke.Fault("multiplying", "CPU", "was ended by SIGILL (illegal instruction)")

    monkeypatch.setattr(smoke, "fault", fault)
    return tried


def test_the_best_variant_is_tried_once_and_used(
    wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = fails(monkeypatch)
    native.check_compiler(("llama-server",))  # none is needed
    folder = native.built()
    assert native.find(tools=("llama-server",)) == native.lib_dir() == folder
    assert tried == ["zen4"]
    files = {file.name: file.read_text() for file in folder.iterdir()}
    stamp = json.loads(files.pop("stamp.json"))
    assert files == {"libllama.so": "llama", "llama-server": "tool", "libggml-cpu.so": "zen4"}
    assert (folder / "llama-server").stat().st_mode & 0o777 == 0o755
    assert (build.bindings() / "llama_cpp" / "__init__.py").is_file()
    assert (stamp["isa"], stamp["off"], stamp["stamp"]) == (["zen4"], {}, "abc")
    assert stamp["ranked"] == ["zen4", "haswell", "x64"]


def test_what_does_not_work_is_passed_over(
    wheel: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tried = fails(monkeypatch, "zen4", "haswell")
    folder = native.built()
    assert tried == ["zen4", "haswell", "x64"]
    assert (folder / "libggml-cpu.so").read_text() == "x64"
    off = json.loads((folder / "stamp.json").read_text())["off"]
    assert list(off) == ["zen4", "haswell"] and "SIGILL" in off["zen4"]
    notes = capsys.readouterr().err.splitlines()
    assert len(notes) == 2 and "zen4" in notes[0] and "haswell" in notes[1]


def test_none_works(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fails(monkeypatch, *RANKED)
    with pytest.raises(SparqError, match="zen4, haswell, x64") as error:
        native.find()
    assert "sparq-cpp build" in error.value.hint
    assert not build.finished()


def test_another_cpu_is_tried_again(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = fails(monkeypatch)
    first = native.built()
    monkeypatch.setattr(probe, "cpu", lambda: ("another", "0123456789ab"))
    assert native.built() != first and tried == ["zen4", "zen4"]


def test_it_is_for_the_sources_that_it_was_built_from(
    wheel: Path, world: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fails(monkeypatch)
    assert native.find(stock=True) is None
    folder = native.built()
    assert build.used() >= {folder, build.bindings()}
    edit(world, "edited")
    assert native.find() is None and build.used() == set()


def test_a_build_made_here_is_preferred(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fails(monkeypatch)
    came = native.built()
    monkeypatch.setattr(smoke, "fault", lambda folder: None)
    monkeypatch.setattr(probe, "find_compiler", lambda: probe.Compiler("cc", "c++", "a compiler"))
    assert build.build(build.Options()) == native.find() != came
    assert native.find(tools=("llama-server",)) == came  # that build has no tools
