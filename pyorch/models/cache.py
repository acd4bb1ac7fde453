"""List and remove the GGUF models in the hub's cache and in ours.

The hub's cache is shared with other programs, so huggingface-hub reads it and deletes in it. What
is deleted is chosen here, because huggingface-hub 1 knows whole revisions only. A link that leads
out of a repository's `blobs` is removed, and what it leads to stays.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from pyorch.models import cards, wheel
from pyorch.paths import expanded
from pyorch.progress import Say, silent

if TYPE_CHECKING:
    from huggingface_hub import CachedRepoInfo, HFCacheInfo

_SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")


UNFINISHED = "an unfinished download"


@dataclass(frozen=True)
class CachedModel:
    """A model of one or several files, in all cached revisions; or what a killed download left."""

    repo: str  # or the package that it came in
    name: str  # the name of the first file, with its folders; or UNFINISHED
    n_bytes: int
    paths: tuple[Path, ...]
    complete: bool = True  # whether a revision has all of its files

    @property
    def spec(self) -> str:
        return f"{self.repo}/{self.name}"


def part_names(name: str) -> list[str]:
    """The names of all files of the model that a GGUF file belongs to, the first part first."""
    shard = _SHARD.fullmatch(name)
    if not shard:
        return [name]
    return [f"{shard[1]}-{i:05d}-of-{shard[3]}.gguf" for i in range(1, int(shard[3]) + 1)] or [name]


def _scan() -> HFCacheInfo | None:
    from huggingface_hub import constants, scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        return scan_cache_dir(expanded(constants.HF_HUB_CACHE))
    except CacheNotFound:
        return None


def models(say: Say = silent) -> list[CachedModel]:
    """All models in the cache, by repository and name; of a split one perhaps only some files.

    Args:
        say: called with a line for each model repository that huggingface-hub cannot read.
    """
    from huggingface_hub import constants

    cached = []
    scan = _scan()
    for warning in scan.warnings if scan else ():
        if "models--" in str(warning):
            say(f"left out of what is in the cache: {warning}")
    for repo in sorted(scan.repos if scan else (), key=lambda repo: repo.repo_id):
        cached += _models_of(repo) if repo.repo_type == "model" else []
    for path in sorted(Path(constants.HF_HUB_CACHE).glob("models--*/blobs/*.incomplete")):
        name = path.parent.parent.name.removeprefix("models--").replace("--", "/")
        cached.append(CachedModel(name, UNFINISHED, path.stat().st_size, (path,), complete=False))
    for package in filter(None, (cards.load(name).package for name in cards.names())):
        if (path := wheel.path_of(package)).is_file():
            size = path.stat().st_size
            cached.append(CachedModel(package.requirement, package.file, size, (path,)))
    return cached


def _models_of(repo: CachedRepoInfo) -> list[CachedModel]:
    files: dict[str, dict[Path, tuple[Path, int]]] = {}  # first name -> path -> content, its bytes
    complete = set()
    for revision in repo.revisions:
        n_parts: Counter[str] = Counter()
        for f in revision.files:
            name = f.file_path.relative_to(revision.snapshot_path).as_posix()
            if name.endswith(".gguf"):
                first, *others = part_names(name)
                files.setdefault(first, {})[f.file_path] = f.blob_path, f.size_on_disk
                n_parts[first] += 1
                if n_parts[first] == 1 + len(others):
                    complete.add(first)
    return [
        CachedModel(repo.repo_id, name, sum(dict(of.values()).values()), (*of,), name in complete)
        for name, of in sorted(files.items())
    ]


def remove(paths: Collection[Path]) -> int:
    """Remove files of models, and content that no other file refers to. A repository goes with the
    last of its files.

    Returns:
        The number of bytes freed.
    """
    scan = _scan()
    repos, links, blobs, others = set(), set(), set(), set(paths)
    for repo in scan.repos if scan else ():
        files = {f for revision in repo.revisions for f in revision.files}
        gone = {f for f in files if f.file_path in paths}
        others -= {f.file_path for f in gone}
        if gone and gone == files and not repo.repo_path.is_symlink():
            repos.add(repo.repo_path)
            continue
        links |= {f.file_path for f in gone}
        own = {f.blob_path for f in gone if f.blob_path.parent == repo.repo_path / "blobs"}
        blobs |= own - {f.blob_path for f in files - gone}
    freed = sum(path.lstat().st_size for path in others)
    for path in others:  # unfinished, of a package, or of a repository that cannot be read
        path.unlink()
    if scan and (repos or links):
        plan = replace(
            scan.delete_revisions(),
            repos=frozenset(repos),
            snapshots=frozenset(links),
            blobs=frozenset(blobs),
        )
        plan.execute()
        rest = _scan()
        freed += scan.size_on_disk - (rest.size_on_disk if rest else 0)
    return freed


def drop(path: Path) -> None:
    """Remove a damaged file, with all that refers to its content."""
    scan = _scan()
    repos = scan.repos if scan else ()
    files = [f for repo in repos for revision in repo.revisions for f in revision.files]
    content = {f.blob_path for f in files if f.file_path == path}
    remove({f.file_path for f in files if f.blob_path in content} | {path})
