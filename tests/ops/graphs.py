"""Graphs of our ops for the data of a case."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from cases import Data
from ggml_ctypes import (
    STATS,
    AttendParams,
    Ggml,
    Graph,
    PrefillParams,
    ScoreParams,
    ScoreSelectParams,
    SelectParams,
)

PADDED = {  # extra elements per numpy axis, as views of larger tensors have them
    "q": (0, 0, 0, 8),
    "k": (0, 64, 2, 16),
    "v": (0, 64, 2, 16),
    "k_t": (0, 0, 32),
    "v_sum": (0, 0, 8),
    "mask": (0, 0, 0, 32),
    "wanted": (0, 0, 0, 2),
}


@dataclass
class Sources:
    """Tensors of a case, by the names of the contract."""

    data: Data
    graph: Graph
    tensors: dict = field(default_factory=dict)

    def __post_init__(self) -> None:
        d = self.data
        for name, array, kind in [
            ("q", d.q, "f32"),
            ("k", d.k, d.case.type_k),
            ("v", d.v, d.case.type_v),
            ("k_t", d.k_t, "f16"),
            ("v_sum", d.v_sum, "f32"),
            ("sealed", d.sealed, "i32"),
            ("mask", d.mask, "f16"),
            ("visible", d.visible, "i32"),
            ("wanted", np.concatenate([d.kl, d.forced], axis=3), "i32"),
            ("sinks", d.sinks, "f32"),
        ]:
            pad = PADDED.get(name, ()) if d.case.strided else ()
            self.tensors[name] = self.graph.tensor(array, kind, pad)
        self.tensors["stats"] = self.graph.tensor(np.zeros(len(STATS)), "i64", inplace=True)

    def __getattr__(self, name: str):
        return self.tensors[name]

    def node(self, step: str, params, **given):
        """Of these tensors, and of those that are given in place of them."""
        return self.graph.node(step, params, **self.tensors | given)

    def stats_read(self) -> dict[str, int]:
        return dict(
            zip(STATS, self.graph.read(self.tensors["stats"])[0, 0, 0].tolist(), strict=True)
        )


def score_params(s: Sources, exact: bool = False) -> ScoreParams:
    case = s.data.case
    rank = 0 if exact else case.rank_value
    return ScoreParams(rank, case.scale, case.max_bias, case.softcap, 16, case.n_rot)


def select_params(s: Sources) -> SelectParams:
    case = s.data.case
    sizes = (s.data.topk_max, case.heads[1], s.data.n_local_max)
    return SelectParams(*sizes, case.mean_v, case.top_p)


def score(s: Sources, exact: bool = False):
    more = {"k_t": None} if exact else {}
    return s.node("score", score_params(s, exact), **more)


def score_select(s: Sources):
    """SCORE and SELECT in one node."""
    params = ScoreSelectParams(score_params(s), select_params(s))
    return s.node("score_select", params)


def select(s: Sources, logits):
    return s.node("select", select_params(s), logits=logits)


def attend(s: Sources, sel):
    case = s.data.case
    mean_v = case.mean_v and sel is not None
    params = AttendParams(case.scale, case.max_bias, case.softcap, mean_v)
    return s.node("attend", params, sel=sel)


def prefill(s: Sources, fast: bool = False):
    case = s.data.case
    params = PrefillParams(case.scale, case.max_bias, case.softcap, fast)
    return s.node("prefill", params)


def whole(s: Sources, exact: bool = False):
    """ggml_sparq_attn, or ggml_topk_attn where exact."""
    params = ScoreSelectParams(score_params(s), select_params(s))
    return s.node("topk_attn" if exact else "sparq_attn", params)


@dataclass
class Selection:
    """The result of SELECT, unpacked: cells per (stream, token, KV head), rest per query head."""

    cells: dict[tuple[int, int, int], np.ndarray]
    rest: np.ndarray  # (n_stream, n_tok, n_head_kv, g)
    raw: np.ndarray

    @classmethod
    def unpack(cls, raw: np.ndarray, g: int) -> Selection:
        cells = {}
        for index in np.ndindex(raw.shape[:-1]):
            row = raw[index]
            assert -1 <= row[0] <= len(row) - 1 - g, f"n_sel {row[0]}"
            n_sel = max(row[0], 0)  # -1: every visible position
            cells[index] = row[1 + g : 1 + g + n_sel]
            assert (row[1 + g + n_sel :] == -1).all(), "the tail is not -1"
        return cls(cells, raw[..., 1 : 1 + g].copy().view(np.float32), raw)

    @staticmethod
    def pack(cells: dict, rest: np.ndarray, topk_max: int) -> np.ndarray:
        g = rest.shape[-1]
        raw = np.full((*rest.shape[:-1], 1 + g + topk_max), -1, np.int32)
        raw[..., 1 : 1 + g] = rest.astype(np.float32).view(np.int32)
        for index, row in cells.items():
            raw[index][0] = len(row)
            raw[index][1 + g : 1 + g + len(row)] = row
        return raw


def sparse_run(ggml: Ggml, data: Data, n_threads: int = 2, exact: bool = False) -> np.ndarray:
    """(n_stream, n_tok, n_head, d_v) of the whole op."""
    with ggml.graph() as g:
        out = whole(Sources(data, g), exact)
        g.compute(out, n_threads=n_threads)
        return g.read(out).reshape(*data.q.shape[:3], -1)


def dense_run(ggml: Ggml, data: Data, n_threads: int = 2) -> np.ndarray:
    with ggml.graph() as g:
        out = attend(Sources(data, g), None)
        g.compute(out, n_threads=n_threads)
        return g.read(out).reshape(*data.q.shape[:3], -1)


def prefill_run(ggml: Ggml, data: Data, n_threads: int = 2, fast: bool = False) -> np.ndarray:
    with ggml.graph() as g:
        out = prefill(Sources(data, g), fast)
        g.compute(out, n_threads=n_threads)
        return g.read(out).reshape(*data.q.shape[:3], -1)
