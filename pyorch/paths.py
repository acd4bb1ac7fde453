"""Where the package's data and its cache are."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from pyorch.errors import SparqError

PACKAGE = Path(__file__).resolve().parent
REPOSITORY = PACKAGE.parent


def data(name: str) -> Path:
    """Folder `patches`, `ggml_ops` or `models`: inside an installed wheel, else of the checkout.

    Raises:
        SparqError: the installation lacks it.
    """
    for root in (PACKAGE / "_data", REPOSITORY):
        if (root / name).is_dir():
            return root / name
    raise SparqError(
        f"this installation lacks its {name} folder", "reinstall: pip install --force-reinstall ."
    )


def cache() -> Path:
    """Root of everything that is built or downloaded; not created here."""
    return expanded(os.environ.get("SPARQ_CACHE") or "~/.cache/sparq-cpp").absolute()


def expanded(name: str) -> Path:
    """With the home folder in place of `~` or `~user`.

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
