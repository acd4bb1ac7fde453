"""What was built is run before it is used; what fails is switched off, and said."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import fake_device
import pytest
from c_library import compiled
from test_build import runs

from pyorch import cli
from pyorch.errors import SparqError
from pyorch.native import build, probe, smoke

OPTIONS = build.Options()


def test_what_is_built_here_works(native_lib_dir: Path) -> None:
    assert smoke.fault(native_lib_dir) is None


def test_every_type_of_weights_is_multiplied(native_lib_dir: Path) -> None:
    """Repacked and not, one token and many; nothing that is left out passes for right."""
    cases = list(smoke.check(native_lib_dir))
    assert not any("how" in case for case in cases)
    plain = [case["case"] for case in cases if case["buffer"] == "CPU"]
    assert len(plain) == 2 * (len(smoke.WEIGHTS) + 2)
    assert "multiplying 37 tokens by K and V, fast (CPU)" in plain
    assert "multiplying 1 token by q4_K (CPU)" in plain
    assert "multiplying 37 tokens by iq2_xxs (CPU)" in plain
    if platform.machine() == "x86_64":
        repacked = [case for case in cases if case["buffer"] == "CPU_REPACK"]
        assert len(repacked) == 2 * len(smoke.WEIGHTS)


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
    assert last["case"] == f"multiplying 1 token by {kind} (CPU)"
    assert last["how"].startswith("is wrong by ")


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
    found = (f"-L{native_lib_dir}", "-Wl,--no-as-needed", "-lggml", f"-Wl,-rpath,{native_lib_dir}")
    compiled(LOADS, folder / "libggml.so", *found)
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


@pytest.mark.skipif(platform.system() != "Linux", reason="LD_PRELOAD")
@pytest.mark.parametrize(
    ("die", "how"),
    [
        ("__builtin_trap()", "was ended by SIGILL (illegal instruction)"),
        ("*(volatile int *) 0 = 1", "was ended by SIGSEGV (segmentation fault)"),
        ("raise(SIGABRT)", "was ended by SIGABRT (aborted)"),
    ],
)
def test_a_library_that_dies(
    native_lib_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, die: str, how: str
) -> None:
    preload(native_lib_dir, tmp_path, monkeypatch, die)
    found = smoke.fault(native_lib_dir)
    assert found == smoke.Fault("multiplying 37 tokens by f16 (CPU)", "CPU", how)


@pytest.mark.skipif(platform.system() != "Linux", reason="LD_PRELOAD")
def test_a_trial_that_was_killed_says_nothing_of_the_library(
    native_lib_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    preload(native_lib_dir, tmp_path, monkeypatch, "raise(SIGKILL)")
    with pytest.raises(SparqError, match=r"could not be tried: was ended by SIGKILL \(out of mem"):
        smoke.fault(native_lib_dir)


def preload(library: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, die: str) -> None:
    """Let a process die at its fourth computation."""
    text = SHIM.replace("DIE", die).replace("LIBRARY", str(library / "libggml-cpu.so"))
    made = compiled(text, folder / "shim.so", "-D_GNU_SOURCE", "-ldl")
    monkeypatch.setenv("LD_PRELOAD", str(made))


def test_a_trial_that_hangs(native_lib_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smoke, "TIMEOUT_S", 0.01)
    with pytest.raises(SparqError, match="it took more than 0.01 s, at loading the library"):
        smoke.fault(native_lib_dir)


# ---- in a build (fakes.py): the flags and cmake's options decide what fails ----

Broken = Callable[[str], smoke.Fault | None]


def broken(
    world: Path, monkeypatch: pytest.MonkeyPatch, fault: Broken, isa: tuple[str, ...] = ()
) -> None:
    """Make builds here that have `fault`, which is called with the flags and options used."""
    monkeypatch.setenv("FAKE_CMAKE", 'echo "$CFLAGS $*" > $2/../options')
    found = probe.Probe(isa, (), {}, True)
    monkeypatch.setattr(probe, "probe", lambda compiler, native: found)
    monkeypatch.setattr(smoke, "fault", lambda bin: fault((bin / "../../options").read_text()))


def amx(options: str) -> smoke.Fault | None:
    how = "was ended by SIGILL (illegal instruction)"
    on = "-mno-amx-int8" not in options
    return smoke.Fault("multiplying 37 tokens by q4_0 (AMX)", "AMX", how) if on else None


def make() -> Path:
    return build.build(OPTIONS)


def off(folder: Path) -> dict[str, str]:
    stamp = build.read_stamp(folder)
    assert stamp is not None
    return stamp["off"]


def test_what_dies_is_switched_off(
    world: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broken(world, monkeypatch, amx, ("avx2", "amx"))
    folder = make()
    assert "without amx" in capsys.readouterr().err
    assert list(off(folder)) == ["amx"] and "SIGILL" in off(folder)["amx"]
    stamp = build.read_stamp(folder)
    assert stamp is not None and stamp["isa"] == ["avx2"]
    assert runs(world) == 2
    assert make() == folder == build.find(OPTIONS)
    assert runs(world) == 2  # found again


def test_what_is_off_stays_off_until_the_compiler_changes(
    world: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken(world, monkeypatch, amx, ("avx2", "amx"))
    make()
    (world / "ggml_ops" / "op.c").write_text("int edited;\n")
    assert list(off(make())) == ["amx"]
    assert runs(world) == 3  # an edit is compiled once
    another = probe.Compiler("cc", "c++", "another")
    monkeypatch.setattr(probe, "find_compiler", lambda: another)
    monkeypatch.setattr(smoke, "fault", lambda bin: None)  # and it makes no such mistake
    assert off(make()) == {}
    assert runs(world) == 4


def test_two_faults(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fault(options: str) -> smoke.Fault | None:
        if "-DGGML_CPU_REPACK=OFF" not in options:
            return smoke.Fault("by q4_0 (CPU_REPACK)", "CPU_REPACK", "is wrong by nan%")
        return amx(options)

    broken(world, monkeypatch, fault, ("avx2", "amx"))
    assert list(off(make())) == ["repack", "amx"]
    assert runs(world) == 3


def test_what_cannot_be_switched_off_is_one_line(
    world: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fault = smoke.Fault("multiplying 1 token by f32 (CPU)", "CPU", "was ended by SIGILL")
    broken(world, monkeypatch, lambda _: fault, ("avx2",))
    with pytest.raises(SparqError) as error:
        make()
    assert str(fault) in error.value.message and "--portable" in error.value.hint
    assert runs(world) == 3  # as it is, without avx2, without llamafile
    assert build.find(OPTIONS) is None
    monkeypatch.setattr(smoke, "fault", lambda bin: None)
    assert off(make()) == {}  # nothing is kept of it


def test_doctor_says_what_is_off_and_what_does_not_work(
    world: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SPARQ_CUDA", "0")
    broken(world, monkeypatch, amx, ("avx2", "amx"))
    make()
    monkeypatch.setattr(smoke, "fault", lambda folder: None)
    facts = doctor(monkeypatch, capsys)
    assert facts["built"]["works"] == "yes"
    assert facts["off"]["amx"].endswith("was ended by SIGILL (illegal instruction)")
    monkeypatch.setattr(smoke, "fault", lambda bin: amx(""))  # as with a build of another machine
    assert "SIGILL" in doctor(monkeypatch, capsys)["built"]["works"]


def doctor(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> dict:
    monkeypatch.setattr("sys.argv", ["sparq-cpp", "doctor", "--json"])
    with pytest.raises(SystemExit):
        cli.main()
    return json.loads(capsys.readouterr().out)
