"""What all tests share: the built library, its Python bindings, small models.

Nothing is built for tests that do not ask for it: those that load the library have the fixture
`native_lib_dir`, by themselves, through another fixture, or from the conftest.py of their folder.
"""

from __future__ import annotations

import io
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple

import pytest
from filelock import FileLock

import pyorch.cli
from pyorch import native, paths
from pyorch.native import source

if TYPE_CHECKING:
    from hub_server import Hub

# What a user has set for their own use would change what the programs under test do.
_OF_TESTS = ["TEST", "FUZZ", "LOAD", "CACHE", "LLAMA", "CUDA", "VULKAN", "LIBRARY"]
for name in [*os.environ]:
    theirs = name.startswith("SPARQ_") and name.split("_")[1] not in _OF_TESTS
    if theirs or name in ("FORCE_COLOR", "TTY_COMPATIBLE", "HF_HUB_OFFLINE"):
        del os.environ[name]

# An sdist has the tests, but not the records that some of them read.
collect_ignore = [] if (paths.REPOSITORY / "bench" / "results").is_dir() else ["test_numbers.py"]

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as a shell starts what is in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)  # or programs under test had it too


@pytest.fixture(scope="session")
def native_lib_dir() -> Path:
    """Folder of the patched library, built if need be; SPARQ_TEST_LIB_DIR names another one."""
    return Path(os.environ.get("SPARQ_TEST_LIB_DIR") or native.built())


@pytest.fixture(scope="session")
def made_once(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`made_once(name, make)`: a folder that `make(folder)` fills, once for all of pytest-xdist's
    workers. For what takes seconds to compile."""
    root = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent  # of all workers of this run

    def folder_of(name: str, make: Callable[[Path], object]) -> Path:
        folder = root / f"made-{name}"
        with FileLock(f"{folder}.lock"):
            if not (folder / "done").exists():
                folder.mkdir(exist_ok=True)
                make(folder)
                (folder / "done").touch()
        return folder

    return folder_of


@pytest.fixture(scope="session")
def server_dir() -> Path:
    """The same with llama-server and llama-quantize, which take minutes to compile."""
    tools = ("llama-quantize", "llama-server")
    return Path(os.environ.get("SPARQ_TEST_LIB_DIR") or native.built(tools=tools))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "server_dir" in getattr(item, "fixturenames", ()):
            by_itself = item.get_closest_marker("slow")
            item.add_marker(pytest.mark.slow)
            if not by_itself:
                item.add_marker(pytest.mark.server)


@pytest.fixture(scope="session")
def llama_cpp(native_lib_dir: Path) -> ModuleType:
    """The Python bindings on the patched library."""
    return native.load()


@pytest.fixture(scope="session")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`unpacked("ggml/include")`: this folder of the source that the library is built from."""
    pin = source.read_pin()
    where = source.locate(pin)

    def folder_of(name: str) -> Path:
        if not where.path.exists():
            pytest.skip("the source of the build is no longer in the cache")
        into = tmp_path_factory.mktemp("source") / name
        source.unpack(where, f"{pin.folder}/{name}", into, skip=("cmake",))
        return into

    return folder_of


@pytest.fixture(scope="session")
def ggml_headers(unpacked: Callable[[str], Path]) -> Path:
    """Folder `ggml` of that source."""
    return unpacked("ggml")


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The small model that is in the repository."""
    files = sorted((paths.data("models") / "demo").glob("*.gguf"))
    assert files, "models/demo holds no .gguf file"
    return files[0]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base model: GQA, 2 layers, 4096 positions, a token is a byte."""
    from tiny import write_tiny_gguf  # numpy: not before ops/conftest.py has set its threads

    return write_tiny_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf")


@pytest.fixture(scope="session")
def tiny_chat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with a chat template."""
    from tiny import CHATML, write_tiny_gguf

    return write_tiny_gguf(tmp_path_factory.mktemp("model") / "chat.gguf", chat_template=CHATML)


@pytest.fixture
def split(tmp_path: Path) -> Path:
    """The base model in three files, as llama.cpp's gguf-split writes it; the first of them."""
    from tiny import write_tiny_gguf

    return write_tiny_gguf(tmp_path / "split.gguf", part_tensors=8)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub without files on this machine, and an empty cache: all that huggingface-hub reads when
    it is imported."""
    import huggingface_hub
    from hub_server import Hub, serve
    from huggingface_hub import constants

    with serve(Hub()) as hub:
        monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
        monkeypatch.delenv("HF_TOKEN", raising=False)
        monkeypatch.delenv("HUGGING_FACE_HUB_TOKEN", raising=False)
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        template = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "home" / "hub"))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        yield hub
        huggingface_hub.close_session()


class Result(NamedTuple):
    """Exit code, stdout, stderr."""

    code: int
    out: str
    err: str


Run = Callable[..., Result]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    """`run("generate", "-p", "x", stdin="...")`: the command as a user would run it, with
    folders of documents of its own; with `terminal`, stdin and stderr pass for one. `explain` does
    not measure the memory's speed, which takes seconds: test_machines.py runs it whole."""

    monkeypatch.setattr("pyorch.engine.bandwidth.measured", lambda n_threads: 1e10)
    monkeypatch.setattr(paths, "documents", lambda: tmp_path / "documents")
    monkeypatch.setattr(paths, "kept_texts", lambda: tmp_path / "texts")
    for command in ("GENERATE", "CHAT", "DEMO", "READ"):  # busy threads wait for each other
        monkeypatch.setenv(f"SPARQ_{command}_THREADS", "1")
    monkeypatch.setenv("SPARQ_CHAT_COMMANDS", "1")  # a test types into a pipe

    def run_command(*args: object, stdin: str | bytes = "", terminal: bool = False) -> Result:
        raw = stdin.encode() if isinstance(stdin, str) else stdin
        monkeypatch.setattr(sys, "argv", ["sparq-cpp", *map(str, args)])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(raw)))
        capsys.readouterr()
        code: object = 0
        with monkeypatch.context() as streams:
            for stream in (sys.stdin, sys.stderr) if terminal else ():
                streams.setattr(stream, "isatty", lambda: True)
            try:
                pyorch.cli.main()
            except SystemExit as e:
                code = e.code or 0
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        assert terminal or "\x1b" not in err  # colour is for terminals
        assert isinstance(code, int)
        return Result(code, out, err)

    return run_command
