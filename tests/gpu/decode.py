"""Greedy tokens after the first 1500 of a text, with K and V where the layers are.

    python decode.py MODEL TEXT N SPEC N_GPU_LAYERS [--log]

Prints JSON: text, how far each token led the second in logits, calls_sparse, reasons of the
layers, groups of the shadow that differ, the log.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
from llama import Context, Model, keep_log

N_PROMPT = 1500


def main() -> None:
    path, text, n, spec, layers = sys.argv[1:6]
    log = keep_log() if "--log" in sys.argv else []
    with Model(Path(path), int(layers)) as model, Context(model, n_ctx=4096) as ctx:
        ctx.set_sparse(spec)
        prompt = model.tokenize(Path(text).read_text("utf-8")[:20000])[:N_PROMPT]
        assert ctx.decode([(t, i, 0) for i, t in enumerate(prompt)]) == 0
        tokens, leads = [], []
        log.clear()
        for i in range(int(n)):
            logits = ctx.logits()
            tokens.append(int(logits.argmax()))
            second, first = np.partition(logits, -2)[-2:]
            leads.append(float(first - second))
            assert ctx.decode([(tokens[-1], len(prompt) + i, 0)]) == 0
        info = ctx.info()
        result = {
            "text": tokens,
            "leads": leads,
            "calls_sparse": info.get("counters", {}).get("calls_sparse", 0),  # none while it is off
            "reasons": sorted({layer["reason"] for layer in info["layers"]}),
            "differ": ctx.check_shadow(),
            "log": [line for line in log if "graph" in line.lower()],
        }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
