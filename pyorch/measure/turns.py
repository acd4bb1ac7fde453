"""Cases of stock llama.cpp and of ours that are timed in turns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, TypeVar

import numpy as np

from pyorch.attention.spec import AttentionSpec
from pyorch.engine.bandwidth import MemoryReader
from pyorch.errors import SparqError
from pyorch.measure.process import Process

FLOATS = ("f32", "f16", "bf16")  # llama.cpp quantises V only with flash attention
MAX_NMSE = 0.01  # of our dense logits against stock's: far above rounding, far below a mistake
OFF = AttentionSpec("off")


@dataclass(frozen=True, kw_only=True)
class Side:
    """The part of a case that says what runs. `library` is stock, sparq, or a rival's name."""

    library: str
    flash_attn: bool
    spec: AttentionSpec

    @property
    def place(self) -> str:
        """The name of a process: cases of one place share it, its cache and its transposed K."""
        name = f"{self.library} -fa {int(self.flash_attn)}"
        return f"{name} {self.spec.shadow}" if self.library == "sparq" else name

    @property
    def counter(self) -> str:
        """What counts its attention calls; "" for llama.cpp's own, which nobody counts."""
        if self.spec == OFF:
            return ""
        return "calls_sparse" if self.spec.sparse else "calls_dense_op"

    @property
    def label(self) -> str:
        return str(self.spec) if self.library == "sparq" else self.place


S = TypeVar("S", bound=Side)


def sides(
    flash_attn: Sequence[bool],
    type_v: str,
    specs: Sequence[AttentionSpec],
    rivals: Iterable[str] = (),
) -> list[dict[str, Any]]:
    """The fields of the sides that take turns: stock and the rivals with each of `flash_attn` that
    this type of V allows, and ours with each of `specs`."""
    both = product(("stock", *rivals), [fa for fa in flash_attn if fa or type_v in FLOATS])
    theirs = [{"library": name, "flash_attn": fa, "spec": OFF} for name, fa in both]
    ours = dict.fromkeys(specs)
    return theirs + [{"library": "sparq", "flash_attn": True, "spec": spec} for spec in ours]


def in_turns(
    group: Sequence[S],
    which: range,
    once: Callable[[S, int], Mapping[str, Any]],
    reader: MemoryReader,
    done: Callable[[float], None],
) -> tuple[list[dict[str, Any]], list[float]]:
    """Time the cases forwards, then backwards, and so on. Turns below 0 warm up.

    Returns:
        The samples and the sums of the counters of each case, and the bandwidth before each turn.
    """
    bandwidth: list[float] = []
    samples: list[list[int]] = [[] for _ in group]
    counters: list[dict[str, int]] = [{} for _ in group]
    for turn in which:
        reader.read()  # the threads of the last turn go to sleep meanwhile
        bandwidth.append(reader.read())
        for i in range(len(group))[:: -1 if turn % 2 else 1]:
            got = once(group[i], turn)
            if turn < 0:
                continue
            samples[i] += got["samples_ns"]
            for name, value in got["counters"].items():
                if isinstance(value, int):
                    counters[i][name] = counters[i].get(name, 0) + value
        done((turn - which.start + 1) / len(which))
    pairs = zip(samples, counters, strict=True)
    return [{"samples_ns": ns, "counters": counted} for ns, counted in pairs], bandwidth


def check_dense(group: Sequence[S], process_of: Callable[[S], Process], n_depth: int) -> None:
    """Compare our dense attention with stock's, so that a wrong kernel is not timed. Where random K
    and V make more of rounding, it may differ by as much as stock's two settings do.

    Args:
        process_of: the one that holds a case.

    Raises:
        SparqError: the logits differ.
    """
    ours = next((c for c in group if c.library == "sparq"), None)
    if ours is None:
        return
    exact = [np.array(process_of(c).logits(token=77)) for c in group if c.library == "stock"]
    process_of(ours).attention(spec="dense")
    b = np.array(process_of(ours).logits(token=77))
    nmse = min(_nmse(b, a) for a in exact)
    if not nmse <= max(MAX_NMSE, _nmse(exact[-1], exact[0])):
        raise SparqError(
            f"our dense attention differs from stock's at {n_depth} positions: NMSE {nmse:.2g}",
            "a wrong kernel is not timed; run `make test`",
        )


def _nmse(x: Any, of: Any) -> float:
    return float(((x - of) ** 2).sum() / (of**2).sum())


def refuse_idle(
    what: str, counters: Mapping[str, int], name: str, n_calls: int, *, at_least: bool = False
) -> None:
    """Refuse to report a row unless a counter has the number of calls that its setting makes.

    Raises:
        SparqError: it has not.
    """
    got = counters.get(name, 0)
    if got < n_calls or (got > n_calls and not at_least):
        raise SparqError(
            f"{what}: {name} is {got}, not {n_calls}; not reported",
            "`sparq-cpp explain` says when attention stays dense, for example below min_ctx",
        )
