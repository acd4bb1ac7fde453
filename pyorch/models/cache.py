"""List and remove the GGUF models in the hub's cache and in ours.

The cache is shared with other programs and laid out by huggingface-hub: `blobs/HASH`, and in
`snapshots/COMMIT/` links to these by the files' names. huggingface-hub lists it. Removing
is done here, because huggingface-hub removes whole revisions, not one model of several. If a link
leads out of the repository's `blobs`, only the link is removed.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pyorch.errors import SparqError
from pyorch.models import wheel
from pyorch.progress import Say, silent

if TYPE_CHECKING:
    from huggingface_hub import CachedFileInfo, CachedRepoInfo, CachedRevisionInfo

SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")


@dataclass(frozen=True)
class CachedModel:
    """A model of one or several files, in all cached revisions."""

    repo: str  # or the package that it came in
    name: str  # the name of the first file, with its folders
    n_bytes: int
    entries: tuple[Path, ...]  # in the snapshots
    complete: bool = True  # whether a revision has all of its files

    @property
    def spec(self) -> str:
        return f"{self.repo}/{self.name}"


def repositories(say: Say = silent) -> list[CachedRepoInfo]:
    """The contents of the cache by repository, as huggingface-hub reads it.

    Args:
        say: called with a line for each model repository that huggingface-hub cannot read.
    """
    from huggingface_hub import constants, scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        found = scan_cache_dir(constants.HF_HUB_CACHE)
    except CacheNotFound:
        return []
    for warning in found.warnings:
        if "models--" in str(warning):
            say(f"left out of what is in the cache: {warning}")
    return sorted(found.repos, key=lambda repo: repo.repo_id)


def by_name(revision: CachedRevisionInfo) -> dict[str, CachedFileInfo]:
    """The files of a revision by their names in the repository, sorted."""
    named = {f.file_path.relative_to(revision.snapshot_path).as_posix(): f for f in revision.files}
    return dict(sorted(named.items()))


def models(say: Say = silent) -> list[CachedModel]:
    """All models in the cache, by repository and name; of a split one perhaps only some files.
    `say`: as in `repositories`."""
    found = []
    for repo in repositories(say):
        models: dict[str, list[CachedFileInfo]] = {}
        complete = set()
        for revision in repo.revisions if repo.repo_type == "model" else ():
            of_model: dict[str, list[CachedFileInfo]] = {}
            for name, file in by_name(revision).items():
                if name.endswith(".gguf"):
                    shard = SHARD.fullmatch(name)
                    first = f"{shard[1]}-00001-of-{shard[3]}.gguf" if shard else name
                    of_model.setdefault(first, []).append(file)
            for name, files in of_model.items():
                models.setdefault(name, []).extend(files)
                shard = SHARD.fullmatch(name)
                if len(files) == (int(shard[3]) if shard else 1):
                    complete.add(name)
        for name, files in sorted(models.items()):
            n_bytes = sum({f.blob_path: f.size_on_disk for f in files}.values())
            entries = tuple(f.file_path for f in files)
            found.append(CachedModel(repo.repo_id, name, n_bytes, entries, name in complete))
    for package, got in wheel.cached().items():
        assert got.path is not None
        found.append(CachedModel(package, got.name, got.path.stat().st_size, (got.path,)))
    return found


def unfinished() -> dict[str, list[Path]]:
    """The remains of interrupted downloads, by repository."""
    from huggingface_hub import constants

    found: dict[str, list[Path]] = {}
    for path in sorted(Path(constants.HF_HUB_CACHE).glob("models--*/blobs/*.incomplete")):
        repo = path.parent.parent.name.removeprefix("models--").replace("--", "/")
        found.setdefault(repo, []).append(path)
    return found


def remove(folder: Path, entries: Iterable[Path], parts: Iterable[Path] = ()) -> int:
    """Remove files of a repository, and the repository with the last of them.

    Args:
        folder: the repository's folder in the cache.
        entries: paths in its snapshots; content that no other entry refers to goes too.
        parts: files of interrupted downloads.

    Returns:
        The number of bytes freed.

    Raises:
        SparqError: the folder is a link.
        OSError: a file cannot be removed.
    """
    for link in (folder, folder / "snapshots", folder / "blobs"):
        if link.is_symlink():
            raise SparqError(f"{link} is a link: what it leads to stays", "remove it there")
    freed = 0
    for entry in entries:
        blob = _blob(folder, entry)
        if blob is None and not entry.is_symlink():  # a file system without links
            freed += entry.stat().st_size
        entry.unlink()
        if blob and not _entries_of(folder, blob):
            freed += _remove_blob(folder, blob)
    for part in parts:
        freed += part.lstat().st_size
        part.unlink()
    left = [p for f in ("snapshots", "blobs") for p in (folder / f).rglob("*")]
    if not any(p.is_file() or p.is_symlink() for p in left):
        shutil.rmtree(folder)
    return freed


def drop(folder: Path, entry: Path) -> None:
    """Remove a damaged file with all that refers to its content."""
    blob = _blob(folder, entry)
    for same in _entries_of(folder, blob) if blob else [entry]:
        same.unlink(missing_ok=True)
    if blob:
        _remove_blob(folder, blob)


def _blob(folder: Path, entry: Path) -> Path | None:
    """The target of an entry's link, if it is in the repository's own `blobs`."""
    if not entry.is_symlink():
        return None
    target = Path(os.path.normpath(entry.parent / os.readlink(entry)))
    in_blobs = target.parent.resolve() == (folder / "blobs").resolve()
    return target if in_blobs and (target.is_file() or target.is_symlink()) else None


def _entries_of(folder: Path, blob: Path) -> list[Path]:
    return [p for p in (folder / "snapshots").rglob("*") if _blob(folder, p) == blob]


def _remove_blob(folder: Path, blob: Path) -> int:
    """Remove content that nothing refers to. Returns the bytes freed."""
    store = folder.parent / "blobs"  # where huggingface-hub 2 keeps what repositories share
    content = blob.resolve()
    n_bytes = blob.lstat().st_size
    linked = blob.is_symlink()
    blob.unlink()
    if not linked:
        return n_bytes
    others = [p for p in folder.parent.glob("*--*/blobs/*") if p.resolve() == content]
    if others or content.parent.parent != store.resolve() or not content.is_file():
        return 0
    n_bytes = content.stat().st_size
    content.unlink()
    content.with_name(f"{content.name}.refs").unlink(missing_ok=True)
    return n_bytes
