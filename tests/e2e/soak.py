"""A long decode on a tiny model: context shifts, cells freed and used again, sealing all along.

    python tests/e2e/soak.py --tokens 100000

test_soak.py runs it, in the environment of llama.python_environment. Two sequences share one cache
and take turns, so their cells mix; now and then the tail of one is decoded again, or its first part
is dropped and the rest moves up. On samples, every node of a step is compared with the oracle
(nodes.py), the shadow with a fresh one, and the logits of our exact attention with llama.cpp's.
Prints one line of JSON, with the growth of memory over the last four fifths of each setting's
tokens; that of the comparisons is in it, so take it from a run without (--sample 0).
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import tiny
from llama import Context, Model
from nodes import Watch
from server import resident

N_CTX = 2048  # cells of both sequences together
N_SEQ = 2
N_LAYER = 2  # of the tiny model
SPECS = {  # each for a quarter of the tokens
    "f16": "sparq,rank=8,topk=64,min_ctx=0,mean_v=on,shadow=f16",
    "q8": "sparq,ratio=1/8,min_k=16,min_ctx=0,shadow=q8",
    "q4": "sparq,ratio=1/8,min_k=16,min_ctx=0,mean_v=on,shadow=q4",
    "topk": "topk,ratio=1/8,min_k=16,min_ctx=0",
}


class Sampler(Watch):
    """Sees no node unless told to: then the graph runs as a whole."""

    on = False

    def wants(self, address: int) -> bool:
        return self.on and super().wants(address)


class Soak:
    def __init__(self, folder: Path, n_threads: int) -> None:
        self.rng = np.random.default_rng(1)
        self.watch = Sampler()
        self.model = Model(tiny.write(folder / "m.gguf", "llama", n_ctx=N_CTX))
        self.ctx = Context(
            self.model, n_ctx=N_CTX, n_seq=N_SEQ, n_threads=n_threads, watch=self.watch
        )
        self.done = dict.fromkeys(("tokens", "shifts", "cuts", "samples"), 0)
        self.worst = 0.0  # largest difference of logits, in units of their spread

    def run(self, spec: str, n_tokens: int, n_sample: int) -> int:
        """Decode; returns the growth in bytes."""
        self.ctx.set_sparse(spec)
        self.ctx.reset_counters()
        begin = self.done["tokens"]
        settled = 0
        for i in range(n_tokens):
            self.step(i % N_SEQ)
            if n_sample and i % n_sample == n_sample - 1:
                self.sample(spec)
            if i == n_tokens // 5:
                settled = resident()
        prompts = 0 if begin else N_SEQ  # the first token of a sequence is its prompt, and exact
        n_sparse = self.done["tokens"] - begin - prompts
        assert self.ctx.info()["counters"]["calls_sparse"] == N_LAYER * n_sparse
        return resident() - settled

    def token(self, seq: int) -> tuple[int, int, int]:
        return int(self.rng.integers(3, 259)), self.ctx.seq_range(seq)[1] + 1, seq

    def step(self, seq: int) -> None:
        last = self.ctx.seq_range(seq)[1]
        if last + 1 >= N_CTX // N_SEQ - 1:  # full: the first part goes, the rest moves up
            n = int(self.rng.integers(50, last // 2))
            assert self.ctx.seq_rm(seq, 4, 4 + n)
            self.ctx.seq_add(seq, 4 + n, -1, -n)
            self.done["shifts"] += 1
        elif self.rng.random() < 0.005 and last > 100:  # that was no good: once more from there
            assert self.ctx.seq_rm(seq, last - int(self.rng.integers(1, 80)), -1)
            self.done["cuts"] += 1
        assert self.ctx.decode([self.token(seq)]) == 0
        self.done["tokens"] += 1

    def sample(self, spec: str) -> None:
        self.watch.on = True
        self.watch.clear()
        self.step(0)
        self.watch.on = False
        assert self.watch.attends and all(a.is_sparse for a in self.watch.attends)
        assert self.ctx.check_shadow() <= 0, "the shadow differs from K and V"
        token, logits = self.token(1), []
        for method in ("dense", "off"):
            self.ctx.set_sparse(method)
            assert self.ctx.decode([token]) == 0
            logits.append(self.ctx.logits())
            assert self.ctx.seq_rm(1, token[1], -1)
        self.ctx.set_sparse(spec)
        self.worst = max(self.worst, float(np.abs(logits[0] - logits[1]).max() / logits[1].std()))
        assert self.worst < 0.05, "exact attention differs from llama.cpp's"
        self.done["samples"] += 1


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=100_000)
    parser.add_argument("--sample", type=int, default=1000, help="every so many tokens; 0: never")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        soak = Soak(Path(folder), args.threads)
        part = args.tokens // len(SPECS)
        grown = {name: soak.run(spec, part, args.sample) for name, spec in SPECS.items()}
    report = soak.done | {
        "logits": round(soak.worst, 6),
        "grown_kib": {name: n // 1024 for name, n in grown.items()},
        "resident_mib": round(resident() / 2**20, 1),
        "seconds": round(time.monotonic() - started),
    }
    print(json.dumps(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
