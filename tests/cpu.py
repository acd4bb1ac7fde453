"""What the library's code for this CPU can do."""

from __future__ import annotations

import ctypes


def has_fast(cpu: ctypes.CDLL) -> bool:
    """Whether libggml-cpu has products of few bits, for prompt=fast."""
    kinds = ("avx512_vnni", "avx_vnni", "dotprod")
    return any(getattr(cpu, f"ggml_cpu_has_{kind}")() for kind in kinds)
