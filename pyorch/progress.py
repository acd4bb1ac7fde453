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
            terminal. The time is that of what was done since the first report, so what an earlier
            run did does not count.
    """
    shown_bar = _bar(of)
    console = shown_bar.console
    task, started, shown, quarter = shown_bar.add_task(label), time.monotonic(), False, 0
    first: tuple[float, float] | None = None

    def update(done: float, total: float, doing: str = "", /) -> None:
        nonlocal shown, quarter, first
        now = time.monotonic()
        slow, first = now - started > AFTER_S, first or (now, done)
        text = f"{label}, {doing}" if doing else label
        shown_bar.update(task, completed=done, total=total, description=text)
        if not console.is_terminal:
            if off_terminal and slow and done * 4 // max(total, 1) > quarter:
                quarter = int(done * 4 // total)
                line = f"{label}: {int(100 * done // total)} %"
                if first[1] < done < total:
                    left = (now - first[0]) * (total - done) / (done - first[1])
                    line += f", {human_time(left)} left"
                off_terminal(line)
        elif not shown and slow and done < total:
            shown_bar.start()
            shown = True
        elif shown and done >= total:  # text follows on the same terminal
            shown_bar.stop()
            shown = False

    try:
        yield update
    finally:
        if shown:
            shown_bar.stop()


@contextmanager
def spinner(label: str) -> Iterator[Callable[[], None]]:
    """Show that work of unknown length goes on, once it has taken two seconds: on a terminal until
    it is done, elsewhere in one line. The work calls what this yields now and then."""
    from rich.console import Console

    console = Console(stderr=True)
    status, started, shown = console.status(f"{label} ..."), time.monotonic(), False

    def turn() -> None:
        nonlocal shown
        if not shown and time.monotonic() - started > AFTER_S:
            shown = True
            if console.is_terminal:
                status.start()
            else:
                say(f"{label} ...")

    try:
        yield turn
    finally:
        status.stop()


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
