"""CUDA and Vulkan from packages: when they are used, and what is said where they are not."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from fakes import write

from pyorch import native, system
from pyorch.errors import SparqError
from pyorch.measure import records
from pyorch.native import build, carried, carried_gpu, cmake, cuda, devices, probe, smoke
from pyorch.native.devices import Device

if TYPE_CHECKING:
    from conftest import Run

H100, RTX = Device("NVIDIA H100", 0, arch="90"), Device("RTX 2080", 0, arch="75")
RADEON = Device("Radeon", 0, backend="Vulkan")
CUBLAS = "packages/nvidia/cu13/lib/libcublas.so.13"


@pytest.fixture
def cpu(world: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Path:
    """What came with the wheel, in the cache, beside the package for an H100 or, if the test asks
    for that, for Vulkan, which are here. What NVIDIA's packages have is in the environment, and no
    compiler."""
    packages, backend = world / "packages", getattr(request, "param", "cuda")
    sources = build.sources(build.Options(cuda="any" * (backend == "cuda")))
    stamp = {"stamp": "abc", "inputs": sources, "archs": ["80", "90"], "cuda": "c", "compiler": "z"}
    files = {f"nvidia/cu13/lib/{name}": name for name in carried_gpu._NEEDED}
    of_package = {"libggml.so": f"with {backend}", f"libggml-{backend}.so": "backend"}
    of_package["stamp.json"] = json.dumps(stamp)
    write(packages, files)
    write(packages / f"sparq_cpp_{backend}", of_package)
    of_cpu: dict[str, Any] = {"time": 1, "off": {"zen4": "it fails"}, "pin": "p", "isa": ["x64"]}
    of_cpu |= {"stamp": "of the CPU", "inputs": build.sources(build.Options()), "ranked": ["x64"]}
    of_cpu["inputs"] |= {"options": carried.NAME, "compiler": "c"}
    files = dict.fromkeys(("libggml.so", "libllama.so", "llama-server"), "CPU")
    files["stamp.json"] = json.dumps(of_cpu)
    folder = write(world / "cache" / "lib" / "sparq-carried-of-this-cpu", files)
    monkeypatch.syspath_prepend(packages)
    monkeypatch.setattr(carried, "find_cpu", lambda: folder)
    monkeypatch.setattr(cuda, "devices", lambda: ((H100,) if backend == "cuda" else (), ""))
    monkeypatch.setattr(cuda, "find_nvcc", lambda: "")
    monkeypatch.setattr(ctypes, "CDLL", lambda name: None)  # libvulkan
    monkeypatch.setattr(devices, "of_library", lambda folder: [RADEON])
    monkeypatch.setattr(probe, "find_compiler", lambda: None)
    monkeypatch.setattr(carried_gpu, "find", carried_gpu.find.__wrapped__)  # as in new processes
    return folder


@pytest.fixture
def tried(cpu: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The stamps of what was tried, all on a GPU; it works until the test adds what fails."""
    folders: list[str] = []

    def fault(folder: Path, gpu: bool = False) -> None:
        if gpu:  # doctor tries the CPU too
            folders.append((folder / "libggml.so").read_text())

    monkeypatch.setattr(smoke, "fault", fault)
    return folders


both = pytest.mark.parametrize(
    ("cpu", "name"), [("cuda", "cuda"), ("vulkan", "vulkan")], indirect=["cpu"]
)


@both
def test_it_is_used_where_a_gpu_is(
    cpu: Path, tried: list[str], name: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as m:
        m.setattr(system, "IS_WINDOWS", name == "vulkan")  # where it is copied
        folder = native.built()
    assert (folder / f"libggml-{name}.so").is_symlink() == (name == "cuda")
    assert native.find(tools=("llama-server",)) == folder and tried == [f"with {name}"]
    assert (folder / "libllama.so").read_text() == "CPU"
    assert (folder / f"libggml-{name}.so").read_text() == "backend"
    assert (folder / "nvidia" / "libcublas.so.13").is_file() == (name == "cuda")
    stamp: Any = build.read_stamp(folder)
    assert (stamp["stamp"], stamp["isa"], stamp["inputs"]["compiler"]) == ("abc", ["x64"], "z")
    assert folder in build.used()
    facts = json.loads(run("doctor", "--json")[1])
    assert facts["built"]["used"] == folder.name and facts["built"]["works"] == "yes"
    assert facts["built"][f"sparq-carried-{name}"]["lib_dir"] == str(folder)
    assert name not in facts["off"]
    records.machine.cache_clear()
    assert records.machine()["gpu"] == {"cuda": "NVIDIA H100", "vulkan": "Radeon"}[name]
    records.machine.cache_clear()


@both
def test_a_build_for_the_cpu_that_was_made_here_gives_way(
    cpu: Path, tried: list[str], name: str, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    with monkeypatch.context() as m:
        m.setattr(probe, "find_compiler", lambda: probe.Compiler("cc", "c++", "a compiler"))
        made, stock = build.build(build.Options()), build.build(build.Options(stock=True))
    folder = native.find()
    assert folder and folder.name.startswith(f"sparq-carried-{name}")
    capsys.readouterr()
    assert native.find(stock=True) == stock
    assert "stock" in capsys.readouterr().err
    monkeypatch.setenv(f"SPARQ_{name.upper()}", "0")
    assert (native.find(), native.find(stock=True)) == (made, stock)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("cpu", ["vulkan"], indirect=True)
def test_a_build_with_vulkan_that_was_made_here_is_used(
    cpu: Path, tried: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert native.find() != cpu and build.usual() == build.Options()
    monkeypatch.setattr(cmake, "vulkan_parts", lambda: ({}, ""))
    with monkeypatch.context() as m:
        m.setattr(probe, "find_compiler", lambda: probe.Compiler("cc", "c++", "a compiler"))
        made = build.build(build.Options(vulkan=True))
    assert native.find() == made


@pytest.mark.parametrize(
    ("cpu", "refuse", "why"),
    [
        ("cuda", lambda m, _: m.setenv("SPARQ_CUDA", "0"), "SPARQ_CUDA=0"),
        ("cuda", lambda m, _: m.setattr(cuda, "devices", lambda: ((), "no libcuda")), "no libcuda"),
        ("cuda", lambda m, _: m.setattr(cuda, "devices", lambda: ((H100, RTX), "")), "RTX 2080"),
        ("cuda", lambda _, world: write(world, {"ggml_ops/cuda/op.cu": "int edited;"}), "sources"),
        ("cuda", lambda _, world: (world / CUBLAS).unlink(), "nvidia-cublas"),
        ("cuda", lambda _, world: shutil.rmtree(world / "packages/sparq_cpp_cuda"), ""),
        ("vulkan", lambda m, _: m.setenv("SPARQ_VULKAN", "0"), "SPARQ_VULKAN=0"),
        ("vulkan", lambda m, _: m.setattr(ctypes, "CDLL", os.stat), "libvulkan.so.1"),
    ],
    indirect=["cpu"],
)
def test_where_it_cannot_be_used_the_cpu_is(
    cpu: Path, tried: list[str], world: Path, monkeypatch: pytest.MonkeyPatch, run: Run,
    capsys: pytest.CaptureFixture[str], refuse: Callable[..., object], why: str,
) -> None:  # fmt: skip
    """Every command says so, but for a user who has switched it off."""
    refuse(monkeypatch, world)
    assert native.find() == cpu and tried == []
    silent = why == "" or why.endswith("=0")
    err = capsys.readouterr().err
    assert not err if silent else why in err
    off = json.loads(run("doctor", "--json")[1])["off"].values()
    of_package = [reason for reason in off if "sparq-cpp-" in reason]
    assert bool(of_package) == bool(why) and all(why in reason for reason in of_package)


@pytest.mark.parametrize(
    ("device", "arch", "runs"),
    [
        ("80", "80", True),
        ("80", "86", False),
        ("89", "89", True),
        ("89", "80", False),  # experts of some tokens: a block larger than its code allows
        ("90", "89", False),
        ("121", "120", False),
    ],
)
def test_which_devices_run_which_code(device: str, arch: str, runs: bool) -> None:
    assert carried_gpu._runs(device, arch) is runs


@pytest.mark.parametrize("raised", [False, True])
def test_one_that_does_not_work_is_not_used_until_it_does(
    cpu: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], raised: bool
) -> None:
    def fault(folder: Path, gpu: bool = False) -> smoke.Fault:
        if raised:
            raise SparqError("CUDA driver version is insufficient")
        return smoke.Fault("multiplying 1 token by f32 (CUDA0)", "CUDA0", "is wrong by 90%")

    monkeypatch.setattr(smoke, "fault", fault)
    with monkeypatch.context() as m:
        m.setattr(carried_gpu, "find", cache(carried_gpu.find))
        assert native.find() == cpu and native.find() == cpu
    why = "driver version is insufficient" if raised else "by f32 (CUDA0) is wrong by 90%"
    assert capsys.readouterr().err.count(why) == 1, "a command says it once"
    monkeypatch.setattr(smoke, "fault", lambda folder, gpu: None)  # the GPU may have been full
    assert native.find() != cpu


def test_what_its_links_lead_to_may_go(cpu: Path, tried: list[str], world: Path) -> None:
    """Another environment with the same package has a folder of its own."""
    first = native.built()
    shutil.move(world / "packages" / "nvidia", world / "elsewhere")
    assert native.find() == cpu
    shutil.move(world / "elsewhere", world / "packages" / "nvidia")
    (first / "libggml-cuda.so").unlink()
    (first / "libggml-cuda.so").symlink_to(world / "gone")
    assert native.find() == first and tried == ["with cuda"] * 2
    assert (first / "libggml-cuda.so").read_text() == "backend"
