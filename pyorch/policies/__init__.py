"""Every method of the papers on real decode steps, at equal bytes; docs/methods.md has a table.

    with open_session("model.gguf", "h2o,ratio=1/8", n_ctx=4096) as s:
        engine.prefill(s, prompt)           # exact attention, always
        engine.decode(s, token)             # reads what the method decides
        print(counted_bytes(s).share)
        engine.rewind(s, len(prompt))
        switch(s, "sparq,ratio=1/8")        # a native method: no Python in the loop

`sparq`, `topk`, `dense` and `off` are the library's own (`pyorch.attention.spec`). The others are
in this folder, one file each; `watch.py` describes how they work.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import asdict, dataclass
from typing import Any

from pyorch import engine
from pyorch.attention import line
from pyorch.attention.cost import per_token
from pyorch.attention.spec import METHODS, AttentionSpec, parse_spec
from pyorch.errors import SparqError, nearest
from pyorch.policies.alisa import Alisa
from pyorch.policies.base import Policy
from pyorch.policies.flexgen import FlexGen
from pyorch.policies.h2o import H2O
from pyorch.policies.keyformer import Keyformer
from pyorch.policies.lm_infinite import LMInfinite, StreamingLLM
from pyorch.policies.low_rank import LowRank
from pyorch.policies.oracle import Oracle
from pyorch.policies.pages import PageMeanStd, Quest
from pyorch.policies.sparq_tau import SparQTau
from pyorch.policies.watch import SPEC, Counters, PolicyWatch

_RETURNING = Oracle, FlexGen, LowRank, SparQTau, Quest, PageMeanStd, Alisa
_EVICTING = LMInfinite, StreamingLLM, H2O, Keyformer  # what was not read once is never read again
POLICIES: dict[str, type[Policy]] = {p.name: p for p in (*_RETURNING, *_EVICTING)}

Method = AttentionSpec | Policy
OFF = AttentionSpec("off")


class _StockFa0(AttentionSpec):
    """llama.cpp's attention without flash attention, its `-fa 0`; `off` is its `-fa 1`.

    Both are exact, so what tells them apart is what rounding alone does. It is a setting of a
    session (`flash_attn`) and not of the library, so only the evaluations can run it.
    """

    def line(self, without: Collection[str] = ()) -> str:
        return "stock-fa0"


STOCK_FA0 = _StockFa0()


@dataclass(frozen=True)
class Index(Policy):
    """A method of committed records, which can be shown and not run; see docs/tried.md."""

    part: int | None = None
    name = "index"


def is_sparse(method: Method) -> bool:
    """Whether a method leaves any position out."""
    return isinstance(method, Policy) or method.sparse


def parse(text: str) -> Method:
    """Parse `METHOD[,key=value]...`. Without ratio and k the ratio is 1/8.

    Raises:
        SparqError: an unknown name or a value out of range.
    """
    head, parts = line.split(text)
    if head == str(STOCK_FA0):
        if parts:
            raise SparqError(f"{head} has no settings", "they belong to sparq and topk", 2)
        return STOCK_FA0
    if head in METHODS:
        return parse_spec(text)
    if head not in POLICIES:
        raise nearest("method", head, (*METHODS, *POLICIES, str(STOCK_FA0)))
    kind = POLICIES[head]
    return kind(**line.read(kind, parts, f"setting of {head}"))


def recorded(text: str) -> Method:
    """The method of a record. Raises SparqError as `parse`."""
    head, parts = line.split(text)
    if head != Index.name:
        return parse(text)
    return Index(**line.read(Index, parts, f"setting of {head}"))


def open_session(
    model: str | os.PathLike[str],
    method: Method | str = OFF,
    *,
    keep_queries: bool = False,
    **load: Any,
) -> engine.Session:
    """A session of `engine.load(model, **load)` that decodes with `method`, which may be a line.

    Args:
        keep_queries: capture the queries of every prefill, so that a method that needs the
            attention of the prompt can be switched to after it. It takes the memory of K in f16
            times the query heads that share a KV head. Otherwise only such a method captures them.

    Raises:
        SparqError: whatever `engine.load` raises.
    """
    watch = PolicyWatch(keep_queries=keep_queries)
    session = engine.load(model, watch=watch, attention="off", **load)
    try:
        switch(session, method)
    except BaseException:
        session.close()
        raise
    return session


def switch(session: engine.Session, method: Method | str) -> None:
    """Decode with another method from the next token on; the counters start at zero.

    The state of the previous method is forgotten: the new one takes all that is in the cache as its
    prompt. The cache stays as it is (rewind it yourself).

    Raises:
        SparqError: the session is not from `open_session`, or the line is wrong.
    """
    method = parse(method) if isinstance(method, str) else method
    watch = _watch(session)
    watch.use(method if isinstance(method, Policy) else None)
    engine.set_attention(session, SPEC if isinstance(method, Policy) else method)
    engine.reset_counters(session)


def counters(session: engine.Session) -> Counters:
    """The counters of the method in Python since `switch` or `engine.reset_counters`.

    If `calls_sparse` is 0 after decoding, the method decided nothing: do not report results.
    """
    return _watch(session).counters


def _watch(session: engine.Session) -> PolicyWatch:
    if not isinstance(session.watch, PolicyWatch):
        raise SparqError("not a session of pyorch.policies.open_session")
    return session.watch


@dataclass(frozen=True)
class Bytes:
    """The bytes per decoded token in all layers: of K, V and what a method keeps beside them."""

    read: float
    dense: float

    @property
    def share(self) -> float:
        return self.read / self.dense if self.dense else 0.0


def counted_bytes(session: engine.Session) -> Bytes:
    """What was read since the counters of a session were reset.

    Raises:
        SparqError: nothing was decoded, nothing ran sparse that should, or the library read other
            positions than the method chose.
    """
    watch, info = _watch(session), engine.info(session)
    if watch.policy is None:
        if not info.counter("steps"):
            raise SparqError("no token was decoded, or all with llama.cpp's own attention")
        return Bytes(*per_token(info.counters))
    c = watch.counters
    if not c.calls_sparse:
        raise SparqError(f"{watch.policy}: nothing was selected", "no token was decoded sparsely")
    chosen, read = c.positions_read, info.counter("positions_read")
    if read != chosen:
        raise SparqError(f"{watch.policy}: chose {chosen} positions, but the library read {read}")
    return Bytes(*per_token(asdict(c)))
