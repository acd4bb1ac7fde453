"""Ctrl-C while C code runs, through which no exception can pass."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Interrupt:
    """Remembers a Ctrl-C until Python code may raise it. One for each call into C."""

    def __init__(self) -> None:
        self.came = False

    def note(self, *_: object) -> None:
        """Ctrl-C came. A function that C calls says so where it would otherwise raise."""
        self.came = True

    def raise_if_it_came(self) -> None:
        """Raises:
        KeyboardInterrupt: Ctrl-C came.
        """
        if self.came:
            raise KeyboardInterrupt

    @contextmanager
    def held_back(self) -> Iterator[None]:
        """Ctrl-C is noted and not raised while C code runs that calls us at any moment.

        A function that C calls would lose it: Python may raise before the first line of its body.
        Nothing changes where a handler other than Python's own is set, or in another thread, which
        gets no signals.
        """
        plain = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if not (plain and threading.current_thread() is threading.main_thread()):
            yield
            return
        signal.signal(signal.SIGINT, self.note)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, signal.default_int_handler)
