"""Runs one model on one library and writes what came out; a process of its own for each.

    python run.py MODEL OUT.npz [CASE...]

Without a case, all of them. OUT.npz has the logits of each case, (steps, logits of the sequences
one after the other), and `facts`, a JSON object: for each case `refused` and why, or `reused`, the
graphs that a step took over from the one before, and `info`, what our library says.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from llama import Context, Model, SpecError, bindings, log_text

N_CTX, N_BATCH, N_STEP = 2048, 512, 6
N_PROMPT, N_SHORT = 1536, 1088  # of one sequence, and of each of two: all of it can be sealed
N_QUESTION = 8  # the last ones of a prompt: a document has the others
N_SOURCE = 16  # tokens that an encoder reads

# the cases, and the same ones by llama.cpp's other setting, which takes no V of 8 bits
PLAIN: dict[str, dict[str, Any]] = {
    "one": {},
    "pair": {"n_seq": 2},
    "k_q8_0": {"type_k": "q8_0"},
}
NO_FLASH = {f"{name}_no_flash": {**options, "flash": False} for name, options in PLAIN.items()}
PLAIN |= {"q8_0": {"type_k": "q8_0", "type_v": "q8_0"}, "restored": {"restore": True}, **NO_FLASH}
SPARSE = "sparq,ratio=1/8"  # as people run it
FEW = "sparq,rank=2,topk=16,local=1,sinks=0,mean_v=off,min_ctx=0"  # too few to be right
ALL = "sparq,rank=16,topk=1000000,prompt=f32"
OURS = {
    "few": ("one", FEW),
    "all": ("one", ALL),
    "all_pair": ("pair", ALL),
    "all_k_q8_0": ("k_q8_0", ALL),
    "sparse": ("one", SPARSE),
    "sparse_pair": ("pair", SPARSE),
    "sparse_q8_0": ("q8_0", SPARSE),
    "sparse_restored": ("restored", SPARSE),
    "all_document": ("one", ALL),
}


def tokens(model: Model, seq: int) -> list[int]:
    """The same ones in every process."""
    return np.random.default_rng(seq).integers(0, model.n_vocab, N_CTX).tolist()


def read(ctx: Context, n: int, start: int = 0) -> None:
    """Tokens [start, n) of each sequence as a prompt."""
    for seq in range(ctx.n_seq):
        text = tokens(ctx.model, seq)
        for at in range(start, n, N_BATCH):
            part = range(at, min(at + N_BATCH, n))
            batch = [(text[i], i, seq) for i in part]
            assert ctx.decode(batch, [i == n - 1 for i in part]) == 0, log_text()


def step(ctx: Context, at: int) -> np.ndarray:
    """One token of each sequence; the logits of all."""
    batch = [(tokens(ctx.model, seq)[at], at, seq) for seq in range(ctx.n_seq)]
    assert ctx.decode(batch, "all") == 0, log_text()
    return np.concatenate([ctx.logits(i) for i in range(ctx.n_seq)])


def run(
    model: Model,
    spec: str = "",
    n_seq: int = 1,
    restore: bool = False,
    keep: bool = False,
    **options: Any,
) -> tuple[np.ndarray, dict[str, Any]]:
    """The logits of the steps, and the facts.

    Args:
        restore: save the state halfway, empty the cache, and take it back.
        keep: make a document of all of the prompt but the question, and open it.

    Raises:
        RuntimeError, SpecError: the library refuses the context, the settings, or the document.
    """
    m, n = bindings(), N_PROMPT if n_seq == 1 else N_SHORT
    has_encoder = m.llama_model_has_encoder(model.handle)  # llama.cpp's bias of positions
    options |= {"n_ctx": N_CTX * n_seq, "n_seq": n_seq, "unified": has_encoder, "n_batch": N_BATCH}
    options["swa_full"] = False  # as in llama.cpp's programs
    with Context(model, **options) as ctx:
        if spec:
            ctx.set_sparse(spec)
        if has_encoder:
            source = [(i, i, seq) for seq in range(n_seq) for i in range(N_SOURCE)]
            assert ctx.encode(source) == 0, log_text()
        read(ctx, n - N_QUESTION)
        if keep:
            ctx.reopen(n - N_QUESTION)
        read(ctx, n, n - N_QUESTION)
        if spec:
            ctx.reset_counters()
        m.llama_perf_context_reset(ctx.handle)
        logits = []
        for i in range(N_STEP):
            if restore and i == N_STEP // 2:
                state = ctx.get_state()
                ctx.clear(True)
                assert ctx.set_state(state) == len(state), log_text()
            logits.append(step(ctx, n + i))
        facts: dict[str, Any] = {"reused": m.llama_perf_context(ctx.handle).n_reused}
        if spec:
            facts["info"] = ctx.info()
    return np.array(logits), facts


def main() -> None:
    is_ours = hasattr(bindings()._lib, "llama_set_sparse_attn")
    logits: dict[str, np.ndarray] = {}
    facts: dict[str, Any] = {}
    with Model(Path(sys.argv[1])) as model:
        cases = {name: ("", options) for name, options in PLAIN.items()}
        if is_ours:
            cases |= {name: (spec, PLAIN[plain]) for name, (plain, spec) in OURS.items()}
        for name in sys.argv[3:] or cases:
            spec, options = cases[name]
            keep = name.endswith("_document")
            try:
                logits[name], facts[name] = run(model, spec, keep=keep, **options)
            except SpecError as error:
                facts[name] = {"refused": str(error).partition("\n")[0]}
            except RuntimeError:
                facts[name] = {"refused": log_text().strip().splitlines()[-1]}
    np.savez(sys.argv[2], facts=json.dumps({"ours": is_ours, **facts}), **logits)


if __name__ == "__main__":
    main()
