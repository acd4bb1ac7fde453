"""The file of a document: what a model has read, kept for later.

    0        magic, version, bytes and CRC-32 of the header, then the header as JSON
    65512    progress: positions read, CRC-32 of the checksums, CRC-32 of these two
    65536    tokens int32 [n_tokens], then the text in UTF-8, then the checksums of the image
             uint32 [ceil(image_bytes / 16 MiB)], each a CRC-32 of 16 MiB
    image_at K and V and their transposed copy, which ggml_ops/llama/sparse-document.cpp lays out

The header is written once. While the document is being read only the image grows, and the progress
after it, in one write. Nothing in a file is believed: every length is checked before it is used.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from datetime import datetime
from pathlib import Path

from pyorch import paths
from pyorch.errors import SparqError
from pyorch.progress import Progress, silent

MAGIC, VERSION, SUFFIX = b"SPARQDOC", 2, ".kv"
FORMS = ("chat", "plain", "saved")  # see `Reading`
ALIGN = 65536  # of the image: a page of any system
BLOCK = 16 << 20  # the bytes of the image that a checksum is of
_HEAD, _PROGRESS = struct.Struct("<8sIII"), struct.Struct("<QII")
_PROGRESS_AT = ALIGN - 24


@dataclass(frozen=True)
class Header:
    """What a document is. `text_crc` is of its tokens and its text."""

    name: str  # what was read, for people
    model: str  # the name of the model's file
    model_hash: str
    rope: str  # what K depends on beside the weights
    kind: str  # what K and V are, a line feed, what the transposed K is: as the library says
    attention: str  # the settings it was read with
    form: str  # "chat", "plain" or "saved", see `Reading`
    system: str  # the system message of such a conversation
    n_tokens: int
    n_text: int  # bytes
    text_crc: int
    image_bytes: int
    stated_time: str = field(default="", kw_only=True)  # the time that its template states, if any

    @property
    def n_blocks(self) -> int:
        return -(-self.image_bytes // BLOCK)

    @property
    def checksums_at(self) -> int:
        return ALIGN + 4 * self.n_tokens + self.n_text

    @property
    def image_at(self) -> int:
        return -(-(self.checksums_at + 4 * self.n_blocks) // ALIGN) * ALIGN

    @property
    def n_bytes(self) -> int:
        """The size of the file."""
        return self.image_at + self.image_bytes


@dataclass(frozen=True)
class Document(Header):
    """A document of which `n_read` positions are in its file `path`; all of them if it is whole."""

    path: Path
    n_read: int
    checksums_crc: int

    @property
    def types(self) -> tuple[str, str]:
        """The types of K and V."""
        type_k, _, type_v = self.kind.partition("\n")[0].partition(",")[0].partition("/")
        return type_k, type_v

    @property
    def needs_whole(self) -> bool:
        """Whether a prompt has to begin with all of it: layers are recurrent, or have a window."""
        return has_state(self.kind)

    @property
    def when(self) -> datetime | None:
        """The time that a conversation about it states, so that it begins with the same tokens;
        None if its template states none."""
        return datetime.fromisoformat(self.stated_time) if self.stated_time else None

    @property
    def is_whole(self) -> bool:
        return self.n_read == self.n_tokens and self.checksums_crc != 0


def has_state(kind: str) -> bool:
    """Whether K and V of this kind go with a state of windows or recurrent layers, which cannot be
    cut."""
    return ",state=" in kind.partition("\n")[0]


def find(name: str) -> Path:
    """The file that `--document NAME` means: a path, or a name in our own folders.

    Raises:
        SparqError: there is none.
    """
    ours = [folder / n for folder in folders() for n in (name, name + SUFFIX)]
    for candidate in (paths.expanded(name), *ours):
        if candidate.is_file():
            return candidate
    raise SparqError(f"{name}: no such document", "sparq-cpp documents list shows those that are")


def named(name: str) -> Document:
    """The document that `--document NAME` means, as `find` and `load`."""
    return load(find(name))


def load(path: Path, whole: bool = True) -> Document:
    """Read and check the header of a document.

    Args:
        whole: refuse one that is not read to its end.

    Raises:
        SparqError: it is not a document, of another version, damaged, or not whole.
    """
    try:
        with path.open("rb") as file:
            head = file.read(ALIGN)
            size = os.fstat(file.fileno()).st_size
    except OSError as e:
        raise SparqError(f"{path}: {e.strerror or e}") from None
    header = _header(path, head)
    if size < header.image_at or (whole and size != header.n_bytes):
        raise _damaged(path, f"it has {size} bytes, and should have {header.n_bytes}")
    n_read, checksums_crc, crc = _PROGRESS.unpack_from(head, _PROGRESS_AT)
    if crc != zlib.crc32(head[_PROGRESS_AT : _PROGRESS_AT + 12]) or n_read > header.n_tokens:
        raise _damaged(path, "its progress is not readable")
    document = Document(**asdict(header), path=path, n_read=n_read, checksums_crc=checksums_crc)
    if whole and not document.is_whole:
        raise SparqError(f"{path}: not read to its end", "read it again: sparq-cpp read")
    return document


def _header(path: Path, head: bytes) -> Header:
    if len(head) < ALIGN or not head.startswith(MAGIC):
        raise SparqError(
            f"{path}: not a document of sparq-cpp", "sparq-cpp read DOC -m M makes one"
        )
    _, version, n, crc = _HEAD.unpack_from(head)
    if version != VERSION:
        hint = "read it again: sparq-cpp read"
        raise SparqError(f"{path}: a document of version {version}, and this is {VERSION}", hint)
    raw = head[_HEAD.size : _HEAD.size + n]
    if _HEAD.size + n > _PROGRESS_AT or zlib.crc32(raw) != crc:
        raise _damaged(path, "its header is not readable")
    try:
        header = Header(**json.loads(raw))
        kinds = {f.name: {"str": str, "int": int}[str(f.type)] for f in fields(Header)}
        if not all(type(getattr(header, name)) is kind for name, kind in kinds.items()):
            raise TypeError
        datetime.fromisoformat(header.stated_time or "2000-01-01")
        lengths = min(header.n_text, header.image_bytes, header.n_tokens - 1)
        if lengths < 0 or header.form not in FORMS:
            raise ValueError
    except (ValueError, TypeError, KeyError):
        raise _damaged(path, "its header has other fields") from None
    return header


def _damaged(path: Path, why: str) -> SparqError:
    return SparqError(f"{path}: damaged: {why}", "read it again: sparq-cpp read")


def content(of: Document) -> tuple[list[int], str]:
    """The tokens and the text of a document.

    Raises:
        SparqError: they are damaged.
    """
    try:
        with of.path.open("rb") as file:
            file.seek(ALIGN)
            raw = file.read(4 * of.n_tokens + of.n_text)
    except OSError as e:
        raise SparqError(f"{of.path}: {e.strerror or e}") from None
    if zlib.crc32(raw) != of.text_crc:
        raise _damaged(of.path, "its text is not what was written")
    tokens = struct.unpack_from(f"<{of.n_tokens}i", raw)
    return list(tokens), raw[4 * of.n_tokens :].decode("utf-8", errors="replace")


def listed(documents: Sequence[Document]) -> str:
    """The list that llama-server takes documents from; llama-sparse-tools.cpp reads it.

    Raises:
        SparqError: the name of a file has a line feed, which would end its line.
    """
    if broken := [d.path for d in documents if "\n" in str(d.path.absolute())]:
        raise SparqError(f"{str(broken[0])!r}: a line feed in its name", "rename it", 2)
    lines = (
        f"{d.path.absolute()}\n{d.n_tokens} {d.image_at} {ALIGN}\n" + d.kind.replace("\n", "|")
        for d in documents
    )
    return "\n".join(lines) + "\n"


def packed(tokens: Sequence[int], text: str) -> tuple[bytes, int]:
    """The tokens and the text as a file has them, and the bytes of the text alone."""
    raw = text.encode("utf-8", errors="replace")
    return struct.pack(f"<{len(tokens)}i", *tokens) + raw, len(raw)


def create(fd: int, header: Header, raw: bytes) -> None:
    """Begin a file, of which nothing is read yet. raw: what `packed` made of its content."""
    os.ftruncate(fd, 0)
    text = json.dumps(asdict(header), ensure_ascii=False).encode("utf-8", errors="replace")
    if _HEAD.size + len(text) > _PROGRESS_AT:
        raise SparqError("the system message is too long to be kept", "at most 60,000 bytes")
    _write(fd, raw, ALIGN)
    os.truncate(fd, header.image_at)
    set_read(fd, 0)
    _write(fd, _HEAD.pack(MAGIC, VERSION, len(text), zlib.crc32(text)) + text, 0)


def _write(fd: int, raw: bytes, at: int) -> None:
    with open(fd, "r+b", closefd=False) as file:
        file.seek(at)
        file.write(raw)


def set_read(fd: int, n_read: int, checksums_crc: int = 0) -> None:
    """Note that so many positions are in the file."""
    raw = struct.pack("<QI", n_read, checksums_crc)
    _write(fd, raw + struct.pack("<I", zlib.crc32(raw)), _PROGRESS_AT)


def finish(fd: int, header: Header) -> None:
    """Write the checksums; the document is whole then."""
    os.truncate(fd, header.n_bytes)  # the end of the image may be a hole
    sums = list(_sums(fd, header))
    raw = struct.pack(f"<{len(sums)}I", *sums)
    _write(fd, raw, header.checksums_at)
    os.fsync(fd)
    set_read(fd, header.n_tokens, zlib.crc32(raw) or 1)


def verify(of: Document, progress: Progress = silent) -> None:
    """Compare all bytes of a document with its checksums.

    Raises:
        SparqError: they differ.
    """
    content(of)
    with of.path.open("rb") as file:
        file.seek(of.checksums_at)
        raw = file.read(4 * of.n_blocks)
        if (zlib.crc32(raw) or 1) != of.checksums_crc:
            raise _damaged(of.path, "its checksums are not what was written")
        written = struct.unpack(f"<{of.n_blocks}I", raw)
        for i, checksum in enumerate(_sums(file.fileno(), of, progress)):
            if checksum != written[i]:
                at = of.image_at + i * BLOCK
                raise _damaged(of.path, f"the 16 MiB from byte {at} on are not what was written")


def _sums(fd: int, header: Header, progress: Progress = silent) -> Iterator[int]:
    """Yields the checksum of each block of the image."""
    with open(fd, "rb", closefd=False) as file:
        file.seek(header.image_at)
        for i in range(header.n_blocks):
            yield zlib.crc32(file.read(BLOCK))
            progress(i + 1, header.n_blocks)


def folders() -> tuple[Path, Path]:
    """Where documents are that were given no other place: those of `read`, and those of `/read`."""
    return paths.documents(), paths.kept_texts()


def documents_in(*places: Path) -> list[Path]:
    """The documents in these folders, by name; those included that are not whole."""
    files = (p for folder in places if folder.is_dir() for p in folder.iterdir())
    return sorted(p for p in files if p.name.endswith((SUFFIX, f"{SUFFIX}.partial")))
