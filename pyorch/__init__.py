"""Sparse attention decode (SparQ, top-k) for llama.cpp. The command is `sparq-cpp`.

import pyorch

with pyorch.load("model.gguf", attention=pyorch.AttentionSpec("sparq", ratio=1 / 8)) as session:
    for piece in pyorch.generate(session, "Once upon a time", max_tokens=64):
        print(piece, end="", flush=True)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyorch.attention.spec import AttentionSpec
    from pyorch.engine import generate, info, load

__version__ = "0.1.0"
__all__ = ["AttentionSpec", "generate", "info", "load"]

_HOMES = {"AttentionSpec": "pyorch.attention.spec"}


if not TYPE_CHECKING:  # otherwise a type checker would accept any name

    def __getattr__(name: str) -> object:
        """Import an exported name when it is first used, so that `import pyorch` is fast."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(_HOMES.get(name, "pyorch.engine")), name)
