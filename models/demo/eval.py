"""Score a model on copying: it reads unseen prose, then continues passages of it word for word.

    python models/demo/eval.py --data DIR [--attention sparq,ratio=1/8] [--count 100]

Each trial reads about 2,000 tokens of a book that train.py holds out, then the first 20 tokens of
a passage from anywhere in them, and decodes greedily. The score is the number of characters until
the continuation leaves the text, at most 300.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from os.path import commonprefix
from pathlib import Path

from pyorch import engine

HELD_OUT = (  # as in train.py, which needs torch
    "the-wonderful-wizard-of-oz-by-l-frank-baum.txt",
    "charles-dickens-christmas-carol.txt",
    "the-story-of-alchemy-and-the-beginnings-of-chemistry.txt",
)
CAP = 300  # characters


def trial(session: engine.Session, book: list[int], rng: random.Random, n: int, cue: int) -> int:
    """Characters continued verbatim. Book: its tokens."""
    at = rng.randrange(len(book) - n)
    prose = book[at : at + n]
    start = rng.randrange(n - cue - CAP // 2)
    prompt = prose + prose[start : start + cue]
    truth = engine.detokenize(session, prose[start + cue :])[:CAP]
    text = ""
    for piece in engine.generate(session, prompt, max_tokens=CAP, ignore_eog=True):
        text += piece.text
        if len(text) >= CAP or not truth.startswith(text):
            break
    return len(commonprefix((truth, text)))


def read_book(path: Path) -> str:
    raw = path.read_bytes()
    try:
        return raw.decode("utf-8").replace("\r\n", "\n")
    except UnicodeDecodeError:
        return raw.decode("latin-1").replace("\r\n", "\n")


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--data", type=Path, required=True, help="folder of the books")
    p.add_argument("--model", type=Path, default=Path(__file__).with_name("demo.gguf"))
    p.add_argument("--attention", help="as in SPARQ_ATTN; default: that, or llama.cpp's own")
    p.add_argument("--count", type=int, default=100, help="passages")
    p.add_argument("--context", type=int, default=2000, help="tokens of prose")
    p.add_argument("--cue", type=int, default=20, help="tokens of the passage that are given")
    p.add_argument("--threads", type=int, help="default: all cores")
    p.add_argument("--seed", type=int, default=0)
    args = p.parse_args()
    rng = random.Random(args.seed)
    scores = []
    n_ctx = args.context + args.cue + CAP
    options = {"n_ctx": n_ctx, "n_threads": args.threads, "attention": args.attention}
    with engine.load(args.model, **options) as session:
        books = [engine.tokenize(session, read_book(args.data / name)) for name in HELD_OUT]
        for i in range(args.count):
            scores.append(trial(session, books[i % 3], rng, args.context, args.cue))
            print(f"\r{i + 1}/{args.count}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    quarters = statistics.quantiles(scores, n=4)
    report = {
        "attention": args.attention or "default",
        "passages": len(scores),
        "context": args.context,
        "mean_chars": round(statistics.mean(scores), 1),
        "standard_error": round(statistics.stdev(scores) / len(scores) ** 0.5, 1),
        "quartiles": quarters,
        "reached_cap": sum(s >= CAP for s in scores),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
