"""Where the package's data, its cache and the user's results are."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import platformdirs

from pyorch.errors import SparqError

PACKAGE = Path(__file__).resolve().parent
REPOSITORY = PACKAGE.parent
_NAME = "sparq-cpp"


def in_checkout() -> bool:
    """Whether this package runs from a clone or an unpacked sdist, not from an installation."""
    return (REPOSITORY / "pyproject.toml").is_file()


def install_command(extra: str = "") -> str:
    """What installs this package again, with an extra: for hints."""
    named = f"[{extra}]" if extra else ""
    return f"pip install -e '.{named}'" if in_checkout() else f"pip install '{_NAME}{named}'"


def data(name: str) -> Path:
    """Folder `patches`, `ggml_ops` or `models`: inside an installed wheel, else of the checkout.

    Raises:
        SparqError: the installation lacks it.
    """
    for root in (PACKAGE / "_data", REPOSITORY):
        if (root / name).is_dir():
            return root / name
    raise SparqError(f"this installation lacks its {name} folder", install_command())


def cache() -> Path:
    """Root of everything that is built or downloaded; not created here.

    SPARQ_CACHE, else the system's place for caches: on Linux `$XDG_CACHE_HOME/sparq-cpp`. This
    was `~/.cache/sparq-cpp` on every system once; where that is all there is, it stays in use.
    """
    if chosen := os.environ.get("SPARQ_CACHE"):
        return expanded(chosen).absolute()
    usual, old = platformdirs.user_cache_path(_NAME), expanded(f"~/.cache/{_NAME}")
    return (old if old.is_dir() and not usual.is_dir() else usual).absolute()


def results() -> Path:
    """Where measurements and figures go that nobody gave a folder for; not created here.

    `bench/` of a checkout, else the user's data: on Linux `$XDG_DATA_HOME/sparq-cpp/bench`.
    """
    return (REPOSITORY if in_checkout() else platformdirs.user_data_path(_NAME)) / "bench"


def expanded(name: str) -> Path:
    """The path, with the home folder in place of `~` or `~user`.

    Raises:
        SparqError: there is none.
    """
    try:
        return Path(name).expanduser()
    except RuntimeError:
        raise SparqError(
            f"{name}: no home folder of that name", "give the whole path, or ./~name"
        ) from None


@contextmanager
def locked(root: Path, waiting: Callable[[str], None]) -> Iterator[int]:
    """Hold `root/lock`, which is made if need be. Yields its descriptor, for children: the system
    drops the lock when its last holder is gone.

    Args:
        waiting: called with the process that holds it, if one does.
    """
    import fcntl  # not on Windows, where `probe.check_system` says so

    root.mkdir(parents=True, exist_ok=True)
    with (root / "lock").open("a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            waiting(file.read().strip() or "unknown")
            fcntl.flock(file, fcntl.LOCK_EX)
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield file.fileno()
