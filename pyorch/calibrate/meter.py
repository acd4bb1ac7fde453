"""Measures attention settings on real decode steps of real text: KL to dense, and bytes.

A context is read densely; the tokens after it are decoded one by one, as in the text. Half of the
contexts are prose, half repeat a passage of themselves: these need retrieval, which prose seldom
does.
"""

from __future__ import annotations

import fcntl
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict, cast

import numpy as np

from pyorch import engine, paths
from pyorch.attention.bytes import cache_bytes
from pyorch.attention.spec import AttentionSpec, parse_spec
from pyorch.bench import records
from pyorch.engine import Session
from pyorch.errors import SparqError
from pyorch.evals.decode import log_softmax
from pyorch.evals.fidelity import divergence
from pyorch.models.new_file import check_space
from pyorch.progress import Progress

N_CUE = 24  # tokens of a repeated passage before those that are decoded


@dataclass(frozen=True)
class Context:
    """A context. `prompt` but its last token is read densely; then `rest` is decoded as given."""

    prompt: list[int]
    rest: list[int]


def contexts(
    session: Session, text: str, n: int, n_pos: int, n_tokens: int, seed: int = 1
) -> list[Context]:
    """`n` contexts of `n_pos` tokens each, prose and repeated passages in turn.

    Raises:
        SparqError: the text is too short.
    """
    head = engine.tokenize(session, "")
    gap = engine.tokenize(session, "\n\n", add_special=False)
    book = engine.tokenize(session, text, add_special=False)
    need = n_pos - len(head)
    if len(book) < need or need < 4 * (n_tokens + N_CUE):
        raise SparqError(
            f"the text has {len(book)} tokens; {n_pos} positions with {n_tokens} decoded ones"
            f" need {max(need, 4 * (n_tokens + N_CUE))}",
            "use a longer --text, or a smaller --ctx or --tokens",
            exit_code=2,
        )
    rng = np.random.default_rng(seed)
    out = []
    for i in range(n):
        again = N_CUE + n_tokens if i % 2 else 0
        size = need - (len(gap) + again if again else 0)
        at = int(rng.integers(0, len(book) - size + 1))
        tokens = book[at : at + size]
        if again:
            start = int(rng.integers(0, size - again - n_tokens))
            tokens = tokens + gap + tokens[start : start + again]
        tokens = head + tokens
        out.append(Context(tokens[:-n_tokens], tokens[-n_tokens:]))
    return out


@dataclass(frozen=True)
class Measured:
    """Means over the decoded tokens of each context. share: the bytes read over those of dense."""

    kl: np.ndarray
    share: np.ndarray


class _Measurement(TypedDict):
    """A line of the file: one context with one spec. `layers` are those that ran sparse."""

    schema: int
    spec: str
    context: int
    layers: list[int]
    kl: float
    share: float


@contextmanager
def _folder(n_bytes: int) -> Iterator[Path]:
    """A new folder in the cache for prefills of that size, which is deleted at the end.

    As long as it is used it is locked; those that are not, of killed processes, are deleted first.

    Raises:
        SparqError: there is not enough room.
    """
    root = paths.cache() / "prefills"
    with paths.locked(root, lambda _: None):
        for old in [f for f in root.iterdir() if f.is_dir()]:
            with (old / "lock").open("w") as lock:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    continue
                shutil.rmtree(old, ignore_errors=True)
        check_space(
            root,
            n_bytes,
            "the cache of all contexts",
            "make room, use fewer --contexts, or set SPARQ_CACHE to a folder on another disk",
        )
        folder = Path(tempfile.mkdtemp(dir=root))
        lock = (folder / "lock").open("w")
        fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        lock.close()


class Meter:
    """Measures KL and bytes of settings by context, and each only once, even over restarts.

    file: JSON lines of all measurements; None keeps none. Prefills are kept in files as long as
    the meter lives, so each context is read only once.
    """

    def __init__(
        self, session: Session, contexts: Sequence[Context], file: Path | None = None
    ) -> None:
        """Raises:
        SparqError: there is not enough room for the prefills.
        """
        self.session, self.contexts, self.file = session, contexts, file
        self.layers: list[int] = []  # those that can be sparse, known after the first measurement
        self._known: dict[tuple[AttentionSpec, int], _Measurement] = {}
        for r in records.load_all(file) if file else []:
            known = cast(_Measurement, r)
            self._known[parse_spec(known["spec"]), known["context"]] = known
        size = cache_bytes(session.geometry, 1, *session.types)
        self._opened = ExitStack()
        room = size * sum(len(c.prompt) for c in contexts)
        self._folder = self._opened.enter_context(_folder(room))
        self._dense: dict[int, np.ndarray] = {}

    def close(self) -> None:
        self._opened.close()

    def measure(
        self, specs: Sequence[AttentionSpec], which: Sequence[int], progress: Progress
    ) -> list[Measured]:
        """Measure each of `specs` in the contexts `which`."""
        different = dict.fromkeys(specs)  # two of them may be equal
        todo = [(c, s) for c in which for s in different if (s, c) not in self._known]
        for n, (context, spec) in enumerate(todo):
            self._known[spec, context] = self._run(context, spec)
            progress(n + 1, len(todo))
        rows = [[self._known[s, c] for c in which] for s in specs]
        self.layers = rows[0][0]["layers"]
        return [
            Measured(np.array([r["kl"] for r in row]), np.array([r["share"] for r in row]))
            for row in rows
        ]

    def _run(self, context: int, spec: AttentionSpec) -> _Measurement:
        session = self.session
        if context not in self._dense:
            self._begin(context)
            self._dense[context] = self._decode(context, AttentionSpec("off"))
        self._begin(context)
        got = self._decode(context, spec)
        info = engine.info(session)
        if not info.counter("bytes_dense"):
            raise SparqError(
                f"no layer of this model can be sparse: {'; '.join(info.dense_reasons)}"
            )
        rec: _Measurement = {
            "schema": records.SCHEMA,
            "spec": str(spec),
            "context": context,
            "layers": [x["il"] for x in info.layers if x["state"] == "sparse"],
            "kl": divergence(log_softmax(self._dense[context]), got)[0],
            "share": info.counter("bytes_read") / info.counter("bytes_dense"),
        }
        if self.file:
            records.append(self.file, rec)
        return rec

    def _begin(self, context: int) -> None:
        """Bring the cache to its state after all of the prompt but its last token."""
        prompt = self.contexts[context].prompt
        if self.session.tokens[: len(prompt) - 1] == prompt[:-1]:
            engine.rewind(self.session, len(prompt) - 1)
            return
        state = self._folder / str(context)
        engine.set_attention(self.session, AttentionSpec("off"))
        if state.exists():
            engine.load_state(self.session, state)
            return
        engine.rewind(self.session, 0)
        engine.prefill(self.session, prompt[:-1])
        engine.save_state(self.session, state)

    def _decode(self, context: int, spec: AttentionSpec) -> np.ndarray:
        """The logits (n_tokens, n_vocab) of the tokens after the prompt."""
        c = self.contexts[context]
        engine.set_attention(self.session, spec)
        engine.reset_counters(self.session)
        out = []
        for token in [c.prompt[-1], *c.rest[:-1]]:
            engine.decode(self.session, token)
            out.append(engine.logits(self.session))
        return np.array(out)
