"""One run with layers on workers: a prompt, then given tokens.

    python away.py MODEL JSON

JSON: workers, spec, and tensor_split, n_gpu_layers, n_sequences, type_k, type_v, restore (the
state is taken out and put back), document (a path for the prompt), n_decode, shift (take a part
out of the context whenever it is full). Prints what the library says of attention, and a hash of
the logits' bits.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import sys
from pathlib import Path

import numpy as np

from pyorch import engine
from pyorch.engine import document_file

N_PROMPT, N_DECODE = 600, 40
N_SHIFT = 700  # positions


def shifted(s: engine.Session) -> None:
    """Context shift, as llama.cpp's programs do it: the beginning goes, the rest moves up."""
    n = N_SHIFT // 4
    assert s.lib.llama_memory_seq_rm(s.memory, 0, 4, 4 + n)
    s.lib.llama_memory_seq_add(s.memory, 0, 4 + n, -1, -n)
    del s.tokens[4 : 4 + n]


def main() -> None:
    options = json.loads(sys.argv[2])
    spec, restore = options.pop("spec"), options.pop("restore", "")
    kept, n_seq = options.pop("document", ""), options.get("n_sequences", 1)
    n_decode, shift = options.pop("n_decode", N_DECODE), options.pop("shift", False)
    rng = np.random.default_rng(7)
    logits = []
    with engine.load(sys.argv[1], n_ctx=1024, n_threads=1, attention=spec, **options) as s:
        if kept:
            letters = np.random.default_rng(1).integers(97, 123, N_PROMPT - 1)
            text = bytes(letters.astype(np.uint8)).decode()
            engine.read_document(s, Path(kept), engine.Reading("letters", text, "plain"))
            engine.rewind(s, 0)
            assert engine.open_document(s, document_file.load(Path(kept))) == 0
        elif n_seq == 1:
            engine.prefill(s, rng.integers(3, s.n_vocab, N_PROMPT).tolist())
        else:
            prompts = [rng.integers(3, s.n_vocab, N_PROMPT - 70 * i).tolist() for i in range(n_seq)]
            engine.prefill_each(s, prompts)
        if restore:
            tokens, state = s.tokens, (ctypes.c_uint8 * s.lib.llama_state_get_size(s.ctx))()
            assert s.lib.llama_state_get_data(s.ctx, state, len(state)) == len(state)
            engine.rewind(s, 0)
            assert s.lib.llama_state_set_data(s.ctx, state, len(state)) == len(state)
            s.tokens = tokens
        for i in range(n_decode):
            if shift and len(s.tokens) == N_SHIFT:
                shifted(s)
            if n_seq == 1:
                engine.decode(s, 5 + i % 200)
                logits.append(engine.logits(s).copy())
            else:
                logits.append(engine.decode_each(s, {j: 5 + i for j in range(n_seq)}).copy())
        info = engine.info(s).raw
    bits = np.array(logits)
    assert np.isfinite(bits).all()
    print(json.dumps({"info": info, "bits": hashlib.sha256(bits.tobytes()).hexdigest()}))


if __name__ == "__main__":
    main()
