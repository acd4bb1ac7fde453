"""Lets a method in Python decide what llama.cpp's real decoding reads.

The library runs its `topk` method: SCORE (exact), SELECT, ATTEND for each layer. `PolicyWatch` is
llama.cpp's evaluation callback: when SELECT is computed it asks the method, and overwrites SELECT's
result, which ATTEND then reads, with the method's choice. Where a method's softmax runs over all
positions, ATTEND's result is scaled by the share of what was read; where the mean of V stands for
the rest, it is added.

The sources of the nodes that attend in prefill give the queries of the prompt, for methods that
need its attention.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from pyorch.engine import Session
from pyorch.errors import SparqError
from pyorch.native.prototypes import declare
from pyorch.native.slots import ATTEND, I_FORCED, PREFILL, SELECT, source_of
from pyorch.native.tensor import Tensor, floats, op_number, row_bytes, source, view
from pyorch.policies.base import Heads, Policy, Selector, Step, at, softmax
from pyorch.policies.prompt import Queries

# SCORE from all of K, and SELECT with room for (nearly) all positions. It always includes the
# newest cell, and then the first four.
SPEC = "topk,ratio=0.997,min_k=1,min_ctx=0,local=1,sinks=4"
_SCALE = 2  # in the op_params of SCORE: the step, the rank, the scale
_OBJECT = 32  # struct ggml_object, in front of every tensor of a context
_OP, _PARAMS = Tensor.op.offset, Tensor.op_params.offset


@dataclass
class Counters:
    """Counts since the last reset, by the names of the library's own. Positions and bytes are
    summed over layers and KV heads."""

    steps: int = 0  # tokens
    bytes_read: float = 0.0
    bytes_dense: float = 0.0
    positions_read: int = 0
    calls_sparse: int = 0  # results of SELECT that were overwritten, one per layer and token


@dataclass
class PolicyWatch:
    """The `engine.Watcher` of methods in Python. With `policy` None it looks at nothing.

    keep_queries: capture the prompt even if the method does not need it, for later methods
    """

    keep_queries: bool = False
    policy: Policy | None = None
    counters: Counters = field(default_factory=Counters)
    queries: Queries = field(default_factory=Queries)

    def __post_init__(self) -> None:
        self.session: Session | None = None
        # by the address of the layer's K
        self._layers: dict[int, tuple[Heads, Selector]] = {}
        self._n_seen = -1  # how many positions the selectors know
        self._n_pos = 0  # the positions of this step; 0: nothing is selected yet
        # by the address of the SELECT node: the change of ATTEND's result (n_head, d_v)
        self._after: dict[int, Callable[[Tensor, np.ndarray], None]] = {}
        # by the address of V: the sums of its first n rows
        self._v_sums: dict[int, tuple[int, np.ndarray]] = {}
        self._error: BaseException | None = None

    # ---- called by the session ----

    def attach(self, session: Session) -> None:
        """Learn the numbers of the ops, and the bytes of a row of V.

        Raises:
            SparqError: the library's tensors do not have the layout of `Tensor`.
        """
        ggml = declare(session.lib._lib)
        if ggml.ggml_tensor_overhead() != ctypes.sizeof(Tensor) + _OBJECT:
            raise SparqError("struct ggml_tensor is not what pyorch/native/tensor.py says")
        self.session = session
        self.ours = op_number(ggml, "SPARSE_ATTN")
        self.flash_attn = op_number(ggml, "FLASH_ATTN_EXT")
        # whether Python can read a buffer
        self.is_host: Callable[[int], bool] = ggml.ggml_backend_buffer_is_host
        self.d_v = session.geometry.head_dim_v

    @property
    def n_tokens(self) -> int:
        """The number of positions in the cache before this llama_decode."""
        assert self.session is not None
        return len(self.session.tokens)

    def use(self, policy: Policy | None) -> None:
        """Use another method, or none. The old method's state is forgotten, but not the prompt."""
        self.policy = policy
        self._forget()

    def reset(self) -> None:
        self.counters = Counters()

    def done(self, n_past: int) -> None:
        """Called after each llama_decode that began with `n_past` positions.

        Raises:
            SparqError, ..: an error of `node`, which cannot raise through C.
        """
        if self._n_pos:
            self._n_seen = self._n_pos
            self.counters.steps += 1
        else:
            self._forget()
        self.queries.done(n_past)
        self._n_pos = 0
        error, self._error = self._error, None
        if error is not None:
            self._forget()
            raise error

    def _forget(self) -> None:
        self._layers.clear()
        self._after.clear()
        self._v_sums.clear()
        self._n_seen = -1

    def node(self, address: int, ask: bool) -> bool:
        """llama.cpp asks whether a tensor is wanted, and passes it again when it is computed."""
        if self.session is None or self._error is not None:
            return not ask
        try:
            op = ctypes.c_int.from_address(address + _OP).value
            step = ctypes.c_int32.from_address(address + _PARAMS).value
            ours = op == self.ours
            if op == self.flash_attn or (ours and step == PREFILL):
                if self._captures and not ask:
                    t = Tensor.from_address(address)
                    self.check_host(source(t, 0), source(t, 1))
                    self.queries.add(t, self.n_tokens, ours)
                return self._captures or not ask
            if ours:
                if self.policy is None or step not in (SELECT, ATTEND):
                    return not ask
                t = Tensor.from_address(address)
                if step == ATTEND and source_of(t, "sinks") is not None:
                    raise SparqError(f"{self.policy}: not for models with learned sinks")
                if step == ATTEND and not self._after:
                    return not ask
                if not ask and step == SELECT:
                    self._select(t)
                elif not ask:
                    self._attend(t)
                return True
        except BaseException as error:  # noqa: BLE001
            self._error = error
        return not ask

    @property
    def _captures(self) -> bool:
        return self.keep_queries or (self.policy is not None and self.policy.needs_prompt)

    # ---- SELECT and ATTEND ----

    def _select(self, t: Tensor) -> None:
        score = source_of(t, "logits")
        assert score is not None and self.policy is not None
        q, k = (source_of(score, name) for name in ("q", "k"))
        assert q is not None and k is not None
        if self._n_pos == 0:
            self.check_host(t, score, q, k)
        logits = view(score)
        if logits.shape[:2] != (1, 1):
            raise SparqError(f"{self.policy}: serves one sequence, one token at a time")
        if self._n_pos == 0:
            self._begin_step(t, logits[0, 0])
        n_pos, n_head_kv = self._n_pos, k.ne[1]
        stored, q_rows = view(k)[0], view(q)[0, 0]
        heads, selector = self._layers.get(k.data) or self._start(k, q)
        step = Step(
            n_pos=n_pos,
            logits=logits[0, 0, :, :n_pos].reshape(n_head_kv, -1, n_pos),
            q=q_rows.reshape(n_head_kv, -1, k.ne[0]),
            scale=float(np.int32(score.op_params[_SCALE]).view(np.float32)),
            keys=lambda a, b: floats(stored[a:b], k.type),
        )
        positions = selector.select(step)
        if self._captures:
            self.queries.put(k.data, q_rows[None], n_pos - 1, None)
        self._write(t, positions, step)
        self._account(heads, positions.shape[1])
        self._plan_result(t, positions, step, selector.alpha)

    def _begin_step(self, t: Tensor, logits: np.ndarray) -> None:
        """In a token's first layer, check that cells are positions and that no token was missed.

        Raises:
            SparqError: cells are not in the order of positions.
        """
        n_pos = self.n_tokens + 1
        rows = source_of(t, "wanted")
        assert rows is not None
        newest, *first = view(rows)[0, 0, 0, t.op_params[I_FORCED] :]
        hidden = np.isneginf(logits[0])
        in_order = newest == n_pos - 1 and all(c in (i, -1) for i, c in enumerate(first))
        if not in_order or hidden[:n_pos].any() or not hidden[n_pos:].all():
            raise SparqError(
                f"{self.policy}: the cells of the cache are not in the order of positions",
                "a session that only prefills, decodes and rewinds keeps them in order",
            )
        if n_pos != self._n_seen + 1:
            self._forget()
        self._n_pos = n_pos

    def check_host(self, *tensors: Tensor | None) -> None:
        """Refuse tensors in the memory of another device.

        Raises:
            SparqError: one does.
        """
        for t in tensors:
            buffer = t and (t.buffer or (t.view_src and t.view_src.contents.buffer))
            if buffer and not self.is_host(buffer):
                raise SparqError(
                    "attention is computed on a GPU, where Python does not see it",
                    "load the model with n_gpu_layers=0",
                )

    def _start(self, k: Tensor, q: Tensor) -> tuple[Heads, Selector]:
        assert self.policy is not None and self.session is not None
        heads = Heads(
            n_head=q.ne[1],
            n_head_kv=k.ne[1],
            d_k=k.ne[0],
            d_v=self.d_v,
            k_bytes=row_bytes(k),
            v_bytes=self.d_v * self.session.types[1].bytes_per_element,
            index=len(self._layers),
        )
        prompt = None
        if self.policy.needs_prompt:
            prompt = self.queries.prompt(k, self._n_pos - 1, self.policy.name)
        self._layers[k.data] = heads, self.policy.start(heads, prompt)
        return self._layers[k.data]

    def _write(self, t: Tensor, positions: np.ndarray, step: Step) -> None:
        """Write SELECT's result: n_sel, rest (-inf: not wanted), cells in ascending order, then -1.

        Raises:
            SparqError: a position does not exist, or is not in ascending order; or there is no room
                for so many.
        """
        n = positions.shape[1]
        if n < 1 or positions[:, 0].min() < 0 or positions[:, -1].max() >= step.n_pos:
            raise SparqError(f"{self.policy}: chose positions that are not there")
        if (positions[:, 1:] <= positions[:, :-1]).any():
            raise SparqError(f"{self.policy}: chose a position twice, or not in order")
        rows, first = view(t)[0, 0], 1 + step.logits.shape[1]
        if n > rows.shape[1] - first:
            raise SparqError(
                f"{self.policy}: reads {n} of {step.n_pos} positions, and the library's selection"
                f" has room for {rows.shape[1] - first}",
                "dense attention reads everything",
            )
        rows[:, 0] = n
        rows[:, first : first + n] = positions
        rows[:, first + n :] = -1

    def _plan_result(
        self, t: Tensor, positions: np.ndarray, step: Step, alpha: np.ndarray | None
    ) -> None:
        """Plan the change of ATTEND's result, if there is one."""
        assert self.policy is not None
        if not self.policy.renormalises:
            kept = at(softmax(step.logits), positions).sum(axis=2).reshape(-1, 1)
            self._after[ctypes.addressof(t)] = lambda _, out: np.multiply(out, kept, out=out)
        elif alpha is not None:
            self._after[ctypes.addressof(t)] = lambda attend, out: self._interpolate(
                attend, out, alpha, step.n_pos
            )

    def _interpolate(self, t: Tensor, out: np.ndarray, alpha: np.ndarray, n_pos: int) -> None:
        """out (n_head, d_v) times alpha (n_head_kv, n_group_q), and the rest of the mean of V."""
        v = source_of(t, "v")
        assert v is not None
        n, total = self._v_sums.get(v.data, (0, np.zeros(())))
        total = total + floats(view(v)[0, n:n_pos], v.type).sum(axis=0, dtype=np.float64)
        self._v_sums[v.data] = n_pos, total
        mean = np.repeat(total / n_pos, alpha.shape[1], axis=0)
        share = alpha.reshape(-1, 1)
        out[:] = share * out + (1 - share) * mean

    def _account(self, heads: Heads, n_read: int) -> None:
        assert self.policy is not None
        c, n_pos = self.counters, self._n_pos
        c.calls_sparse += 1
        c.positions_read += n_read * heads.n_head_kv
        c.bytes_read += self.policy.bytes_read(n_read, n_pos, heads) * heads.n_head_kv
        c.bytes_dense += n_pos * heads.row * heads.n_head_kv

    def _attend(self, t: Tensor) -> None:
        selection = source_of(t, "sel")
        assert selection is not None
        if change := self._after.pop(ctypes.addressof(selection), None):
            change(t, view(t)[0, 0, 0].reshape(-1, self.d_v))
