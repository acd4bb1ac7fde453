"""One table of all tasks, like SparQ's Table 2: a row per method, a column per task and ratio."""

from __future__ import annotations

import math
from collections.abc import Sequence

from pyorch import table as tables
from pyorch.attention.spec import ratio_text
from pyorch.evals import stats, table, tasks
from pyorch.evals.series import Series, by_setting
from pyorch.evals.table import Row, line_of, ratio_of, rows
from pyorch.evals.task import Task
from pyorch.policies import is_sparse


def markdown(found: Sequence[Series]) -> str:
    """Ratios that only one method was run at, and settings with only one method, are left out.

    What reads everything, beside the first method of a setting, has the same score in all columns.
    """
    groups = [rows(g) for g in by_setting(found) if len(g) > 1]
    lines_at: dict[float, set[str]] = {}
    for row in (row for g in groups for row in g):
        lines_at.setdefault(ratio_of(row.method), set()).add(line_of(row.method))
    shown = sorted((r for r, n in lines_at.items() if r and len(n) > 1), reverse=True)
    exact = dict.fromkeys(
        line_of(r.method) for g in groups for r in g[1:] if not is_sparse(r.method)
    )
    lines = dict.fromkeys(
        line_of(r.method) for g in groups for r in g if ratio_of(r.method) in shown
    )
    head, dense = ["method"], ["`off`, dense"]
    body = {line: [f"`{line}`"] for line in (*exact, *lines)}
    for g in groups:
        by_key = {(line_of(row.method), ratio_of(row.method)): row for row in g}
        for ratio in shown:
            head.append(f"{g[0].task} {ratio_text(ratio)}")
            dense.append(_cell(g[0], plain=True))
            for line, cells in body.items():
                found_row = by_key.get((line, 0 if line in exact else ratio))
                cells.append(_cell(found_row) if found_row else "-")
    text = _about(groups) + table.about_old(found)
    return tables.markdown(head, (dense, *body.values())) + "\n\n" + text


def _cell(row: Row, plain: bool = False) -> str:
    """A score and half of its interval, with a star if it differs from dense."""
    task = tasks()[row.task]
    half = (row.score_high - row.score_low) / 2
    differs = row.difference_low > 0 or row.difference_high < 0
    text = _text(task, row.score, row.score)
    text += "" if math.isnan(half) else f" ± {_text(task, half, row.score)}"
    return text + (" *" if differs and not plain else "")


def _text(task: Task, value: float, score: float) -> str:
    """A score, or half of its interval, with the digits of the score."""
    if task.percent:
        return f"{100 * value:.0f}"
    return f"{value:.{0 if score >= 9.95 else 1 if task.metric.startswith('char') else 3}f}"


def _about(groups: Sequence[Sequence[Row]]) -> str:
    parts = []
    for g in groups:
        task = tasks()[g[0].task]
        n = sorted({row.n for row in g})
        count = f"{n[0]} to {n[-1]}" if len(n) > 1 else str(n[0])
        unit = " in %" if task.percent else ""
        what = f"{task.name}: {task.metric}{unit}, {count} examples"
        what += f" of up to {g[0].ctx} positions"
        if min(row.texts for row in g) < stats.FEWEST:
            what += f" about fewer than {stats.FEWEST} texts: no interval"
        if len(n) > 1:
            fewest = min(g, key=lambda row: row.n)
            dense = fewest.score - fewest.difference
            what += f" (dense on the same {n[0]}: {_text(task, dense, dense)})"
        parts.append(what)
    text = "; ".join(parts)
    text += ". ± half of the 95 % interval; * differs from dense on the same examples."
    text += table.about_missing([row for g in groups for row in g])
    over: dict[str, list[float]] = {}
    for row in (row for g in groups for row in g):
        # SparQ's last positions, which are not sealed yet, come on top of its ratio
        if ratio_of(row.method) and row.share_of_dense > ratio_of(row.method) + 0.05:
            over.setdefault(line_of(row.method), []).append(100 * row.share_of_dense)
    for line, shares in over.items():
        text += f" `{line}` reads {min(shares):.0f} to {max(shares):.0f} % of dense's bytes"
        text += (
            " whatever its ratio, which is that of the positions it keeps."
            if line == "topk"
            else "."
        )
    return text
