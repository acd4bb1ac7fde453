"""What the library really did in a session: queries, keys, values, selections and results.

Read from the tensors with the readers of the end-to-end tests, not with those of the package.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

sys.path += [str(Path(__file__).parents[1] / part) for part in ("e2e", "ops")]

import nodes
from ggml_ctypes import Tensor

from pyorch import engine
from pyorch.native.slots import ATTEND, PREFILL, source_of


@dataclass
class Read:
    """One token in one layer. cells: what each KV head read; out (n_head, d_v)."""

    q: np.ndarray
    k: np.ndarray  # (n_pos, n_head_kv, d_k)
    v: np.ndarray
    cells: list[set[int]]
    out: np.ndarray


@dataclass
class Trace:
    """prompt: (n, n_head, d_k) by layer; reads: by layer, one per decoded token.

    A layer is named by the address of its K.
    """

    prompt: dict[int, list[np.ndarray]] = field(default_factory=lambda: defaultdict(list))
    reads: dict[int, list[Read]] = field(default_factory=lambda: defaultdict(list))


def trace(session: engine.Session) -> Trace:
    """Record from now on; `untrace` ends it."""
    watch: Any = session.watch
    trace, inner, ours = Trace(), type(watch).node, watch.ours

    def node(address: int, ask: bool) -> bool:
        answer = inner(watch, address, ask)
        t = Tensor.from_address(address)
        is_attend = t.op == ours and t.op_params[0] == ATTEND
        is_prompt = t.op == ours and t.op_params[0] == PREFILL
        if ask:
            return answer or is_attend or is_prompt
        if not is_attend and not is_prompt:
            return answer
        layer = source_of(t, "k").data
        if is_attend and source_of(t, "sel"):
            sources = (source_of(t, name) for name in ("q", "k", "v", "sel"))
            q, k, v, sel = (nodes.read(x)[0] for x in sources)
            n = len(session.tokens) + 1
            group = q.shape[1] // k.shape[1]
            rows = [set(r[1 + group :][: r[0]].tolist()) for r in sel[0]]
            assert all((r[1 + group + r[0] :] == -1).all() for r in sel[0])
            out = nodes.read(t).reshape(q.shape[1], -1).copy()
            trace.reads[layer].append(
                Read(q[0].copy(), k[:n].astype(np.float32), v[:n].astype(np.float32), rows, out)
            )
        elif is_prompt:
            trace.prompt[layer].append(nodes.read(source_of(t, "q"))[0].copy())
        return answer

    watch.node = node
    return trace


def untrace(session: engine.Session) -> None:
    del session.watch.node
