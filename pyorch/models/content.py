"""The content of a model's file, whatever its name: its hash, and the card that knows it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from pyorch import paths
from pyorch.models import cards
from pyorch.models.cards import Card
from pyorch.models.gguf_file import GGUFFile, read_gguf
from pyorch.native.source import sha256

LARGE_BYTES = 64 << 20  # the hash of a model this large is remembered


def file_hash(*files: Path) -> str:
    """A hash of 16 digits of the content of a file, or of several files as if they were one.

    Raises:
        OSError: one of them cannot be read.
    """
    return sha256(*files)[:16]


def content_hash(model: Path | GGUFFile) -> str:
    """The `file_hash` of all parts of a model, whose header may have been read. For a large model
    it takes minutes, so it is computed only once for files of the same paths, sizes and times of
    change.

    Raises:
        SparqError: a part is not a GGUF file.
        OSError: a part cannot be read.
    """
    return _remembered((read_gguf(model) if isinstance(model, Path) else model).parts)


def card_of(model: Path) -> Card | None:
    """The card that knows the content of a model's file, whatever its name. The file has to exist;
    it is read only if a card knows one of its size, and then once, as for `content_hash`.

    Raises:
        OSError: it cannot be read.
    """
    n_bytes = model.stat().st_size
    if all(f.n_bytes != n_bytes for _, f in cards.known()):
        return None
    return cards.of_hash(_remembered([model]))


def _remembered(parts: Sequence[Path]) -> str:
    """The `file_hash` of large files, computed once."""
    about = [(str(part.resolve()), part.stat()) for part in parts]
    if sum(stat.st_size for _, stat in about) < LARGE_BYTES:
        return file_hash(*parts)
    files = [[path, stat.st_size, stat.st_mtime_ns] for path, stat in about]
    store = paths.cache() / "model_hashes.jsonl"
    for line in store.read_text(errors="replace").splitlines() if store.is_file() else ():
        with suppress(ValueError, KeyError, TypeError):  # cut off, or an older one
            known = json.loads(line)
            if known["files"] == files:
                return str(known["hash"])
    digest = file_hash(*parts)
    with suppress(OSError):  # next time it takes as long
        store.parent.mkdir(parents=True, exist_ok=True)
        with store.open("a") as f:
            f.write("\n" + json.dumps({"files": files, "hash": digest}) + "\n")
    return digest
