"""Captures queries, keys and values of a real model over real text, and keeps records of them.

There are two kinds of text: `prose`, a book, and `recite`, in which a passage of the context is
repeated. Queries are those of the last positions, 64 if nothing else is asked for. Layers with a
sliding window are left out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
import watch

from pyorch import engine
from pyorch.attention.bytes import GROUP
from pyorch.bench import records
from pyorch.bench.records import Record, where_given
from pyorch.cli.types import Number, Numbers
from pyorch.errors import SparqError
from pyorch.evals.texts import read_texts
from pyorch.models import cards
from pyorch.models.content import content_hash
from pyorch.native.slots import FLASH_ATTN
from pyorch.native.tensor import Tensor, floats, op_number, view
from pyorch.progress import Progress

TASKS = ("prose", "recite")


@dataclass(frozen=True)
class Case:
    """The case of a record: a length and a kind of text. `model` and `text` are hashes."""

    model: str
    text: str
    n_pos: int
    task: str
    n_context: int
    n_query: int
    seed: int
    library: str = where_given("sparq")

    @property
    def n_last(self) -> int:
        """How many positions have queries."""
        return GROUP


SIZES = (
    click.option(
        "--positions", "-S", type=Numbers(256), default="1024,2048,4096", show_default=True
    ),
    click.option("--contexts", "n_context", type=Number(int, 2), default=30, show_default=True),
    click.option("--queries", "n_query", type=Number(int, 1, GROUP), default=8, show_default=True),
    click.option("--seed", type=Number(int, 0), default=1, show_default=True),
)


def _read(t: Tensor) -> np.ndarray:
    """An f32 copy with numpy's axes (slowest first)."""
    if t.type not in (0, 1):
        raise SparqError("q, K or V is neither f16 nor f32")
    return floats(view(t), t.type)


@dataclass(frozen=True)
class Heads:
    """One layer. q (n_query, n_head_kv, n_group_q, d), k and v (n_head_kv, S, d); scale of q.k."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    scale: float


class Capture:
    """The inputs of attention in a session of a model; `session` has to be closed."""

    def __init__(
        self, model: engine.Model, n_ctx: int, n_threads: int, n_last: int = GROUP
    ) -> None:
        """n_last: how many positions have queries, at most a micro-batch."""
        self._op = op_number(model.lib, "FLASH_ATTN_EXT")
        self._windows = [model.geometry.windows.of(il) for il in model.geometry.kv_layers]
        self._layers: list[Heads] | None = None  # while they are wanted
        self._n_seen = 0  # layers with and without a window
        self._n_last = n_last
        self.session = model.session(n_ctx=n_ctx, n_threads=n_threads, watch=watch.Watch(self._see))

    def _see(self, t: Tensor, ask: bool) -> bool:
        if self._layers is None or t.op != self._op:
            return not ask
        wanted = not self._windows[self._n_seen]
        if not ask:
            self._layers.append(_heads(t))
        if not ask or not wanted:
            self._n_seen += 1
        return wanted

    def layers(self, tokens: Sequence[int]) -> list[Heads]:
        """All layers for the last of `tokens`, whose number is a multiple of GROUP.

        Our exact attention reads what comes before them, which takes less time than llama.cpp's.
        """
        session = self.session
        engine.rewind(session, 0)
        engine.set_attention(session, "dense,prompt=f32")
        engine.prefill(session, tokens[: -self._n_last])
        engine.set_attention(session, "off")
        found: list[Heads] = []
        self._layers, self._n_seen = found, 0
        engine.prefill(session, tokens[-self._n_last :])
        self._layers = None
        if self._n_seen != len(self._windows) or not found:
            raise SparqError("no flash attention was seen: not a model with a plain KV cache")
        n = len(tokens)
        return [Heads(h.q, h.k[:, :n], h.v[:, :n], h.scale) for h in found]


def _heads(t: Tensor) -> Heads:
    q, k, v, mask = (_read(t.src[FLASH_ATTN[x]].contents)[0] for x in ("q", "k", "v", "mask"))
    scale, max_bias, softcap = np.array(t.op_params[:3], np.int32).view(np.float32)
    seen = np.isfinite(mask.reshape(-1, mask.shape[-1])[: q.shape[1]]).sum(1)
    if (
        max_bias
        or softcap
        or t.src[FLASH_ATTN["sinks"]]
        or not np.array_equal(seen - seen[0], np.arange(len(seen)))
    ):
        raise SparqError("biased, capped, windowed attention or attention sinks: not modelled here")
    n_head_kv, d = k.shape[0], k.shape[2]
    q = q.swapaxes(0, 1).reshape(q.shape[1], n_head_kv, -1, d)
    return Heads(q, k, v, float(scale))


def contexts(
    model: engine.Model, texts: Sequence[str], n_pos: int, task: str, seed: int
) -> Iterator[list[int]]:
    """Yields sequences of `n_pos` tokens without end, from each book in turn."""
    head = engine.tokenize(model, "")
    gap = engine.tokenize(model, "\n\n", add_special=False)
    again = GROUP + 32 if task == "recite" else 0  # 32 tokens of it are the cue
    n_book = n_pos - len(head) - (len(gap) + again if again else 0)
    books = [engine.tokenize(model, t, add_special=False) for t in texts]
    books = [b for b in books if len(b) >= n_book]
    if not books:
        raise SparqError(f"no text has {n_book} tokens", "a longer text, or fewer --positions")
    rng = np.random.default_rng(seed)
    i = 0
    while True:
        book = books[i % len(books)]
        at = int(rng.integers(0, len(book) - n_book + 1))
        text = book[at : at + n_book]
        start = int(rng.integers(0, n_book - again + 1))
        yield head + text + (gap + text[start : start + again] if again else [])
        i += 1


def measured(
    bench: str,
    kind: Callable[..., Any],
    samples_of: Callable[[Iterator[list[Heads]], Any], Any],
    model: Path,
    texts: Sequence[Path],
    file: Path,
    progress: Progress,
    *,
    positions: Sequence[int],
    n_query: int = 8,
    seed: int = 1,
    tasks: Sequence[str] = TASKS,
    n_threads: int = 1,
    force: bool = False,
    **sizes: Any,
) -> list[Record]:
    """Measure each length and kind of text that `file` lacks. Returns all records.

    Args:
        kind: makes a case from hashes, length, kind of text and `sizes`.
        samples_of: makes the samples of a case from the layers of each of its contexts.

    Raises:
        SparqError: a text is too short, or the model's attention is not modelled.
    """
    for n_pos in positions:
        if n_pos % GROUP or n_pos < 4 * GROUP:
            raise SparqError(f"{n_pos} positions: a multiple of {GROUP}, 256 or more", exit_code=2)
    books = read_texts(texts)
    text = hashlib.sha256("\0".join(books).encode()).hexdigest()[:16]
    hashes = {"model": content_hash(model), "text": text}
    sizes |= {"n_query": n_query, "seed": seed}
    cases = [kind(**hashes, n_pos=n, task=t, **sizes) for n in positions for t in tasks]
    card = cards.of_hash(hashes["model"])
    with engine.load_model(model) as loaded:
        geo = loaded.geometry
        about = {
            "model_name": card.title if card else model.name,
            "head_dim": geo.head_dim_k,
            "n_layer": geo.n_layer,
            "layers": [il for il in geo.kv_layers if not geo.windows.of(il)],
            "n_head_kv": max(geo.n_head_kv),
        }

        def measure(group: Sequence[Any], done: Callable[[float], None]) -> list[dict[str, Any]]:
            (case,) = group
            layers = _layers(loaded, books, case, n_threads, done)
            return [{"samples": samples_of(layers, case), **about}]

        return records.resume(
            bench,
            [[case] for case in cases],
            measure,
            file,
            progress,
            cost=lambda group: group[0].n_pos * group[0].n_context,
            force=force,
            libraries=("sparq",),
        )


def _layers(
    model: engine.Model,
    books: Sequence[str],
    case: Any,
    n_threads: int,
    done: Callable[[float], None],
) -> Iterator[list[Heads]]:
    """Yields the layers of each context of a case."""
    capture = Capture(model, case.n_pos, n_threads, case.n_last)
    try:
        texts = contexts(model, books, case.n_pos, case.task, case.seed)
        for i in range(case.n_context):
            yield capture.layers(next(texts))
            done((i + 1) / case.n_context)
    finally:
        capture.session.close()
