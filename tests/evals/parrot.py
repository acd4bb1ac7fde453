"""A model that says what a test wants, in place of one that knows something."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pyorch import engine

WORDS = ("the", "of", "and", "a", "to", "in", "he", "was", "that", "his", "it", "had", "with")
EOG = 256


class Parrot:
    """Says `script`, a byte per token, then ends. `asked`: the tokens it was given."""

    def __init__(self, script: bytes) -> None:
        self.script, self.asked = script, []

    def decode(self, session: Any, token: int) -> None:
        self.asked.append(token)

    def logits(self, session: Any) -> np.ndarray:
        n = len(self.asked)
        return np.eye(EOG + 1)[self.script[n - 1] if n <= len(self.script) else EOG]

    def token_bytes(self, session: Any, token: int) -> bytes:
        return bytes([token])

    def is_eog(self, session: Any, token: int) -> bool:
        return token == EOG

    def install(self, monkeypatch: pytest.MonkeyPatch) -> Any:
        for name in ("decode", "logits", "token_bytes", "is_eog"):
            monkeypatch.setattr(engine, name, getattr(self, name))
        return SimpleNamespace(path="parrot", tokens=self.asked)
