"""Random operations on a tiny model, next to a plain model of what the cache must hold.

    python tests/e2e/fuzz.py --seed 3 --ops 400

test_fuzz.py runs it, in the environment of llama.python_environment. The plain model is a list of
cells, each with a position, a token and the sequences that it belongs to; it knows nothing of where
llama.cpp puts them. K of layer 0 depends on token and position only: it tells which cell is which.

After every decoded batch
    the shadow equals a fresh one;
    every SCORE, SELECT and ATTEND node equals the oracle (nodes.py);
    each token sees the positions of its sequence, and K of layer 0 is what those tokens give;
    the forced cells are the newest and the first positions of it, k and l those of the spec;
    the counters moved by what was seen;
    logits equal those of a fresh dense context, wherever every K and V of the sequence is exact.
The operations go to stderr as they happen, which tells what ended the library; the first thing that
is wrong ends the program. With all well it prints one line of JSON.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import tiny
from llama import Context, Model, Token, log_text
from nodes import Attend, Watch

from pyorch.attention.cost import split
from pyorch.attention.spec import AttentionSpec, LayerK

HEAD_DIM = 32
# operations, each the method op_NAME, and how often they come, in proportion
ACTIONS = {"decode": 36, "prefill": 13, "draft": 10, "rm": 11, "cp": 3, "keep": 1, "shift": 4}
ACTIONS |= {"clear": 0.7, "save": 3, "restore": 3, "restore_damaged": 2, "abort": 4}
ACTIONS |= {"spec": 6, "threads": 0.7}


def random_spec(rng: np.random.Generator, n_layer: int) -> AttentionSpec:
    method = str(rng.choice(["off", "dense", "sparq", "topk"], p=[0.06, 0.08, 0.66, 0.2]))
    if method in ("off", "dense"):
        return AttentionSpec(method)
    keys: dict[str, Any] = {
        "sinks": int(rng.choice([0, 1, 4])),
        "local": rng.choice([None, None, 0, 5]),
        "min_ctx": int(rng.choice([0, 0, 0, 256, 512])),
        "budget": "ramp" if rng.random() < 0.2 else "uniform",
    }
    how = rng.choice(["topk", "ratio", "all", "k_layers"], p=[0.5, 0.25, 0.13, 0.12])
    if method == "sparq":
        keys["mean_v"] = str(rng.choice(["auto", "on", "off"]))
        keys["shadow"] = str(rng.choice(["f16", "q8", "q4"]))
        if how != "ratio":
            keys["rank"] = int(rng.integers(1, HEAD_DIM + 1))
    if how == "ratio":
        keys |= {"ratio": float(rng.choice([0.125, 0.25, 0.5])), "min_k": int(rng.integers(12, 40))}
    elif how == "k_layers":  # beside which a ramp is refused
        keys["k_layers"] = tuple(map(LayerK, rng.integers(16, 64, n_layer).tolist()))
        keys["budget"] = "uniform"
    else:
        keys["topk"] = 10**6 if how == "all" else int(rng.integers(16, 80))
    return AttentionSpec(method, **keys)


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@dataclass(eq=False)
class Cell:
    position: int
    token: int
    seqs: set[int]
    chain: int | None  # what its K and V were computed from, if by exact attention
    index: int | None = None  # where the library has it, once seen
    asked: bool = True  # for its logits, as far as is known

    def copy(self, seq: int, asked: bool) -> Cell:
        """The same for one sequence, in a place not known yet."""
        return Cell(self.position, self.token, {seq}, self.chain, asked=asked)


@dataclass
class Plain:
    """The cells that the cache must hold, per stream."""

    unified: bool
    n_seq: int
    streams: list[list[Cell]] = field(default_factory=list)

    draft: tuple[int, ...] = ()  # the sequences of this call whose tokens verify a draft

    def __post_init__(self) -> None:
        self.streams = [[] for _ in range(1 if self.unified else self.n_seq)]

    def stream(self, seq: int) -> list[Cell]:
        return self.streams[0 if self.unified else seq]

    def cells(self, seq: int) -> list[Cell]:
        """The cells of a sequence by position."""
        return sorted((c for c in self.stream(seq) if seq in c.seqs), key=lambda c: c.position)

    def last(self, seq: int) -> int:
        return max((c.position for c in self.stream(seq) if seq in c.seqs), default=-1)

    def remove(self, seq: int, p0: int, p1: int) -> None:
        for c in self.stream(seq):
            if p0 <= c.position < p1:
                c.seqs.discard(seq)
        self.sweep()

    def replying(self, batch: list[Token], asks: list[bool]) -> list[bool]:
        """Which tokens are decoded ones, by the rule in llama-sparse.h."""
        of = Counter(s for *_, s in batch)
        before = {s: self.cells(s)[-1:] for s in of}
        all_ask = {s: all(a for (*_, q), a in zip(batch, asks, strict=True) if q == s) for s in of}
        return [
            (of[s] == 1 or s in self.draft)
            and all_ask[s]
            and bool(before[s])
            and before[s][0].asked
            for *_, s in batch
        ]

    def sweep(self) -> None:
        for cells in self.streams:
            cells[:] = [c for c in cells if c.seqs]

    def chain(self, seq: int) -> int | None:
        """Names the content of the sequence; None unless exact attention made all K and V of it."""
        chain = 0
        cells = self.cells(seq)
        for i, c in enumerate(cells):
            chain = link(chain, c.token, c.position)
            if c.chain != chain or c.position != cells[0].position + i:
                return None
        return chain


def link(chain: int, token: int, position: int) -> int:
    return hash((chain, token, position))


class Fuzz:
    def __init__(self, seed: int, folder: Path) -> None:
        self.rng = rng = np.random.default_rng(seed)
        self.counts = dict.fromkeys(ACTIONS, 0)
        self.compared = self.sparse_calls = 0

        self.unified = seed % 2 == 0
        self.n_seq = 3 if self.unified else 2
        n_head, n_head_kv = [(4, 2), (2, 2), (3, 1)][seed // 2 % 3]
        self.n_layer = 2 + seed % 3 // 2
        type_k = str(rng.choice(["f16", "f16", "bf16", "f32"]))
        self.can_shift = type_k != "bf16"  # llama.cpp aborts: its RoPE on the CPU lacks it
        type_v = str(rng.choice([type_k, "f16"]))
        n_ctx = 1024 if self.unified else 1280
        self.n_ubatch = int(rng.choice([32, 64, 200]))
        n_threads = 2 if seed % 8 == 7 else 1
        note(f"{n_head}/{n_head_kv} heads, {self.n_layer} layers, K {type_k}, V {type_v}")
        note(f"unified={self.unified}, n_ctx {n_ctx}, n_ubatch {self.n_ubatch}")

        weights = tiny.make(
            "llama",
            n_layer=self.n_layer,
            n_head=n_head,
            n_head_kv=n_head_kv,
            head_dim=HEAD_DIM,
            seed=seed,
        )
        self.keys = first_layer_keys(weights)
        self.watch = Watch()
        self.model = Model(tiny.save(weights, folder / "m.gguf"))
        types = {"type_k": type_k, "type_v": type_v, "n_threads": n_threads}
        self.ctx = Context(
            self.model, n_ctx=n_ctx, n_seq=self.n_seq, unified=self.unified,
            n_ubatch=self.n_ubatch, watch=self.watch, **types,
        )  # fmt: skip
        self.fresh = Context(self.model, n_ctx=1024, n_ubatch=512, **types)
        self.plain = Plain(self.unified, self.n_seq)
        self.size = self.ctx.n_ctx_seq  # cells per stream
        self.spec = AttentionSpec("off")
        self.prompt = ("f32", "fast")[seed // 4 % 2]  # beside each of the other choices
        self.pending = False  # a shift or copy that the next decode will carry out
        self.saved: list[tuple[int | None, bytes, Plain]] = []
        first = AttentionSpec("sparq", rank=8, topk=40, min_ctx=0, shadow="f16")
        self.set_spec(first)

    # ---- the loop ----

    def run(self, n_ops: int) -> None:
        weights = np.array([*ACTIONS.values()])
        done = 0
        while done < n_ops:
            name = str(self.rng.choice([*ACTIONS], p=weights / weights.sum()))
            # decoding comes in runs, so that graphs are reused
            for _ in range(int(self.rng.integers(1, 8)) if name == "decode" else 1):
                self.counts[name] += 1
                getattr(self, f"op_{name}")()
                self.check_ranges()
                done += 1

    def check_ranges(self) -> None:
        for seq in range(self.n_seq):
            cells = self.plain.cells(seq)
            want = (cells[0].position, cells[-1].position) if cells else (-1, -1)
            assert self.ctx.seq_range(seq) == want, (
                f"sequence {seq} is {self.ctx.seq_range(seq)}, expected {want}"
            )

    def pick(self, least: int = 1) -> int | None:
        """A sequence with at least that many cells."""
        seqs = [s for s in range(self.n_seq) if len(self.plain.cells(s)) >= least]
        return int(self.rng.choice(seqs)) if seqs else None

    # ---- decoding ----

    def tokens(self, seq: int, n: int) -> list[Token]:
        first = self.plain.last(seq) + 1
        return [(int(t), first + i, seq) for i, t in enumerate(self.rng.integers(3, 259, n))]

    def op_decode(self) -> None:
        """The next token of a sequence, or of several."""
        n = int(self.rng.integers(2, self.n_seq + 1))
        seqs = sorted(self.rng.choice(self.n_seq, n, replace=False).tolist())
        if self.rng.random() < 0.6:
            seqs = [self.pick() or 0]
        self.decode([t for s in seqs for t in self.tokens(s, 1)])

    def op_prefill(self) -> None:
        """A piece of a prompt; or several in one batch, of different lengths, some of one token."""
        if self.rng.random() < 0.75:
            n = int(self.rng.choice([2, 3, 17, 64, 65, 130, 300]))
            return self.decode(self.tokens(int(self.rng.integers(self.n_seq)), n))
        most = np.where(self.rng.random(self.n_seq) < 0.5, 2, 60)
        n_each = self.rng.integers(1, most).tolist()
        return self.decode([t for s, n in enumerate(n_each) for t in self.tokens(s, n)])

    def op_draft(self) -> None:
        """Drafts of some sequences are verified, beside a token of others; some are rejected."""
        seqs = [s for s in range(self.n_seq) if self.plain.cells(s) and self.rng.random() < 0.7]
        n = {s: int(self.rng.choice([1, 2, 4, 8, 8, 70])) for s in seqs}
        batch = [t for s in seqs for t in self.tokens(s, n[s])]
        if not batch:
            return
        for s in seqs:
            self.ctx.say_draft(s, self.plain.last(s) + 1, n[s])
        self.plain.draft = tuple(seqs) if self.spec.sparse else ()
        first = {s: self.plain.last(s) + 1 for s in seqs}
        note(f"drafts {n}")
        self.decode(batch)
        self.plain.draft = ()
        for s in seqs:
            self.ctx.say_draft(s, 0, 0)
            if self.plain.last(s) > first[s] and self.rng.random() < 0.6:
                self.rm(s, int(self.rng.integers(first[s], self.plain.last(s) + 1)), -1)

    def asks(self, batch: list[Token]) -> list[bool]:
        """Which tokens ask for their logits: the last of a sequence, or none of it; or all."""
        if self.rng.random() < (0.9 if self.plain.draft else 0.1):
            return [True] * len(batch)
        goes_on = {s for *_, s in batch[:-1] if self.rng.random() < 0.3}
        last = {s: i for i, (*_, s) in enumerate(batch) if s not in goes_on}
        return [last.get(s) == i for i, (*_, s) in enumerate(batch)]

    def decode(self, batch: list[Token], abort: int | None = None) -> None:
        seqs = sorted({s for *_, s in batch})
        note(f"decode {[(s, sum(q == s for *_, q in batch)) for s in seqs]} abort={abort}")
        needed = {id(self.plain.stream(s)): 0 for s in seqs}
        for *_, s in batch:
            needed[id(self.plain.stream(s))] += 1
        fits = all(
            len(self.plain.stream(s)) + needed[id(self.plain.stream(s))] <= self.size for s in seqs
        )
        chains = {s: self.plain.chain(s) for s in seqs}
        asks = self.asks(batch)
        replies = self.plain.replying(batch, asks)
        note(f"  asks {np.flatnonzero(asks).tolist()}, replies {np.flatnonzero(replies).tolist()}")

        before = self.counters()
        self.watch.clear()
        if abort is not None:
            self.ctx.abort_after(abort)
        result = self.ctx.decode(batch, asks)
        self.pending = False
        note(f"  -> {result}")
        assert result in ((1,) if not fits else (0,) if abort is None else (0, 2)), (
            f"llama_decode: {result}"
        )
        if result == 1:
            assert not self.watch.attends
            return self.make_room()

        exact = all(a.n_read == int(a.visible.sum()) * a.shape[2] for a in self.watch.attends)
        for (token, position, s), ask, reply in zip(batch, asks, replies, strict=True):
            is_exact = chains[s] is not None and (exact or not reply)
            chains[s] = link(chains[s], token, position) if is_exact else None
            self.plain.stream(s).append(Cell(position, token, {s}, chains[s], asked=ask))
        if result == 2:  # what the failed part would have added is gone
            for s in seqs:
                self.plain.remove(s, self.ctx.seq_range(s)[1] + 1, 1 << 30)
            note(f"  aborted; left {[self.ctx.seq_range(s) for s in seqs]}")
            self.ctx.abort_after(None)
            self.check_shadow()
            return None
        self.check_shadow()
        several = {s for s in seqs if sum(q == s for *_, q in batch) > 1}
        n_verified = sum(r and s in several for (*_, s), r in zip(batch, replies, strict=True))
        self.check_counters(before, len(batch), n_verified)
        self.check_attends(batch, replies)
        if not any(asks):
            return None
        logits = self.ctx.logits()
        assert np.isfinite(logits).all(), "logits are not finite"
        last = int(np.flatnonzero(asks)[-1])
        if last == len(batch) - 1:
            self.check_logits(batch[-1][2], logits)
        return None

    def make_room(self) -> None:
        seq = max(range(self.n_seq), key=lambda s: len(self.plain.cells(s)))
        self.rm(seq, self.plain.cells(seq)[0].position + int(self.rng.integers(100)), 1 << 30)

    # ---- what must hold ----

    def check_shadow(self) -> None:
        bad = self.ctx.check_shadow()
        assert bad <= 0, f"the shadow differs from K and V in {bad} groups"

    def counters(self) -> dict:
        return self.ctx.info().get("counters", {})

    def check_counters(self, before: dict, n_tokens: int, n_verified: int) -> None:
        if self.spec.method == "off":
            return
        after, seen = self.counters(), self.watch.attends
        sparse = sum(a.sparse_calls for a in seen)
        self.sparse_calls += sparse
        for key, want in {
            "calls_sparse": sparse,
            "calls_dense_op": sum(a.calls - a.sparse_calls for a in seen),
            "calls_prefill": self.watch.prefilled,
            "calls_stock": 0,
            "steps": sum(a.calls for a in seen if a.layer == 0),
            "verified": n_verified,
            "positions_visible": sum(int(a.visible.sum()) * a.shape[2] for a in seen),
            "positions_read": sum(a.n_read for a in seen),
            "groups_sealed": self.watch.sealed,
        }.items():
            moved = after[key] - before.get(key, 0)
            if key == "groups_sealed":  # what waited before it the call seals without a node
                want = max(moved, want)
            assert moved == want, f"counter {key} moved by {moved}, expected {want}"
        calls = self.watch.prefilled + sum(a.calls for a in seen)
        assert calls == n_tokens * self.n_layer, "a token was left to llama.cpp, or attended twice"

    def check_attends(self, batch: list[Token], replies: list[bool]) -> None:
        """Decoded tokens are what ATTEND reads, in each layer, and nothing else is."""
        seen = self.watch.attends
        if self.spec.method == "off":
            assert not seen
            return
        left: dict[int, list[Token]] = {}  # by stream, in order
        for token, reply in zip(batch, replies, strict=True):
            if reply:
                left.setdefault(0 if self.unified else token[2], []).append(token)
        rows: list[Token] = []
        for layer, nodes in itertools.groupby(seen, lambda a: a.layer):
            # ubatch by ubatch, in each the layers in order, in each the stages; of each stream
            places, done = [], 0
            for a in nodes:
                places += [((s, done + t), a, (s, t)) for s, t in a.tokens]
                done += a.shape[1]
            places.sort(key=lambda x: x[0])
            if layer == 0:
                # all streams, or the only one whose tokens are not through
                rest = [s for s, tokens in left.items() if tokens]
                whole = not self.unified and places[0][1].shape[0] == self.n_seq
                rows = [left[s if whole else rest[0]].pop(0) for (s, _), *_ in places]
            assert len(rows) == len(places)
            for (_, a, place), (_, position, seq) in zip(places, rows, strict=True):
                if layer == 0:
                    self.check_row(a, place, seq, position)
                if a.is_sparse:
                    self.check_forced(a, place, seq, position)
        calls = sum(a.calls for a in seen)
        assert calls == sum(replies) * self.n_layer, "a prompt was sparse, or a decoded token not"

    def check_row(self, a: Attend, place: tuple[int, int], seq: int, position: int) -> None:
        """The token sees its sequence, and K of layer 0 holds those tokens at those positions."""
        cells = [c for c in self.plain.cells(seq) if c.position <= position]
        where, k = np.flatnonzero(a.visible[place]), a.k[place[0]]
        assert len(where) == len(cells), f"sees {len(where)} positions, expected {len(cells)}"
        positions = [c.position for c in cells]
        want = self.keys(np.array([c.token for c in cells]), np.array(positions))
        known = {c.index for c in cells} - {None}
        left = np.array([i for i in where if i not in known], dtype=int)
        unknown = [i for i, c in enumerate(cells) if c.index is None]
        assert len(left) == len(unknown), "sees cells that belong to others"
        index = [c.index for c in cells]
        if unknown:
            far = ((want[unknown][:, None] - k[left][None]) ** 2).sum(axis=2)
            for row, i in zip(far, unknown, strict=True):
                j = int(row.argmin())
                index[i] = int(left[j])
                far[:, j] = np.inf
                cells[i].index = index[i]
        got = k[index]
        error = np.linalg.norm(got - want, axis=1) / np.linalg.norm(want, axis=1)
        at = cells[error.argmax()].position
        assert error.max() < 0.05, f"K of layer 0 is off by {error.max():.3f} at position {at}"

    def check_forced(self, a: Attend, place: tuple[int, int], seq: int, position: int) -> None:
        cells = [c for c in self.plain.cells(seq) if c.position <= position]
        position_of = {c.index: c.position for c in cells}
        by_age = sorted((c.position for c in cells), reverse=True)
        spec = self.spec
        k = split(spec, len(by_age), HEAD_DIM, il=a.layer, n_layer=self.n_layer).topk
        n_local = max(k // 4, 1) if spec.local is None else spec.local
        got_k, got_l = a.kl[place].tolist()
        if len(by_age) <= -(-spec.min_ctx // 256) * 256:
            assert got_k == -1, f"k is {got_k} up to min_ctx"
            return
        off_by = abs(got_k - k)
        # 1: rounding of a half
        assert off_by <= (spec.ratio is not None), f"k is {got_k}, expected {k}"
        assert off_by or got_l == min(n_local, a.n_local_max), f"l is {got_l}, expected {n_local}"
        forced, n = a.forced[place], a.n_local_max
        for cells, want in (forced[:n], by_age[:n]), (forced[n:], by_age[::-1][: spec.sinks]):
            got = [position_of.get(i, p) for i, p in zip(cells[cells >= 0], want, strict=True)]
            assert got == want, f"forced are {got} of {by_age}"

    def check_logits(self, seq: int, logits: np.ndarray) -> None:
        if self.plain.chain(seq) is None or self.rng.random() < 0.6:
            return
        cells = self.plain.cells(seq)
        self.fresh.clear(data=False)
        assert self.fresh.decode([(c.token, c.position, 0) for c in cells]) == 0
        want = self.fresh.logits()
        error = np.abs(logits - want).max() / want.std()
        note(f"  logits against a fresh context: {error:.1e}")
        assert error < (0.05 if self.prompt == "f32" else 0.25), (
            f"logits differ from those of a fresh dense context by {error:.3f} of their spread"
        )
        self.compared += 1

    # ---- edits ----

    def rm(self, seq: int, p0: int, p1: int) -> None:
        note(f"seq_rm {seq} {p0} {p1}")
        assert self.ctx.seq_rm(seq, p0, p1)
        self.plain.remove(seq, max(p0, 0), p1 if p1 >= 0 else 1 << 30)

    def span(self, seq: int) -> tuple[int, int]:
        cells = self.plain.cells(seq)
        return cells[0].position, cells[-1].position

    def op_rm(self) -> None:
        """The end of a sequence, its beginning, a part between, or all of it."""
        if (seq := self.pick(10)) is None:
            return
        p0, p1 = self.span(seq)
        a, kind = int(self.rng.integers(p0, p1)), self.rng.random()
        if kind < 0.37:
            self.rm(seq, int(self.rng.integers(max(p0 + 1, p1 - 80), p1 + 1)), -1)
        elif kind < 0.55:
            self.rm(seq, 0, a)
        elif kind < 0.9:
            self.rm(seq, a, min(a + int(self.rng.integers(1, 100)), p1))
        else:
            self.rm(seq, -1, -1)

    def op_cp(self) -> None:
        if (src := self.pick()) is None:
            return
        dst = int(self.rng.choice([s for s in range(self.n_seq) if s != src]))
        if self.unified:
            self.rm(dst, -1, -1)
            p0, p1 = self.span(src)
            a, b = (
                (0, -1) if self.rng.random() < 0.5 else (p0, int(self.rng.integers(p0, p1 + 1)) + 1)
            )
            note(f"seq_cp {src} {dst} {a} {b}")
            self.ctx.seq_cp(src, dst, a, b)
            for c in self.plain.cells(src):
                if a <= c.position and (b < 0 or c.position < b):
                    c.seqs.add(dst)
        else:
            note(f"seq_cp {src} {dst}")
            self.ctx.seq_cp(src, dst)
            self.plain.streams[dst] = [c.copy(dst, c.asked) for c in self.plain.cells(src)]
            self.pending = True

    def op_keep(self) -> None:
        if (seq := self.pick()) is None:
            return
        note(f"seq_keep {seq}")
        self.ctx.seq_keep(seq)
        for c in self.plain.stream(seq):
            c.seqs &= {seq}
        self.plain.sweep()

    def op_shift(self) -> None:
        """Context shift: the beginning goes, the rest moves up; at times just a move."""
        if not self.can_shift or (seq := self.pick(20)) is None:
            return
        p0, p1 = self.span(seq)
        n = int(self.rng.integers(1, (p1 - p0) // 2))
        keep = p0 + int(self.rng.integers(0, 8))
        self.rm(seq, keep, keep + n)
        delta = -n if self.rng.random() < 0.8 else int(self.rng.integers(1, 50))
        note(f"seq_add {seq} {keep + n} -1 {delta}")
        self.ctx.seq_add(seq, keep + n, -1, delta)
        for c in self.plain.cells(seq):
            if c.position >= keep + n:
                c.position += delta
                c.chain = None
                self.pending = True

    def op_clear(self) -> None:
        data = bool(self.rng.random() < 0.5)
        note(f"clear data={data}")
        self.ctx.clear(data)
        for cells in self.plain.streams:
            cells.clear()

    # ---- states ----

    def op_save(self) -> None:
        if self.pending:  # llama.cpp would store positions that K does not have yet
            return
        seq = self.pick() if self.rng.random() < 0.6 else None
        note(f"save {'everything' if seq is None else seq}")
        plain = copy.deepcopy(self.plain)
        for c in (c for cells in plain.streams for c in cells):
            c.index, c.asked = None, True
        self.saved = [*self.saved[-3:], (seq, self.ctx.get_state(seq), plain)]

    def op_restore(self) -> None:
        if self.pending or not self.saved:
            return
        seq, data, plain = self.saved[self.rng.integers(len(self.saved))]
        if seq is None:
            note("restore everything")
            assert self.ctx.set_state(data) > 0, "a whole state was refused"
            self.plain = copy.deepcopy(plain)
            return
        dst = int(self.rng.integers(self.n_seq))
        cells = [c.copy(dst, True) for c in plain.cells(seq)]
        self.plain.remove(dst, 0, 1 << 30)
        fits = len(self.plain.stream(dst)) + len(cells) <= self.size
        result = self.ctx.set_state(data, dst)
        note(f"restore {seq} into {dst} -> {result > 0}")
        assert (result > 0) == fits, f"restore of {len(cells)} cells: {result}, fits: {fits}"
        if fits:
            self.plain.stream(dst).extend(cells)

    def op_restore_damaged(self) -> None:
        """A state that is cut short, or with wrong numbers: refused, and nothing wrong remains."""
        if self.pending or not self.saved:
            return
        seq, data, _ = self.saved[self.rng.integers(len(self.saved))]
        cut = int(self.rng.integers(9, len(data)))
        damaged = data[:cut]
        if self.rng.random() < 0.3:  # another number of streams
            at = 8 if seq is not None else data.index(b"llama") + 5
            damaged = data[:at] + b"\x07" + data[at + 1 :]
        dst = None if seq is None else int(self.rng.integers(self.n_seq))
        note(f"restore damaged ({len(damaged)} of {len(data)} bytes) into {dst}")
        assert self.ctx.set_state(damaged, dst) == 0, "a damaged state was accepted"
        self.check_shadow()
        if dst is None:  # what is left is llama.cpp's affair: start again
            self.ctx.clear(False)
            for cells in self.plain.streams:
                cells.clear()
        elif self.ctx.seq_range(dst) == (-1, -1):
            self.plain.remove(dst, 0, 1 << 30)

    # ---- the rest ----

    def op_abort(self) -> None:
        if self.pending:  # the abort could hit the shift
            return
        seq = int(self.rng.integers(self.n_seq))
        n = int(self.rng.choice([1, 1, 40, 150]))
        self.decode(self.tokens(seq, n), abort=int(self.rng.integers(1, 160)))
        self.ctx.abort_after(None)

    def op_spec(self) -> None:
        if self.rng.random() < 0.1:
            note("reset counters")
            self.ctx.reset_counters()
            assert self.counters().get("calls_sparse", 0) == 0
        self.set_spec(random_spec(self.rng, self.n_layer))

    def op_threads(self) -> None:
        n = int(self.rng.choice([1, 1, 1, 2, 3]))
        note(f"{n} threads")
        self.ctx.set_threads(n)

    def set_spec(self, spec: AttentionSpec) -> None:
        note(f"spec {spec}")
        how = f",prompt={self.prompt}" if spec.method != "off" else ""
        self.ctx.set_sparse(f"{spec}{how}")
        self.spec = spec


def first_layer_keys(weights: tiny.Model) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    """A function (tokens, positions) -> K of layer 0 (n, n_head_kv*d), for a Llama."""
    x = weights.tensors["token_embd.weight"].astype(np.float64)
    x = (
        x
        / np.sqrt((x**2).mean(axis=1, keepdims=True) + 1e-5)
        * weights.tensors["blk.0.attn_norm.weight"]
    )
    keys = x @ weights.tensors["blk.0.attn_k.weight"].T.astype(np.float64)
    d = weights.head_dim
    keys = keys.reshape(len(keys), -1, d // 2, 2)  # RoPE turns neighbours
    speed = 10000.0 ** (-2 * np.arange(d // 2) / d)

    def of(tokens: np.ndarray, positions: np.ndarray) -> np.ndarray:
        k = keys[tokens]
        angle = positions[:, None] * speed
        cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
        turned = np.stack(
            [k[..., 0] * cos - k[..., 1] * sin, k[..., 0] * sin + k[..., 1] * cos], axis=-1
        )
        return turned.reshape(len(tokens), -1)

    return of


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ops", type=int, default=250)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        fuzz = Fuzz(args.seed, Path(folder))
        try:
            fuzz.run(args.ops)
        except AssertionError:
            note(log_text()[-1000:])
            raise
    report = {
        "shadow_bits": sorted(fuzz.watch.n_bits),
        "operations": fuzz.counts,
        "sparse_calls": fuzz.sparse_calls,
        "compared": fuzz.compared,
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
