"""SparQ with another softmax temperature for its approximate scores: SparQ's Fig. 7b.

It scores with the r components of K in which |q| is largest (summed over the query heads of a KV
head, as the library does), and reads them from K itself. tau (arXiv 2312.04985, eq. 9 and section
5.4) is one of:

    eq9     sqrt(d_k |q_r| / |q|) with L1 norms, as in `sparq`
    sqrt-d  the temperature of exact attention
    sqrt-r  the temperature of r independent components

tau decides alpha and, for shared KV heads, the ranking. As in `sparq`, the model's own scale takes
the place of 1/sqrt(d_k).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pyorch.errors import nearest
from pyorch.policies.base import Step, top_rows
from pyorch.policies.scan import Scan, ScanSelector

TAUS = ("eq9", "sqrt-d", "sqrt-r")


class SparQTauSelector(ScanSelector):
    policy: SparQTau

    def approximate_logits(self, step: Step) -> np.ndarray:
        rank = self.policy.rank_of(self.heads)
        size = np.abs(step.q)
        best = top_rows(size.sum(axis=1), rank)  # (n_head_kv, rank)
        keys = step.keys(0, step.n_pos).transpose(1, 2, 0)
        kept_k = np.take_along_axis(keys, best[:, :, None], axis=1)
        kept_q = np.take_along_axis(step.q, best[:, None], axis=2)
        match self.policy.tau:
            case "eq9":
                total = np.maximum(size.sum(axis=2, keepdims=True), np.finfo(np.float32).tiny)
                factor = np.sqrt(np.abs(kept_q).sum(axis=2, keepdims=True) / total)
            case "sqrt-r":
                factor = np.float32(np.sqrt(rank / step.q.shape[2]))
            case _:
                factor = np.float32(1)
        logits: np.ndarray = kept_q @ kept_k * np.float32(step.scale)
        return logits / np.where(factor > 0, factor, 1)


@dataclass(frozen=True)
class SparQTau(Scan):
    tau: str = "eq9"
    name = "sparq-tau"
    selector = SparQTauSelector

    def check(self) -> None:
        super().check()
        if self.tau not in TAUS:
            raise nearest("tau", self.tau, TAUS)
