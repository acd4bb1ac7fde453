"""What is shipped: the wheel and the sdist hold what they need, and the demo runs from each."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import pyorch
from pyorch import paths
from pyorch.native import carried_gpu, cuda

pytestmark = pytest.mark.skipif(not paths.in_checkout(), reason="there is nothing to pack here")
DATA = ("patches", "ggml_ops", "models")
DIST = paths.REPOSITORY / "dist"
BUILT = sorted(DIST.glob(f"sparq_cpp-*manylinux*_{platform.machine()}.whl"))
WITH_GPU = {
    backend: sorted(DIST.glob(f"sparq_cpp_{backend}-*manylinux*_{platform.machine()}.whl"))
    for backend in carried_gpu.BACKENDS
}


def pack(folder: Path, into: Path, kind: str, env: dict[str, str] | None = None) -> Path:
    """The `wheel` or `sdist` of a checkout, made without an index."""
    argv = [sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", str(into)]
    env = {**os.environ, **(env or {})}
    subprocess.run(argv, cwd=folder, check=True, capture_output=True, env=env)
    (file,) = into.glob("*.whl" if kind == "wheel" else "*.tar.gz")
    return file


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pack(paths.REPOSITORY, tmp_path_factory.mktemp("wheel"), "wheel")


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pack(paths.REPOSITORY, tmp_path_factory.mktemp("sdist"), "sdist")


def contents(file: Path) -> dict[str, int]:
    """Sizes in bytes by name, without the folder that an sdist has around everything."""
    if file.suffix == ".whl":
        with zipfile.ZipFile(file) as archive:
            return {info.filename: info.file_size for info in archive.infolist()}
    with tarfile.open(file) as archive:
        return {m.name.partition("/")[2]: m.size for m in archive if m.isfile()}


def test_the_wheel_has_the_data_and_nothing_of_the_workshop(wheel: Path) -> None:
    files = contents(wheel)
    assert {name.split("/")[0].partition("-")[0] for name in files} == {"pyorch", "sparq_cpp"}
    for folder in DATA:
        ours = {
            f"pyorch/_data/{file.relative_to(paths.REPOSITORY)}"
            for file in (paths.REPOSITORY / folder).rglob("*")
            if file.is_file() and file.parent.name != "__pycache__"
        }
        assert ours <= files.keys()
    assert {"pyorch/py.typed", "pyorch/_data/models/demo/document.txt"} <= files.keys()
    assert wheel.stat().st_size < 10e6  # the demo model is 7 MB of it


def test_the_sdist_makes_the_same_wheel_and_leaves_the_records_out(
    wheel: Path, sdist: Path, tmp_path: Path
) -> None:
    files = contents(sdist)
    assert not [name for name in files if name.startswith(("bench/results", ".ci", ".venv"))]
    assert {"Makefile", "bench/plot.py", "tests/conftest.py"} <= files.keys()
    assert sdist.stat().st_size < 10e6
    with tarfile.open(sdist) as archive:
        # the filter is the default of Python 3.14, and not known to every 3.10 and 3.11
        archive.extraction_filter = getattr(tarfile, "data_filter", None)
        archive.extractall(tmp_path)
    (folder,) = tmp_path.iterdir()
    assert contents(pack(folder, tmp_path / "dist", "wheel")) == contents(wheel)


@pytest.mark.parametrize("name", ["CITATION.cff", "conda/recipe.yaml"])
def test_what_names_the_version_names_the_present_one(name: str) -> None:
    text = (paths.REPOSITORY / name).read_text("utf-8").replace('"', "")
    assert re.search(rf"^ *version: {re.escape(pyorch.__version__)}$", text, re.M)


def installed(folder: Path, *files: Path, beside: Sequence[str | Path] = ()) -> Path:
    """The Python of an empty environment, with these files and what pip finds for them; or without
    an index, on top of the packages in the folders `beside`."""
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    argv = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
    argv += ["--no-deps", "--no-index"] * bool(beside)
    subprocess.run([*argv, *map(str, files)], check=True)
    (packages,) = (folder / "lib").glob("python*/site-packages")
    (packages / "beside.pth").write_text("\n".join(map(str, beside)))
    return python


def works(
    python: Path, cwd: Path, env: dict[str, str] | None = None, spec: str = "sparq,ratio=1/8"
) -> dict[str, Any]:
    """Let the program that is installed beside `python` go on with a text, from a folder that is
    not the clone, with the model and the text that come with it. Returns what it prints.

    Raises:
        AssertionError: it failed, or not all ran sparse.
    """
    if env is None:
        env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"SPARQ_CUDA": "0"}
    where = "from pyorch import paths; print(paths.data('models') / 'demo')"
    folder = subprocess.run([python, "-c", where], cwd=cwd, env=env, capture_output=True, text=True)
    demo = Path(folder.stdout.strip())
    assert demo.is_relative_to(python.parents[1])
    argv = [str(python.with_name("sparq-cpp")), "generate", "-m", str(demo / "demo.gguf")]
    argv += ["-f", str(demo / "document.txt"), "-a", spec, "-n", "16", "--json"]
    done = subprocess.run([*argv, "--temp", "0"], cwd=cwd, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["share_sparse"] == 1
    return found


def test_it_works_from_the_wheel(wheel: Path, tmp_path: Path, native_lib_dir: Path) -> None:
    """The library was built before."""
    python = installed(tmp_path / "env", wheel, beside=[sysconfig.get_path("purelib")])
    works(python, tmp_path)


@pytest.mark.slow
@pytest.mark.skipif(not BUILT, reason="`make wheels` has put none for this system into dist/")
def test_a_wheel_with_the_library_needs_no_compiler(tmp_path: Path) -> None:
    """In an empty environment, with an empty cache, where no program is found but Python's own; a
    llama-cpp-python that is there is not used."""
    python = installed(tmp_path / "env", BUILT[-1])
    bin_folder = python.parent
    (packages,) = (tmp_path / "env" / "lib").glob("python*/site-packages")
    foreign = packages / "llama_cpp" / "__init__.py"
    foreign.parent.mkdir()
    foreign.write_text("raise SystemExit('the wrong one')")
    env = {"PATH": str(bin_folder), "HOME": str(tmp_path / "home")}
    works(python, tmp_path, env)
    argv = [str(bin_folder / "sparq-cpp"), "doctor", "--json"]
    done = subprocess.run(argv, cwd=tmp_path, env=env, capture_output=True, text=True, check=True)
    facts = json.loads(done.stdout)
    assert facts["toolchain"]["compiler"] == "" and facts["built"]["works"] == "yes"
    assert facts["built"]["used"].startswith("sparq-carried")
    assert facts["built"]["variant"]
    (library,) = (tmp_path / "home" / ".cache" / "sparq-cpp" / "lib").iterdir()
    for tool in ("llama-server", "llama-bench"):
        subprocess.run([library / tool, "--help"], env=env, check=True, capture_output=True)
    argv = [str(python), "-m", "pip", "uninstall", "--quiet", "--yes", "sparq-cpp"]
    subprocess.run(argv, check=True)
    assert not (packages / "pyorch").exists() and foreign.is_file()
    assert (library / "stamp.json").is_file(), "`sparq-cpp clean`, before it, removes the cache"


@pytest.mark.slow
@pytest.mark.parametrize("wheel", sorted(DIST.glob("*.whl")), ids=lambda wheel: wheel.stem)
def test_a_wheel_is_small_and_tells_nothing_of_the_machine(wheel: Path) -> None:
    """So that it fits the package index, and another run makes the same bytes."""
    limit = 100e6 if wheel.name.startswith("sparq_cpp_cuda") else 30e6
    assert wheel.stat().st_size < limit
    private = [bytes(paths.REPOSITORY), bytes(Path.home() / ".cache")]
    with zipfile.ZipFile(wheel) as archive:
        assert len({info.date_time for info in archive.infolist()}) == 1
        for name in archive.namelist():
            data = archive.read(name)
            assert not any(path in data for path in private), name


def with_gpu(backend: str, folder: Path, **how: Any) -> Path:
    """An environment with the wheel and that of a backend; skips where they were not made."""
    if not (BUILT and WITH_GPU[backend]):
        pytest.skip(f"`make wheels` and `make wheel-{backend}` have put none into dist/")
    return installed(folder, BUILT[-1], WITH_GPU[backend][-1], **how)


@pytest.mark.slow
@pytest.mark.parametrize("backend", carried_gpu.BACKENDS)
def test_a_wheel_for_gpus_needs_none(backend: str, tmp_path: Path) -> None:
    """Without one the CPU is used, and doctor says why. CUDA's backend loads, with NVIDIA's
    packages of the index: each symbol is found, and CUDA asks for its driver."""
    python = with_gpu(backend, tmp_path / "env")
    bin_folder = python.parent
    env = {"PATH": str(bin_folder), "HOME": str(tmp_path / "home"), "VK_ICD_FILENAMES": ""}
    works(python, tmp_path, env)

    def output(*argv: str | Path) -> str:
        done = subprocess.run(argv, cwd=tmp_path, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    if backend == "vulkan" or not cuda.devices()[0]:
        facts = json.loads(output(bin_folder / "sparq-cpp", "doctor", "--json"))
        assert f"sparq-cpp-{backend}" in facts["off"][backend]
    if backend == "cuda" and not cuda.devices()[0]:
        pretended = output(python, "-c", PRETEND)
        assert "failed to initialize CUDA" in pretended and "undefined symbol" not in pretended
    (library,) = (tmp_path / "env" / "lib").glob(f"*/*/*/libggml-{backend}.so")
    if nm := shutil.which("nm"):
        names = output(nm, "-D", library)
        versions = {tuple(map(int, x.split("."))) for x in re.findall(r"@GLIBC_([\d.]+)", names)}
        assert max(versions) <= (2, 17)
        defined = [s.split()[-1] for s in names.splitlines() if re.search(r" [TDBRVW] ", s)]
        assert defined and all(name.startswith("ggml_") for name in defined)


PRETEND = """
from pyorch.native import carried, carried_gpu, cuda
cuda.devices = lambda: ((cuda.Device("one that is not there", 0, arch="90"),), "")
print(carried_gpu.find("cuda", carried.find_cpu())[1])
"""


@pytest.mark.gpu
def test_the_wheels_use_a_gpu(tmp_path: Path) -> None:
    """Without an index, on top of this environment's packages: sparse on the GPU, with the tokens
    of the CPU. The package has what `make wheel-cuda` was asked for."""
    ours = {paths.REPOSITORY, paths.REPOSITORY / "tests"}
    beside = [p for p in sys.path if Path(p).is_dir() and Path(p).absolute() not in ours]
    python = with_gpu("cuda", tmp_path / "env", beside=beside)
    env = {k: v for k, v in os.environ.items() if not k.startswith(("SPARQ_", "PYTHONPATH"))}
    env["SPARQ_CACHE"] = str(tmp_path / "cache")
    on_gpu, on_cpu = (
        works(python, tmp_path, env | more, "sparq,ratio=1/8,gpu_min_mb=0")
        for more in ({}, {"SPARQ_CUDA": "0"})
    )
    counts = {device["name"]: device["calls_sparse"] for device in on_gpu["attention"]["devices"]}
    assert counts.get("CUDA0"), counts
    assert on_gpu["tokens"] == on_cpu["tokens"]


def test_a_wheel_with_the_library_is_for_one_system(tmp_path: Path) -> None:
    """What the hook of pyproject.toml puts into a wheel, and what it says of it."""
    folder = tmp_path / "built"
    (folder / "lib").mkdir(parents=True)
    (folder / "lib" / "libllama.so").write_text("library")
    tag = "py3-none-manylinux_2_17_x86_64"
    env = {"SPARQ_WHEEL_LIBRARY": str(folder), "SPARQ_WHEEL_TAG": tag}
    file = pack(paths.REPOSITORY, tmp_path / "dist", "wheel", env)
    assert file.name.endswith(f"-{tag}.whl")
    assert "pyorch/_built/lib/libllama.so" in contents(file)
    with zipfile.ZipFile(file) as archive:
        (about,) = (name for name in archive.namelist() if name.endswith("/WHEEL"))
        assert "Root-Is-Purelib: false" in archive.read(about).decode()
