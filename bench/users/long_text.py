"""Does the error of sparse attention grow along a text that it writes itself?

Each book's beginning is read exactly. Then one attention writes, and the other decodes the same
tokens, so that both keep K and V as they made them. KL(dense || sparse) of the
next token, in nats, is averaged over steps of 1,024 tokens; along the text that sparse attention
wrote, and along the one of dense attention. What is due to the length of the context shows in
both, what is due to the text in the first alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import click
import numpy as np

from pyorch import engine
from pyorch.attention.spec import AttentionSpec, parse_spec
from pyorch.evals.decode import log_softmax

STEP, GRAM = 1024, 16
DENSE = parse_spec("dense")
WRITERS = ("sparse", "dense")


@dataclass(frozen=True)
class Text:
    """One text: its book and writer; by step the KL, the share of equal first choices, and the
    share of runs of GRAM tokens that the text had before."""

    book: int
    writer: str
    kl: tuple[float, ...]
    agree: tuple[float, ...]
    repeated: tuple[float, ...]


def decode(
    s: engine.Session,
    spec: AttentionSpec,
    prompt: list[int],
    choose: Callable[[int, np.ndarray], int],
    n: int,
) -> np.ndarray:
    """The logits (n, n_vocab) of n steps after the prompt; choose(i, logits) is token i."""
    engine.rewind(s, 0)
    engine.set_attention(s, DENSE)
    engine.prefill(s, prompt[:-1])
    engine.set_attention(s, spec)
    engine.reset_counters(s)
    token, out = prompt[-1], np.empty((n, s.n_vocab), np.float32)
    for i in range(n):
        engine.decode(s, token)
        out[i] = engine.logits(s)
        token = choose(i, out[i])
    if spec.sparse:
        assert engine.info(s).counters["calls_sparse"] > 0, "the sparse path did not run"
    return out


def compare(dense: np.ndarray, sparse: np.ndarray) -> tuple[float, float]:
    """The mean KL in nats, and the share of equal first choices; of logits (n, n_vocab)."""
    kl = [
        float(np.exp(p) @ (p - log_softmax(y)))
        for x, y in zip(dense, sparse, strict=True)
        for p in [log_softmax(x)]
    ]
    return float(np.mean(kl)), float(np.mean(dense.argmax(1) == sparse.argmax(1)))


def repeats(text: list[int]) -> list[bool]:
    """Whether the last GRAM tokens were there before, for each token."""
    seen, out = set[tuple[int, ...]](), []
    for i in range(len(text)):
        gram = tuple(text[max(i + 1 - GRAM, 0) : i + 1])
        out.append(gram in seen)
        seen.add(gram)
    return out


@click.command
@click.option("-m", "--model", type=click.Path(exists=True, path_type=Path), required=True)
@click.option(
    "--text",
    "books",
    type=click.Path(exists=True, path_type=Path),
    required=True,
    help="A folder of books.",
)
@click.option("-a", "--attn", default="sparq,ratio=1/8", show_default=True)
@click.option("-p", "n_prompt", default=2048, show_default=True, help="Tokens of each book.")
@click.option("-n", "n_gen", default=6144, show_default=True, help="Tokens that are written.")
@click.option("--temperature", "heat", default=0.0, show_default=True)
@click.option("--books", "n_book", default=8, show_default=True)
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Without a suffix.")
def command(
    model: Path,
    books: Path,
    attn: str,
    n_prompt: int,
    n_gen: int,
    heat: float,
    n_book: int,
    out: Path,
) -> None:
    """KL along long texts that sparse and dense attention write."""
    sparse = parse_spec(attn)
    with engine.load_model(model) as loaded:
        session = loaded.session(n_ctx=n_prompt + n_gen, attention=DENSE)
        for book, path in enumerate(sorted(books.glob("*.txt"))[:n_book]):
            words = path.read_text(errors="replace")[20000 : 20000 + 8 * n_prompt]
            prompt = engine.tokenize(session, words)[:n_prompt]
            for by in WRITERS:
                rng, text = np.random.default_rng(book), list[int]()

                def sample(_: int, x: np.ndarray) -> int:
                    noise = rng.gumbel(size=x.shape) if heat else 0.0  # noqa: B023
                    text.append(int((x / (heat or 1.0) + noise).argmax()))  # noqa: B023
                    return text[-1]  # noqa: B023

                other, own = (DENSE, sparse) if by == "sparse" else (sparse, DENSE)
                logits = {own: decode(session, own, prompt, sample, n_gen)}
                logits[other] = decode(session, other, prompt, lambda i, _: text[i], n_gen)  # noqa: B023
                steps = [slice(i, i + STEP) for i in range(0, n_gen, STEP)]
                kl, agree = zip(
                    *(compare(logits[DENSE][x], logits[sparse][x]) for x in steps), strict=True
                )
                again = repeats(text)
                repeated = tuple(float(np.mean(again[x])) for x in steps)
                line = json.dumps(asdict(Text(book, by, kl, agree, repeated)))
                print(line, flush=True)
                with out.with_suffix(".jsonl").open("a") as f:
                    print(line, file=f)


if __name__ == "__main__":
    command()
