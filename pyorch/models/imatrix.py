"""Importance matrices, which llama-imatrix makes: how much each column of a weight matters."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

from pyorch.errors import SparqError
from pyorch.models.gguf_file import MAGIC, read_gguf

Imatrix = dict[str, Any]  # tensor -> float32 weights of its columns (per expert)


def read_imatrix(path: Path) -> Imatrix:
    """Read an importance matrix: mean square of the inputs of each tensor, float32.

    This follows `common_imatrix_load` and `load_imatrix` of llama.cpp: GGUF (`NAME.in_sum2` over
    `NAME.counts`, one count per expert), or the older format (means multiplied by the calls).

    Raises:
        SparqError: it is not an importance matrix.
        OSError: the file cannot be read.
    """
    import numpy as np

    try:
        with path.open("rb") as f:
            is_gguf = f.read(4) == MAGIC
        found = _imatrix_gguf(path) if is_gguf else _imatrix_old(path.read_bytes())
    except (struct.error, ValueError, KeyError):
        found = {}
    if not found or not all(np.isfinite(v).all() and v.size for v in found.values()):
        raise SparqError(f"{path}: not an importance matrix", "llama-imatrix makes one")
    return found


def _imatrix_gguf(path: Path) -> Imatrix:
    import gguf
    import numpy as np

    read_gguf(path)  # the library's reader believes what a file says
    tensors = {t.name: t.data for t in gguf.GGUFReader(path).tensors}
    out = {}
    for name, sums in tensors.items():
        if not name.endswith(".in_sum2"):
            continue
        counts = np.rint(tensors[name.removesuffix(".in_sum2") + ".counts"]).reshape(-1, 1)
        sums = sums.reshape(len(counts), -1).astype(np.float32)
        means = np.divide(sums, counts, out=np.ones_like(sums), where=counts > 0)
        out[name.removesuffix(".in_sum2")] = means.astype(np.float32).ravel()
    return out


def _imatrix_old(data: bytes) -> Imatrix:
    import numpy as np

    out, at = {}, 0

    def number() -> int:
        nonlocal at
        n: int = struct.unpack_from("<i", data, at)[0]
        if not 0 <= n <= len(data):
            raise ValueError("a length beyond the file")
        at += 4
        return n

    for _ in range(number()):
        n = number()
        name = data[at : at + n].decode()
        at += n
        n_calls, n = number(), number()
        values = np.frombuffer(data, "<f4", n, at)
        at += 4 * n
        out[name] = (values / max(n_calls, 1)).astype(np.float32)
    return out
