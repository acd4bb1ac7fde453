"""Prefill, then decode 200 tokens; writes the logits of every step (n + 1, n_vocab) and the tokens.

Runs on the stock library too: the attention is touched only with a spec.

    python gate.py MODEL OUT.npz JSON

JSON: spec; then_off (read and decode with it first, take that back, set off); text (a file with the
prompt; without it random tokens, also in place of decoded ones); options of a context.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
from llama import Context, Model, bindings

N_PROMPT, N_DECODE, N_CTX = 700, 200, 1024


def main() -> None:
    path, out, options = Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
    spec, then_off = options.pop("spec", ""), options.pop("then_off", False)
    text, options = options.pop("text", ""), {"n_threads": 2, **options}
    rng = np.random.default_rng(5)
    with Model(path) as model, Context(model, n_ctx=N_CTX, **options) as ctx:
        forced = rng.integers(3, model.n_vocab, N_PROMPT + N_DECODE).tolist()
        prompt = forced[:N_PROMPT]
        if text:
            prompt, forced = model.tokenize(Path(text).read_text()[:8000])[:N_PROMPT], None
        if spec:
            ctx.set_sparse(spec)
        assert ctx.decode([(t, i, 0) for i, t in enumerate(prompt)]) == 0
        logits = [ctx.logits()]
        if then_off:
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
    np.savez(out, logits=np.array(logits), tokens=np.array(tokens), ours=ours)


if __name__ == "__main__":
    main()
