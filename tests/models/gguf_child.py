"""Reads damaged files, one per line of stdin, in little memory; answers with one line each:
the seconds of CPU that it took, and what came of it.

python gguf_child.py read            `read_gguf` and `geometry`
python gguf_child.py run             the whole path: load in llama.cpp, tokenise, decode
"""

from __future__ import annotations

import resource
import signal
import sys
import time
from pathlib import Path

from pyorch.errors import SparqError
from pyorch.models.geometry import geometry
from pyorch.models.gguf_file import read_gguf

MEMORY = 1 << 30


def read(path: Path) -> None:
    geometry(read_gguf(path))


def run(path: Path) -> None:
    from pyorch import engine

    with engine.load(path, n_ctx=64, n_threads=1, attention="sparq,rank=4,topk=8,min_ctx=0") as s:
        tokens = engine.tokenize(s, "Hé, 12 <s>\n\0", parse_special=True)[:32] or [0]
        engine.prefill(s, tokens)
        for _ in range(2):
            token = int(engine.logits(s).argmax())
            engine.token_bytes(s, token, special=True)
            engine.is_eog(s, token)
            engine.decode(s, token)
        engine.detokenize(s, range(min(s.n_vocab, 300)), special=True)


def main(mode: str) -> None:
    if mode == "run":
        from pyorch import engine

        engine.library()  # its memory is not the file's
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
    for line in sys.stdin:
        signal.alarm(300)  # a hang ends as a crash
        started = time.process_time()
        try:
            {"read": read, "run": run}[mode](Path(line.rstrip("\n")))
            answer = "ok"
        except SparqError as e:
            answer = f"refused: {e.message}"
        except BaseException as e:
            answer = f"WRONG {type(e).__name__}: {e}"
        print(f"{time.process_time() - started:.3f} {answer!s}".replace("\n", "\\n"), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
