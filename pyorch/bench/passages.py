"""What sparse attention does to quality: passages of a long text, recited from their first words.

The paper's Repetition task: a context of about 2,000 tokens of a book, an empty line, and the first
tokens of a passage from somewhere in that context; the model goes on greedily. Counted are the
characters until the first that differs from the book: only attention to the right place gives them.

The context is read once, densely. The last token of the cue and all that follow are decoded with
the method that is measured.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pyorch import native
from pyorch.attention.spec import parse_spec
from pyorch.bench import records
from pyorch.bench.records import Record
from pyorch.errors import SparqError

if TYPE_CHECKING:
    from pyorch.engine import Session

BENCH = "passages"
# without the lower bounds, so that a ratio is that ratio at 2,000 positions too; then with them
_BOUNDS = "min_ctx=0,min_k=1"
SPECS = (
    "off",
    "dense",
    f"sparq,ratio=1/2,{_BOUNDS}",
    f"sparq,ratio=1/4,{_BOUNDS}",
    f"sparq,ratio=1/8,{_BOUNDS}",
    f"sparq,ratio=1/16,{_BOUNDS}",
    f"sparq,ratio=1/32,{_BOUNDS}",
    f"sparq,ratio=1/8,mean_v=on,{_BOUNDS}",
    f"sparq,ratio=1/16,mean_v=on,{_BOUNDS}",
    f"sparq,ratio=1/32,mean_v=on,{_BOUNDS}",
    f"sparq,ratio=1/8,shadow=f16,{_BOUNDS}",
    f"sparq,ratio=1/16,shadow=f16,{_BOUNDS}",
    f"topk,ratio=1/8,{_BOUNDS}",
    f"topk,ratio=1/16,{_BOUNDS}",
    "sparq,ratio=1/8",
)
CHUNK = 10  # passages per record: what an interrupted run loses at most
N_BOOT = 10_000

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Case:
    """CHUNK passages, all methods. `model` and `text` are hashes of contents."""

    model: str
    text: str
    n_context: int
    n_cue: int
    max_chars: int
    seed: int
    first: int  # passage
    n_passages: int
    specs: tuple[str, ...]


@dataclass(frozen=True)
class Passage:
    """`prompt` ends with the cue; `expected` is how the book goes on, as bytes."""

    prompt: list[int]
    expected: bytes


def read_texts(names: Sequence[Path]) -> list[str]:
    """The books: each name is a file, or a folder with *.txt. What Project Gutenberg adds is cut.

    Raises:
        SparqError: nothing there.
    """
    files: list[Path] = []
    for name in names:
        files += sorted(name.glob("*.txt")) if name.is_dir() else [name]
    if not files:
        raise SparqError(f"no *.txt in {', '.join(map(str, names))}", "--text FILE or DIR")
    try:
        return [_body(_decode(f.read_bytes())) for f in files]
    except OSError as e:
        raise SparqError(f"{e.filename}: {e.strerror or e}", "--text FILE or DIR") from None


def _decode(raw: bytes) -> str:
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError:
        text = raw.decode("latin-1")  # old Gutenberg files
    return text.replace("\r\n", "\n")


def _body(text: str) -> str:
    start = re.search(r"^\*\*\* ?START OF .*$", text, re.M)
    end = re.search(r"^\*\*\* ?END OF .*$", text, re.M)
    return text[start.end() if start else 0 : end.start() if end else len(text)].strip()


def passages(
    session: Session, texts: Sequence[str], *, n_context: int, n_cue: int, max_chars: int, seed: int
) -> Iterator[Passage]:
    """Passages without end, the i-th always the same; books in turn.

    Raises:
        SparqError: no book is as long as a context.
    """
    from pyorch import engine

    books = [engine.tokenize(session, t, add_special=False) for t in texts]
    books = [b for b in books if len(b) >= n_context]
    if not books:
        raise SparqError(
            f"no text has {n_context} tokens", "a longer text, or a smaller --context", exit_code=2
        )
    head = engine.tokenize(session, "")  # the model's begin token, where it wants one
    gap = engine.tokenize(session, "\n\n", add_special=False)
    rng = np.random.default_rng(seed)
    i = 0
    while True:
        book = books[i % len(books)]
        start = int(rng.integers(0, len(book) - n_context + 1))
        context = book[start : start + n_context]
        # at least one token per character, so the passage cannot pass the end of the context
        words = _word_starts(session, context, n_context - n_cue - max_chars)
        at = words[int(rng.integers(len(words)))]
        expected = b"".join(engine.token_bytes(session, t) for t in context[at + n_cue :])
        yield Passage(head + context + gap + context[at : at + n_cue], expected[:max_chars])
        i += 1


def _word_starts(session: Session, tokens: Sequence[int], end: int) -> list[int]:
    """Indices below `end` at which a word begins."""
    from pyorch import engine

    found = [i for i in range(end) if engine.token_bytes(session, tokens[i])[:1] == b" "]
    if not found:
        raise SparqError(
            "a context is too short for a passage, or has no words",
            "a larger --context, or a smaller --chars",
            exit_code=2,
        )
    return found


def run(
    model: Path,
    texts: Sequence[Path],
    file: Path,
    progress: Progress,
    *,
    n_passages: int = 100,
    n_context: int = 2000,
    n_cue: int = 20,
    max_chars: int = 300,
    specs: Sequence[str] = SPECS,
    n_threads: int | None = None,
    seed: int = 1,
    force: bool = False,
) -> list[Record]:
    """Measure what `file` lacks, add it there, return all records of this measurement in order.

    Raises:
        SparqError: a sparse row in which nothing ran sparse, or the model or a text cannot be read.
    """
    from pyorch import engine

    env = records.environment({"sparq": native.lib_dir()})
    stamp = env["stamps"]["sparq"]
    done = {} if force else records.load(file)
    books = read_texts(texts)
    canonical = tuple(str(parse_spec(s)) for s in specs)
    text_hash = hashlib.sha256("\0".join(books).encode()).hexdigest()[:16]
    cases = [
        Case(
            model=_hash_file(model),
            text=text_hash,
            n_context=n_context,
            n_cue=n_cue,
            max_chars=max_chars,
            seed=seed,
            first=first,
            n_passages=min(CHUNK, n_passages - first),
            specs=canonical,
        )
        for first in range(0, n_passages, CHUNK)
    ]
    keys = [records.key(BENCH, asdict(c), stamp) for c in cases]
    if all(k in done for k in keys):
        return [done[k] for k in keys]
    room = n_context + n_cue + max_chars + 16
    with engine.load(model, n_ctx=room, n_threads=n_threads) as session:
        source = passages(
            session, books, n_context=n_context, n_cue=n_cue, max_chars=max_chars, seed=seed
        )
        for case, key in zip(cases, keys, strict=True):
            chunk = [next(source) for _ in range(case.n_passages)]
            if key in done:
                continue
            result = _measure(
                session, chunk, canonical, lambda n, c=case: progress(c.first + n, n_passages)
            )
            rec = records.record(BENCH, asdict(case), stamp, **result, env=env)
            records.append(file, rec)
            done[key] = rec
    return [done[k] for k in keys]


def _hash_file(path: Path) -> str:
    digest = hashlib.sha256()
    try:
        with path.open("rb") as f:
            while piece := f.read(1 << 20):
                digest.update(piece)
    except OSError as e:
        raise SparqError(f"{path}: {e.strerror or e}", "--model takes a GGUF file") from None
    return digest.hexdigest()[:16]


def _measure(
    session: Session,
    chunk: Sequence[Passage],
    specs: Sequence[str],
    progress: Callable[[int], None],
) -> dict[str, Any]:
    """`samples`: characters by spec and passage; `counters` by spec, over the chunk."""
    from pyorch import engine

    samples: dict[str, list[int]] = {s: [] for s in specs}
    counters: dict[str, dict[str, int]] = {s: {} for s in specs}
    for n, passage in enumerate(chunk):
        engine.rewind(session, 0)
        engine.set_attention(session, "off")
        engine.prefill(session, passage.prompt[:-1])
        for spec in specs:
            engine.rewind(session, len(passage.prompt) - 1)
            engine.set_attention(session, spec)
            if parse_spec(spec).method == "sparq":
                engine.seal(session)
            engine.reset_counters(session)
            samples[spec].append(recite(session, passage))
            _add(counters[spec], engine.info(session).counters)
        progress(n + 1)
    for spec in specs:
        refuse_idle(spec, counters[spec])
    return {"samples": samples, "counters": counters}


def recite(session: Session, passage: Passage) -> int:
    """Characters that the model gets right before its first mistake. Greedy."""
    from pyorch import engine

    engine.decode(session, passage.prompt[-1])
    said = b""
    while len(said) < len(passage.expected):
        token = int(np.argmax(engine.logits(session)))
        said += engine.token_bytes(session, token)
        if not passage.expected.startswith(said[: len(passage.expected)]):
            break
        if not said or engine.is_eog(session, token):
            break
        engine.decode(session, token)
    right = 0
    for a, b in zip(said, passage.expected, strict=False):
        if a != b:
            break
        right += 1
    return len(passage.expected[:right].decode("utf-8", errors="ignore"))


def _add(total: dict[str, int], more: Any) -> None:
    for name, value in more.items():
        if isinstance(value, int):
            total[name] = total.get(name, 0) + value


def refuse_idle(spec: str, counters: dict[str, int]) -> None:
    """A sparse row is reported only if something ran sparse.

    Raises:
        SparqError: nothing did.
    """
    if parse_spec(spec).sparse and counters.get("calls_sparse", 0) == 0:
        raise SparqError(
            f"{spec}: no attention call ran sparse; not reported",
            "`sparq-cpp explain` says when attention stays dense",
        )


# ---- what is said about it ----


@dataclass(frozen=True)
class Row:
    """One method over all passages. Intervals are 95 % bootstrap over passages."""

    spec: str
    chars: float
    chars_ci: tuple[float, float]
    difference: float  # from the first row, passage by passage
    difference_ci: tuple[float, float]
    bytes_per_token: float
    bytes_dense: float
    positions: float  # gathered per KV head and token, on average
    share_sparse: float  # of the attention calls


def rows(recs: Sequence[Record]) -> list[Row]:
    specs = recs[0]["case"]["specs"]
    chars = {s: np.array([x for r in recs for x in r["samples"][s]], float) for s in specs}
    totals: dict[str, dict[str, int]] = {s: {} for s in specs}
    for rec in recs:
        for s in specs:
            _add(totals[s], rec["counters"][s])
    dense = totals.get("dense", {})  # what all of K and V would be, for rows that do not count
    out = []
    for s in specs:
        c = totals[s] if totals[s].get("steps") else dense
        n = max(c.get("steps", 0), 1)
        visible = max(c.get("positions_visible", 0), 1)
        calls = c.get("calls_sparse", 0) + c.get("calls_dense_op", 0) + c.get("calls_stock", 0)
        out.append(
            Row(
                s,
                float(chars[s].mean()),
                interval(chars[s]),
                float((chars[s] - chars[specs[0]]).mean()),
                interval(chars[s] - chars[specs[0]]),
                c.get("bytes_read", 0) / n,
                c.get("bytes_dense", 0) / n,
                c.get("positions_read", 0) / visible,
                c.get("calls_sparse", 0) / max(calls, 1),
            )
        )
    return out


def interval(samples: np.ndarray, seed: int = 0) -> tuple[float, float]:
    """95 % bootstrap interval of the mean."""
    rng = np.random.default_rng(seed)
    means = rng.choice(samples, (N_BOOT, len(samples))).mean(1)
    low, high = np.percentile(means, (2.5, 97.5))
    return float(low), float(high)


def label(spec: str) -> str:
    """The spec without the bounds that make a ratio exact, which the line below the table names."""
    parsed = parse_spec(spec)
    exact = parsed.min_ctx == 0 and parsed.min_k == 1
    if parsed.sparse and exact:
        return f"`{replace(parsed, min_ctx=1024, min_k=128)}`"
    return f"`{spec}`" + (" with default bounds" if parsed.sparse else "")


def markdown(recs: Sequence[Record]) -> str:
    case = recs[0]["case"]
    first = case["specs"][0]
    n = sum(r["case"]["n_passages"] for r in recs)
    out = [
        f"| attention | characters verbatim (95 % CI) | against `{first}` (95 % CI) "
        "| positions gathered | KB read per token | share of dense |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for r in rows(recs):
        low, high = (round(x, 1) + 0.0 for x in r.difference_ci)  # + 0.0: no "-0.0"
        difference = f"{round(r.difference, 1) + 0.0:+.1f} ({low:+.1f} to {high:+.1f})"
        out.append(
            f"| {label(r.spec)} | {r.chars:.1f} ({r.chars_ci[0]:.1f}-{r.chars_ci[1]:.1f}) "
            f"| {'' if r.spec == first else difference} | {100 * r.positions:.1f} % "
            f"| {r.bytes_per_token / 1e3:.0f} | {100 * r.bytes_per_token / r.bytes_dense:.1f} % |"
        )
    text = (
        f"{n} passages, {case['n_context']} tokens of context, a cue of {case['n_cue']} tokens, at "
        f"most {case['max_chars']} characters. `off` is llama.cpp's own attention, `dense` our "
        "exact one. Bytes are of K, V and the transposed K, counted by the library."
    )
    if tuple(case["specs"]) == tuple(str(parse_spec(s)) for s in SPECS):
        text += (
            " Exact top-k reads all of K to choose, so it moves at least half of dense's bytes. "
            f"`{_BOUNDS}` makes a ratio exact at this length; the last row has the default bounds, "
            "`min_ctx=1024,min_k=128`."
        )
    return "\n".join([*out, "", text])
