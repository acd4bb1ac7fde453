"""Models from the hub: which files a short name means, and how they come into the shared cache.

The transfer is huggingface-hub's. What is added here: a choice among the files of a repository,
the disk's space before and the checksum after, and errors that say what to do. Names and hashes
that a hub sends are checked before they become part of a path.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from pyorch.errors import SparqError
from pyorch.models.gguf_file import human_bytes, read_gguf

PREFERRED = "Q4_K_M"  # of several files, when none is named
BLOCK = 1 << 20  # bytes hashed at once

_SPEC = re.compile(
    r"(?P<repo>\w[\w.-]*/\w[\w.-]*)(:(?P<quant>\w[\w.-]*)|/(?P<file>[^@]+\.gguf))?"
    r"(@(?P<revision>\w[\w./-]*))?",
    re.ASCII,
)
_SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_DIGEST = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")


@dataclass(frozen=True)
class Spec:
    """A model on the hub: one file, one quantisation, or neither = to be chosen."""

    repo: str
    file: str = ""
    quant: str = ""
    revision: str = "main"


@dataclass(frozen=True)
class HubFile:
    """A file of a repository. `path` is None unless it is in the cache."""

    name: str
    n_bytes: int
    digest: str  # SHA-256, of small files git's SHA-1; "" = not known
    path: Path | None


@dataclass(frozen=True)
class Model:
    """The files that make up one model (several if it is split), first part first."""

    spec: Spec
    commit: str
    files: tuple[HubFile, ...]

    @property
    def missing_bytes(self) -> int:
        return sum(f.n_bytes for f in self.files if f.path is None)

    @property
    def complete(self) -> bool:
        return all(f.path is not None for f in self.files)

    @property
    def path(self) -> Path:
        """Of the first file, in the cache. Only of a complete model."""
        assert self.files[0].path is not None
        return self.files[0].path


def parse_spec(text: str) -> Spec | None:
    """`hf:org/repo`, `hf:org/repo:QUANT`, `[hf:]org/repo/file.gguf`, each with `@REVISION`.

    Returns None for the path of a file: what is there, or begins with a folder that is there, or
    has no such form.

    Raises:
        SparqError: begins with `hf:` but goes on wrongly.
    """
    named = text.startswith("hf:")
    match = _SPEC.fullmatch(text.removeprefix("hf:"))
    if not named and (
        not match or not match["file"] or Path(text).exists() or Path(text.split("/")[0]).exists()
    ):
        return None
    if not match:
        raise SparqError(
            f"{text!r} names no model on the hub",
            "hf:org/repo, hf:org/repo:Q4_K_M or hf:org/repo/file.gguf, with @REVISION if need be",
            exit_code=2,
        )
    spec = Spec(
        match["repo"], match["file"] or "", match["quant"] or "", match["revision"] or "main"
    )
    for name in (spec.file or "x", spec.revision, spec.repo):
        if not _is_safe(name):
            raise SparqError(f"{text!r}: {name!r} is not a plain name", exit_code=2)
    return spec


def _is_safe(name: str) -> bool:
    """Whether a name with slashes stays below the folder it is put in, on any system."""
    return name.isprintable() and not any(
        part in ("", ".", "..") or "\\" in part for part in name.split("/")
    )


def find(spec: Spec) -> Model:
    """Choose the files that `spec` means, among those of the hub; offline, of the cache.

    Raises:
        SparqError: no such repository, revision or file, no access, no connection, or a choice
            that only the user can make.
    """
    from huggingface_hub import constants

    commit, files = _cached(spec) if constants.HF_HUB_OFFLINE else _listed(spec)
    return Model(spec, commit, _choose(spec, files))


def _listed(spec: Spec) -> tuple[str, dict[str, HubFile]]:
    """The commit that the revision means and the GGUF files of it, by the hub's account."""
    from huggingface_hub import HfApi, try_to_load_from_cache

    files = {}
    with _explained(spec):
        info = HfApi().model_info(spec.repo, revision=spec.revision, files_metadata=True)
        commit = str(info.sha)
        if not _COMMIT.fullmatch(commit):
            raise SparqError(f"{spec.repo}: {commit!r} is no commit", "is HF_ENDPOINT a hub?")
        for s in info.siblings or ():
            name = s.rfilename
            if not name.endswith(".gguf"):
                continue
            if not _is_safe(name):
                raise SparqError(
                    f"{spec.repo}: refused: its file name {name!r} leads out of the cache",
                    "a repository with such a name is not to be trusted",
                )
            found = try_to_load_from_cache(spec.repo, name, revision=commit)
            path = Path(found) if isinstance(found, str) else None
            digest = s.lfs.sha256 if s.lfs else s.blob_id
            files[name] = HubFile(name, s.size or 0, str(digest), path)
    return commit, files


def _cached(spec: Spec) -> tuple[str, dict[str, HubFile]]:
    """The same, of what the cache holds."""
    from huggingface_hub import constants, scan_cache_dir
    from huggingface_hub.utils import CacheNotFound

    try:
        repos = scan_cache_dir(constants.HF_HUB_CACHE).repos
    except CacheNotFound:
        repos = frozenset()
    for repo in repos:
        if repo.repo_id != spec.repo or repo.repo_type != "model":
            continue
        for rev in repo.revisions:
            if spec.revision in rev.refs or spec.revision == rev.commit_hash:
                files = {}
                for f in rev.files:
                    name = f.file_path.relative_to(rev.snapshot_path).as_posix()
                    # the cache names a file's content by its hash
                    blob = os.readlink(f.file_path) if f.file_path.is_symlink() else ""
                    digest = Path(blob).name if _DIGEST.fullmatch(Path(blob).name) else ""
                    if name.endswith(".gguf"):
                        files[name] = HubFile(name, f.size_on_disk, digest, f.file_path)
                return rev.commit_hash, files
    raise SparqError(
        f"{spec.repo}@{spec.revision} is not in the cache, and HF_HUB_OFFLINE forbids to download",
        "unset HF_HUB_OFFLINE",
    )


def _choose(spec: Spec, files: Mapping[str, HubFile]) -> tuple[HubFile, ...]:
    models: dict[str, list[str]] = {}  # name with the part's number left out -> files
    for name in sorted(files):
        shard = _SHARD.fullmatch(name)
        models.setdefault(f"{shard[1]}.gguf of {shard[3]}" if shard else name, []).append(name)
    if spec.file:
        chosen = [names for names in models.values() if spec.file in names]
    elif spec.quant:
        chosen = _of_quant(models, spec.quant)
    else:  # what is no model by its name is not offered, but can be asked for
        chosen = [n for n in models.values() if not re.search("mmproj|imatrix", n[0].lower())]
        if len(chosen) > 1:
            chosen = _of_quant(models, PREFERRED) or chosen
    if len(chosen) != 1:
        raise _no_choice(spec, files, chosen)
    names = chosen[0]
    shard = _SHARD.fullmatch(names[0])
    if shard:
        wanted = [f"{shard[1]}-{i:05d}-of-{shard[3]}.gguf" for i in range(1, int(shard[3]) + 1)]
        lacking = [n for n in wanted if n not in names]
        if lacking:
            raise SparqError(
                f"{spec.repo}: {lacking[0]} is missing of a split model",
                f"choose another model of it, as hf:{spec.repo}/FILE",
            )
    return tuple(files[n] for n in names)


def _of_quant(models: Mapping[str, list[str]], quant: str) -> list[list[str]]:
    """Those with this quantisation as a word of their name: Q4_K is not in Q4_K_M or IQ4_K."""
    word = re.compile(rf"(?<![A-Za-z0-9]){re.escape(quant)}(?![A-Za-z0-9_])", re.IGNORECASE)
    return [n for key, n in models.items() if word.search(key.rpartition("/")[2])]


def _no_choice(spec: Spec, files: Mapping[str, HubFile], chosen: list[list[str]]) -> SparqError:
    if not files:
        return SparqError(
            f"{spec.repo}: no GGUF file in it at {spec.revision}",
            "look for a repository with GGUF in its name; other formats must be converted first",
        )
    offered = [names[0] for names in chosen] or sorted(files)
    shown = ", ".join(f"{n} ({human_bytes(files[n].n_bytes)})" for n in offered[:40])
    shown += f" and {len(offered) - 40} more" if len(offered) > 40 else ""
    wanted = spec.file or spec.quant or "the one to use"
    what = f"no {wanted} in it" if not chosen else f"{len(chosen)} models in it"
    return SparqError(
        f"{spec.repo}: {what}", f"name one, as hf:{spec.repo}/FILE: {shown}", exit_code=2
    )


def download(model: Model, quiet: bool = False) -> Model:
    """Bring what is missing into the cache; `check` comes next.

    Raises:
        SparqError: no space, no connection, or no access.
    """
    from huggingface_hub import constants
    from huggingface_hub.utils import disable_progress_bars, logging

    if quiet:
        logging.set_verbosity_error()
        disable_progress_bars()
    _check_space(model.missing_bytes, Path(constants.HF_HUB_CACHE))
    with _explained(model.spec):
        files = tuple(f if f.path else replace(f, path=_download(model, f)) for f in model.files)
    return replace(model, files=files)


def check(model: Model, progress: Callable[[int, int], None]) -> None:
    """Compare the checksums of a complete model and read its header.

    Args:
        progress: called with (bytes read, bytes of the model).

    Raises:
        SparqError: a wrong checksum (the file is deleted), or not a GGUF file.
    """
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    total, done = sum(f.n_bytes for f in model.files), 0
    with _explained(model.spec):
        for f in model.files:
            if f.digest:
                _check_digest(f, lambda n, before=done: progress(before + n, total))
            done += f.n_bytes
        try:
            read_gguf(model.path)
        except SparqError as e:
            hint = "its checksum is right: the file is like that on the hub"
            raise SparqError(e.message, hint if model.files[0].digest else e.hint) from None
        # not before: offline, the name of a revision finds what is complete and checked
        folder = repo_folder_name(repo_id=model.spec.repo, repo_type="model")
        ref = Path(constants.HF_HUB_CACHE) / folder / "refs" / model.spec.revision
        known = ref.is_file() and ref.read_text() == model.commit
        if not known and model.spec.revision != model.commit:
            ref.parent.mkdir(parents=True, exist_ok=True)
            ref.write_text(model.commit)


def _check_space(n_bytes: int, cache: Path) -> None:
    folder = cache.absolute()
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if n_bytes > free:
        raise SparqError(
            f"{human_bytes(n_bytes)} to download, but only {human_bytes(free)} free in {cache}",
            "make room, choose a smaller quantisation, or set HF_HOME to a folder on another disk",
        )


def _download(model: Model, file: HubFile) -> Path:
    """Bring one file into the cache; a broken connection is resumed."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url

    repo, commit = model.spec.repo, model.commit
    etag = get_hf_file_metadata(hf_hub_url(repo, file.name, revision=commit)).etag
    # the cache names a file by its etag, so that has to be the hash it ought to be
    if etag != file.digest or not _DIGEST.fullmatch(etag):
        raise SparqError(
            f"{repo}: {file.name}: the hub contradicts itself on the checksum",
            "try again later; is HF_ENDPOINT a hub?",
        )
    return Path(hf_hub_download(repo, file.name, revision=commit))


def _check_digest(file: HubFile, progress: Callable[[int], None]) -> None:
    path = file.path
    assert path is not None
    n_bytes = path.stat().st_size
    digest = hashlib.sha256()
    if len(file.digest) == 40:
        digest = hashlib.sha1(b"blob %d\0" % n_bytes)  # as git does
    done = 0
    with path.open("rb") as f:
        while block := f.read(BLOCK):
            digest.update(block)
            done += len(block)
            progress(done)
    if digest.hexdigest() != file.digest:
        path.resolve().unlink(missing_ok=True)
        path.unlink(missing_ok=True)
        raise SparqError(
            f"{file.name}: wrong checksum {digest.hexdigest()}, the hub says {file.digest}",
            "the file was deleted: pull it again",
        )


@contextmanager
def _explained(spec: Spec) -> Iterator[None]:
    """Turn what huggingface-hub raises into one line and a hint."""
    from huggingface_hub.utils import HfHubHTTPError

    base = HfHubHTTPError.__bases__[0]  # of requests or httpx, with the version of the hub's client
    try:
        yield
    except (base, OSError, ValueError) as e:
        raise _reason(spec, e) from None


def _reason(spec: Spec, e: BaseException) -> SparqError:
    from huggingface_hub import get_token
    from huggingface_hub import utils as hub

    if isinstance(e, hub.LocalEntryNotFoundError) and e.__cause__:
        e = e.__cause__
    repo, login = spec.repo, "log in with `hf auth login`, or set HF_TOKEN"
    response = getattr(e, "response", None)
    status = getattr(response, "status_code", None)
    if isinstance(e, hub.GatedRepoError):
        return SparqError(
            f"{repo} is gated: its owner gives access to those who accept the terms",
            f"accept them on the repository's page, then {login}",
        )
    if isinstance(e, hub.RevisionNotFoundError):
        return SparqError(f"{repo}: no revision {spec.revision}", "@main is the newest")
    token = get_token()
    if isinstance(e, hub.RepositoryNotFoundError) or status == 404 or (status == 401 and not token):
        who = "your token may not see it" if token else "private"
        return SparqError(f"{repo}: not found, or {who}", f"check the name; if private, {login}")
    if status == 401:
        return SparqError(f"{repo}: the hub refused the token", login)
    if status == 403:
        return SparqError(f"{repo}: access denied", f"{login}, of an account that has access")
    if status == 429:
        wait = response.headers.get("Retry-After", "") if response is not None else ""
        hint = f"wait {wait} s" if wait.isdigit() else "wait a few minutes"
        return SparqError(f"{repo}: the hub refuses: too many requests", f"{hint}, or {login}")
    if status is not None:
        return SparqError(f"{repo}: the hub answered {status}", "try again later")
    if isinstance(e, hub.HFValidationError):
        return SparqError(f"{repo!r} is no repository's name", "it is org/repo", exit_code=2)
    what = (str(e).splitlines() or [type(e).__name__])[0]
    if isinstance(e, OSError) and e.errno in (errno.ENOSPC, errno.EDQUOT):
        return SparqError(f"{repo}: the disk is full", "make room, then pull again")
    if isinstance(e, OSError) and e.filename:
        return SparqError(f"{e.filename}: {e.strerror}")
    return SparqError(
        f"{repo}: no usable answer from the hub: {what}",
        "check the network and HF_ENDPOINT; with HF_HUB_OFFLINE=1 the cache alone is used",
    )
