"""K and V on devices that are not there (fake_device.cpp), as many as fit.

    python fitted.py MODEL LIBRARY JSON

JSON: kv_offload, and options of a session. Prints one line of JSON: the layers whose K and V stay
in memory, what is said of them, what the devices have left, nodes of ATTEND that each ran, and the
tokens of a reply.
"""

from __future__ import annotations

import ctypes
import json
import sys
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path

from pyorch import engine
from pyorch.cli.gpu import note_in_memory
from pyorch.engine import gpus
from pyorch.native.slots import STEPS


def main() -> None:
    path, library, options = Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
    found = engine.library()
    load = found.lib._lib.ggml_backend_load
    load.restype, load.argtypes = ctypes.c_void_p, [ctypes.c_char_p]
    assert load(library.encode())
    count, prompt = ctypes.CDLL(library).fake_count, list(range(3, 253))
    with (
        redirect_stderr(StringIO()) as said,
        engine.load(path, n_threads=1, placed=note_in_memory(), **options) as s,
    ):
        pieces = engine.generate(s, prompt, max_tokens=20, ignore_eog=True)
        tokens = [p.token for p in pieces]
        result = {"in_memory": s.kv_in_memory, "tokens": tokens, "said": said.getvalue()}
        result["left"] = [gpu.free for gpu in gpus.gpus(found)]
    result["attend"] = [count(i, STEPS.index("ATTEND")) for i in range(len(result["left"]))]
    print(json.dumps(result))


if __name__ == "__main__":
    main()
