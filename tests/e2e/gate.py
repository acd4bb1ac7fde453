"""Prefill, then decode 200 tokens; writes the logits of every step (n + 1, n_vocab) and the tokens.

Runs on the stock library too: the attention is touched only with a spec.

    python gate.py MODEL OUT.npz JSON

JSON: spec; then_off (read and decode with it first, take that back, set off); text (a file with the
prompt; without it random tokens, also in place of decoded ones); n_prompt, n_decode, n_gpu_layers;
options of a context. With a spec it writes what the library says, too, how many groups of the
shadow differ, and the log of the decoded tokens.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
from llama import Context, Model, bindings, keep_log


def main() -> None:
    path, out, options = Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
    spec, then_off = options.pop("spec", ""), options.pop("then_off", False)
    text, n_gpu_layers = options.pop("text", ""), options.pop("n_gpu_layers", 0)
    n_prompt, n_decode = options.pop("n_prompt", 700), options.pop("n_decode", 200)
    options = {"n_threads": 2, "n_ctx": 1024, **options}
    rng, facts = np.random.default_rng(5), {}
    with Model(path, n_gpu_layers) as model, Context(model, **options) as ctx:
        forced = rng.integers(3, model.n_vocab, n_prompt + n_decode).tolist()
        prompt = forced[:n_prompt]
        if text:
            words = Path(text).read_text("utf-8")[: 12 * n_prompt]
            prompt, forced = model.tokenize(words)[:n_prompt], None
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
        tokens, log = [], keep_log()
        for i in range(n_decode):
            tokens.append(forced[n_prompt + i] if forced else int(logits[-1].argmax()))
            assert ctx.decode([(tokens[-1], len(prompt) + i, 0)]) == 0
            logits.append(ctx.logits())
        if spec:
            lines = [line for line in log if "graph" in line.lower()]
            facts = {"info": ctx.info(), "differ": ctx.check_shadow(), "log": lines}
    ours = hasattr(bindings()._lib, "llama_set_sparse_attn")
    facts = json.dumps({"ours": ours, **facts})
    np.savez(out, logits=np.array(logits), tokens=np.array(tokens), facts=facts)


if __name__ == "__main__":
    main()
