"""Downloads files from the hub into its cache: several at once, resumed, and with checksums.

This is not left to huggingface-hub, which writes to a file with a random name and deletes it on any
failure, so that a killed process starts over. Here bytes go into `blobs/HASH.incomplete`, the name
that its earlier versions resumed from, and become `blobs/HASH` when the hash is right.
Addresses, tokens, locks, the HTTP client and the layout of the cache are huggingface-hub's.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from pyorch import system
from pyorch.errors import SparqError
from pyorch.models.hub_errors import is_from_client, retry_after, status_of
from pyorch.progress import Progress, Say, silent

N_PARALLEL = 4  # files
TRIES = 5  # attempts in a row without progress, half a minute with the waits between them
FIRST_WAIT_S = 2.0  # doubled after each attempt
LONGEST_WAIT_S = 120.0  # the longest wait that a hub may ask for
PART = 32 << 30  # bytes per request: some servers refuse more than 50 GB
BLOCK = 1 << 20  # bytes per update of the hash

DIGEST = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
PASSES = (408, 429, 500, 502, 503, 504)  # HTTP statuses after which to try again

T = TypeVar("T")


@dataclass(frozen=True)
class HubFile:
    """A file of a repository. `path` is None unless the file is in the cache."""

    name: str
    n_bytes: int
    digest: str  # SHA-256, or git's SHA-1 for small files; "" = not known
    path: Path | None
    n_cached: int = 0  # bytes that need not be downloaded
    verified: bool = field(default=False, compare=False)  # its content has this digest


class Stopped(Exception):
    """Another file failed, or the user has had enough."""


class Transfer:
    """The state that the files of one download share."""

    def __init__(
        self,
        total: int,
        progress: Progress = silent,
        say: Say = silent,
    ) -> None:
        """`progress` is called with (bytes here, total bytes), `say` with a line on each wait."""
        self.total, self.done = total, 0
        self.progress, self.say = progress, say
        self.stop = threading.Event()
        self._lock = threading.Lock()

    def add(self, n_bytes: int) -> None:
        with self._lock:
            self.done += n_bytes
            self.progress(self.done, self.total)
        if self.stop.is_set():
            raise Stopped


class Retries:
    """Decides whether to try again, and after what wait."""

    def __init__(self, transfer: Transfer, name: str, broken: bool = True) -> None:
        """`broken`: whether failed connections are tried again too, or only busy servers."""
        self.transfer, self.name, self.broken, self.failed = transfer, name, broken, 0

    def wait_or_raise(self, error: Exception) -> None:
        """Wait before the next try.

        Raises:
            `error` itself, if waiting does not help or has not helped.
        """
        status = status_of(error)
        broken = isinstance(error, (Truncated, ConnectionError)) or is_from_client(error)
        passes = status in PASSES if status else self.broken and broken
        asked = retry_after(error)
        self.failed += 1
        if not passes or self.failed >= TRIES or (asked or 0) > LONGEST_WAIT_S:
            raise error
        wait_s = FIRST_WAIT_S * 2 ** (self.failed - 1) if asked is None else asked
        what = f"the hub answered {status}" if status else "the connection broke"
        again = f"try {self.failed + 1} of {TRIES}"
        self.transfer.say(f"{self.name}: {what}; {again} in {wait_s:.0f} s")
        if self.transfer.stop.wait(wait_s):
            raise Stopped

    def call(self, function: Callable[[], T]) -> T:
        while True:
            try:
                return function()
            except Exception as e:
                self.wait_or_raise(e)


class Truncated(OSError):
    """A response that ended early."""


def repo_folder(repo: str, kind: str = "model") -> Path:
    """The folder of a repository of a model, or of a `dataset`, in the cache."""
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    return Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=repo, repo_type=kind)


def bytes_cached(folder: Path, digest: str) -> int:
    """The bytes of a file that are in a repository's folder: those of an interrupted download, or
    all of them under another name."""
    if not DIGEST.fullmatch(digest):
        return 0
    blobs = folder / "blobs"
    there = [p for p in (blobs / digest, blobs / f"{digest}.incomplete") if p.is_file()]
    return there[0].stat().st_size if there else 0


def fetch_files(
    repo: str, commit: str, files: Sequence[HubFile], transfer: Transfer, kind: str = "model"
) -> dict[str, HubFile]:
    """Download files into the cache and return them, with their paths, by name.

    If a file fails or the process is killed, all bytes stay for the next attempt.

    Raises:
        SparqError: a checksum is wrong (the download is deleted), or the hub contradicts itself.
        OSError, and any exception of huggingface-hub.
    """
    with ThreadPoolExecutor(N_PARALLEL) as pool:
        running = {f.name: pool.submit(_fetch_one, repo, commit, f, transfer, kind) for f in files}
        try:
            done, _ = wait(running.values(), return_when=FIRST_EXCEPTION)
            for future in done:
                if (error := future.exception()) and not isinstance(error, Stopped):
                    raise error
            return {name: future.result() for name, future in running.items()}
        finally:
            transfer.stop.set()
            pool.shutdown(wait=False, cancel_futures=True)


def _fetch_one(repo: str, commit: str, file: HubFile, transfer: Transfer, kind: str) -> HubFile:
    from huggingface_hub import hf_hub_url

    if not DIGEST.fullmatch(file.digest):  # it becomes a file's name, and all checks rest on it
        raise SparqError(
            f"{repo}: {file.name}: the hub gives no checksum for it", "does HF_ENDPOINT name a hub?"
        )
    url = hf_hub_url(repo, file.name, repo_type=kind, revision=commit)
    folder = repo_folder(repo, kind)
    blob = folder / "blobs" / file.digest
    pointer = folder / "snapshots" / commit / file.name
    lock = folder.parent / ".locks" / folder.name / f"{file.digest}.lock"
    for path in (blob, pointer, lock):
        make_folder(path.parent)
    with _locked(lock, file, transfer):
        if there := blob.is_file():
            transfer.add(file.n_bytes)
        else:
            part = blob.with_name(f"{file.digest}.incomplete")
            _download(url, part, file, transfer)
            part.replace(blob)
        _point(pointer, blob)
    return replace(file, path=pointer, verified=not there)


@contextmanager
def _locked(lock: Path, file: HubFile, transfer: Transfer) -> Iterator[None]:
    """Hold the lock of a file, which other programs with huggingface-hub respect too."""
    from filelock import Timeout
    from huggingface_hub.utils import WeakFileLock

    waited = False
    with ExitStack() as stack:
        while True:
            try:
                stack.enter_context(WeakFileLock(lock, timeout=0.2))
                break
            except Timeout:
                if not waited:
                    transfer.say(f"{file.name}: another process is downloading it; waiting")
                waited = True
                transfer.add(0)
        yield


def make_folder(folder: Path) -> None:
    """Make a folder of the cache, unless a link in its path leads out of it.

    Raises:
        SparqError: one does. A repository's own folder may be a link to another disk.
    """
    from huggingface_hub import constants

    cache = Path(constants.HF_HUB_CACHE)
    top = cache / folder.relative_to(cache).parts[0]
    if not folder.resolve().is_relative_to(top.resolve()):
        raise SparqError(f"{folder} leads out of the cache", "remove that link")
    folder.mkdir(parents=True, exist_ok=True)


def _point(pointer: Path, blob: Path) -> None:
    """Give a file of the cache its name in a snapshot, as huggingface-hub does."""
    if pointer.is_file():
        return
    pointer.unlink(missing_ok=True)  # it may be a dangling link
    try:
        pointer.symlink_to(os.path.relpath(blob, pointer.parent))
    except OSError:  # a file system without links
        if not blob.is_file():
            raise
        shutil.move(blob, pointer)


def _download(url: str, part: Path, file: HubFile, transfer: Transfer) -> None:
    """Complete `part`. Its content is trusted no more than the hub's: the hash decides."""
    descriptor = system.open_shared(part)
    with os.fdopen(descriptor, "r+b", buffering=0) as f:
        state = _State(f, file, transfer)
        state.resume()
        retries = Retries(transfer, file.name)
        while state.n < file.n_bytes:
            before = state.n
            try:
                _ask(url, state)
            except Exception as e:
                if state.n > before:
                    retries.failed = 0
                retries.wait_or_raise(e)
        found = state.digest.hexdigest()
    if found != file.digest:
        part.unlink()
        raise wrong_checksum(file, found)


def wrong_checksum(file: HubFile, found: str) -> SparqError:
    return SparqError(
        f"{file.name}: wrong checksum {found}, not {file.digest}",
        "the file was deleted: pull it again",
    )


def new_digest(file: HubFile, n_bytes: int) -> Any:
    """The hash that names a file's content: SHA-256, or git's for small files."""
    if len(file.digest) == 40:
        return hashlib.sha1(b"blob %d\0" % n_bytes, usedforsecurity=False)
    return hashlib.sha256()


class _State:
    """A file during its download: `n` bytes are written and hashed."""

    def __init__(self, f: BinaryIO, file: HubFile, transfer: Transfer) -> None:
        self.f, self.file, self.transfer = f, file, transfer
        self.n, self.digest = 0, new_digest(file, file.n_bytes)

    def resume(self) -> None:
        while self.n < self.file.n_bytes and (block := self.f.read(BLOCK)):
            self._count(block[: self.file.n_bytes - self.n])
        self.f.truncate(self.n)

    def write(self, block: bytes) -> None:
        # at its offset, so that two processes on a disk without locks write the same bytes
        self.f.seek(self.n)
        if self.f.write(block) != len(block):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._count(block)

    def _count(self, block: bytes) -> None:
        self.digest.update(block)
        self.n += len(block)
        self.transfer.add(len(block))

    def restart(self) -> None:
        self.transfer.add(-self.n)
        self.n, self.digest = 0, new_digest(self.file, self.file.n_bytes)
        self.f.truncate(0)


def _ask(url: str, state: _State) -> None:
    """Request the remaining bytes."""
    from huggingface_hub import constants
    from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

    first, size = state.n, state.file.n_bytes
    last = min(first + PART, size) - 1
    headers = build_hf_headers() | {"Accept-Encoding": "identity", "Range": f"bytes={first}-{last}"}
    # The timeout is for each read: a slow link may take all day, a dead one this long. Redirected
    # to another host, the client leaves the token behind.
    timeout = constants.HF_HUB_DOWNLOAD_TIMEOUT
    with get_session().stream("GET", url, headers=headers, timeout=timeout) as answer:
        hf_raise_for_status(answer)
        if answer.status_code != 206:  # the whole file, whatever range was requested
            state.restart()
        elif not answer.headers.get("Content-Range", "").startswith(f"bytes {first}-"):
            raise SparqError(
                f"{state.file.name}: the hub sent a different part of it than requested",
                "try again later; does HF_ENDPOINT name a hub?",
            )
        for block in answer.iter_bytes():
            if len(block) > size - state.n:
                block = block[: size - state.n]
            state.write(block)
            if state.n == size:
                return
    if state.n <= last:
        raise Truncated("the answer ended early")
