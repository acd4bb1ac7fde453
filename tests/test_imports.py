"""Imports go one way, and importing the package costs nothing."""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pyorch
from pyorch import engine
from pyorch.attention.spec import AttentionSpec

ROOT = Path(pyorch.__file__).parent
# each may import those before it; modules of one folder may import each other, but not in a circle
FLOORS = ("system", "errors", "text", "children", "progress", "paths", "text_file", "table")
FLOORS += ("ggml", "native", "models", "attention", "engine", "policies", "measure", "evals")
FLOORS += ("calibrate", "cli", "__main__")


def module_of(file: Path) -> str:
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(f): f for f in ROOT.rglob("*.py") if "_data" not in f.parts}


def imports(tree: ast.AST) -> set[str]:
    """Modules of ours that a file imports anywhere, type checking aside."""
    modules: set[str] = set()
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "pyorch":
            base = (node.module or "").removeprefix("pyorch").lstrip(".")
            for alias in node.names:
                inner = f"{base}.{alias.name}".lstrip(".")
                modules.add(inner if inner in MODULES else base)
        elif isinstance(node, ast.Import):
            names = (a.name for a in node.names if a.name.split(".")[0] == "pyorch")
            modules |= {name.removeprefix("pyorch").lstrip(".") for name in names}
        else:
            modules |= imports(node)
    return modules - {""}


@cache
def graph() -> dict[str, set[str]]:
    return {name: imports(ast.parse(file.read_text("utf-8"))) for name, file in MODULES.items()}


def test_no_import_goes_back_up() -> None:
    assert {name.split(".")[0] for name in MODULES} - {""} == set(FLOORS)
    floor = {name: FLOORS.index(name.split(".")[0]) for name in MODULES if name}
    up = {(a, b) for a, targets in graph().items() if a for b in targets if floor[b] > floor[a]}
    assert not up


def test_no_modules_import_each_other() -> None:
    """Lazy imports count as well: they hide a circle, they do not break it."""
    left = {a: targets - {a} for a, targets in graph().items() if a}
    while free := [a for a, targets in left.items() if not targets & left.keys()]:
        for a in free:
            del left[a]
    assert not left


def test_the_package_exports_its_few_names_when_they_are_used() -> None:
    assert (pyorch.load, pyorch.generate) == (engine.load, engine.generate)
    assert pyorch.AttentionSpec is AttentionSpec
    code = "import sys, pyorch; print('numpy' in sys.modules, 'pyorch.engine' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]
