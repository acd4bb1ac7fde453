"""Where the package's data, its cache and the user's results are."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import platformdirs

from pyorch import system
from pyorch.errors import SparqError
from pyorch.progress import say

PACKAGE = Path(__file__).resolve().parent
REPOSITORY = PACKAGE.parent
_NAME = "sparq-cpp"


def in_checkout() -> bool:
    """Whether this package runs from a clone or an unpacked sdist, not from an installation."""
    return (REPOSITORY / "pyproject.toml").is_file()


def install_command(extra: str = "") -> str:
    """The command that installs this package again, with an extra; hints show it."""
    named = f"[{extra}]" if extra else ""
    return f"pip install -e '.{named}'" if in_checkout() else f"pip install '{_NAME}{named}'"


def data(name: str) -> Path:
    """The folder `patches`, `ggml_ops` or `models` of the installed wheel or of the checkout.

    Raises:
        SparqError: the installation lacks it.
    """
    for root in (PACKAGE / "_data", REPOSITORY):
        if (root / name).is_dir():
            return root / name
    raise SparqError(f"this installation lacks its {name} folder", install_command())


def cache() -> Path:
    """The root of everything that is built or downloaded; it is not created here.

    It is SPARQ_CACHE, else the system's place for caches: `$XDG_CACHE_HOME/sparq-cpp` on Linux.
    """
    if folder := os.environ.get("SPARQ_CACHE"):
        return expanded(folder).absolute()
    return _of_user(platformdirs.user_cache_path)


def results() -> Path:
    """The default folder for measurements, and of a clone's figures; it is not created here.

    `bench/` in a checkout, else in the user's data, `$XDG_DATA_HOME/sparq-cpp/bench` on Linux.
    """
    return (REPOSITORY if in_checkout() else _of_user(platformdirs.user_data_path)) / "bench"


def documents() -> Path:
    """The default folder of what `sparq-cpp read` has read; it is not created here."""
    return _of_user(platformdirs.user_data_path) / "documents"


def kept_texts() -> Path:
    """The folder of what `/read` of a chat has read and may be removed; it is not created here."""
    return cache() / "texts"


def _of_user(folder: Callable[[str], Path]) -> Path:
    with suppress(RuntimeError):
        if (path := folder(_NAME)).is_absolute():  # some versions leave a ~ as it is
            return path
    hint = "set HOME to a folder, or SPARQ_CACHE and XDG_DATA_HOME"
    raise SparqError("this user has no home folder", hint)


def size(path: Path) -> int:
    """The bytes of a file, or of all files in a folder."""
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.lstat().st_size for file in files if file.is_file())


def check_exec(folder: Path) -> None:
    """Refuse a folder, which need not exist yet, where programs and libraries cannot run.

    Raises:
        SparqError: its file system is mounted with noexec.
    """
    while not folder.exists():
        folder = folder.absolute().parent
    if hasattr(os, "ST_NOEXEC") and os.statvfs(folder).f_flag & os.ST_NOEXEC:
        raise SparqError(
            f"{folder}: nothing can run from this file system, which is mounted with noexec",
            "SPARQ_CACHE=FOLDER takes another place",
        )


def put(file: Path, text: str) -> None:
    """Write a small file, which has its name only when all of it is there.

    Raises:
        OSError: it cannot be written.
    """
    new = file.with_name(f"{file.name}.{os.getpid()}.new")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        new.write_text(text, "utf-8")
        new.replace(file)
    except OSError as e:
        new.unlink(missing_ok=True)
        raise OSError(e.errno, e.strerror, str(file)) from None


def private(folder: Path) -> Path:
    """The folder, which is made for this user alone if it is not there."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def expanded(name: str) -> Path:
    """The path, with the home folder in place of `~` or `~user`.

    Raises:
        SparqError: there is none.
    """
    try:
        return Path(name).expanduser()
    except RuntimeError:
        raise SparqError(
            f"{name}: no home folder of that name", "set HOME, give the whole path, or ./~name"
        ) from None


@contextmanager
def locked(root: Path) -> Iterator[int]:
    """Hold `root/lock`, which is created if necessary. Yields its descriptor for child
    processes: the system releases the lock when its last holder is gone."""
    name = root / "lock"
    root.mkdir(parents=True, exist_ok=True)
    with name.open("a+", encoding="utf-8") as file:
        if not system.lock(file.fileno()):
            file.seek(0)
            say(f"waiting for process {file.read().strip()}")
            system.lock(file.fileno(), wait=True)
        is_there = name.exists() and os.path.samestat(name.stat(), os.fstat(file.fileno()))
        if not is_there:  # whoever had it has removed the folder
            with locked(root) as lock:
                yield lock
            return
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield file.fileno()


def once(root: Path, done: Callable[[], bool], make: Callable[[int], None]) -> None:
    """Make something below `root` unless it is done, also by another process meanwhile.

    Args:
        make: gets the descriptor of the lock that `root` has meanwhile.
    """
    if not done():
        with locked(root) as lock:
            if not done():
                make(lock)
