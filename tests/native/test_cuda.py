"""Building with CUDA: what is found, what is asked for, and that the CPU build never notices."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from c_library import compiled
from fakes import write

from pyorch import native
from pyorch.errors import SparqError
from pyorch.native import build, cuda, probe
from pyorch.native.devices import Device

H100 = Device("NVIDIA H100", 0, arch="90")
TOOLKIT = cuda.Toolkit(
    "/opt/cuda/bin/nvcc", "13.0", ("/i",), ("/l",), {"cublas": "/l/libcublas.so"}
)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch):
    """machine(devices, nvcc): what this one pretends to have."""

    monkeypatch.delenv("SPARQ_CUDA", raising=False)  # `make test` sets it

    def pretend(*devices: Device, nvcc: str = "/opt/cuda/bin/nvcc") -> None:
        monkeypatch.setattr(cuda, "devices", lambda: (devices, "" if devices else "none here"))
        monkeypatch.setattr(cuda, "find_nvcc", lambda: nvcc)
        monkeypatch.setattr(cuda, "release", lambda nvcc: "13.0")
        monkeypatch.setattr(cuda, "toolkit", lambda compiler: (TOOLKIT, ""))

    return pretend


def nvcc(folder: Path, release: str, body: str) -> str:
    """A compiler that says it is of a release, and otherwise does `body`."""
    version = f'[ "$1" = --version ] && {{ echo "Cuda, release {release}, V{release}.1"; exit; }}'
    return str(write(folder, {"nvcc": f"#!/bin/sh\n{version}\n{body}\n"}) / "nvcc")


DRIVER = """
#include <stdio.h>
#include <string.h>
int cuInit(unsigned flags) { return flags; }
int cuDeviceGetCount(int * n) { *n = 2; return 0; }
int cuDeviceGetName(char * name, int n, int i) { snprintf(name, n, "GPU %d", i); return 0; }
int cuDeviceGetAttribute(int * x, int what, int i) {
    *x = what == 75 ? 8 + i : what == 18 ? i : 0;
    return 0;
}
int cuDeviceTotalMem_v2(size_t * n, int i) { *n = (i + 5ul) << 30; return 0; }
"""


def test_devices_are_those_of_the_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one that is not there: its calls, as cuda.h has them."""
    compiled(DRIVER, tmp_path / "libcuda.so.1")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    monkeypatch.setattr(cuda.Path, "exists", lambda path: True)
    devices, why = cuda.devices.__wrapped__()
    assert (devices[0], why) == (Device("GPU 0", 5 << 30, arch="80"), "")
    assert devices[1] == Device("GPU 1", 6 << 30, 0, True, arch="90") and len(devices) == 2


@pytest.mark.parametrize(
    ("text", "devices", "expected"),
    [
        (None, (), "75;80;86;89;90;100;120"),
        (None, (H100,), "90"),
        ("all", (H100,), "75;80;86;89;90;100;120"),
        ("80,90", (), "80;90"),
        ("native", (H100, H100), "90"),
        ("native", (Device("Orin", 0, arch="87"),), "87"),  # not on the list, but here
    ],
)
def test_archs(text: str | None, devices: tuple, expected: str, machine) -> None:
    machine(*devices)
    assert cuda.archs(text) == expected


@pytest.mark.parametrize(
    ("release", "body", "why"),
    [
        ("11.8", "exit 1", "11.8"),
        ("13.0", "echo 'a.cu:1: fatal error: cublas_v2.h: No such file'; exit 1", "cublas_v2.h"),
        (
            "13.0",
            'printf "#!/bin/sh\\nexit 3\\n" > "$3"; chmod +x "$3"',
            "exit code 3 on NVIDIA",
        ),
        ("12.8", 'printf "#!/bin/sh\\n" > "$3"; chmod +x "$3"', ""),
    ],
)
def test_toolkit(
    release: str, body: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found out by compiling and running; `$3` is the program that it is to make."""
    monkeypatch.setattr(cuda, "find_nvcc", lambda: nvcc(tmp_path, release, body))
    monkeypatch.setattr(cuda, "devices", lambda: ((H100,), ""))
    toolkit, reason = cuda.toolkit(probe.Compiler("cc", "c++", ""))
    assert why in reason and (toolkit is None) == bool(why)
    if toolkit:
        assert toolkit.release == release


def test_libraries_of_python_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the toolkit lacks comes from nvidia-cublas; what it has is its own."""
    files = ("lib/libcublas.so.13", "lib/libcublasLt.so.13", "include/cccl/cub/version.cuh")
    write(tmp_path / "nvidia" / "cu13", dict.fromkeys(files, ""))
    write(tmp_path / "cuda", {"lib64/libcudart.so": "", "bin/nvcc": ""})
    compiler = nvcc(tmp_path / "cuda" / "bin", "13.0", 'touch "$3"')
    monkeypatch.setattr(cuda, "find_nvcc", lambda: compiler)
    monkeypatch.setattr(cuda, "devices", lambda: ((), "none"))
    monkeypatch.syspath_prepend(tmp_path)
    toolkit, why = cuda.toolkit(probe.Compiler("cc", "c++", ""))
    assert toolkit is not None, why
    assert set(toolkit.libraries) == {"cublas", "cublasLt"}
    # the loader looks there in this order: cudart of the toolkit, not another release's
    assert toolkit.lib[:2] == (str(tmp_path / "cuda/lib64"), str(tmp_path / "nvidia/cu13/lib"))
    options = cuda.cmake_options(toolkit, "90")
    assert options["CUDA_cublas_LIBRARY"].endswith("cu13/lib/libcublas.so.13")
    assert f"-isystem={tmp_path}/nvidia/cu13/include" in toolkit.flags


def test_what_is_usual(machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine()
    assert build.usual() == build.Options()
    machine(H100)
    assert build.usual(stock=True) == build.Options(stock=True, cuda="90")
    machine(H100, nvcc="")
    assert build.usual() == build.Options(cuda="90"), "a finished build needs no compiler"
    monkeypatch.setenv("SPARQ_CUDA", "0")
    assert build.usual() == build.Options()


def test_build(world: Path, machine, run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own folder and stamp; the sources in cuda/ concern it alone."""
    machine(H100)
    monkeypatch.setenv(
        "FAKE_CMAKE", f'echo "$@" > {world}/cmake.args; echo $CUDAFLAGS >> {world}/cmake.args'
    )
    with_cuda = build.Options(cuda="90")
    plain = build.build(build.Options())
    folder = build.build(with_cuda)
    args = (world / "cmake.args").read_text()
    assert folder.name.startswith("sparq-cuda-") and folder != plain
    assert "-DGGML_CUDA=ON" in args and "-DCMAKE_CUDA_ARCHITECTURES=90" in args
    assert "-isystem=/i" in args and "-DCMAKE_INSTALL_RPATH=$ORIGIN;/l" in args
    assert build.find(with_cuda) == folder and build.find(build.Options(cuda="80")) is None
    more = build.build(build.Options(cuda="80;90"))
    assert build.find(build.Options(cuda="80")) == build.find(with_cuda) == more
    shutil.rmtree(more)
    machine(H100, nvcc="")
    assert native.find() == folder and native.gpus()[0].name == H100.name, "it needs no compiler"
    assert folder in build.used(), "clean leaves it"
    facts = json.loads(run("doctor", "--json")[1])["built"]
    assert facts["used"] == folder.name and facts[with_cuda.name]["lib_dir"] == str(folder)

    write(world, {"ggml_ops/cuda/op.cu": ""})
    assert build.find(build.Options()) == plain and build.find(with_cuda) is None


def test_build_without_a_working_toolkit(world: Path, machine, monkeypatch, capsys) -> None:
    machine(H100)
    monkeypatch.setattr(cuda, "toolkit", lambda compiler: (None, "it is broken"))
    with pytest.raises(SparqError, match="it is broken") as e:
        build.build(build.Options(cuda="90"))
    assert "SPARQ_CUDA=0" in e.value.hint
    assert build.working(build.usual()) == build.Options()
    assert "it is broken" in capsys.readouterr().err
