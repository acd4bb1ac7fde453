"""Index: the best positions among those that an index of nearest neighbours finds.

Top-k attention for a million tokens (arXiv 2502.06766, section 3) keeps K in an index of faiss.
This is its index of inverted lists: each key lies in the list of the centroid with the largest
inner product, and a query head looks into the lists whose centroids are the best for it. The rows
that it finds are scored exactly. As for `sparq`, the newest k/4 and the first 4 positions are
always in. Shared KV heads: all heads of a group score what one of them finds, and the softmaxed
scores are summed. Where fewer than k are found, the first positions fill up.

What is read to choose depends on the text, so only k can be set, and the bytes are counted.
`topk` reads what faiss's flat index finds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from pyorch import paths
from pyorch.errors import SparqError
from pyorch.policies.base import Heads, Policy, Prompt, Selector, Step
from pyorch.policies.scan import always_in, select

TRAINED_WITH = 64  # keys for each list, at most


@dataclass(frozen=True)
class Index(Policy):
    """part: a query head looks into one of so many lists."""

    part: int = 16
    sinks: int = 4

    name = "index"

    def check(self) -> None:
        if self.k is None:
            raise self.error("what it reads depends on the text", f"{self.name},k=128,part=16")
        if self.part < 1 or self.sinks < 0:
            raise self.error("part is at least 1, sinks 0")

    def start(self, heads: Heads, prompt: Prompt | None) -> IndexSelector:
        return IndexSelector(self, heads)

    def position_bytes(self, heads: Heads) -> float:
        return heads.v_bytes  # K is among what is read to choose


@dataclass
class IndexSelector(Selector):
    """The lists are made from the positions of the first token that is decided on; later positions
    join them.

    centroids (n_head_kv, n_list, d_k) f32
    lists     (n_head_kv, n) the number of each position's list
    """

    policy: Index
    heads: Heads
    centroids: np.ndarray | None = None
    lists: np.ndarray | None = None

    def select(self, step: Step) -> np.ndarray:
        centroids, lists = self._lists_of(step)
        n_list = centroids.shape[1]
        looks = max(n_list // self.policy.part, 1)
        near = step.q @ centroids.transpose(0, 2, 1)  # (n_head_kv, n_group_q, n_list)
        best = np.argpartition(-near, looks - 1, axis=2)[..., :looks]
        is_open = np.zeros((len(near), n_list), bool)
        np.put_along_axis(is_open, best.reshape(len(near), -1), True, 1)
        found = np.take_along_axis(is_open, lists, 1)
        k = self.policy.k_at(step.n_pos, self.heads)
        n_first, n_newest = always_in(step.n_pos, k, self.policy.sinks)
        found[:, :n_first] = found[:, step.n_pos - n_newest :] = True
        logits = np.where(found[:, None], step.logits, -np.inf)
        positions = select(logits, k, self.policy.sinks)
        np.put_along_axis(found, positions, True, 1)
        self.bytes_to_choose = self.heads.k_bytes * float(found.sum() + len(near) * n_list)
        return positions

    def _lists_of(self, step: Step) -> tuple[np.ndarray, np.ndarray]:
        """The centroids, and the lists of all positions of a token."""
        if self.centroids is None or self.lists is None:
            keys = step.keys(0, step.n_pos).transpose(1, 0, 2)
            self.centroids = np.stack([centroids_of(head) for head in keys])
            self.lists = np.zeros((len(keys), 0), np.int64)
        n = self.lists.shape[1]
        keys = step.keys(n, step.n_pos).transpose(1, 0, 2)
        nearest = (keys @ self.centroids.transpose(0, 2, 1)).argmax(2)
        self.lists = np.concatenate([self.lists, nearest], axis=1)
        return self.centroids, self.lists


def faiss() -> Any:
    """The library.

    Raises:
        SparqError: it is not installed.
    """
    try:
        import faiss as module
    except ImportError:
        raise SparqError("faiss is not installed", paths.install_command("eval")) from None
    return module


def inverted_lists(keys: np.ndarray) -> Any:
    """faiss's index of inverted lists for keys (n, d) f32: trained, and empty."""
    lib, (n, d) = faiss(), keys.shape
    n_list = min(2 ** round(np.log2(4 * np.sqrt(n))), n)
    index = lib.IndexIVFFlat(lib.IndexFlatIP(d), d, n_list, lib.METRIC_INNER_PRODUCT)
    index.cp.min_points_per_centroid = 1
    index.train(np.ascontiguousarray(keys[:: max(n // (TRAINED_WITH * n_list), 1)]))
    return index


def centroids_of(keys: np.ndarray) -> np.ndarray:
    """The centroids of the lists for keys (n, d) f32: (n_list, d)."""
    index = inverted_lists(keys)
    found: np.ndarray = index.quantizer.reconstruct_n(0, index.nlist)
    return found
