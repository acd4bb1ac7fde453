"""One run on devices that are not there (fake_device.cpp), or with LIBRARY "" on those that are:
prefill, then decode 40 tokens.

    python placed.py MODEL LIBRARY JSON

JSON: spec, and n_gpu_layers, offload_kqv, type_k, type_v, n_seq, reseal, reopen (the prompt as a
document), refused (why the spec is). Runs on the stock library too, with the spec "". Prints one
line of JSON: what `llama_get_sparse_attn_info` says, nodes run by each device, what was copied for
the last token (with GGML_SCHED_DEBUG=1), its logits, a hash of the bits of all.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path

import numpy as np
from llama import Context, Model, SpecError, bindings, crossed, keep_log, load_devices

from pyorch.native.devices import listed, runs_sparse
from pyorch.native.prototypes import declare
from pyorch.native.slots import STEPS

N_PROMPT, N_DECODE, N_CTX = 600, 40, 1024


def main() -> None:
    path, library, options = Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
    spec, n_gpu_layers = options.pop("spec"), options.pop("n_gpu_layers", 0)
    n_seq, reseal = options.get("n_seq", 1), options.pop("reseal", False)
    refused, reopened = options.pop("refused", ""), options.pop("reopen", False)
    count = load_devices(library) if library else None
    rng = np.random.default_rng(7)
    logits = []
    with (
        Model(path, n_gpu_layers) as model,
        Context(model, n_ctx=N_CTX * n_seq, unified=n_seq == 1, **options) as ctx,
    ):
        try:
            if spec:
                ctx.set_sparse(spec)
        except SpecError as e:
            assert refused and refused in str(e), e
            spec = "off"
        for seq in range(n_seq):
            prompt = rng.integers(3, model.n_vocab, N_PROMPT - 70 * seq).tolist()
            assert ctx.decode([(t, i, seq) for i, t in enumerate(prompt)]) == 0
        logits.append(ctx.logits())
        sealed = 0
        if reseal:  # a restored state is sealed anew
            before = ctx.info()["counters"]["groups_sealed"]
            assert ctx.set_state(ctx.get_state()) > 0
            sealed = ctx.info()["counters"]["groups_sealed"] - before
        if reopened:
            ctx.reopen(N_PROMPT)
        for i in range(N_DECODE):
            log = keep_log()
            batch = [(5 + i, N_PROMPT - 70 * seq + i, seq) for seq in range(n_seq)]
            assert ctx.decode(batch, logits="all") == 0
            logits += [ctx.logits(t) for t in range(n_seq)]
        info, differ = (ctx.info(), ctx.check_shadow()) if spec else ({}, 0)
        if spec not in ("off", ""):
            ctx.reset_counters()
            assert ctx.info()["counters"]["bytes_read"] == 0
    bits = np.array(logits)
    assert np.isfinite(bits).all()
    fakes = range(int(os.environ["FAKE_DEVICES"])) if count else ()
    nodes = [{name: count(dev, op) for op, name in enumerate(STEPS)} for dev in fakes]
    result = {"info": info, "nodes": nodes, "differ": differ, "sealed": sealed}
    if spec and count:
        lib, asked = bindings(), "gpu_min_mb" in spec
        result["runs"] = [runs_sparse(lib, gpu, asked) for gpu in listed(declare(lib._lib))]
    result |= {"crossed": crossed(log), "logits": logits[-1].tolist()}
    print(json.dumps(result | {"bits": hashlib.sha256(bits.tobytes()).hexdigest()}))


if __name__ == "__main__":
    main()
