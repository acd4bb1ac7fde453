"""Read the header of a GGUF file: metadata and tensor table.

A model file comes from anywhere, so nothing in it is believed: every length is checked against
the size of the file before it is used, and every fault is a `SparqError` that names the file. The
reader of the `gguf` package is not used because it believes what a file says. No weights are read,
so a 100 GB model takes milliseconds.
"""

from __future__ import annotations

import errno
import math
import mmap
import os
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyorch.errors import SparqError
from pyorch.ggml import MAX_DIMS, MAX_NAME, TENSOR_TYPES
from pyorch.text import human_bytes

MAGIC = b"GGUF"
MAX_ARRAY_KEPT = 4096  # longer arrays (vocabularies) are skipped: only their length is kept

ALIGNMENT = 32  # TENSOR_ALIGNMENT of llama.cpp, for mapped tensors
# Our own limits are far above any model, so that a small lie costs neither time nor memory.
MAX_KEYS = 1 << 16
MAX_KEY_NAME = 1 << 16  # from the GGUF specification
MAX_TENSORS = 1 << 17
MAX_STRINGS = 1 << 22  # per array
MAX_KEPT = 64 << 20  # bytes of all metadata that is kept

# value types of the metadata: struct format of the scalars; 8 = string, 9 = array
_SCALARS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True)
class SkippedArray:
    """A metadata array that was not kept."""

    length: int
    lacks: str = ""  # for a vocabulary: the first byte without a token


@dataclass(frozen=True)
class Tensor:
    """A row of the tensor table."""

    name: str
    shape: tuple[int, ...]
    type: str
    n_bytes: int


@dataclass(frozen=True, eq=False)
class GGUFFile:
    """The header of one GGUF file (or of all parts of a split one)."""

    path: Path
    n_bytes: int
    metadata: Mapping[str, Any]
    tensors: tuple[Tensor, ...]
    parts: tuple[Path, ...]  # all files of a split model, else (path,)

    @property
    def arch(self) -> str:
        """The name of the architecture; "" if there is no usable one."""
        name = self.metadata.get("general.architecture")
        return name if isinstance(name, str) and re.fullmatch(r"[\w.-]{1,64}", name) else ""


class _Reader:
    """A cursor over the mapped file that refuses to leave it."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data, self.pos, self.kept = path, data, 0, 0

    def fail(self, what: str) -> SparqError:
        return SparqError(
            f"{self.path}: corrupt GGUF header: {what} at byte {self.pos}",
            hint="the download may be incomplete: compare its size and checksum with the source",
        )

    def unpack(self, fmt: str) -> Any:
        size = struct.calcsize("<" + fmt)
        if self.pos + size > len(self.data):
            raise self.fail("the file ends")
        (value,) = struct.unpack_from("<" + fmt, self.data, self.pos)
        self.pos += size
        return value

    def text(self) -> str:
        """A string of any length and content."""
        start = self.pos + 8
        n = self.unpack("Q")
        self._skip(n)
        self._keep(n)
        return self.data[start : self.pos].decode("utf-8", errors="replace")

    def name(self, what: str, limit: int) -> str:
        """The name of a key or tensor: printable, below `limit` bytes."""
        start = self.pos + 8
        text = self.text()
        if not text or not text.isprintable() or self.pos - start >= limit:
            raise self.fail(f"unusable name {text[:MAX_NAME]!r} of a {what}")
        return text

    def _skip(self, n: int) -> None:
        if n > len(self.data) - self.pos:
            raise self.fail(f"{n} bytes of text or numbers pass the end of the file")
        self.pos += n

    def _keep(self, n: int) -> None:
        self.kept += n
        if self.kept > MAX_KEPT:
            raise self.fail(f"more than {human_bytes(MAX_KEPT)} of metadata")

    def value(self, kind: int, key: str) -> Any:
        if kind in _SCALARS:
            return self.unpack(_SCALARS[kind])
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            return self._array(key)
        raise self.fail(f"unknown value type {kind}")

    def _array(self, key: str) -> list[Any] | SkippedArray:
        kind, n = self.unpack("I"), self.unpack("Q")
        if kind == _STRING:
            return self._strings(key, n)
        if kind not in _SCALARS:
            raise self.fail(f"array of unsupported type {kind}")
        size = struct.calcsize("<" + _SCALARS[kind])
        start = self.pos
        self._skip(n * size)
        if n > MAX_ARRAY_KEPT:
            return SkippedArray(n)
        self._keep(32 * n)  # the size of Python objects
        return list(struct.unpack_from(f"<{n}{_SCALARS[kind]}", self.data, start))

    def _strings(self, key: str, n: int) -> SkippedArray:
        if n > min(MAX_STRINGS, (len(self.data) - self.pos) // 8):
            raise self.fail(f"an array of {n} strings")
        data, pos, length = self.data, self.pos, struct.Struct("<Q").unpack_from
        seen: set[bytes] | None = set() if key == "tokenizer.ggml.tokens" else None
        for i in range(n):
            end = pos + 8
            end += length(data, pos)[0] if end <= len(data) else len(data)
            if end > len(data):
                self.pos = pos
                raise self.fail("a string passes the end of the file")
            if seen is not None:
                seen.add(data[pos + 8 : end] or b"[EMPTY_%d]" % i)  # as llama.cpp calls it
            pos = end
        self.pos = pos
        if seen is not None and len(seen) != n:  # llama.cpp would end the process
            raise self.fail(f"{n} tokens, but {len(seen)} different ones")
        bytes_of = ((f"<0x{b:02X}>", bytes([b])) for b in range(256)) if seen else ()
        lacks = (name for name, raw in bytes_of if not {name.encode(), raw} & (seen or set()))
        return SkippedArray(n, next(lacks, ""))


def read_gguf(path: str | os.PathLike[str]) -> GGUFFile:
    """Read the header of `path`, or those of all parts of a split file (`...-00001-of-0000N.gguf`).

    Raises:
        SparqError: there is no such GGUF file, it is corrupt or truncated, or its parts differ.
    """
    first = _read_part(Path(path))
    n_split = first.metadata.get("split.count", 0)
    if not isinstance(n_split, int) or not 0 <= n_split < 1 << 16:
        raise SparqError(f"{path}: corrupt GGUF header: split.count is {n_split!r:.80}")
    if n_split <= 1:
        return first
    parts = [first, *_other_parts(first.path, n_split)]
    tensors = tuple(t for p in parts for t in p.tensors)
    n_expected = first.metadata.get("split.tensors.count", len(tensors))
    if n_expected != len(tensors) or len({t.name for t in tensors}) != len(tensors):
        raise SparqError(
            f"{path}: its {n_split} parts do not belong together: {n_expected!r:.80} tensors "
            f"expected, {len({t.name for t in tensors})} of {len(tensors)} are different",
            hint="download all parts again, from one place",
        )
    for i, part in enumerate(parts):
        number = part.metadata.get("split.no", i)
        count = part.metadata.get("split.count", n_split)
        if (number, count) != (i, n_split):
            raise SparqError(
                f"{part.path}: named as part {i + 1} of {n_split}, but it holds part number "
                f"{number!r:.80} (from 0) of {count!r:.80}",
                hint="download all parts again, and do not rename them",
            )
    return GGUFFile(
        first.path,
        sum(p.n_bytes for p in parts),
        first.metadata,
        tensors,
        tuple(p.path for p in parts),
    )


def _other_parts(path: Path, n_split: int) -> Iterator[GGUFFile]:
    mark = f"-00001-of-{n_split:05d}.gguf"
    if not path.name.endswith(mark):
        raise SparqError(
            f"{path}: one of {n_split} parts of a split model, but not named as the first",
            hint=f"pass the part whose name ends in {mark}, with the others beside it",
        )
    stem = path.name[: -len(mark)]
    for i in range(2, n_split + 1):
        part = path.with_name(f"{stem}-{i:05d}-of-{n_split:05d}.gguf")
        if not part.exists():
            hint = "all parts have to be beside the first, under their original names"
            raise SparqError(f"{part}: part {i} of {n_split} is missing; the model is split", hint)
        yield _read_part(part)


def _read_part(path: Path) -> GGUFFile:
    if not path.exists():
        raise SparqError(
            f"{path}: no such file", hint="it takes a GGUF file, or one on the hub: org/repo"
        )
    if path.is_dir():
        hint = "name the file in it; a folder of safetensors: sparq-cpp convert FOLDER"
        raise SparqError(f"{path}: a folder, not a GGUF file", hint)
    if not path.is_file():  # reading a pipe would wait for ever
        raise SparqError(f"{path}: not a plain file", "it takes a GGUF file")
    try:
        with path.open("rb") as f:
            if f.read(4) != MAGIC:
                raise SparqError(
                    f"{path}: not a GGUF file (it does not begin with the letters GGUF)",
                    hint="safetensors must be converted first: sparq-cpp convert FOLDER",
                )
            with mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _parse(path, data)
    except OSError as e:
        hint = "raise ulimit -v" if e.errno == errno.ENOMEM else "check its permissions"
        raise SparqError(f"{path}: {e.strerror or e}", hint) from None


def _parse(path: Path, data: mmap.mmap) -> GGUFFile:
    r = _Reader(path, data)
    r.pos = len(MAGIC)
    version = r.unpack("I")
    if version not in (2, 3):
        raise SparqError(
            f"{path}: GGUF version {version}; this program reads versions 2 and 3",
            hint="a very large number means a big-endian file" if version > 0xFFFF else "",
        )
    n_tensors, n_keys = r.unpack("Q"), r.unpack("Q")
    # no entry is smaller than 12 bytes
    if n_tensors > min(MAX_TENSORS, len(data) // 12) or n_keys > min(MAX_KEYS, len(data) // 12):
        raise r.fail(f"{n_tensors} tensors and {n_keys} keys in {len(data)} bytes")
    metadata: dict[str, Any] = {}
    for _ in range(n_keys):
        key = r.name("key", MAX_KEY_NAME)
        if key in metadata:
            raise r.fail(f"key {key[:MAX_NAME]!r} is there twice")
        kind = r.unpack("I")
        metadata[key] = r.value(kind, key)
        if key == "general.alignment":
            align = metadata[key]
            if kind != 4 or align <= 0 or align & (align - 1):
                raise r.fail(f"the alignment {align!r:.80} is not a power of 2 (u32)")
    table = [_tensor_row(r) for _ in range(n_tensors)]
    _check_extent(r, metadata.get("general.alignment", ALIGNMENT), table)
    return GGUFFile(path, len(data), metadata, tuple(t for t, _ in table), (path,))


def _tensor_row(r: _Reader) -> tuple[Tensor, int]:
    """Returns a tensor, and the offset of its data in the data section."""
    name, n_dims = r.name("tensor", MAX_NAME), r.unpack("I")
    if n_dims > MAX_DIMS:
        raise r.fail(f"tensor {name!r} has {n_dims} dimensions")
    shape = tuple(r.unpack("Q") for _ in range(n_dims))
    kind, offset = r.unpack("I"), r.unpack("Q")
    if kind not in TENSOR_TYPES:
        raise r.fail(f"tensor {name!r} has the unknown type {kind}")
    of = TENSOR_TYPES[kind]
    n = math.prod(shape)
    if n == 0 or n >= 2**63 or (shape[0] if shape else 1) % of.per_block:
        raise r.fail(f"tensor {name!r} of {of.name} cannot have the shape {shape}")
    return Tensor(name, shape, of.name, of.n_bytes(n)), offset


def _check_extent(r: _Reader, align: int, table: list[tuple[Tensor, int]]) -> None:
    """Refuse tensors with gaps or overlaps, as llama.cpp does, or beyond the end of the file."""
    names = set()
    start, expected, end = -(-r.pos // align) * align, 0, r.pos
    for t, offset in table:
        if t.name in names:
            raise r.fail(f"tensor {t.name!r} is there twice")
        names.add(t.name)
        if offset != expected:
            raise r.fail(f"tensor {t.name!r} begins at {offset}, where {expected} is its place")
        end = start + offset + t.n_bytes
        expected += -(-t.n_bytes // align) * align
    if end > len(r.data):
        raise SparqError(
            f"{r.path}: truncated: {len(r.data)} bytes, but its tensors end at byte {end}",
            hint="download it again",
        )
