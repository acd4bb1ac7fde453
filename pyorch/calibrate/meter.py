"""Measures attention settings on real decode steps of real text: KL to dense, and bytes.

A context is read densely; the tokens after it are decoded one by one, as in the text, in several
contexts together. Half of the contexts are prose, half repeat a passage of themselves: these need
retrieval, which prose seldom does. No two contexts share a token of the text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pyorch import engine
from pyorch.attention.spec import AttentionSpec, parse_spec
from pyorch.engine import Session
from pyorch.errors import SparqError
from pyorch.evals.decode import log_softmax
from pyorch.measure import records
from pyorch.progress import Progress, silent

N_CUE = 24  # tokens of a repeated passage before those that are decoded


@dataclass(frozen=True)
class Context:
    """A context. `prompt` but its last token is read densely; then `rest` is decoded as given."""

    prompt: list[int]
    rest: list[int]


def contexts(session: Session, text: str, n: int, n_pos: int, n_tokens: int) -> list[Context]:
    """`n` contexts of `n_pos` tokens each, from `n` parts of the text that do not overlap, prose
    and repeated passages in turn.

    Raises:
        SparqError: the text is too short.
    """
    head = engine.tokenize(session, "")
    gap = engine.tokenize(session, "\n\n", add_special=False)
    book = engine.tokenize(session, text, add_special=False)
    need, again = n_pos - len(head), N_CUE + n_tokens
    if len(book) < n * need or need < 4 * again:
        raise SparqError(
            f"the text has {len(book)} tokens, and {n} contexts of {n_pos} positions need "
            f"{n * max(need, 4 * again)}",
            f"a longer --text, or --ctx {max(len(book) // n, 4 * again + len(head))}",
            exit_code=2,
        )
    out = []
    for i in range(n):
        part = book[i * (len(book) // n) :][:need]
        if i % 2:
            kept = part[: need - len(gap) - again]
            start = (len(kept) - again) * i // n  # far from the end and near it
            part = kept + gap + kept[start : start + again]
        tokens = head + part
        out.append(Context(tokens[:-n_tokens], tokens[-n_tokens:]))
    return out


@dataclass(frozen=True)
class Measured:
    """kl (n_context,): nats, means over the decoded tokens of each context. share: the bytes read
    over those of dense, in all of these contexts."""

    kl: np.ndarray
    share: float


class Meter:
    """Measures settings, and each only once, even over restarts.

    The contexts are sequences of one session, in which nothing else may be read meanwhile.

    file: JSON lines of all measurements; None keeps none.
    """

    def __init__(
        self,
        session: Session,
        contexts: Sequence[Context],
        file: Path | None = None,
        progress: Progress = silent,
    ) -> None:
        """Reads the contexts. progress: called with (tokens done, all tokens).

        Raises:
            SparqError: the session has fewer sequences.
        """
        if session.n_sequences < len(contexts):
            raise SparqError(f"{len(contexts)} contexts need as many sequences of a session")
        self.session, self.contexts, self.file = session, contexts, file
        self.layers: list[int] = []  # those that can be sparse, known after the first measurement
        self._known: dict[tuple[AttentionSpec, tuple[int, ...]], records.Record] = {}
        for rec in records.load_all(file) if file else []:
            self._known[parse_spec(rec["spec"]), tuple(rec["contexts"])] = rec
        engine.set_attention(session, AttentionSpec("off"))
        engine.prefill_each(session, [c.prompt[:-1] for c in contexts], progress)
        # of each decoded token, over all contexts
        self._dense = [log_softmax(x) for x in self._decode(range(len(contexts)))]

    def measure(self, spec: AttentionSpec, which: Sequence[int]) -> Measured:
        """Decode in the contexts `which`."""
        rec = self._known.get((spec, tuple(which)))
        if rec is None:
            rec = self._known[spec, tuple(which)] = self._run(spec, which)
            if self.file:
                records.append(self.file, rec)
        self.layers = rec["layers"]
        return Measured(np.array(rec["kl"]), rec["share"])

    def _run(self, spec: AttentionSpec, which: Sequence[int]) -> records.Record:
        engine.set_attention(self.session, spec)
        engine.reset_counters(self.session)
        kls = []  # of each token, in nats (n_context,)
        for of_all, logits in zip(self._dense, self._decode(which), strict=True):
            dense = of_all[list(which)]
            kls.append((np.exp(dense) * (dense - log_softmax(logits))).sum(-1))
        kl = np.mean(kls, axis=0)
        info = engine.info(self.session)
        if not info.counter("bytes_dense"):
            reasons = "; ".join(info.dense_reasons)
            raise SparqError(f"no layer of this model can be sparse: {reasons}")
        return {
            "schema": records.SCHEMA,
            "spec": str(spec),
            "contexts": list(which),
            "layers": [x["il"] for x in info.layers if x["state"] == "sparse"],
            "kl": kl.tolist(),
            "share": info.counter("bytes_read") / info.counter("bytes_dense"),
        }

    def _decode(self, which: Sequence[int]) -> Iterator[np.ndarray]:
        """Yields the logits (len(which), n_vocab) of each token after the prompts."""
        engine.rewind_each(self.session, len(self.contexts[0].prompt) - 1, which)
        rows = [[self.contexts[c].prompt[-1], *self.contexts[c].rest[:-1]] for c in which]
        for step in zip(*rows, strict=True):
            yield engine.decode_each(self.session, dict(zip(which, step, strict=True)))
