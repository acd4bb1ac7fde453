"""Docstrings say what they are about in whole phrases."""

from __future__ import annotations

import ast
from pathlib import Path

import pyorch

ROOT = Path(pyorch.__file__).parent
FRAGMENTS = ("As", "By", "For", "Of", "That", "Those")
DEFINITIONS = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def fragments(source: str) -> list[str]:
    """The docstrings that begin with a bare preposition or pronoun and so lack their subject."""
    nodes = (n for n in ast.walk(ast.parse(source)) if isinstance(n, DEFINITIONS))
    docs = (ast.get_docstring(n) or "" for n in nodes)
    return [d for d in docs if d.split(maxsplit=1)[:1] and d.split(maxsplit=1)[0] in FRAGMENTS]


def test_docstrings_are_no_fragments() -> None:
    assert fragments('def f():\n    """Of a model."""') == ["Of a model."]
    found = {f: fragments(f.read_text("utf-8")) for f in ROOT.rglob("*.py")}
    assert len(found) > 100
    assert not {str(f): docs for f, docs in found.items() if docs}
