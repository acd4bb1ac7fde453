"""Tokens of a real model with its weights on a GPU and K and V in memory, beside the CPU's.

    python -m bench gpu_real_text -m MODEL

This project's own pages are read once, on the GPU. Then each way decodes the tokens that the CPU
finds most likely with sparse attention. Where two are about as likely, rounding may decide: the
CPU's token leads the GPU's by no more than llama.cpp's own attention (`off`), run in both ways too,
moves two logits by. Each way is told of when it is done.
"""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import click
import numpy as np

from pyorch import engine, paths
from pyorch.cli.bench import measurement
from pyorch.cli.groups import takes
from pyorch.cli.terminal import note
from pyorch.errors import SparqError

OURS, OFF = "sparq,ratio=1/8", "off"


@dataclass(frozen=True, kw_only=True)
class TextOptions:
    model: Path = measurement.model_option()
    n_prompt: int = measurement.number_option("--n-prompt", default=32000, low=2)
    n_gen: int = measurement.number_option("-n", "--n-gen", default=64)


@click.command("gpu_real_text", context_settings=measurement.SETTINGS)
@takes(options=TextOptions)
def command(options: TextOptions) -> None:
    """Compare tokens after a long text, weights on a GPU and K and V in memory, with the CPU's."""
    model, n_prompt, n_gen = options.model, options.n_prompt, options.n_gen
    pages = [paths.REPOSITORY / "README.md", *sorted((paths.REPOSITORY / "docs").glob("*.md"))]
    text = "\n\n".join(page.read_text("utf-8") for page in pages)
    if not engine.library().gpu_devices():
        raise SparqError("no GPU is here", "sparq-cpp doctor says why")
    with (
        engine.load_model(model, kv_offload=False) as on_gpu,
        engine.load_model(model, n_gpu_layers=0) as on_cpu,
    ):
        prompt = engine.tokenize(on_gpu, text)[:n_prompt]
        if len(prompt) < n_prompt:
            raise SparqError(f"the pages have {len(prompt)} tokens", "a smaller --n-prompt")
        n_ctx = n_prompt + n_gen
        with on_gpu.session(n_ctx=n_ctx, attention=OFF) as s:
            started = time.perf_counter()
            engine.prefill(s, prompt[:-1])
            note(f"{n_prompt} tokens of a prompt: {time.perf_counter() - started:.1f} s")
            state = (ctypes.c_uint8 * s.lib.llama_state_get_size(s.ctx))()
            s.lib.llama_state_get_data(s.ctx, state, len(state))

        def run(model: engine.Model, spec: str, forced: Sequence[int]) -> np.ndarray:
            """The logits after the last token of the prompt and after those that are given, or
            after the most likely ones: (n_gen, vocabulary)."""
            rows: list[np.ndarray] = []
            with model.session(n_ctx=n_ctx, attention=spec) as s:
                if s.lib.llama_state_set_data(s.ctx, state, len(state)) != len(state):
                    raise SparqError("the state of the prompt was not taken")
                s.tokens = prompt[:-1]
                for i in range(n_gen):
                    before = forced[i - 1] if forced else int(rows[-1].argmax()) if i else 0
                    engine.decode(s, before if i else prompt[-1])
                    rows.append(engine.logits(s))
                ms = 1e3 * statistics.median(s.timings.decode_s)
                where = "CPU" if model is on_cpu else "GPU"
                note(f"{spec} on the {where}: {ms:.1f} ms per token")
                if spec == OURS and not engine.info(s).counters["calls_sparse"]:
                    raise SparqError("no layer was sparse", f"more than --n-prompt {n_prompt}")
            return np.array(rows)

        ours = run(on_cpu, OURS, [])
        tokens = ours.argmax(1).tolist()
        ours_there = run(on_gpu, OURS, tokens)
        off = run(on_cpu, OFF, tokens), run(on_gpu, OFF, tokens)
    moved = compare(OFF, *off)[1]
    lead, _ = compare(OURS, ours, ours_there)
    if lead > 2 * moved:
        raise SparqError(f"a token differs that leads by {lead:.2f}, more than rounding moves two")


def compare(spec: str, on_cpu: np.ndarray, on_gpu: np.ndarray) -> tuple[float, float]:
    """The greatest lead of a token that the GPU does not choose, and by how much logits differ at
    most. Both are (token, vocabulary)."""
    at, a, b = np.arange(len(on_cpu)), on_cpu.argmax(1), on_gpu.argmax(1)
    lead, moved = float((on_cpu[at, a] - on_cpu[at, b]).max()), float(np.abs(on_cpu - on_gpu).max())
    same = (a == b).sum()
    print(f"{spec}: {same} of {len(a)} tokens are the CPU's, logits differ by {moved:.2g}")
    return lead, moved
