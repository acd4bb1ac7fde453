"""The interface that the methods share, and how a ratio becomes a number of positions.

A method is a frozen dataclass of its settings (`Policy`). For each layer of a decoding session it
makes a `Selector`, which is asked at every token which positions each KV head reads. The
decision itself is a plain function of arrays in the method's file.

Bytes count all data that outlives a token and is read for one: rows of K and V, and what a method
keeps beside them. Logits, which do not outlive a token, cost nothing, and neither do writes. SparQ
and dense attention are counted in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from pyorch.attention import line
from pyorch.attention.cost import mean_bytes
from pyorch.attention.spec import DEFAULT_RATIO, MEAN_V
from pyorch.errors import SparqError, nearest
from pyorch.policies.prompt import Prompt


@dataclass(frozen=True)
class Heads:
    """The heads of one layer, the index-th that a method serves.

    k_bytes, v_bytes: the bytes of one position and KV head in the cache
    """

    n_head: int
    n_head_kv: int
    d_k: int
    d_v: int
    k_bytes: float
    v_bytes: float
    index: int = 0

    @property
    def row(self) -> float:
        return self.k_bytes + self.v_bytes


@dataclass(frozen=True)
class Step:
    """One token in one layer, with positions 0 .. n_pos-1, of which the last is the token's own.

    logits (n_head_kv, n_group_q, n_pos) f32: exact, scaled, soft-capped, biased
    q      (n_head_kv, n_group_q, d_k) f32
    keys   keys(a, b) reads K of the positions a .. b-1: (b - a, n_head_kv, d_k) f32
    """

    n_pos: int
    logits: np.ndarray
    q: np.ndarray
    scale: float
    keys: Callable[[int, int], np.ndarray]

    @property
    def last(self) -> int:
        return self.n_pos - 1


class Selector:
    """A method's state in one layer of one sequence. It is asked once per token, in order.

    prompt: the attention of the prompt, if the method `needs_prompt`
    alpha (n_head_kv, n_group_q), set by `select`: its estimate of the share of attention on
    the positions it chose; the mean of V stands for the rest (SparQ, eq. 10). None: no mean of V.
    """

    policy: Policy
    prompt: Prompt | None
    alpha: np.ndarray | None = None

    def __init__(self, policy: Policy, heads: Heads, prompt: Prompt | None) -> None:
        self.policy, self.heads, self.prompt = policy, heads, prompt
        self.begin()

    def begin(self) -> None:
        """Make the state that the method keeps from token to token."""

    def k_at(self, step: Step) -> int:
        return self.policy.k_at(step.n_pos, self.heads)

    def select(self, step: Step) -> np.ndarray:
        """The positions to read: (n_head_kv, n), ascending, each only once."""
        raise NotImplementedError


@dataclass(frozen=True)
class Policy:
    """The settings of a method. Exactly one of `ratio` and `k` decides how many positions are read.

    ratio  bytes read, including what the method keeps beside K and V, over the bytes of all K and
           V; 1/8 if neither is given
    k      the number of positions, whatever they cost

    Raises:
        SparqError: a value is out of range, or both are given.
    """

    ratio: float | None = None
    k: int | None = None

    name: ClassVar[str]
    selector: ClassVar[type[Selector]]
    needs_prompt: ClassVar[bool] = False  # whether it reads the attention of the prompt
    renormalises: ClassVar[bool] = True  # softmax over what is read, else over all positions

    def __post_init__(self) -> None:
        if self.k is not None and self.ratio is not None:
            raise self.error("ratio and k", "ratio gives k; choose one of them")
        if self.k is None and self.ratio is None:
            object.__setattr__(self, "ratio", DEFAULT_RATIO)  # frozen for everyone else
        if self.k is not None and self.k < 1:
            raise self.error(f"k {self.k} is below 1")
        if self.ratio is not None:
            line.check_ratio(self.ratio)
        self.check()

    def error(self, what: str, hint: str = "") -> SparqError:
        """The error for a wrong setting of this method."""
        return SparqError(f"{self.name}: {what}", hint, exit_code=2)

    @property
    def takes_ratio(self) -> bool:
        """Whether a ratio decides how many positions are read."""
        return self.k is None

    def at_ratio(self, ratio: float) -> Policy:
        """The same settings at another ratio, in place of k."""
        return replace(self, ratio=ratio, k=None)

    def start(self, heads: Heads, prompt: Prompt | None) -> Selector:
        """Begin a sequence in one layer."""
        return self.selector(self, heads, prompt)

    def fixed_bytes(self, n_pos: int, heads: Heads) -> float:
        """The bytes per KV head that do not depend on the number of positions read."""
        return 0.0

    def position_bytes(self, heads: Heads) -> float:
        """The bytes per KV head and position read."""
        return heads.row

    def bytes_read(self, n_read: int, n_pos: int, heads: Heads) -> float:
        """The bytes per KV head of a token that reads `n_read` of `n_pos` positions."""
        return self.fixed_bytes(n_pos, heads) + n_read * self.position_bytes(heads)

    @property
    def least(self) -> int:
        """The number of positions that are read whatever the ratio."""
        return 1

    def k_at(self, n_pos: int, heads: Heads) -> int:
        """The number of positions that a token may read at `n_pos` positions, itself included.

        Raises:
            SparqError: the costs that do not depend on k exceed the ratio.
        """
        if self.k is not None:
            return min(self.k, n_pos)
        assert self.ratio is not None
        fixed, dense = self.fixed_bytes(n_pos, heads), n_pos * heads.row
        if fixed >= self.ratio * dense:
            raise SparqError(
                f"{self}: what it reads to choose is {100 * fixed / dense:.1f} % of the bytes",
                f"a ratio above {fixed / dense:.3f}, or k=N",
                exit_code=2,
            )
        k = int((self.ratio * dense - fixed) / self.position_bytes(heads) + 1e-9)
        return min(max(k, self.least), n_pos)

    def check(self) -> None:
        """Raise SparqError if a setting of the method's own is out of range."""

    def line(self, without: Collection[str] = ()) -> str:
        """The canonical line: the name, then what differs from the defaults."""
        return line.write(self.name, self, without)

    def __str__(self) -> str:
        return self.line()


@dataclass(frozen=True)
class WithMeanV(Policy):
    """mean_v: whether the mean of V stands for positions not read: on, off, or auto (only if no KV
    head is shared, as in SparQ's paper)."""

    mean_v: str = "auto"

    def check(self) -> None:
        if self.mean_v not in MEAN_V:
            raise nearest("mean_v", self.mean_v, MEAN_V)

    def uses_mean_v(self, heads: Heads) -> bool:
        return self.mean_v == "on" or (self.mean_v == "auto" and heads.n_head == heads.n_head_kv)

    def fixed_bytes(self, n_pos: int, heads: Heads) -> float:
        """The sums of V, as `sparq` keeps them."""
        return mean_bytes(n_pos, heads.d_v, heads.v_bytes) if self.uses_mean_v(heads) else 0.0


def softmax(logits: np.ndarray) -> np.ndarray:
    """Softmax over the last axis; -inf becomes 0. A row with only -inf gives NaN."""
    e: np.ndarray = np.exp(logits - logits.max(axis=-1, keepdims=True))
    e /= e.sum(axis=-1, keepdims=True)
    return e


def summed_scores(logits: np.ndarray) -> np.ndarray:
    """(n_head_kv, n_group_q, n) logits to (n_head_kv, n): what positions are ranked by.

    As SparQ does for shared KV heads: softmaxed scores, summed over their query heads. With one
    query head the logit itself, which has the same order.
    """
    return logits[:, 0] if logits.shape[1] == 1 else softmax(logits).sum(axis=1)


def top(scores: np.ndarray, k: int) -> np.ndarray:
    """The indices of the k largest of (n,) scores, ascending. Ties go to the lower index."""
    n = len(scores)
    if k >= n:
        return np.arange(n)
    if k <= 0:
        return np.empty(0, np.int64)
    cut = np.partition(scores, n - k)[n - k]
    chosen = scores > cut
    ties = np.flatnonzero(scores == cut)
    chosen[ties[: k - np.count_nonzero(chosen)]] = True
    return np.flatnonzero(chosen)


def top_rows(scores: np.ndarray, k: int) -> np.ndarray:
    """`top` of each row: (h, n) to (h, min(k, n))."""
    return np.stack([top(row, k) for row in scores])


def evict(
    positions: np.ndarray, sums: np.ndarray, last: int, k: int, local: int
) -> tuple[np.ndarray, np.ndarray]:
    """Add position `last` with sum 0, then keep k: the newest `local`, and the largest sums.

    (n_head_kv, m) to (n_head_kv, min(k, m + 1)), both. Ties: the lower position. The newest `local`
    positions up to `last` must be among `positions`.
    """
    h = len(positions)
    positions = np.concatenate([positions, np.full((h, 1), last)], axis=1)
    sums = np.concatenate([sums, np.zeros((h, 1), sums.dtype)], axis=1)
    n_old = positions.shape[1] - local
    if k >= positions.shape[1]:
        return positions, sums
    newest = np.arange(n_old, positions.shape[1])
    keep = np.stack([np.append(top(row[:n_old], k - local), newest) for row in sums])
    return np.take_along_axis(positions, keep, axis=1), np.take_along_axis(sums, keep, axis=1)


def at(values: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """(n_head_kv, n_group_q, n) at (n_head_kv, k) positions: (n_head_kv, n_group_q, k)."""
    return np.take_along_axis(values, positions[:, None], axis=2)


def same_for_all(positions: np.ndarray, n_head_kv: int) -> np.ndarray:
    """The same positions for all KV heads: (n,) to (n_head_kv, n)."""
    return np.broadcast_to(positions, (n_head_kv, len(positions)))
