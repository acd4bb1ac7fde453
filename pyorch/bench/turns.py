"""Code for benches that measure stock llama.cpp and ours side by side, in turns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np

from pyorch.attention.spec import AttentionSpec
from pyorch.bench.bandwidth import MemoryReader
from pyorch.bench.worker import Worker
from pyorch.errors import SparqError

FLOATS = ("f32", "f16", "bf16")  # llama.cpp quantises V only with flash attention
MAX_NMSE = 0.01  # of our dense logits against stock's: far above rounding, far below a mistake


class Side:
    """The part of a case that says what runs. `library` is stock or sparq."""

    library: str
    flash_attn: bool
    spec: AttentionSpec

    @property
    def place(self) -> str:
        """The name of a process: cases of one place share it, its cache and its transposed K."""
        name = f"{self.library} -fa {int(self.flash_attn)}"
        return name if self.library == "stock" else f"{name} {self.spec.shadow}"

    @property
    def label(self) -> str:
        return self.place if self.library == "stock" else str(self.spec)


S = TypeVar("S", bound=Side)


def turns(
    n: int, which: range, reader: MemoryReader, bandwidth: list[float], *, swap: bool = False
) -> Iterator[tuple[int, Iterable[int]]]:
    """Yields (turn, order of the `n` cases): forwards, then backwards; reversed with `swap`. Adds
    the bandwidth that `reader` measures first."""
    for turn in which:
        reader.read()  # the threads of the last turn go to sleep meanwhile
        bandwidth.append(reader.read())
        yield turn, range(n - 1, -1, -1) if (turn % 2 == 1) != swap else range(n)


def gather(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The samples and counters of all turns of one case."""
    counters: dict[str, int] = {}
    for turn in found:
        for name, value in turn["counters"].items():
            if isinstance(value, int):
                counters[name] = counters.get(name, 0) + value
    return {"samples_ns": [x for turn in found for x in turn["samples_ns"]], "counters": counters}


def check_dense(group: Sequence[S], process: Callable[[S], Worker], n_depth: int) -> None:
    """Compare our dense attention with stock's, so that a wrong kernel is not timed.

    Args:
        process: the one that holds a case.

    Raises:
        SparqError: the logits differ.
    """
    ours = next((c for c in group if c.library == "sparq"), None)
    if ours is None:
        return
    a = np.array(process(group[0]).logits(token=77))
    process(ours).attention(spec="dense")
    b = np.array(process(ours).logits(token=77))
    nmse = float(((b - a) ** 2).sum() / (a**2).sum())
    if not nmse <= MAX_NMSE:
        raise SparqError(
            f"our dense attention differs from stock's at {n_depth} positions: NMSE {nmse:.2g}",
            "a wrong kernel is not timed; run `make test`",
        )
