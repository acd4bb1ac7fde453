"""Methods that choose whole pages by two vectors per page: Quest, and the mean of the keys.

A page is `page` positions in a row. Its two vectors are made once it is full, and kept in f16. The
page of the token itself is always read, and needs no vectors.

Quest (Tang et al., arXiv 2406.10774) takes an upper bound of a page's scores: it keeps the least
and the largest value of K per component, and the bound of q.k is the sum over the components of
max(q*min, q*max). For shared KV heads the bounds are taken as logits, softmaxed and summed over
their query heads (its code repeats K for every query head). Its code leaves the first two layers
dense; here every layer has the same bytes.

`page-mean-std` (arXiv 2605.27740) takes the sum over components of q*mean + offset*|q|*std. The
paper's offset is the norm of q times one deviation per page; per component it is Quest's bound with
other numbers, at the same bytes, as GGUF runtimes use it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pyorch.policies.base import Heads, Policy, Selector, Step, summed_scores, top_rows


class PageSelector(Selector):
    """summaries: the two vectors of the full pages (pages, n_head_kv, d_k), f16 values as f32."""

    policy: Paged

    def begin(self) -> None:
        self.summaries = [np.empty((0, self.heads.n_head_kv, self.heads.d_k), np.float32)] * 2

    def select(self, step: Step) -> np.ndarray:
        page = self.policy.page
        known, n_full = len(self.summaries[0]), step.last // page
        if n_full > known:
            keys = step.keys(known * page, n_full * page)
            new = self.policy.summary(keys.reshape(n_full - known, page, *keys.shape[1:]))
            self.summaries = [
                np.concatenate([old, add.astype(np.float16).astype(np.float32)])
                for old, add in zip(self.summaries, new, strict=True)
            ]
        logits = page_logits(self.policy.weights(step.q), self.summaries) * np.float32(step.scale)
        return select(logits, self.k_at(step), step.n_pos, page)


@dataclass(frozen=True)
class Paged(Policy):
    """page: the number of positions in a page."""

    page: int = 32
    selector = PageSelector

    def check(self) -> None:
        if self.page < 1:
            raise self.error(f"page {self.page} is below 1")

    def fixed_bytes(self, n_pos: int, heads: Heads) -> float:
        """The bytes of two vectors of d_k f16 for each page before the token's own."""
        return (n_pos - 1) // self.page * 2 * heads.d_k * 2

    def summary(self, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(pages, page, n_head_kv, d_k) f32 to two vectors per page: (pages, n_head_kv, d_k)."""
        raise NotImplementedError

    def weights(self, q: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The factors of both vectors, from q (n_head_kv, n_group_q, d_k): its shape, twice."""
        raise NotImplementedError


def page_logits(weights: tuple[np.ndarray, ...], summaries: list[np.ndarray]) -> np.ndarray:
    """(n_head_kv, n_group_q, pages): sum over the vectors of weight . vector."""
    each = (w @ s.transpose(1, 2, 0) for w, s in zip(weights, summaries, strict=True))
    logits: np.ndarray = sum(each)
    return logits


def select(logits: np.ndarray, k: int, n_pos: int, page: int) -> np.ndarray:
    """(n_head_kv, n_group_q, full pages) logits to positions: the best pages, and the own one."""
    n_head_kv, _, n_full = logits.shape
    n_own = n_pos - n_full * page
    m = min(max(k - n_own, 0) // page, n_full)
    pages = np.empty((n_head_kv, 0), np.int64)
    if m:  # in f64, since bounds differ by more than exp can represent in f32
        pages = top_rows(summed_scores(logits.astype(np.float64)), m)
    positions = (pages[:, :, None] * page + np.arange(page)).reshape(n_head_kv, -1)
    own = np.tile(np.arange(n_full * page, n_pos), (n_head_kv, 1))
    return np.concatenate([positions, own], axis=1)


@dataclass(frozen=True)
class Quest(Paged):
    page: int = 16  # as in its code
    name = "quest"

    def summary(self, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return keys.min(axis=1), keys.max(axis=1)

    def weights(self, q: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return np.minimum(q, 0), np.maximum(q, 0)


@dataclass(frozen=True)
class PageMeanStd(Paged):
    """offset: weight of the standard deviation."""

    offset: float = 1.0
    name = "page-mean-std"

    def summary(self, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return keys.mean(axis=1), keys.std(axis=1)

    def weights(self, q: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return q, np.abs(q) * np.float32(self.offset)
