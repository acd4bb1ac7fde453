"""One interface to the methods of attention, native and in Python: read a prompt, then decode.

Our exact attention reads the prompts, as in real use; what a prompt shares with the one before it
is not read again. A native method runs in a session without a callback, which would cost time.
Methods in Python (`pyorch.policies`) share a second session of the same model.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from pyorch import engine, policies
from pyorch.attention.saved import resolve
from pyorch.attention.spec import AttentionSpec
from pyorch.evals.recall import RecallWatch
from pyorch.policies import Method
from pyorch.policies.base import Policy

if TYPE_CHECKING:
    from typing_extensions import Unpack

# the library's counters that tables need
_COUNTED = ("steps", "bytes_read", "bytes_dense", "positions_read", "calls_sparse")

EXACT = AttentionSpec("dense")
T = TypeVar("T")


def meaning(method: Method, model: Path) -> str:
    """The meaning of a method for a model: a calibrated method has the settings found for it.

    Raises:
        SparqError: the model is not calibrated for it.
    """
    return str(resolve(method, model) if isinstance(method, AttentionSpec) else method)


class Runner:
    """A model, and the sessions that the methods need. It is a context manager."""

    def __init__(
        self,
        model: Path,
        methods: Sequence[Method],
        recall: bool,
        *,
        n_gpu_layers: int | None = None,
        numa: str = "",
        **options: Unpack[engine.SessionOptions],
    ) -> None:
        """
        Args:
            recall: whether `masses` will be called.
            n_gpu_layers, numa: as for `engine.load_model`.
            options: those of the sessions, but for their attention, which the methods set.

        Raises:
            SparqError: the model cannot be loaded, or has no such session.
        """
        python = [m for m in methods if isinstance(m, Policy)]
        dense: engine.SessionOptions = {**options, "attention": "off"}
        with ExitStack() as opened:
            loaded = opened.enter_context(
                engine.load_model(model, n_gpu_layers=n_gpu_layers, numa=numa)
            )
            self.session = loaded.session(**dense)  # it also tokenises
            self._watch: RecallWatch | None = None
            self._watched: engine.Session | None = None
            if python or recall:
                if not loaded.on_cpu:  # numpy could not read the tensors
                    loaded = opened.enter_context(engine.load_model(model, n_gpu_layers=0))
                self._watch = RecallWatch(keep_queries=any(p.needs_prompt for p in python))
                self._watched = loaded.session(watch=self._watch, **dense)
            self._read_by: dict[engine.Session, AttentionSpec] = {}
            self._opened = opened.pop_all()

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def _of(self, method: Method) -> engine.Session:
        if isinstance(method, AttentionSpec):
            return self.session
        assert self._watched is not None
        return self._watched

    def read(
        self,
        tokens: Sequence[int],
        methods: Sequence[Method],
        recall: bool,
        by: AttentionSpec = EXACT,
    ) -> None:
        """Read a prompt in the sessions of these methods.

        by: the attention that reads it. The common prefix with the prompt before is kept if that
            was read by the same.
        """
        sessions = [self._of(m) for m in methods]
        if recall and self._watched is not None:
            sessions.append(self._watched)
        for s in dict.fromkeys(sessions):
            if self._read_by.get(s) != by:
                engine.rewind(s, 0)
            self._read_by[s] = by
            if s is self._watched:
                policies.switch(s, by)
            else:
                engine.set_attention(s, by)
            engine.prefill(s, engine.align(s, tokens))

    def decode(
        self, method: Method, n: int, work: Callable[[engine.Session], T]
    ) -> tuple[T, Mapping[str, int], float | None]:
        """Do `work` after the first `n` tokens, with the method set.

        Returns:
            the result, the counters, and the seconds of the median token (None if in Python).
        """
        s = self._of(method)
        engine.rewind(s, n)
        if not isinstance(method, AttentionSpec):
            policies.switch(s, method)
            result = work(s)
            c = policies.counters(s)
            policies.counted_bytes(s)  # refuses if the library did not read what the method chose
            counters = {
                "steps": c.steps,
                "bytes_read": round(c.bytes_read),
                "bytes_dense": round(c.bytes_dense),
                "positions_read": c.positions,
                "calls_sparse": c.selections,
            }
            return result, counters, None
        engine.set_attention(s, method)
        engine.reset_counters(s)
        result = work(s)
        counted = engine.info(s).counters
        seconds = round(statistics.median(s.timings.decode_s), 6) if s.timings.decode_s else None
        return result, {name: int(counted.get(name, 0)) for name in _COUNTED}, seconds

    def masses(
        self, method: Method, n: int, work: Callable[[engine.Session], object]
    ) -> list[float]:
        """The share of the true attention that `work` reads with this method, by layer; it is 1
        for a dense layer. The module `recall` says how it is found.
        """
        s, watch = self._watched, self._watch
        assert s is not None and watch is not None
        engine.rewind(s, n)
        policies.switch(s, method)
        found: dict[int, list[float]] = {}
        watch.masses = found
        try:
            work(s)
        finally:
            watch.masses = None
        layers = range(s.geometry.n_layer)
        return [float(np.mean(found[i])) if i in found else 1.0 for i in layers]
