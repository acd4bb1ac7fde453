"""Ctrl-C while C code runs, through which no exception can pass."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Interrupt:
    """Remembers a Ctrl-C until Python code may raise it. Each call into C has its own."""

    def __init__(self) -> None:
        self.came = False

    def note(self, *_: object) -> None:
        """Remember that Ctrl-C came; functions that C calls do this instead of raising."""
        self.came = True

    def raise_if_it_came(self) -> None:
        """Raises:
        KeyboardInterrupt: Ctrl-C came.
        """
        if self.came:
            raise KeyboardInterrupt

    @contextmanager
    def held_back(self) -> Iterator[None]:
        """Wrap C code that may call us at any moment: Ctrl-C is noted and not raised.

        A function that C calls would lose it, because Python may raise before the first line of its
        body. Nothing changes if a program has a handler of its own, or in threads other than the
        main one, which get no signals.
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
