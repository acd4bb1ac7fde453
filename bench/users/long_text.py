"""Does the error of sparse attention grow along a text that it writes itself?

Each book's beginning is read exactly. Then two sessions go on: one writes, the other decodes the
same tokens, so that both keep K and V as their own attention made them. KL(dense || sparse) of the
next token, in nats, is averaged over steps of 1,024 tokens; along the text that sparse attention
wrote, and along the one of dense attention. What is due to the length of the context shows in
both, what is due to the text in the first alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
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
    kl: list[float]
    agree: list[float]
    repeated: list[float]


def write(
    sessions: dict[AttentionSpec, engine.Session],
    prompt: list[int],
    n: int,
    heat: float,
    seed: int,
    by: str,
) -> Iterator[tuple[float, bool, bool]]:
    """Yields KL, agreement and repetition of each of n tokens that `by` writes."""
    for name, s in sessions.items():
        engine.rewind(s, 0)
        engine.set_attention(s, DENSE)
        engine.prefill(s, prompt[:-1])
        engine.set_attention(s, name)
    rng, token, text, seen = np.random.default_rng(seed), prompt[-1], list[int](), set()
    for _ in range(n):
        log_p = {}
        for name, s in sessions.items():
            engine.decode(s, token)
            log_p[name] = log_softmax(engine.logits(s))
        sparse, dense = log_p.values()
        own = dense if by == "dense" else sparse
        token = int((own / heat + rng.gumbel(size=own.shape)).argmax() if heat else own.argmax())
        text.append(token)
        gram = tuple(text[-GRAM:])
        yield (
            float(np.exp(dense) @ (dense - sparse)),
            dense.argmax() == sparse.argmax(),
            gram in seen,
        )
        seen.add(gram)


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
    texts, sparse = list[Text](), parse_spec(attn)
    with engine.load_model(model) as loaded:
        sessions = {
            x: loaded.session(n_ctx=n_prompt + n_gen, attention=DENSE) for x in (sparse, DENSE)
        }
        for book, path in enumerate(sorted(books.glob("*.txt"))[:n_book]):
            words = path.read_text(errors="replace")[20000 : 20000 + 8 * n_prompt]
            prompt = engine.tokenize(sessions[sparse], words)[:n_prompt]
            for by in WRITERS:
                steps = list(write(sessions, prompt, n_gen, heat, book, by))
                parts = [steps[i : i + STEP] for i in range(0, n_gen, STEP)]
                kl, agree, repeated = (
                    [float(np.mean([x[j] for x in p])) for p in parts] for j in range(3)
                )
                texts.append(Text(book, by, kl, agree, repeated))
                print(asdict(texts[-1]), flush=True)
                calls = engine.info(sessions[sparse]).counters["calls_sparse"]
                assert calls > 0, "the sparse path did not run"
                with out.with_suffix(".jsonl").open("a") as f:
                    print(json.dumps(asdict(texts[-1])), file=f)


if __name__ == "__main__":
    command()
