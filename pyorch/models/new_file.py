"""A file that appears under its name only when it is finished.

It is written as `NAME.partial` in the same folder and renamed at the end. Whoever writes it holds a
lock on it, so that the remains of a killed run are overwritten, and a file that another run is
writing is not. A child process that writes is given the lock too: it may outlive a killed parent.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pyorch import system
from pyorch.errors import SparqError
from pyorch.text import human_bytes

DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def check_target(path: Path, force: bool) -> None:
    """Refuse a name that cannot or should not be written.

    Raises:
        SparqError: the file exists and `force` is not given, it is not a plain file, or its folder
            does not exist.
    """
    if not path.absolute().parent.is_dir():
        raise SparqError(f"{path}: there is no folder {path.parent}", "make it first", 2)
    if path.exists() and not path.is_file():
        raise SparqError(f"{path}: not a plain file", "give another name", 2)
    if os.path.lexists(path) and not force:
        raise SparqError(f"{path}: exists already", "--force replaces it", 2)


def check_space(
    folder: Path, n_bytes: int, what: str, hint: str = "free some disk space, or use another disk"
) -> None:
    """Refuse to begin writing if the disk does not have enough room.

    Raises:
        SparqError: there is not enough room; the message has both sizes.
    """
    while not folder.exists():
        folder = folder.absolute().parent
    free = shutil.disk_usage(folder).free
    if n_bytes > free:
        raise SparqError(
            f"{what} takes {human_bytes(n_bytes)}, but only {human_bytes(free)} are free in "
            f"{folder}",
            hint,
        )


@contextmanager
def new_file(
    path: Path, force: bool = False, resumable: bool = False, private: bool = False
) -> Iterator[tuple[Path, int]]:
    """Yield a temporary name to write to and the descriptor of its lock, for `pass_fds`.

    The file becomes `path` when the block ends without an error.

    Any exception, Ctrl-C included, deletes it; a killed process leaves `NAME.partial`, which the
    next run replaces. If it is `resumable`, whatever ends the block early leaves it as it is, and
    so does the next run, which continues it. A `private` file, which holds what somebody wrote or
    read, is for this user alone, whatever stood there before.

    Raises:
        SparqError: as `check_target`; another process is writing the file; or the system refuses.
    """
    check_target(path, force)
    real = Path(os.path.realpath(path))  # a link stays a link
    partial = real.with_name(real.name + ".partial")
    mode = 0o600 if private else 0o666
    try:
        lock = system.open_shared(partial, mode)
        try:
            if not system.lock(lock):
                raise SparqError(f"{path}: another process is writing it", "wait for it")
            if not partial.exists() or not os.path.samestat(os.fstat(lock), partial.stat()):
                raise SparqError(f"{path}: another process has just written it", "try again")
            try:
                if not resumable:
                    os.truncate(lock, 0)
                yield partial, lock
                check_target(path, force)
                os.fsync(lock)
                os.replace(partial, real)
            except BaseException:
                if not resumable or os.fstat(lock).st_size == 0:
                    partial.unlink(missing_ok=True)
                raise
        finally:
            os.close(lock)
    except OSError as e:
        raise cannot_write(path, e, resumable) from None


def cannot_write(path: Path, e: OSError, resumable: bool = False) -> SparqError:
    """The error that replaces the system's."""
    if e.errno in DISK_FULL and resumable:
        return SparqError(
            f"{path}: the disk is full", "free some disk space, and run it again: it goes on"
        )
    if e.errno in DISK_FULL:
        return SparqError(f"{path}: the disk is full; nothing was kept", "free some disk space")
    return SparqError(f"{path}: cannot be written: {e.strerror or e}", "write to another folder")
