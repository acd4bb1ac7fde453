"""What was built is run before it is used; what fails is switched off, and said."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import IO, TYPE_CHECKING

import fake_device
import pytest
from c_library import compiled
from fakes import edit, runs

from pyorch import children, system
from pyorch.errors import SparqError
from pyorch.native import build, probe, smoke

if TYPE_CHECKING:
    from conftest import Run

OPTIONS = build.Options()


def test_every_type_of_weights_is_multiplied(native_lib_dir: Path) -> None:
    """Repacked and not, one token and many, and what is built here does it right."""
    assert smoke.fault(native_lib_dir) is None
    cases = [case["case"] for case in smoke.check(native_lib_dir)]
    buffers = ["CPU", *["CPU_REPACK"] * (platform.machine() == "x86_64")]
    for tokens in ("1 token", "37 tokens"):
        for buffer in buffers:
            for kind in smoke.WEIGHTS:
                assert f"multiplying {tokens} by {kind} ({buffer})" in cases
        assert f"multiplying {tokens} by K and V, fast (CPU)" in cases


@pytest.mark.parametrize("kind", ["f16", "q4_0", "iq1_m"])
def test_a_wrong_number_is_found(
    native_lib_dir: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Here the numbers to compare with are wrong, in one output of 64."""
    weights = smoke._weights

    def spoilt(base: object, of: str) -> tuple[object, object]:
        data, values = weights(base, of)
        values = values.copy()
        values[63] *= 2.0 if of == kind else 1.0
        return data, values

    monkeypatch.setattr(smoke, "_weights", spoilt)
    *_, last = smoke.check(native_lib_dir)
    assert last["case"] == f"multiplying 1 token by {kind} (CPU)" and last["how"]


LOADS = """
#include <stdlib.h>
void * ggml_backend_load(const char *);
__attribute__((constructor)) static void with_devices(void) { ggml_backend_load(getenv("FAKE")); }
"""


@pytest.fixture
def on_gpus(native_lib_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same library, with a libggml that knows of devices that are not there."""
    monkeypatch.setenv("FAKE", str(fake_device.build(tmp_path, native_lib_dir)))
    (folder := tmp_path / "library").mkdir()
    for file in native_lib_dir.glob("lib*"):
        (folder / file.name).symlink_to(file)
    (folder / "libggml.so").unlink()
    link = (f"-L{native_lib_dir}", "-Wl,--no-as-needed", "-lggml", f"-Wl,-rpath,{native_lib_dir}")
    compiled(LOADS, folder / "libggml.so", *link)
    return folder


def test_gpus_are_tried(on_gpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_DEVICES", "2")
    assert smoke.fault(on_gpus, gpu=True) is None
    # in a process of its own: the devices would stay, and later tests put models there
    code = "import json, pathlib, sys; from pyorch.native import smoke; smoke.WRONG = -1.0; "
    code += "print(json.dumps(list(smoke.check(pathlib.Path(sys.argv[1]), gpu=True))))"
    argv = [sys.executable, "-c", code, str(on_gpus)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120)
    first, last = json.loads(done.stdout.splitlines()[-1])
    assert first["case"] == "multiplying 1 token by f32 (FAKE0)" and "how" in last


def test_there_must_be_a_gpu(on_gpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_DEVICES", "0")
    with pytest.raises(SparqError, match="could not be tried: .*, at loading the library"):
        smoke.fault(on_gpus, gpu=True)


SHIM = """
#include <dlfcn.h>
#include <signal.h>
int ggml_graph_compute(void * graph, void * plan) {
    static int n = 0;
    if (++n == 4) DIE;
    void * library = dlopen("LIBRARY", RTLD_LAZY); // it is loaded
    return ((int (*)(void *, void *)) dlsym(library, "ggml_graph_compute"))(graph, plan);
}
"""


@pytest.fixture
def dies(
    native_lib_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], None]:
    """dies(code): let a process run this at its fourth computation."""
    if platform.system() != "Linux":
        pytest.skip("LD_PRELOAD")

    def prepare(code: str) -> None:
        library = str(native_lib_dir / "libggml-cpu.so")
        text = SHIM.replace("DIE", code).replace("LIBRARY", library)
        made = compiled(text, tmp_path / "shim.so", "-D_GNU_SOURCE", "-ldl")
        monkeypatch.setenv("LD_PRELOAD", str(made))

    return prepare


@pytest.mark.parametrize(
    ("code", "name"),
    [
        ("__builtin_trap()", "SIGILL"),
        ("*(volatile int *) 0 = 1", "SIGSEGV"),
        ("raise(SIGABRT)", "SIGABRT"),
    ],
)
def test_a_library_that_dies(
    native_lib_dir: Path, dies: Callable[[str], None], code: str, name: str
) -> None:
    dies(code)
    fault = smoke.fault(native_lib_dir)
    assert fault and fault.case == "multiplying 1 token by q4_0 (CPU)" and fault.buffer == "CPU"
    assert name in fault.how


def test_a_trial_that_did_not_end_says_nothing_of_the_library(
    native_lib_dir: Path, dies: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as m, pytest.raises(SparqError, match=r"0\.01 s"):
        m.setattr(smoke, "TIMEOUT_S", 0.01)
        smoke.fault(native_lib_dir)
    dies("raise(SIGKILL)")
    with pytest.raises(SparqError, match="could not be tried: was ended by SIGKILL"):
        smoke.fault(native_lib_dir)


@pytest.mark.parametrize(("n_case", "backend"), [(2, "vulkan"), (1, "vulkan"), (2, "cuda")])
def test_a_vulkan_device_that_is_slow_works_as_far_as_it_was_tried(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, n_case: int, backend: str
) -> None:
    """One in software compiles some of its programs for minutes."""

    def slow(argv: list[str], stdout: IO[str], timeout: float) -> None:
        stdout.write('{"case": "multiplying", "buffer": "Vulkan0"}\n' * n_case)
        raise subprocess.TimeoutExpired(argv, timeout)

    monkeypatch.setattr(children, "run", slow)
    (tmp_path / system.library(f"ggml-{backend}")).touch()
    is_fine = backend == "vulkan" and n_case > 1
    with nullcontext() if is_fine else pytest.raises(SparqError, match=r"more than \d+ s"):
        assert smoke.fault(tmp_path, gpu=True) is None


# ---- in a build (fakes.py): the flags and cmake's options decide what fails ----

ILL = "was ended by SIGILL (illegal instruction)"


def amx(options: str) -> smoke.Fault | None:
    on = "-mno-amx-int8" not in options
    return smoke.Fault("multiplying 37 tokens by q4_0 (AMX)", "AMX", ILL) if on else None


def repack(options: str) -> smoke.Fault | None:
    on = "-DGGML_CPU_REPACK=OFF" not in options
    return smoke.Fault("by q4_0 (CPU_REPACK)", "CPU_REPACK", "is wrong by nan%") if on else None


@pytest.fixture
def faults(world: Path, monkeypatch: pytest.MonkeyPatch) -> list:
    """The faults of builds here, by the flags and options used: that of AMX until a test says
    otherwise."""
    of_library: list[Callable[[str], smoke.Fault | None]] = [amx]
    monkeypatch.setenv("FAKE_CMAKE", 'echo "$CFLAGS $*" > $2/../options')
    cpu = probe.Probe(("avx2", "amx"), (), {}, True)
    monkeypatch.setattr(probe, "probe", lambda compiler, native: cpu)

    def fault(folder: Path, gpu: bool = False) -> smoke.Fault | None:
        options = folder / "../../options"  # a finished build has none: as of another machine
        text = options.read_text() if options.exists() else ""
        return next((x for f in of_library if (x := f(text))), None)

    monkeypatch.setattr(smoke, "fault", fault)
    return of_library


def make() -> tuple[Path, dict[str, str]]:
    """The build, and what is off in it."""
    stamp = build.read_stamp(folder := build.build(OPTIONS))
    assert stamp is not None
    return folder, stamp["off"]


def test_what_dies_is_switched_off(
    world: Path, faults: list, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, off = make()
    assert "without amx" in capsys.readouterr().err
    assert list(off) == ["amx"] and "SIGILL" in off["amx"]
    stamp = build.read_stamp(folder)
    assert stamp is not None and stamp["isa"] == ["avx2"]
    assert runs(world) == 2
    assert make()[0] == folder == build.find(OPTIONS) and runs(world) == 2


def test_what_is_off_stays_off_until_the_compiler_changes(
    world: Path, faults: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    make()
    edit(world, "edited")
    assert list(make()[1]) == ["amx"] and runs(world) == 3  # an edit is compiled once
    another = probe.Compiler("cc", "c++", "another")
    monkeypatch.setattr(probe, "find_compiler", lambda: another)
    faults.clear()  # it makes no such mistake
    assert make()[1] == {} and runs(world) == 4


def test_what_cannot_be_switched_off_is_one_line(world: Path, faults: list) -> None:
    fault = smoke.Fault("multiplying 1 token by f32 (CPU)", "CPU", ILL)
    faults[:] = [lambda _: fault]
    with pytest.raises(SparqError) as error:
        make()
    assert str(fault) in error.value.message and "--portable" in error.value.hint
    assert runs(world) == 4  # as it is, without amx, without avx2, without llamafile
    assert build.find(OPTIONS) is None
    faults.clear()
    assert make()[1] == {}  # nothing is kept of it


def test_doctor_says_what_is_off_and_what_does_not_work(
    world: Path, faults: list, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPARQ_CUDA", "0")
    make()
    faults.clear()
    for broken in (False, True):
        facts = json.loads(run("doctor", "--json").out)
        assert ("SIGILL" in facts["built"]["works"]) is (facts["built"]["works"] != "yes") is broken
        assert ILL in facts["off"]["amx"]
        faults.append(amx)  # as with a build of another machine
