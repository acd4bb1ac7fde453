"""How long an evaluation will still take, from how long its parts took.

A part is a prompt that is read, or an example that is decoded with a method. Its size is a rough
guess of its cost, made before anything runs. What parts of a kind took over their sizes corrects
the guess for the others of that kind; until one of them is done, all parts together stand for it.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from pyorch.models.geometry import Geometry
from pyorch.progress import Progress, Report

DECODED = 3  # reading one token costs 1; decoding one, with a native method
DECODED_IN_PYTHON = 60


@dataclass(frozen=True)
class Part:
    """The next thing to do. size: see the top of the module."""

    kind: Hashable
    size: float


class Pace:
    """Tells the time that is left. The parts are done in their order."""

    def __init__(
        self,
        parts: Sequence[Part],
        report: Report,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            report: called with (seconds so far, seconds in all as far as is known, what is done
                at the moment), as soon as that can be told.
        """
        self.left = list(reversed(parts))
        self._report, self._clock, self._started = report, clock, clock()
        self._took: dict[Hashable, float] = defaultdict(float)
        self._size: dict[Hashable, float] = defaultdict(float)
        self._size_left: dict[Hashable, float] = defaultdict(float)
        for part in parts:
            self._size_left[part.kind] += part.size

    @contextmanager
    def part(self, doing: str = "") -> Iterator[Progress]:
        """Do the next part. The function that is yielded may be told how far it is."""
        part, started, before = self.left.pop(), self._clock(), 0.0

        def tick(done: int, total: int) -> None:
            nonlocal started, before
            now, size = self._clock(), part.size * done / max(total, 1)
            self._took[part.kind] += now - started
            self._size[part.kind] += size - before
            self._size_left[part.kind] -= size - before
            started, before = now, size
            self._tell(now, doing.format(done=done, total=total))

        yield tick
        tick(1, 1)

    def _tell(self, now: float, doing: str) -> None:
        so_far, known = now - self._started, sum(self._size.values())
        if known:
            mean = sum(self._took.values()) / known
            rates = {k: self._took[k] / size for k, size in self._size.items() if size}
            rest = sum(size * rates.get(k, mean) for k, size in self._size_left.items())
            self._report(so_far, so_far + rest if self.left else so_far, doing)


def size_of(geometry: Geometry, at: int, n: int) -> float:
    """The cost of `n` tokens from position `at` on, where one token by itself costs 1.

    The cost of attention grows with the positions, and that of the weights does not: a token
    multiplies each weight once, and with every position two numbers per dimension of its heads.
    """
    per_position = 2 * sum(geometry.n_head) * geometry.head_dim_k
    return n + n * (at + n / 2) * per_position / max(geometry.n_params, 1)
