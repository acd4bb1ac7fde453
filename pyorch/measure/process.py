"""A process that holds one library and answers one request at a time.

One process cannot hold two builds of llama.cpp, so each has its own: `python -m
pyorch.measure.process` reads requests as JSON lines from stdin and answers on stdout. The caller
asks one at a time, so no two measurements run at once. `Process` is the caller's side, `Subject`
does the work.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np

from pyorch import children, engine
from pyorch.engine.bandwidth import MemoryReader
from pyorch.errors import SparqError
from pyorch.measure import state

FORGET_BYTES = 128 << 20  # read before a timed token: more than a last-level cache holds
_TOKENS = 256  # tokens used as input: the bytes, after three special ones


class Subject:
    """A model in a context of a library. Its methods are the requests that the process accepts."""

    def __init__(self, stock: bool = False) -> None:
        self.stock = stock
        self.session: engine.Session | None = None
        self.reader: MemoryReader | None = None
        self.text: list[int] = []  # the tokens of `read`

    def open(self, model: str, n_threads: int, rope: str = "", **options: Any) -> None:
        """Load a model, with other options of `engine.load`; it replaces the previous one."""
        self.close()
        options = {"n_batch": 32, "kv_offload": True} | options
        self.reader = MemoryReader(n_threads, FORGET_BYTES // n_threads // 512 * 512)
        self.session = engine.load(
            model, n_threads=n_threads, rope=engine.Rope.parse(rope), stock=self.stock, **options
        )

    def close(self) -> None:
        if self.session is not None:
            self.session.close()
        self.session, self.text = None, []

    def fill(self, n_pos: int, seed: int) -> None:
        """Fill the cache with random K and V for `n_pos` positions."""
        state.fill(self._session, n_pos, seed)

    def read(self, text: str, n_pos: int, n: int) -> None:
        """Take the `n` tokens of later tests from a text, after its first `n_pos`. Ours reads these
        in place of what the cache holds; stock needs the same time whatever it holds.

        Raises:
            SparqError: the text is too short.
        """
        session = self._session
        self.text = engine.tokenize(session.model, text)
        if len(self.text) < n_pos + n:
            raise SparqError(
                f"the text has {len(self.text)} tokens, but {n_pos + n} are needed",
                "a longer --text, or a lower -d",
            )
        if not self.stock:
            engine.rewind(session, 0)
            engine.set_attention(session, "dense")
            engine.prefill(session, self.text[:n_pos])

    def attention(self, spec: str) -> None:
        engine.set_attention(self._session, spec)

    def decode(self, n: int, seed: int) -> dict[str, Any]:
        """Time `n` tokens, each at the position after those in the cache, which stays the same.

        Every token differs, and the caches are made to forget before each: between two tokens of a
        real model the weights of all layers pass through them. The first token is not timed.
        """

        def step(token: int) -> int:
            assert self.reader is not None
            self.reader.read()
            return self._step(token)

        return self._timed(step, n, seed)

    def generate(self, n: int, seed: int) -> dict[str, Any]:
        """Time `n` tokens, each at the next position, after an untimed one; then take all back."""
        n_pos = len(self._session.tokens)
        result = self._timed(self._next, n, seed)
        engine.rewind(self._session, n_pos)
        return result

    def _timed(self, step: Callable[[int], int], n: int, seed: int) -> dict[str, Any]:
        first, *tokens = self._tokens(n + 1, seed)
        self._step(first)  # not timed
        engine.reset_counters(self._session)
        samples = [step(token) for token in tokens]
        return {"samples_ns": samples, "counters": self._counters()}

    def layers(self) -> tuple[int, list[str]]:
        """The number of layers that ran our code at the last token, and why the others did not."""
        session = self._session
        n_pos = len(session.tokens)
        if n_pos == 0:
            engine.decode(session, 3)  # the first token of a text counts as its prompt
        self._step(3)
        info = engine.info(session)
        engine.rewind(session, n_pos)
        return info.layers_sparse if info.active else 0, info.dense_reasons

    def logits(self, token: int) -> list[float]:
        """The logits after one more token, which is taken back."""
        session = self._session
        n_pos = len(session.tokens)
        engine.decode(session, token)
        values = [float(x) for x in engine.logits(session)]
        engine.rewind(session, n_pos)
        return values

    def prefill(self, n: int, seed: int) -> dict[str, Any]:
        """Time the prefill of `n` tokens after those in the cache, and take them back."""
        session = self._session
        n_pos = len(session.tokens)
        engine.reset_counters(session)
        tokens = self._tokens(n, seed)
        started = time.perf_counter_ns()
        engine.prefill(session, tokens)
        took = time.perf_counter_ns() - started
        counters = self._counters()
        engine.rewind(session, n_pos)
        return {"samples_ns": [took], "counters": counters}

    @property
    def _session(self) -> engine.Session:
        if self.session is None:
            raise SparqError("no model is open")
        return self.session

    def _counters(self) -> dict[str, Any]:
        return {} if self.stock else dict(engine.info(self._session).counters)

    def _tokens(self, n: int, seed: int) -> list[int]:
        """The next `n` of the text, or random ones without a text."""
        at = len(self._session.tokens)
        random = 3 + np.random.default_rng(seed).integers(0, _TOKENS, n)
        return self.text[at : at + n] if self.text else random.tolist()

    def _next(self, token: int) -> int:
        """The nanoseconds of one decoded token."""
        started = time.perf_counter_ns()
        engine.decode(self._session, token)
        return time.perf_counter_ns() - started

    def _step(self, token: int) -> int:
        """As `_next`, and the token is taken back."""
        n_pos = len(self._session.tokens)
        took = self._next(token)
        engine.rewind(self._session, n_pos)
        return took


class Process:
    """A `Subject` in a process of its own. `process.fill(n_pos=4095, seed=1)` is a request.

    Args:
        rival: a program that answers the same requests with another library.
    """

    def __init__(self, stock: bool = False, rival: str | None = None) -> None:
        ours = children.python("pyorch.measure.process", *["--stock"] * stock)
        self.process = subprocess.Popen(
            children.bound([rival] if rival else ours),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C in a terminal comes to us alone, who then end it
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda **args: self._ask(name, args)

    def _ask(self, call: str, args: dict[str, Any]) -> Any:
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps({"call": call, "args": args}) + "\n")
            self.process.stdin.flush()
            answer = json.loads(self.process.stdout.readline())
        except (OSError, ValueError):
            code = self.process.wait()
            raise SparqError(
                f"the measured process {children.ended(code)}, during {call!r}",
                "its own messages are above",
            ) from None
        if "error" in answer:
            raise SparqError(answer["error"], answer["hint"])
        return answer["result"]

    def stop(self) -> None:
        """End the process without waiting for its current request."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.terminate()  # before its pipes are closed, which would end it otherwise
        for pipe in (self.process.stdin, self.process.stdout):
            with suppress(OSError):  # a request that a dead process did not accept
                pipe.close()
        children.stop(self.process)

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


class Processes(dict[str, Process]):
    """Processes by name."""

    def start(self, name: str, library: str, rival: str | None = None) -> Process:
        """The process of this name, with the library stock, sparq or a rival's; started on first
        use."""
        if name not in self:
            self[name] = Process(library == "stock", rival)
        return self[name]

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_: object) -> None:
        for one in self.values():  # end all before waiting for any: Ctrl-C may come again
            one.process.terminate()
        for one in self.values():
            one.stop()


def main() -> None:
    """Answer requests until stdin ends. Output of C code goes to stderr, not into answers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the engine's calls then set no handler of theirs
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    subject = Subject(stock="--stock" in sys.argv)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = {"result": getattr(subject, request["call"])(**request["args"])}
        except SparqError as e:
            answer = {"error": e.message, "hint": e.hint}
        print(json.dumps(answer), file=answers, flush=True)
    subject.close()


if __name__ == "__main__":
    main()
