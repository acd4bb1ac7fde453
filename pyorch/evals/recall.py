"""Measures how much of the true attention a method reads, by layer, from the nodes that ran.

The inputs of ATTEND suffice: q and K give the exact scores, and the node's list has the selection,
whoever made it. So native methods and those in Python are measured alike.
"""

from __future__ import annotations

import ctypes

import numpy as np

from pyorch.native.slots import ATTEND, source_of
from pyorch.native.tensor import Tensor, floats, view
from pyorch.policies.base import softmax
from pyorch.policies.watch import Watch

_OP, _PARAMS = Tensor.op.offset, Tensor.op_params.offset


class RecallWatch(Watch):
    """A `Watch` that also notes, while `masses` is a dict, the mass of each ATTEND node by layer.

    A mass is the share of the softmax in the positions that were read, as a mean over query heads.
    It is NaN where attention is biased by distance (ALiBi), which is not modelled here.
    """

    masses: dict[int, list[float]] | None = None

    def node(self, address: int, ask: bool) -> bool:
        wanted = self.masses is not None and self._is_attend(address)
        if wanted and not ask:
            try:
                t = Tensor.from_address(address)
                self.check_host(t, *(source_of(t, name) for name in ("q", "k", "mask", "sel")))
                self._note(t)
            except BaseException as error:  # noqa: BLE001  raised by `done`
                self._error = self._error or error
        mine = super().node(address, ask)
        return mine or wanted if ask else mine

    def _is_attend(self, address: int) -> bool:
        if ctypes.c_int.from_address(address + _OP).value != self.attached.ours:
            return False
        return ctypes.c_int32.from_address(address + _PARAMS).value == ATTEND

    def _note(self, t: Tensor) -> None:
        assert self.masses is not None
        layer = int(t.name.decode().rpartition("-")[2])
        self.masses.setdefault(layer, []).append(mass_read(t))


def mass_read(t: Tensor) -> float:
    """The mass that an ATTEND node reads with one token of one sequence; 1 where it reads all."""
    selection = source_of(t, "sel")
    if selection is None:
        return 1.0
    q, k, mask = (source_of(t, name) for name in ("q", "k", "mask"))
    assert q is not None and k is not None and mask is not None
    scale, max_bias, softcap = np.array(t.op_params[1:4], np.int32).view(np.float32)
    if max_bias:
        return float("nan")
    keys = floats(view(k)[0], k.type)  # (n_kv, n_head_kv, d)
    rows = view(q)[0, 0].reshape(keys.shape[1], -1, keys.shape[2])  # (n_head_kv, n_group_q, d)
    logits = np.einsum("hgd,nhd->hgn", rows, keys, dtype=np.float32) * scale
    if softcap:
        logits = softcap * np.tanh(logits / softcap)
    hidden = np.isneginf(floats(view(mask)[0, 0, 0], mask.type))[: logits.shape[2]]
    share = softmax(np.where(hidden, -np.inf, logits))
    chosen, first = view(selection)[0, 0], 1 + rows.shape[1]
    return float(
        np.mean([s[:, c[first : first + c[0]]].sum(1) for s, c in zip(share, chosen, strict=True)])
    )
