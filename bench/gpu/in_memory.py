"""Tokens with weights on a GPU and K and V in memory: SparQ beside llama.cpp's -nkvo, in turns.

    python -m bench gpu_in_memory                 # Llama-3-8B's geometry, 131,072
    python -m bench gpu_in_memory -d 524288 -ct q8_0 -a sparq,ratio=1/32
    python -m bench gpu_in_memory --card 24       # as a card of 24 GiB would hold
    python -m bench gpu_in_memory -ngl 0 --layers 4 -d 32768 -t 1,2,4,8,16   # cores alone

The model is synthetic, K and V are random. llama.cpp's attention is that of our library: `off`, its
own code, with -fa 1 and, where V can be transposed, -fa 0 in a context of its own. With --card the
GPU takes K and V of as many layers as fit a card of that size beside the weights, and llama.cpp's
is left out, since it has no such placement. The last row is a batch of a prompt after so many
positions, which llama.cpp reads on the GPU. With -ngl 0 weights are in memory too, no device is
needed, and there is no prompt. Each result is printed at once, so that a run that is
killed loses none.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import click
import numpy as np

from bench.gpu.tokens import depths, layers, like, quant, random_tokens, shared, timed
from pyorch import engine
from pyorch.attention import cost
from pyorch.attention.spec import AttentionSpec
from pyorch.cli.bench.measurement import Done, Measurement, number_option, specs_option
from pyorch.cli.groups import option, several
from pyorch.cli.terminal import note
from pyorch.cli.types import Number, Numbers
from pyorch.engine import bandwidth
from pyorch.errors import SparqError
from pyorch.ggml import MAX_THREADS
from pyorch.measure import records, state
from pyorch.measure.records import Record, Result, optional
from pyorch.measure.room import Synthetic
from pyorch.measure.turns import FLOATS, OFF
from pyorch.models.gguf_file import read_gguf
from pyorch.models.memory import weight_bytes
from pyorch.table import markdown

N_PROMPT = 512


@dataclass(frozen=True, kw_only=True)
class MemoryOptions:
    like: str = like("llama3-8b")
    n_layer: int | None = layers()
    quant: str = quant("q8_0")
    cache: str = option("-ct", "--cache-type", default="f16", show_default=True, help="Of K and V.")
    n_depth: list[int] = depths("131072")
    card: float = option("--card", type=Number(0), default=0, help="GiB of a card that is filled.")
    n_threads: list[int] = several(
        "-t", "--threads", of=Numbers(1, MAX_THREADS), text="[default: all cores]"
    )
    n_gen: int = number_option("-n", "--n-gen", default=3)
    repetitions: int = number_option("-r", "--repetitions", default=2)
    flash_attn: list[int] = several(
        "-fa", "--flash-attn", of=Numbers(0, 1), default="1,0", text="Of stock."
    )
    n_gpu_layers: int | None = option(
        "-ngl", "--n-gpu-layers", type=click.IntRange(0, 0), help="0: without a GPU."
    )
    attn: tuple[AttentionSpec, ...] = specs_option(
        "dense", "sparq,ratio=1/8,gpu_min_mb=0", "sparq,ratio=1/32,gpu_min_mb=0"
    )


@dataclass(frozen=True, kw_only=True)
class MemoryCase:
    """A token that is decoded or, with `n_prompt`, so many tokens of a prompt that are read."""

    like: str
    n_layer: int
    quant: str
    cache: str
    n_depth: int
    card: float | None  # GiB that K and V of some layers fill, 0 = of none; None = weights neither
    threads: int
    n_gen: int = optional(0)  # older records say neither this
    repetitions: int = optional(0)  # nor this, and -1 for a card that is None
    flash: bool
    spec: AttentionSpec
    n_prompt: int = 0
    library: str = "sparq"

    @property
    def name(self) -> str:
        what = f"stock -fa {int(self.flash)}" if self.spec == OFF else str(self.spec)
        return f"{what}, {self.n_prompt} tokens of a prompt" if self.n_prompt else what


def groups(o: MemoryOptions) -> list[list[MemoryCase]]:
    """All settings at a depth, with each number of threads."""
    card = None if o.n_gpu_layers == 0 else o.card
    of = shared(o, MemoryCase) | {"card": card, "flash": True, "spec": OFF}
    planned = []
    for n_depth in o.n_depth:
        plain = MemoryCase(**of | {"n_depth": n_depth}, threads=0)
        # a cache of blocks has no transposed V
        flash = [bool(fa) for fa in o.flash_attn if fa or o.cache in FLOATS]
        cases = [] if card else [replace(plain, flash=fa) for fa in flash]
        cases += [replace(plain, spec=spec) for spec in o.attn]
        cases += [] if card is None else [replace(plain, n_prompt=N_PROMPT)]
        threads = o.n_threads or [engine.usable_cores()]
        planned.append([replace(case, threads=n) for n in threads for case in cases])
    return planned


def measure(_: MemoryOptions, cases: Sequence[MemoryCase], __: Done) -> list[Result]:
    """The samples of the cases of one depth, in nanoseconds per token, or per batch of a prompt.

    Raises:
        SparqError: nothing ran sparse in a sparse case.
    """
    first = cases[0]
    model = Synthetic(first.like, first.n_layer, first.quant).written()
    n_ctx = -(-(first.n_depth + N_PROMPT + first.n_gen + 2) // 256) * 256
    results: list[Result] = [{"samples_ns": [], "counters": {}} for _ in cases]
    with ExitStack() as stack:
        if first.card:
            free = int(first.card * 2**30) - weight_bytes(read_gguf(model))
            os.environ["SPARQ_GPU_LIMIT"] = str(max(free, 0))
            stack.callback(os.environ.pop, "SPARQ_GPU_LIMIT")
        loaded = engine.load_model(
            model,
            n_gpu_layers=0 if first.card is None else None,
            kv_offload=None if first.card else False,
        )
        stack.enter_context(loaded)
        sessions = {}
        for flash in dict.fromkeys(case.flash for case in cases):
            sessions[flash] = s = stack.enter_context(
                loaded.session(
                    n_ctx=n_ctx,
                    n_threads=max(case.threads for case in cases),
                    n_batch=N_PROMPT,
                    flash_attn=flash,
                    type_k=first.cache,
                    type_v=first.cache,
                )
            )
            state.fill(s, first.n_depth)
        stay = len(sessions[True].kv_in_memory) if first.card else first.n_layer
        note(f"{first.n_depth} positions, K and V of {stay} of {first.n_layer} layers in memory")
        rates = {n: bandwidth.measured(n) for n in dict.fromkeys(case.threads for case in cases)}
        for turn in range(first.repetitions):
            for case, result in zip(cases, results, strict=True):
                s = sessions[case.flash]
                s.lib.llama_set_n_threads(s.ctx, case.threads, case.threads)
                engine.set_attention(s, case.spec)
                drawn = random_tokens(case.n_prompt or case.n_gen + 1, 1)
                samples, counters = (_prompt if case.n_prompt else timed)(s, drawn)
                if case.spec.sparse and not counters.get("calls_sparse"):
                    raise SparqError(f"{case.spec}: no layer was sparse: {counters}")
                result["samples_ns"] += samples
                result |= {"counters": counters, "in_memory": stay}
                result |= {"bytes": _bytes(s, case), "memory": rates[case.threads]}
                of = f"{case.name}, {case.threads} threads"
                note(f"turn {turn + 1}: {of}: {float(np.median(samples)) / 1e6:.1f} ms")
    return results


def _prompt(s: engine.Session, tokens: Sequence[int]) -> tuple[list[int], Any]:
    """As `timed`, of a prompt that is read twice; the second time counts."""
    n_pos, took = len(s.tokens), 0
    for _ in range(2):
        engine.reset_counters(s)
        started = time.perf_counter_ns()
        engine.prefill(s, tokens)
        took = time.perf_counter_ns() - started
        engine.rewind(s, n_pos)
    return [took], dict(engine.info(s).counters)


def _bytes(s: engine.Session, case: MemoryCase) -> float:
    """What a token reads from memory, the weights included where no device has them."""
    costs = cost.layer_costs(s.geometry, case.spec, case.n_depth, *s.settings.element_bytes)
    weights = s.geometry.weight_bytes_per_token if case.card is None else 0
    return weights + sum(c.bytes_read for c in costs if not case.card or c.il in s.kv_in_memory)


def table(recs: Sequence[Record]) -> str:
    rows = []
    for run in records.by_run(recs):
        cases = [(records.read_case(MemoryCase, rec), rec) for rec in run.values()]
        stock: dict[int, float] = {}
        for case, rec in cases:
            if case.spec == OFF and not case.n_prompt:
                ms = float(np.median(rec["samples_ns"])) / 1e6
                stock[case.threads] = min(ms, stock.get(case.threads, ms))
        for case, rec in cases:
            ms, low, high = (x / 1e6 for x in records.spread(rec["samples_ns"]))
            is_token = not case.n_prompt
            best = stock.get(case.threads) if is_token else None
            faster = f"{best / ms:.2f}x" if best else ""
            share = f"{rec['bytes'] / ms * 1e3 / rec['memory']:.0%}" if rec["memory"] else ""
            of = f"{rec['in_memory']} of {case.n_layer}"
            row = [f"{case.like} {case.quant}", case.cache, f"{case.n_depth}", of]
            row += [case.name, f"{case.threads}", f"{ms:.1f} ({low:.1f}-{high:.1f})", faster]
            rows.append([*row, share if is_token else ""])
    head = ["model", "K, V", "positions", "layers in memory", "attention", "threads"]
    head += ["ms (p10-p90)", "of the best stock", "of the memory's rate"]
    return markdown(head, rows, left=("model", "K, V", "attention"))


MEASUREMENT = Measurement("gpu_in_memory", MemoryOptions, MemoryCase, groups, measure, table)
