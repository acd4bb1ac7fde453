"""One interface to the methods of attention, native and in Python: read a prompt, then decode.

Our exact attention reads the prompts, as in real use; what a prompt shares with the one before it
is not read again. A native method runs in a session without a callback, which would cost time.
Methods in Python (`pyorch.policies`) share a second session of the same model, and native methods
that read prompts in another way (`prompt=fast`) have one for each way.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Generic, TypeVar

from pyorch import engine, policies
from pyorch.attention.spec import AttentionSpec
from pyorch.policies import STOCK_FA0, Method
from pyorch.policies.base import Policy
from pyorch.policies.watch import Counters, PolicyWatch
from pyorch.progress import Progress, silent

_COUNTED = tuple(f.name for f in fields(Counters))  # the counters that tables need

EXACT = AttentionSpec("dense")
T = TypeVar("T")


def reader(method: Method) -> AttentionSpec:
    """The attention that reads the prompts of a method. `stock-fa0` reads its own."""
    if method == STOCK_FA0:
        return STOCK_FA0
    return method.of_prompt if isinstance(method, AttentionSpec) else EXACT


@dataclass(frozen=True)
class Decoded(Generic[T]):
    """The result of some work with a method, and the library's counters of it.

    seconds: of the median token; None for a method in Python
    masses: the share of the true attention that was read, by layer; 1 if it was not measured
    """

    result: T
    counters: Mapping[str, int]
    seconds: float | None
    masses: Sequence[float]


class Runner:
    """A model, and the sessions that the methods need. It is a context manager."""

    def __init__(
        self,
        model: Path,
        methods: Sequence[Method],
        recall: bool,
        *,
        placement: engine.Placement = engine.Placement(),  # noqa: B008  it is frozen
        document: engine.Document | None = None,
        **options: Any,
    ) -> None:
        """
        Args:
            recall: whether `decode` will be asked for it.
            placement: where the model goes.
            document: what all prompts begin with: exact attention does not read it again.
            options: those of the sessions, but for their attention, which the methods set.

        Raises:
            SparqError: the model cannot be loaded, or has no such session.
        """
        self._document = document
        python = [m for m in methods if isinstance(m, Policy)]
        native = [m for m in methods if not isinstance(m, Policy)]
        dense = {**options, "attention": "off"}
        with ExitStack() as opened:
            loaded = opened.enter_context(engine.load_model(model, **vars(placement)))
            self.session = loaded.session(**dense)  # it also tokenises
            self._by_reader = {EXACT: self.session}
            for by in dict.fromkeys(map(reader, native)):
                if by not in self._by_reader:
                    kind = {**dense, "flash_attn": by != STOCK_FA0}
                    self._by_reader[by] = loaded.session(**kind)
            self._fa0 = self._by_reader.get(STOCK_FA0)
            self._watched: engine.Session | None = None
            self._measured: engine.Session | None = None  # None: the session of each method
            if (python or recall) and not loaded.on_cpu:  # nobody could read the tensors
                loaded = opened.enter_context(engine.load_model(model, n_gpu_layers=0))
                self._measured = loaded.session(**dense) if recall else None
            if python:
                watch = PolicyWatch(keep_queries=any(p.needs_prompt for p in python))
                self._watched = loaded.session(watch=watch, **dense)
            self._read_by: dict[engine.Session, AttentionSpec] = {}
            self._opened = opened.pop_all()

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def _of(self, method: Method) -> engine.Session:
        if isinstance(method, Policy):
            assert self._watched is not None
            return self._watched
        return self._by_reader[reader(method)]

    def read(
        self,
        tokens: Sequence[int],
        methods: Sequence[Method],
        recall: bool,
        by: AttentionSpec | None = None,
        progress: Progress = silent,
    ) -> None:
        """Read a prompt in the sessions of these methods.

        by: the attention that reads it; None: that of each method. The common prefix with the
            prompt before is kept if that was read by the same. The session of `stock-fa0` has only
            its own attention.
        progress: called with (tokens read, total), those of all sessions.
        """
        readers = {self._of(m): by or reader(m) for m in methods}
        if recall and self._measured and any(map(policies.is_sparse, methods)):
            readers[self._measured] = by or EXACT
        lacking = {}
        for s, spec in readers.items():
            if self._read_by.get(s) != spec:
                engine.rewind(s, 0)
            self._read_by[s] = spec
            if s is self._watched:
                policies.switch(s, spec)
            elif s is not self._fa0:
                engine.set_attention(s, spec)
            if self._document and s is self.session and len(s.tokens) < self._document.n_tokens:
                engine.open_document(s, self._document)
            lacking[s] = engine.align(s, tokens)
        done, total = 0, sum(map(len, lacking.values()))

        def reading(n: int, _: int) -> None:
            progress(done + n, total)

        for s, rest in lacking.items():
            engine.prefill(s, rest, progress=reading)
            done += len(rest)

    def decode(
        self,
        method: Method,
        n: int,
        work: Callable[[engine.Session], T],
        recall: bool = False,
    ) -> Decoded[T]:
        """Do `work` after the first `n` tokens, with the method set.

        recall: measure what share of the attention is read, for which a native sparse method
            does `work` once more, since measuring takes time.
        """
        s = self._of(method)
        engine.rewind(s, n)
        masses = [1.0] * s.geometry.n_layer
        if isinstance(method, Policy):
            policies.switch(s, method)
            if recall:
                result, masses = engine.measure_mass(s, lambda: work(s))
            else:
                result = work(s)
            policies.counted_bytes(s)  # refuses if the library did not read what the method chose
            counters = {x: round(n) for x, n in vars(policies.counters(s)).items()}
            return Decoded(result, counters, None, masses)
        if s is not self._fa0:
            engine.set_attention(s, method)
        engine.reset_counters(s)
        result = work(s)
        counted = engine.info(s).counters
        seconds = round(statistics.median(s.timings.decode_s), 6) if s.timings.decode_s else None
        if recall and method.sparse:
            measured = self._measured or s
            engine.rewind(measured, n)
            engine.set_attention(measured, method)
            _, masses = engine.measure_mass(measured, lambda: work(measured))
        return Decoded(result, {x: int(counted.get(x, 0)) for x in _COUNTED}, seconds, masses)
