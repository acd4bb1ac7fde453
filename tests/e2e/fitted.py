"""K and V on devices that are not there (fake_device.cpp), or with LIBRARY "" on those that are, as
many as fit.

    python fitted.py MODEL LIBRARY JSON

JSON: kv_offload, rates (of devices without our kernels), document (the prompt, read if the file is
not there and opened), and options of a session. Prints one line of JSON: the layers whose K and V
stay in memory, what is said of them, the bytes of the document that were mapped, nodes of ATTEND
that each device ran, sparse calls, the tokens of a reply, and the log.
"""

from __future__ import annotations

import json
import logging
import sys
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path

from llama import load_devices

from pyorch import engine
from pyorch.attention.placement import Rates
from pyorch.cli.gpu import note_in_memory
from pyorch.engine import bandwidth, document_file
from pyorch.native.slots import STEPS


def main() -> None:
    path, library, options = Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
    document = Path(options.pop("document", ""))
    if rates := options.pop("rates", None):
        bandwidth.beside_gpu = lambda *_: Rates(*rates)
    found, prompt, mapped = engine.library(), list(range(3, 253)), 0
    logging.basicConfig(level="INFO", stream=(log := StringIO()))
    count = load_devices(library, found.lib._lib) if library else None
    with (
        redirect_stderr(StringIO()) as said,
        engine.load(path, n_threads=1, placed=note_in_memory, **options) as s,
    ):
        if document.name:
            if not document.exists():
                engine.read_document(s, document, engine.Reading("ab", "ab" * 600, "plain"))
                engine.rewind(s, 0)
            mapped = engine.open_document(s, document_file.load(document))
            prompt = [*s.tokens, 100]
        pieces = engine.generate(s, prompt, max_tokens=20, ignore_eog=True)
        tokens = [p.token for p in pieces]
        result = {"in_memory": s.kv_in_memory, "tokens": tokens, "said": said.getvalue()}
        result["sparse"] = engine.info(s).counter("calls_sparse")
    fakes = range(len(found.gpu_devices())) if count else ()
    result["attend"] = [count(i, STEPS.index("ATTEND")) for i in fakes]
    result |= {"mapped": mapped, "log": log.getvalue()}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
