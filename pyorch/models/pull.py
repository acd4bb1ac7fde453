"""Models and data sets on the hub: finding the files that a name means, and caching them.

`transfer` downloads the bytes. This module has the names, the choice among a repository's files,
the checks of disk space before and of the header after, and errors that say what to do. Names and
hashes that a hub sends are checked before they become part of a path.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from functools import partial
from pathlib import Path

from pyorch.errors import SparqError, nearest
from pyorch.models import cache, cards, wheel
from pyorch.models.gguf_file import read_gguf
from pyorch.models.hub_errors import Unreachable, explained
from pyorch.models.new_file import check_space
from pyorch.models.transfer import (
    BLOCK,
    DIGEST,
    HubFile,
    Retries,
    Transfer,
    bytes_cached,
    fetch_files,
    make_folder,
    new_digest,
    repo_folder,
    wrong_checksum,
)
from pyorch.progress import Progress, Say, progress_bar, silent
from pyorch.text import human_bytes

PREFERRED = "Q4_K_M"  # the preferred file if none is named
ANSWER_S = 10.0  # seconds that the hub has for its answer, before the cache alone is used

_SPEC = re.compile(
    r"(?P<repo>\w[\w.-]*/\w[\w.-]*)(:(?P<quant>\w[\w.-]*)|/(?P<file>[^@]+\.gguf))?"
    r"(@(?P<revision>\w[\w./-]*))?",
    re.ASCII,
)
_CARD = re.compile(
    r"(?P<name>\w[\w.-]*)(:(?P<quant>\w[\w.-]*))?(@(?P<revision>\w[\w./-]*))?", re.ASCII
)
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class Spec:
    """A model on the hub. It names a file or a quantisation; otherwise one is chosen."""

    repo: str
    file: str = ""
    quant: str = ""
    revision: str = "main"
    card: str = ""  # the card that named the repository
    kind: str = "model"  # the kind of repository; or `dataset`, or `package` (Python index)

    @property
    def folder(self) -> Path:
        """The repository's place in the hub's cache; a package's place is in ours."""
        if package := self.package:
            return wheel.folder_of(package)
        return repo_folder(self.repo, self.kind)

    @property
    def package(self) -> cards.Package | None:
        """The package that contains the card's file."""
        return cards.load(self.card).package if self.kind == "package" else None


@dataclass(frozen=True)
class Model:
    """The files of a model (several if it is split), with the first part first."""

    spec: Spec
    commit: str
    files: tuple[HubFile, ...]

    @property
    def missing_bytes(self) -> int:
        return sum(f.n_bytes - f.n_cached for f in self.files if f.path is None)

    @property
    def complete(self) -> bool:
        return all(f.path is not None for f in self.files)

    @property
    def path(self) -> Path:
        """The path of the first file in the cache. Only a complete model has one."""
        assert self.files[0].path is not None
        return self.files[0].path


def parse_spec(text: str, original: bool = False) -> Spec | None:
    """`hf:org/repo`, `hf:org/repo:QUANT`, `[hf:]org/repo/file.gguf`, a card's name with `:QUANT` or
    without, each with `@REVISION`.

    Returns None for the path of a file: it exists, its first folder exists, or it has none of these
    forms.

    Args:
        original: a card means the repository that the model was published in, not its GGUF files.

    Raises:
        SparqError: what follows `hf:` is wrong or missing, the card knows no GGUF files, or a word
            is neither a file nor a card.
    """
    named = text.startswith("hf:")
    if not named:
        if Path(text).exists():
            return None
        if (word := _CARD.fullmatch(text)) and not text.endswith(".gguf"):
            return _of_card(word, original)
    match = _SPEC.fullmatch(text.removeprefix("hf:"))
    if not named and (not match or Path(text.split("/")[0]).exists()):
        return None
    if match and not named and not match["file"]:
        if text.endswith(".gguf"):
            return None
        raise SparqError(f"{text}: no such file", f"on the hub it is hf:{text}", exit_code=2)
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


def _of_card(word: re.Match[str], original: bool) -> Spec:
    if word["name"] not in cards.names():
        raise SparqError(
            f"{word['name']}: no such file, and no model of that name",
            f"{nearest('model', word['name'], cards.names()).hint}; on the hub: hf:org/repo",
            exit_code=2,
        )
    card = cards.load(word["name"])
    revision = word["revision"] or "main"
    if original:
        return Spec(card.repository, revision=revision, card=card.name)
    if card.package:
        if more := word[0].removeprefix(card.name):
            raise SparqError(f"{card.name} has one file, {card.package.file}", f"omit {more}", 2)
        return Spec(card.source, revision=card.package.version, card=card.name, kind="package")
    if not card.gguf:
        raise SparqError(
            f"{card.name}: no repository is known for certain to have its GGUF files",
            f"make one: sparq-cpp convert hf:{card.repository}; or name one: hf:org/repo",
        )
    return Spec(card.gguf, "", word["quant"] or card.quant, revision, card.name)


def _is_safe(name: str) -> bool:
    """Whether a name with slashes stays below the folder it is put in, on any system."""
    return name.isprintable() and not any(
        part in ("", ".", "..") or len(part.encode()) > 255 or re.search(r"[\\:]", part)
        for part in name.split("/")
    )


def find(spec: Spec, say: Say = silent) -> Model:
    """Choose the files that `spec` means from those on the hub or, offline, in the cache.

    Args:
        say: called with one line when there is something to wait for.

    Raises:
        SparqError: there is no such repository, revision or file, no access, or no connection; only
            the user can choose; or a checksum differs from the card's.
    """
    if spec.package:
        return Model(spec, spec.revision, (wheel.file_of(spec.package),))
    commit, files = _files(spec, lambda name: name.endswith(".gguf"), say)
    known = {f.name: f.sha256 for f in cards.load(spec.card).files} if spec.card else {}
    chosen = _choose(spec, files)
    for f in chosen:
        if f.digest and known.get(f.name, f.digest) != f.digest:
            raise SparqError(
                f"{f.name}: its checksum on the hub, {f.digest}, is not the one on the card",
                f"it was replaced since; to use it anyway: hf:{spec.repo}/{f.name}",
            )
    # where the cache does not say a file's checksum, `check` compares it with the card's
    chosen = tuple(replace(f, digest=f.digest or known.get(f.name, "")) for f in chosen)
    return Model(spec, commit, chosen)


def find_files(spec: Spec, patterns: tuple[str, ...], say: Say = silent) -> Model:
    """All files of a repository that match a pattern such as `*.json` or, in a folder, `a/*.json`.

    Raises:
        SparqError: as `find`.
    """

    def wanted(name: str) -> bool:
        return any(fnmatch(name, p) and name.count("/") == p.count("/") for p in patterns)

    commit, files = _files(spec, wanted, say)
    if not files:
        raise SparqError(f"{spec.repo}: none of {', '.join(patterns)} in it at {spec.revision}")
    return Model(spec, commit, tuple(files[n] for n in sorted(files)))


def _files(spec: Spec, wanted: Callable[[str], bool], say: Say) -> tuple[str, dict[str, HubFile]]:
    """The commit that the revision means, and the wanted ones of its files: those that the hub has,
    or, if it cannot be reached or may not be, those in the cache."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        if found := _cached(spec, wanted, say):
            return found
        raise SparqError(
            f"{spec.repo}@{spec.revision} is not in the cache, and HF_HUB_OFFLINE forbids "
            "downloads",
            "unset HF_HUB_OFFLINE",
        )
    try:
        return _listed(spec, wanted, say)
    except Unreachable as error:
        if found := _cached(spec, wanted, say):
            say(f"{spec.repo}: the hub cannot be reached, so the cache is used as it is")
            return found
        raise error


def _listed(spec: Spec, wanted: Callable[[str], bool], say: Say) -> tuple[str, dict[str, HubFile]]:
    """The commit and the wanted files, as the hub lists them."""
    from huggingface_hub import HfApi, try_to_load_from_cache

    files, retries = {}, Retries(Transfer(0, say=say), spec.repo, broken=False)
    ask = HfApi().dataset_info if spec.kind == "dataset" else HfApi().model_info
    ask = partial(ask, revision=spec.revision, timeout=ANSWER_S, files_metadata=True)
    with explained(spec.repo, spec.revision):
        info = retries.call(lambda: ask(spec.repo))
        commit = str(info.sha)
        if not _COMMIT.fullmatch(commit):
            raise SparqError(
                f"{spec.repo}: {commit!r} is not a commit", "does HF_ENDPOINT name a hub?"
            )
        for s in info.siblings or ():
            name = s.rfilename
            if not wanted(name):
                continue
            if not _is_safe(name):
                raise SparqError(
                    f"{spec.repo}: refused: its file name {name!r} leads out of the cache",
                    "do not trust a repository with such a name",
                )
            found = try_to_load_from_cache(spec.repo, name, revision=commit, repo_type=spec.kind)
            path = Path(found) if isinstance(found, str) else None
            digest = str(s.lfs.sha256 if s.lfs else s.blob_id)
            n_cached = 0 if path else min(bytes_cached(spec.folder, digest), s.size or 0)
            files[name] = HubFile(name, s.size or 0, digest, path, n_cached)
    return commit, files


def _cached(
    spec: Spec, wanted: Callable[[str], bool], say: Say
) -> tuple[str, dict[str, HubFile]] | None:
    """The commit and the wanted files, as the cache holds them; None if it has no such revision."""
    for repo in cache.repositories(say):
        if (repo.repo_id, repo.repo_type) != (spec.repo, spec.kind):
            continue
        for rev in repo.revisions:
            if spec.revision not in (*rev.refs, rev.commit_hash):
                continue
            files = {}
            for name, f in cache.by_name(rev).items():
                # the cache names a file's content by its hash
                digest = f.blob_path.name if DIGEST.fullmatch(f.blob_path.name) else ""
                if wanted(name):
                    files[name] = HubFile(name, f.size_on_disk, digest, f.file_path)
            return rev.commit_hash, files
    return None


def _choose(spec: Spec, files: Mapping[str, HubFile]) -> tuple[HubFile, ...]:
    models: dict[str, list[str]] = {}  # name without the number of the part -> files
    for name in sorted(files):
        shard = cache.SHARD.fullmatch(name)
        models.setdefault(f"{shard[1]}.gguf of {shard[3]}" if shard else name, []).append(name)
    if spec.file:
        chosen = [names for names in models.values() if spec.file in names]
    elif spec.quant:
        chosen = _of_quant(models, spec.quant)
    else:  # files whose names are not a model's are not offered, but can be asked for
        chosen = [n for n in models.values() if not re.search("mmproj|imatrix", n[0].lower())]
        if len(chosen) > 1:
            chosen = _of_quant(models, PREFERRED) or chosen
    if len(chosen) != 1:
        raise _no_choice(spec, files, chosen)
    names = chosen[0]
    shard = cache.SHARD.fullmatch(names[0])
    if shard:
        wanted = [f"{shard[1]}-{i:05d}-of-{shard[3]}.gguf" for i in range(1, int(shard[3]) + 1)]
        lacking = [n for n in wanted if n not in names]
        if lacking:
            raise SparqError(
                f"{spec.repo}: {lacking[0]} is missing; the model is split",
                f"choose another model of it, as hf:{spec.repo}/FILE",
            )
    return tuple(files[n] for n in names)


def _of_quant(models: Mapping[str, list[str]], quant: str) -> list[list[str]]:
    """The models with this quantisation as a word of their name: Q4_K is not in Q4_K_M or IQ4_K."""
    word = re.compile(rf"(?<![A-Za-z0-9]){re.escape(quant)}(?![A-Za-z0-9_])", re.IGNORECASE)
    return [n for key, n in models.items() if word.search(key.rpartition("/")[2])]


def is_named(spec: Spec, name: str) -> bool:
    """Whether `spec` names a model's file; without a file or a quantisation it names all."""
    if spec.file:
        shard, asked = cache.SHARD.fullmatch(name), cache.SHARD.fullmatch(spec.file)
        return shard[1] == asked[1] if shard and asked else name == spec.file
    return not spec.quant or bool(_of_quant({name: [name]}, spec.quant))


def _no_choice(spec: Spec, files: Mapping[str, HubFile], chosen: list[list[str]]) -> SparqError:
    if not files:
        return SparqError(
            f"{spec.repo}: no GGUF file in it at {spec.revision}",
            f"make one: sparq-cpp convert hf:{spec.repo}; or look for one with GGUF in its name",
        )
    offered = [names[0] for names in chosen] or sorted(files)
    shown = ", ".join(f"{n} ({human_bytes(files[n].n_bytes)})" for n in offered[:40])
    shown += f" and {len(offered) - 40} more" if len(offered) > 40 else ""
    wanted = spec.file or spec.quant or "the one to use"
    what = f"no {wanted} in it" if not chosen else f"{len(chosen)} models in it"
    return SparqError(
        f"{spec.repo}: {what}", f"name one, as hf:{spec.repo}/FILE: {shown}", exit_code=2
    )


def fetch(model: Model, say: Say = silent) -> Model:
    """Download a model and check it, with progress bars on a terminal."""
    with progress_bar("downloading", of="bytes") as progress:
        model = download(model, progress, say)
    with progress_bar("checking", of="bytes") as progress:
        check(model, progress)
    return model


def download(
    model: Model,
    progress: Progress = silent,
    say: Say = silent,
) -> Model:
    """Download what is missing and check its checksum; `check` comes next.

    Args:
        progress: called with (bytes here, total bytes), from other threads.
        say: called with one line when there is something to wait for.

    Raises:
        SparqError: there is no space, no connection or no access, or a checksum is wrong.
    """
    from huggingface_hub import constants
    from huggingface_hub.utils import logging

    logging.set_verbosity_error()  # type: ignore[no-untyped-call]  # what matters is said here
    missing = [f for f in model.files if f.path is None]
    if not missing:
        return model
    if model.spec.package:
        return replace(model, files=(wheel.fetch(model.spec.package, progress, say),))
    check_space(
        Path(constants.HF_HUB_CACHE),
        model.missing_bytes,
        model.spec.repo,
        "free some disk space, choose a smaller quantisation, or set HF_HOME to another disk",
    )
    transfer = Transfer(sum(f.n_bytes for f in missing), progress, say)
    with explained(model.spec.repo, model.spec.revision):
        got = fetch_files(model.spec.repo, model.commit, missing, transfer, model.spec.kind)
    files = tuple(got.get(f.name, f) for f in model.files)
    return replace(model, files=files)


def check(model: Model, progress: Progress = silent) -> None:
    """Compare the checksums of files that were cached before, and read the model's header.

    Args:
        progress: called with (bytes read, bytes to read).

    Raises:
        SparqError: a checksum is wrong (the file is deleted), or a file is not GGUF.
    """
    unchecked = [f for f in model.files if f.digest and not f.verified]
    total, done = sum(f.n_bytes for f in unchecked), 0
    with explained(model.spec.repo, model.spec.revision):
        for f in unchecked:
            _check_digest(model.spec.folder, f, done, total, progress)
            done += f.n_bytes
        try:
            if model.path.suffix == ".gguf":
                read_gguf(model.path)
        except SparqError as e:
            hint = "its checksum is right: the file is like that on the hub"
            raise SparqError(e.message, hint if model.files[0].digest else e.hint) from None
        _remember(model)


def _remember(model: Model) -> None:
    """Note the commit of the revision: offline, its name finds the complete, checked files."""
    if model.spec.revision == model.commit:
        return
    ref = model.spec.folder / "refs" / model.spec.revision
    if not (ref.is_file() and ref.read_text() == model.commit):
        make_folder(ref.parent)
        ref.write_text(model.commit)


def _check_digest(folder: Path, file: HubFile, done: int, total: int, progress: Progress) -> None:
    """Compare a file with its checksum; `done` of `total` bytes were read before."""
    path = file.path
    assert path is not None
    digest = new_digest(file, path.stat().st_size)
    with path.open("rb") as f:
        while block := f.read(BLOCK):
            digest.update(block)
            done += len(block)
            progress(done, total)
    if digest.hexdigest() != file.digest:
        cache.drop(folder, path)
        raise wrong_checksum(file, digest.hexdigest())
