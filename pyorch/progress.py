"""Reports from long-running work: lines of text, and progress that a terminal shows as a bar."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from pyorch.text import human_time

if TYPE_CHECKING:
    import rich.progress

Say = Callable[[str], None]  # a line for people
Progress = Callable[[int, int], None]  # (done, total)
Report = Callable[[float, float, str], None]  # (done, total, what is done at the moment)


class Bar(Protocol):
    """What `progress_bar` yields: a `Progress` and a `Report`."""

    def __call__(self, done: float, total: float, doing: str = "", /) -> None: ...


AFTER_S = 2.0  # a bar is shown only for what takes longer


def say(text: str) -> None:
    """Tell the user something that is not data."""
    print(f"sparq-cpp: {text}", file=sys.stderr, flush=True)


def silent(*_: object) -> None:
    """A `Say` or a `Progress` that reports nothing."""


@contextmanager
def progress_bar(
    label: str, of: str = "", off_terminal: Callable[[str], None] | None = None
) -> Iterator[Bar]:
    """Show a bar on stderr once the work has taken two seconds, until it is done.

    Args:
        label: the name of the work, such as `downloading`.
        of: `bytes` or `tokens`: they are counted, and their speed is shown.
        off_terminal: receives `downloading: 25 %, 3 min left` at each quarter if stderr is not a
            terminal.
    """
    bar = _bar(of)
    bar.add_task(label)
    (task,) = bar.tasks
    start, quarter = time.monotonic(), 0

    def update(done: float, total: float, doing: str = "", /) -> None:
        nonlocal quarter
        text = f"{label}, {doing}" if doing else label
        bar.update(task.id, completed=done, total=total, description=text)
        if time.monotonic() - start < AFTER_S:
            return
        if bar.console.is_interactive:
            (bar.start if done < total else bar.stop)()  # text follows on the same terminal
        elif off_terminal and done * 4 // max(total, 1) > quarter:
            quarter = int(done * 4 // total)
            left = f", {human_time(task.time_remaining)} left" if task.time_remaining else ""
            off_terminal(f"{label}: {task.percentage:.0f} %{left}")

    try:
        yield update
    finally:
        if bar.console.is_interactive:
            bar.stop()


def _bar(of: str) -> rich.progress.Progress:
    from rich import progress
    from rich.console import Console
    from rich.text import Text

    class Speed(progress.ProgressColumn):
        """Units per second so far."""

        def render(self, task: progress.Task) -> Text:
            return Text(f"{task.speed:,.0f} {of}/s" if task.speed else "")

    counted: dict[str, tuple[progress.ProgressColumn, ...]] = {
        "bytes": (progress.DownloadColumn(), progress.TransferSpeedColumn()),
        "tokens": (progress.MofNCompleteColumn(), Speed()),
    }
    return progress.Progress(
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.TaskProgressColumn(),
        *counted.get(of, ()),
        progress.TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
        # a speed needs two updates within this many seconds, and a bench has one a minute
        speed_estimate_period=30 if of == "bytes" else 1800,
    )
