"""Prefill, then decode 200 tokens; writes the logits of every step (n + 1, n_vocab) and the tokens.

Runs on the stock library too: the attention is touched only with --spec.

    python gate.py MODEL OUT.npz [--spec S] [--then-off] [--text FILE] [--threads 2] [--no-flash]
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from llama import Context, Model, bindings

N_PROMPT, N_DECODE, N_CTX = 700, 200, 1024


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--spec", default="")
    parser.add_argument(
        "--then-off",
        action="store_true",
        help="read and decode with the spec first, take that back, set off",
    )
    parser.add_argument(
        "--text", type=Path, help="prompt; without it random tokens, also in place of decoded ones"
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--no-flash", action="store_true")
    args = parser.parse_args()

    rng = np.random.default_rng(5)
    with (
        Model(args.model) as model,
        Context(model, n_ctx=N_CTX, n_threads=args.threads, flash=not args.no_flash) as ctx,
    ):
        forced = rng.integers(3, model.n_vocab, N_PROMPT + N_DECODE).tolist()
        prompt = forced[:N_PROMPT]
        if args.text:
            prompt, forced = model.tokenize(args.text.read_text()[:8000])[:N_PROMPT], None
        if args.spec:
            ctx.set_sparse(args.spec)
        assert ctx.decode([(t, i, 0) for i, t in enumerate(prompt)]) == 0
        logits = [ctx.logits()]
        if args.then_off:
            for i in range(40):
                assert ctx.decode([(10 + i, len(prompt) + i, 0)]) == 0
            assert ctx.info()["counters"]["calls_sparse"] > 0
            ctx.seq_rm(0, 0, -1)
            ctx.set_sparse("off")
            assert ctx.decode([(t, i, 0) for i, t in enumerate(prompt)]) == 0
            logits = [ctx.logits()]
        tokens = []
        for i in range(N_DECODE):
            tokens.append(forced[N_PROMPT + i] if forced else int(logits[-1].argmax()))
            assert ctx.decode([(tokens[-1], len(prompt) + i, 0)]) == 0
            logits.append(ctx.logits())
    ours = hasattr(bindings()._lib, "llama_set_sparse_attn")
    np.savez(args.out, logits=np.array(logits), tokens=np.array(tokens), ours=ours)


if __name__ == "__main__":
    main()
