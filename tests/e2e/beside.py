"""Replies beside prompts in one batch, alone, and with llama.cpp's own attention.

    python beside.py MODEL LIBRARY JSON

LIBRARY: devices that are not there (fake_device.cpp), or "". JSON: spec, n_gpu_layers, order, say
"rpr" for sequences that reply and sequences that read a prompt; n_read (tokens that these read in
each of the two batches), n_before (tokens of each sequence that replies), only_info, and options of
a context. Prints one line of JSON: what `llama_get_sparse_attn_info` says, groups of the shadow
that differ, what was copied for the last batch (with GGML_SCHED_DEBUG=1), and of each sequence the
logits after its tokens, those of the sequence alone, and those of llama.cpp's own attention.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from llama import Context, Model, Token, crossed, keep_log, load_devices


def main() -> None:
    path, library, options = Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
    spec, kinds = options.pop("spec"), dict(enumerate(options.pop("order")))
    n_gpu_layers, n_read = options.pop("n_gpu_layers", 0), options.pop("n_read", 90)
    if library:
        load_devices(library)
    only_info = options.pop("only_info", False)
    with Model(path, n_gpu_layers) as model:
        together = run(model, spec, kinds, n_read, **options)
        if only_info:
            print(json.dumps({"info": together["info"]}))
            return
        off = run(model, "off", kinds, n_read, **options)["logits"]
        each = [run(model, spec, {seq: kind}, n_read, **options) for seq, kind in kinds.items()]
    print(json.dumps(together | {"off": off, "alone": [one["logits"][0] for one in each]}))


def run(
    model: Model, spec: str, kinds: dict[int, str], n_read: int, n_before: int = 0, **options: Any
) -> dict[str, Any]:
    """Two batches of a token of each sequence that replies ("r"), `n_read` of those that read."""
    texts = {seq: np.random.default_rng(seq).integers(3, model.n_vocab, 700) for seq in kinds}
    done, logits = dict.fromkeys(kinds, 0), {seq: [] for seq in kinds}

    def take(seq: int, n: int) -> list[Token]:
        done[seq] += n
        return [(int(texts[seq][i]), i, seq) for i in range(done[seq] - n, done[seq])]

    with Context(model, n_ctx=4096, n_seq=max(4, len(kinds)), **options) as ctx:
        ctx.set_sparse(spec)
        for seq in (seq for seq, kind in kinds.items() if kind == "r"):
            assert ctx.decode(take(seq, n_before or 330 - 20 * seq)) == 0
        ctx.reset_counters()
        for _ in range(2):
            log = keep_log()
            each = [take(seq, 1 if kind == "r" else n_read) for seq, kind in kinds.items()]
            batch = [token for tokens in each for token in tokens]
            assert ctx.decode(batch) == 0
            for i, (_, _, seq) in enumerate(batch):
                if i + 1 == len(batch) or batch[i + 1][2] != seq:
                    logits[seq].append(ctx.logits(i).tolist())
        found = {"info": ctx.info(), "differ": ctx.check_shadow(), "crossed": crossed(log)}
        return found | {"logits": [*logits.values()]}


if __name__ == "__main__":
    main()
