"""Evaluations: what sparse attention does to quality, task by task.

There is one file per task or family; its `TASKS` holds the `Task` objects. `run` measures and keeps
one record per example and method, `table` and `figures` show them.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pyorch.errors import nearest

if TYPE_CHECKING:
    from pyorch.evals.task import Task

MODULES = (
    "repetition",
    "needle",
    "niah",
    "ruler",
    "key_value",
    "fidelity",
    "qa",
    "summaries",
    "gsm8k",
    "wikitext",
)


def tasks() -> dict[str, Task]:
    """All tasks by name, in the order of the list above."""
    modules = [importlib.import_module(f"pyorch.evals.{name}") for name in MODULES]
    return {task.name: task for module in modules for task in module.TASKS}


def find(names: Sequence[str]) -> list[Task]:
    """The tasks of these names; a family's name means all of it. By default the generated tasks.

    Raises:
        SparqError: there is no such task.
    """
    known = tasks()
    if not names:
        return [t for t in known.values() if not t.data]
    chosen: dict[str, Task] = {}
    for name in names:
        family = {k: t for k, t in known.items() if name in (k, t.family)}
        if not family:
            families = {t.family for t in known.values() if t.family}
            raise nearest("task", name, (*known, *sorted(families)))
        chosen |= family
    return list(chosen.values())
