"""Measures attention settings on real decode steps of real text: KL to dense, and bytes.

A context is read densely; the tokens after it are decoded one by one, as in the text, in all
contexts side by side. Half of the contexts are prose, half repeat a passage of themselves: these
need retrieval, which prose seldom does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict, cast

import numpy as np

from pyorch import engine
from pyorch.attention.spec import AttentionSpec, parse_spec
from pyorch.bench import records
from pyorch.engine import Session
from pyorch.errors import SparqError
from pyorch.evals.decode import log_softmax
from pyorch.progress import Progress

BENCH = "calibrate"  # its version is in every line of the file
N_CUE = 24  # tokens of a repeated passage before those that are decoded
PROMPT = 0.5  # the time of reading a token of a prompt over that of decoding one, roughly


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
    """Means over the decoded tokens of each context.

    share: the bytes read over those of dense, in all the contexts that were decoded together.
    """

    kl: np.ndarray
    share: np.ndarray


class _Measurement(TypedDict):
    """A line of the file: one context with one spec. `layers` are those that ran sparse."""

    schema: int
    bench: str
    version: int
    spec: str
    context: int
    layers: list[int]
    kl: float
    share: float


class Meter:
    """Measures KL and bytes of settings by context, and each only once, even over restarts.

    The contexts are sequences of one session, decoded together; each is read once, unless another
    meter uses the session in between. `work` is what
    has been asked for so far, whether it was known or not: decoded tokens, and those of prompts,
    which take less time, at `PROMPT` each.

    file: JSON lines of all measurements; None keeps none.
    """

    def __init__(
        self, session: Session, contexts: Sequence[Context], file: Path | None = None
    ) -> None:
        """Raises:
        SparqError: the session has fewer sequences.
        """
        if session.n_sequences < len(contexts):
            raise SparqError(f"{len(contexts)} contexts need as many sequences of a session")
        self.session, self.contexts, self.file = session, contexts, file
        self.layers: list[int] = []  # those that can be sparse, known after the first measurement
        self._known: dict[tuple[AttentionSpec, int], _Measurement] = {}
        for r in records.load_all(file) if file else []:
            if records.is_old({"bench": BENCH, **r}):
                continue
            known = cast(_Measurement, r)
            self._known[parse_spec(known["spec"]), known["context"]] = known
        self._prompts = [c.prompt[:-1] for c in contexts]
        self._dense: list[_Dense] = []  # of each decoded token, over all contexts
        self.work = 0.0

    @property
    def n_tokens(self) -> int:
        return len(self.contexts[0].rest)

    @property
    def reading(self) -> float:
        """The work of reading all contexts, with the dense decoding that all are compared with."""
        return sum(PROMPT * len(c.prompt) + len(c.rest) for c in self.contexts)

    def measure(
        self, specs: Sequence[AttentionSpec], which: Sequence[int], progress: Progress
    ) -> list[Measured]:
        """Measure each of `specs` in the contexts `which`.

        Args:
            progress: called with the work (done, total) of this call, once something is decoded.
        """
        different = dict.fromkeys(specs)  # two of them may be equal
        todo = {s: [c for c in which if (s, c) not in self._known] for s in different}
        todo = {s: cs for s, cs in todo.items() if cs}
        begun, size = self.work, len(which) * self.n_tokens
        total = size * len(different) + (0 if not todo or self._is_ready() else self.reading)
        self.work += size * (len(different) - len(todo))
        for spec, contexts in todo.items():
            if not self._is_ready():
                self._begin(lambda: progress(round(self.work - begun), round(total)))
            self._run(spec, contexts)
            self.work += size
            progress(round(self.work - begun), round(total))
        rows = [[self._known[s, c] for c in which] for s in specs]
        self.layers = rows[0][0]["layers"]
        return [
            Measured(np.array([r["kl"] for r in row]), np.array([r["share"] for r in row]))
            for row in rows
        ]

    def _is_ready(self) -> bool:
        """Whether the session holds our contexts; another meter may have used it since."""
        return bool(self._dense) and self.session.prompts is self._prompts

    def _begin(self, progress: Callable[[], None]) -> None:
        """Read all contexts, and keep what dense attention predicts for the tokens after them."""
        begun = self.work

        def on_batch(done: int, _: int) -> None:
            self.work = begun + PROMPT * done
            progress()

        engine.set_attention(self.session, AttentionSpec("off"))
        engine.prefill_each(self.session, self._prompts, on_batch)
        self._dense = [_Dense.of(x) for x in self._decode(range(len(self.contexts)))]
        self.work = begun + self.reading

    def _run(self, spec: AttentionSpec, which: Sequence[int]) -> None:
        engine.set_attention(self.session, spec)
        engine.reset_counters(self.session)
        steps = zip(self._dense, self._decode(which), strict=True)
        kl = np.mean([dense.divergence(x, which) for dense, x in steps], axis=0)
        info = engine.info(self.session)
        if not info.counter("bytes_dense"):
            raise SparqError(
                f"no layer of this model can be sparse: {'; '.join(info.dense_reasons)}"
            )
        layers = [x["il"] for x in info.layers if x["state"] == "sparse"]
        share = info.counter("bytes_read") / info.counter("bytes_dense")
        for context, x in zip(which, kl, strict=True):
            rec: _Measurement = {
                "schema": records.SCHEMA,
                "bench": BENCH,
                "version": records.version_of(BENCH),
                "spec": str(spec),
                "context": context,
                "layers": layers,
                "kl": float(x),
                "share": share,
            }
            self._known[spec, context] = rec
            if self.file:
                records.append(self.file, rec)

    def _decode(self, which: Sequence[int]) -> Iterator[np.ndarray]:
        """Yields the logits (len(which), n_vocab) of each token after the prompts."""
        engine.rewind_each(self.session, len(self._prompts[0]), which)
        rows = [[self.contexts[c].prompt[-1], *self.contexts[c].rest[:-1]] for c in which]
        for step in zip(*rows, strict=True):
            yield engine.decode_each(self.session, dict(zip(which, step, strict=True)))


@dataclass(frozen=True)
class _Dense:
    """What dense attention predicts for one token of each context.

    p (n_context, n_vocab) float32; negentropy (n_context,), the sum of p log p.
    """

    p: np.ndarray
    negentropy: np.ndarray

    @classmethod
    def of(cls, logits: np.ndarray) -> _Dense:
        log_p = log_softmax(logits)
        p = np.exp(log_p)
        return cls(p.astype(np.float32), (p * log_p).sum(-1))

    def divergence(self, logits: np.ndarray, which: Sequence[int]) -> np.ndarray:
        """KL(dense || softmax(logits)) in nats (len(which),), of the contexts `which`.

        log softmax is x - log sum exp x, so one exponential per logit is enough. Terms are in
        single precision, whose rounding is that of the logits themselves; sums are in double.
        """
        at, x = list(which), logits - logits.max(-1, keepdims=True)
        log_sum = np.log(np.exp(x).sum(-1, dtype=np.float64))
        cross = (self.p[at] * x).sum(-1, dtype=np.float64)
        return np.asarray(self.negentropy[at] - cross + log_sum)
