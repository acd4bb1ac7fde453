"""Tokens with weights on a GPU and K and V in memory: SparQ beside llama.cpp's -nkvo, in turns.

    python -m bench gpu_in_memory                 # Llama-3-8B's geometry, 131,072
    python -m bench gpu_in_memory -d 524288 -ct q8_0 -a sparq,ratio=1/32
    python -m bench gpu_in_memory --card 24       # as a card of 24 GiB would hold
    python -m bench gpu_in_memory --prompts --layers 4 -d 32768,131072
    python -m bench gpu_in_memory -ngl 0 --layers 4 -d 32768 -t 1,2,4,8,16   # cores alone

The model is synthetic, K and V are random. llama.cpp's attention is that of our library: `off`, its
own code, with -fa 1 and, where V can be transposed, -fa 0 in a context of its own. With --card the
GPU takes K and V of as many layers as fit a card of that size beside the weights, and llama.cpp's
is left out, since it has no such placement. The last row is a batch of a prompt after so many
positions, which llama.cpp reads on the GPU. --prompts times nothing but these, read by our PREFILL
on the CPU too, and with K and V on the GPU, in a short batch as well: a copy of K and V takes as
long for a few tokens as for many. With -ngl 0 weights are in memory too, no device is needed, and
there is no prompt unless it is asked for. Each result is printed at once, so that a run that is
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

from bench.gpu.tokens import depths, layers, like, quant, random_tokens, timed
from pyorch import engine
from pyorch.attention import bytes as cost
from pyorch.attention.spec import AttentionSpec
from pyorch.bench import bandwidth, records, state
from pyorch.bench.records import Record, Result
from pyorch.bench.room import Synthetic
from pyorch.bench.turns import FLOATS, OFF
from pyorch.cli.bench.measurement import (
    Done,
    Given,
    Measurement,
    from_option,
    number_of,
    settings,
    specs,
)
from pyorch.cli.groups import option
from pyorch.cli.terminal import note
from pyorch.cli.types import Number, Numbers
from pyorch.errors import SparqError
from pyorch.ggml import MAX_THREADS
from pyorch.models.gguf_file import read_gguf
from pyorch.models.memory import weight_bytes
from pyorch.table import markdown

OURS = AttentionSpec("dense")  # of a prompt
N_PROMPT, N_SHORT = 512, 32
NO_CARD, ON_CARD = -1.0, -2.0


@dataclass(frozen=True, kw_only=True)
class MemoryCase:
    """card: GiB of the card that takes what fits, 0 = none of K and V; NO_CARD = nor weights;
    ON_CARD = all of both. n_prompt: tokens of a prompt that are read, instead of a token that is
    decoded."""

    like: str = like("llama3-8b")
    n_layer: int = layers()
    quant: str = quant("q8_0")
    cache: str = from_option(
        option("-ct", "--cache-type", default="f16", show_default=True, help="Of K and V.")
    )
    n_depth: int = depths("131072")
    card: float = from_option(
        option("--card", type=Number(0), default=0, help="GiB of a card that is filled."),
        to=lambda given: NO_CARD if given.n_gpu_layers == 0 else given.card,
    )
    threads: int = from_option(
        option("-t", "--threads", type=Numbers(1, MAX_THREADS), help="[default: all cores]")
    )
    # older records say neither
    n_gen: int = number_of("-n", "--n-gen", default=3, where_given=True, otherwise=0)
    repetitions: int = number_of("-r", "--repetitions", default=2, where_given=True, otherwise=0)
    flash: bool
    spec: AttentionSpec
    n_prompt: int = 0
    library: str = "sparq"

    @property
    def name(self) -> str:
        ours = "ours, on the CPU" if self.n_prompt else str(self.spec)
        what = f"stock -fa {int(self.flash)}" if self.spec == OFF else ours
        return f"{what}, {self.n_prompt} tokens of a prompt" if self.n_prompt else what


OPTIONS = (
    click.option("-fa", "--flash-attn", type=Numbers(0, 1), default="1,0", help="Of stock."),
    click.option("--prompts", is_flag=True, help="Time prompts alone."),
    click.option("-ngl", "--n-gpu-layers", type=click.IntRange(0, 0), help="0: without a GPU."),
    specs("dense", "sparq,ratio=1/8,gpu_min_mb=0", "sparq,ratio=1/32,gpu_min_mb=0"),
)


def groups(given: Given) -> list[list[MemoryCase]]:
    """All settings at a depth, or all ways to read a prompt there: that with K and V on the GPU
    loads the model again."""
    given.threads = given.threads or [engine.usable_cores()]
    shared, found = settings(MemoryCase, given), []
    for depth in given.n_depth:
        plain = MemoryCase(**shared, n_depth=depth, threads=0, flash=True, spec=OFF)
        # a cache of blocks has no transposed V
        flash = [bool(fa) for fa in given.flash_attn if fa or given.cache in FLOATS]
        stock = [] if plain.card > 0 else [replace(plain, flash=fa) for fa in flash]
        prompt = replace(plain, n_prompt=N_PROMPT)
        both, has_card = [prompt, replace(prompt, n_prompt=N_SHORT)], plain.card != NO_CARD
        ours = [replace(plain, spec=spec) for spec in given.specs]
        alone = [[*stock, *ours, *[prompt] * has_card]]
        if given.prompts:
            alone = [both + [replace(case, spec=OURS) for case in both]]
            alone += [[replace(case, card=ON_CARD) for case in both]] * has_card
        for cases in alone:
            found.append([replace(c, threads=n) for n in given.threads for c in cases])
    return found


def measure(_: Given, cases: Sequence[MemoryCase], __: Done) -> list[Result]:
    """The samples of the cases of one depth, in nanoseconds per token, or per batch of a prompt.

    Raises:
        SparqError: nothing ran sparse in a sparse case, or PREFILL did not in a case of it.
    """
    first = cases[0]
    model = Synthetic(first.like, first.n_layer, first.quant).written()
    n_ctx = -(-(first.n_depth + N_PROMPT + first.n_gen + 2) // 256) * 256
    results: list[Result] = [{"samples_ns": [], "counters": {}} for _ in cases]
    variables = {"SPARQ_PROMPT_ON_CPU": "1"}  # `off` is llama.cpp's all the same
    if first.card > 0:
        free = int(first.card * 2**30) - weight_bytes(read_gguf(model))
        variables["SPARQ_GPU_LIMIT"] = str(max(free, 0))
    with ExitStack() as stack:
        for name, value in variables.items():
            os.environ[name] = value
            stack.callback(os.environ.pop, name)
        offload = None if first.card > 0 else first.card == ON_CARD
        n_gpu_layers = 0 if first.card == NO_CARD else None
        loaded = engine.load_model(model, n_gpu_layers=n_gpu_layers, kv_offload=offload)
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
        stay = first.n_layer if first.card in (0, NO_CARD) else len(sessions[True].kv_in_memory)
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
                if case.n_prompt and case.spec == OURS and not counters.get("calls_prefill"):
                    raise SparqError(f"no layer's prompt was read by PREFILL: {counters}")
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
    sizes = (t.bytes_per_element for t in s.cache.types)
    costs = cost.layer_costs(s.geometry, case.spec, case.n_depth, *sizes)
    weights = s.geometry.weight_bytes_per_token if case.card == NO_CARD else 0
    here = case.card in (0, NO_CARD)
    return weights + sum(c.bytes_read for c in costs if here or c.il in s.kv_in_memory)


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


MEASUREMENT = Measurement(
    name="gpu_in_memory",
    about="Tokens with the weights on a CUDA device and K and V in memory, beside llama.cpp's.",
    case=MemoryCase,
    options=OPTIONS,
    groups=groups,
    measure=measure,
    table=table,
)
