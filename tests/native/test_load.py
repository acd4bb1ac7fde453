"""The bindings run on our library, whatever else is installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from pyorch import native
from pyorch.errors import SparqError
from pyorch.native import build, probe, source


def python(code: str, **env: str) -> str:
    """Standard output of another Python process."""
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **env}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_our_library_with_our_functions(llama_cpp: ModuleType, native_lib_dir: Path) -> None:
    assert Path(llama_cpp.llama_cpp._lib._name).parent == native_lib_dir
    assert llama_cpp.__version__ == source.read_pin().version
    assert llama_cpp.llama_cpp._lib.llama_set_sparse_attn
    assert native.load() is llama_cpp
    assert str(Path(llama_cpp.__file__).parents[1]) not in sys.path


def test_one_library_per_process(llama_cpp: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SparqError, match="already imported"):
        native.load(stock=True)
    library = SimpleNamespace(_name="/elsewhere/libllama.so")
    foreign = SimpleNamespace(llama_cpp=SimpleNamespace(_lib=library))
    monkeypatch.setitem(sys.modules, "llama_cpp", foreign)
    monkeypatch.setattr(native, "_loaded", None)
    with pytest.raises(SparqError, match="/elsewhere"):
        native.load()


def test_an_installed_llama_cpp_python_is_left_alone(tmp_path: Path, native_lib_dir: Path) -> None:
    (tmp_path / "llama_cpp").mkdir()
    (tmp_path / "llama_cpp" / "__init__.py").write_text("raise SystemExit('the wrong one')")
    root = str(Path(__file__).parents[2])
    code = "from pyorch import native; print(native.load().llama_cpp._lib._name)"
    out = python(code, PYTHONPATH=os.pathsep.join([str(tmp_path), root]))
    assert out == str(native_lib_dir / "libllama.so")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_library_may_be_moved(native_lib_dir: Path, tmp_path: Path) -> None:
    """Everything that libllama needs of ours is found beside it."""
    moved = shutil.copytree(native_lib_dir, tmp_path / "moved", symlinks=True)
    code = (
        f"import ctypes; ctypes.CDLL('{moved}/libllama.so'); print(open('/proc/self/maps').read())"
    )
    maps = python(code)
    used = {
        line.split()[-1] for line in maps.splitlines() if "libggml" in line or "libllama" in line
    }
    assert len(used) >= 4
    assert {str(Path(path).parent) for path in used} == {str(moved)}


def test_a_build_of_another_machine_is_taken_as_it_is(
    tmp_path: Path, native_lib_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it was built from: nothing is compiled, and its own bindings are used."""
    folder, bindings = tmp_path / "carried", build.bindings()
    shutil.copytree(native_lib_dir, folder, symlinks=True)
    monkeypatch.setenv("SPARQ_LIBRARY", str(folder))
    with pytest.raises(SparqError, match="no finished build with its bindings"):
        native.find()
    shutil.copytree(bindings, folder / "python")
    assert native.built() == folder and native.environment()["PYTHONPATH"] == f"{folder}/python"
    code = "from pyorch import native; print(native.load().llama_cpp._lib._name)"
    env = {"PYTHONPATH": str(Path(__file__).parents[2]), "SPARQ_CACHE": str(tmp_path / "empty")}
    assert python(code, SPARQ_LIBRARY=str(folder), **env) == f"{folder}/libllama.so"
    with pytest.raises(SparqError, match="has no llama-nothing"):
        native.find(tools=("llama-nothing",))
    (folder / "stamp.json").write_text("{")
    with pytest.raises(SparqError, match="no finished build"):
        native.find()


@pytest.mark.usefixtures("native_lib_dir")
def test_threads_that_wait_sleep_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """libgomp reads these when it is loaded, so they are there before. What a user has set stays,
    and on machines with many cores the system's own setting."""
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(probe, "cores", lambda: 16)
    assert native.waiting() == {"GOMP_SPINCOUNT": "4000"}
    assert native.environment()["GOMP_SPINCOUNT"] == "4000"
    monkeypatch.setattr(probe, "cores", lambda: 17)
    assert native.waiting() == {}
    monkeypatch.setattr(probe, "cores", lambda: 2)
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    assert native.waiting() == {}
