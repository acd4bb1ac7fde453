"""Times replies with drafts: llama.cpp's attention and ours, without drafts and with, in turns.

    python -m bench drafts -m MODEL --draft SMALLER --text BOOK [-d 4096,16384] [-a SPEC]...

The model goes on with the text at each depth, greedily. Drafts are guessed by a smaller model, or
by n-grams: what followed the newest three tokens where they stood last. The model then evaluates
the last token and the draft at once, and keeps what it would have said itself. llama.cpp's
attention is `off` of our library, which is its own code; the smaller model always has it.

What drafts gain depends on the text, so it is a real one, and acceptance stands beside the times.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import click

from bench import runner
from pyorch import engine
from pyorch.attention.spec import AttentionSpec, parse_spec
from pyorch.bench import records
from pyorch.bench.plan import text_hash
from pyorch.bench.records import Done, Record, Result
from pyorch.cli import types
from pyorch.cli.types import Number, Numbers
from pyorch.engine import sparse
from pyorch.errors import SparqError
from pyorch.models.content import content_hash
from pyorch.table import markdown

NGRAM = 3  # tokens that a guess follows
READER = parse_spec("dense,prompt=sparse")
COUNTERS = ("steps", "verified", "calls_sparse", "calls_prefill")
KINDS = ("none", "model", "ngram")


@dataclass(frozen=True)
class Case:
    """An attention and a kind of drafts at a depth. `model`, `draft` and `text` are hashes."""

    model: str
    draft: str
    text: str
    n_depth: int
    spec: AttentionSpec
    drafts: str
    n_draft: int
    n_gen: int
    n_threads: int
    n_samples: int
    flash: bool = True
    library: str = "sparq"


OPTIONS = (
    runner.MODEL,
    click.option(
        "--draft",
        metavar="FILE",
        required=True,
        type=types.File(),
        callback=lambda _, __, given: Path(given),
        help="GGUF model that guesses, with the same vocabulary.",
    ),
    runner.TEXT,
    click.option("-d", "--n-depth", type=Numbers(16), default="4096,16384", show_default=True),
    click.option(
        "--n-draft", type=Number(int, 1), default=3, show_default=True, help="Tokens of a draft."
    ),
    click.option("-n", "--n-gen", type=Number(int, 1), default=64, show_default=True),
    click.option(
        "-fa", "--flash-attn", type=Numbers(0, 1), default="1", show_default=True, help="Of stock."
    ),
    runner.specs("off", "sparq,ratio=1/8", "sparq,ratio=1/8,verify=exact"),
    runner.THREADS,
    runner.samples(3),
)


def groups(given: runner.Given) -> list[list[Case]]:
    """A group for each depth; without drafts `verify` makes no difference."""
    common = {
        "model": content_hash(given.model),
        "draft": content_hash(given.draft),
        "text": text_hash(given.text),
        "n_draft": given.n_draft,
        "n_gen": given.n_gen,
        "n_threads": given.threads,
        "n_samples": given.samples,
    }
    return [
        [
            Case(n_depth=d, spec=spec, drafts=kind, flash=bool(flash), **common)
            for spec in given.specs
            for flash in (given.flash_attn if spec.method == "off" else [1])
            for kind in KINDS
            if kind != "none" or spec.verify == "sparse"
        ]
        for d in sorted(given.n_depth)
    ]


def measure(given: runner.Given, cases: Sequence[Case], done: Done) -> list[Result]:
    """The samples of a depth, in turns.

    Raises:
        SparqError: the text is too short, the vocabularies differ, or as `refuse_idle`.
    """
    first = cases[0]
    n_ctx = first.n_depth + first.n_gen + first.n_draft + 1
    options: dict[str, Any] = {"n_ctx": -(-n_ctx // 256) * 256, "n_threads": first.n_threads}
    found: dict[Case, dict[str, Any]] = {c: {"samples_ns": []} for c in cases}
    with engine.load_model(given.model) as big, engine.load_model(given.draft) as small:
        tokens = engine.tokenize(big, given.text)[: first.n_depth]
        if len(tokens) < first.n_depth:
            raise SparqError(f"the text has {len(tokens)} tokens, not {first.n_depth}")
        if engine.tokenize(small, given.text)[: first.n_depth] != tokens:
            raise SparqError("the two models have other vocabularies", "use two of one family", 2)
        guesser = small.session(attention=str(READER), **options)
        engine.prefill(guesser, tokens, progress=lambda i, n: done(0.2 * i / n))
        engine.set_attention(guesser, AttentionSpec("off"))
        targets = {}
        for flash in sorted({case.flash for case in cases}, reverse=True):
            read_by = str(READER) if flash else "off"  # ours has no transposed V
            target = big.session(attention=read_by, flash_attn=flash, **options)
            engine.prefill(target, tokens, progress=lambda i, n: done(0.2 + 0.5 * i / n))
            targets[flash] = target
        begins = int(engine.logits(next(iter(targets.values()))).argmax())
        for turn in range(first.n_samples):
            for case in cases[:: -1 if turn % 2 else 1]:
                result = _time(targets[case.flash], guesser, case, begins)
                samples = [*found[case]["samples_ns"], result["ns"]]
                found[case] = {**result, "samples_ns": samples}
            done(0.7 + 0.3 * (turn + 1) / first.n_samples)
        for session in (*targets.values(), guesser):
            session.close()
    for case, result in found.items():
        del result["ns"]
        alone = replace(case, drafts="none", spec=replace(case.spec, verify="sparse"))
        result["n_same"] = _n_same(result["tokens"], found[alone]["tokens"])
    for result in found.values():
        del result["tokens"]
    refuse_idle(found)
    return list(found.values())


def refuse_idle(found: Mapping[Case, Result]) -> None:
    """Raises:
    SparqError: nothing was sparse where it should be, or no draft was verified.
    """
    for c, r in found.items():
        if c.spec.sparse and not r["counters"]["calls_sparse"] and c.spec.verify == "sparse":
            raise SparqError(f"{c.spec} ran nothing sparse at {c.n_depth}", "a greater depth")
        if c.drafts == "model" and not r["n_drafted"]:
            raise SparqError(f"{c.spec}: nothing was drafted at {c.n_depth}")
        if c.spec.sparse and bool(r["counters"]["verified"]) != (
            bool(r["n_drafted"]) and c.spec.verify == "sparse"
        ):
            raise SparqError(f"{c.spec}: {r['counters']['verified']} tokens were verified sparsely")


def _n_same(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), len(a))


@dataclass
class _Ngrams:
    """What followed three tokens where they stood last."""

    tokens: list[int]
    after: dict[tuple[int, ...], int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.read = NGRAM

    def guess(self, n: int) -> list[int]:
        for i in range(self.read, len(self.tokens)):
            self.after[tuple(self.tokens[i - NGRAM : i])] = i
        self.read = len(self.tokens)
        at = self.after.get(tuple(self.tokens[-NGRAM:]))
        return [] if at is None else self.tokens[at : at + n]


def _guesses(session: engine.Session, last: Sequence[int], n: int) -> list[int]:
    """`n` tokens, by the model that guesses, after `last`, which it has not read yet."""
    out: list[int] = []
    for token in last[:-1]:
        engine.decode(session, token)
    token = last[-1]
    for _ in range(n):
        engine.decode(session, token)
        token = int(engine.logits(session).argmax())
        out.append(token)
    return out


def _verify(session: engine.Session, tokens: Sequence[int]) -> list[int]:
    """What the model would say after each of these tokens, which it reads at once."""
    import numpy as np

    lib, n = session.lib, len(tokens)
    said = (ctypes.c_void_p, ctypes.c_int32, ctypes.c_int32, ctypes.c_int32)
    say: Callable[..., Any] = sparse.function(lib, "llama_sparse_attn_seq_draft", None, *said)
    say(session.ctx, 0, len(session.tokens), n if n > 1 else 0)
    read, asks = (ctypes.c_int32 * n)(*tokens), (ctypes.c_int8 * n)(*[1] * n)
    batch = lib.llama_batch_get_one(read, n)
    batch.logits = asks
    code = lib.llama_decode(session.ctx, batch)
    if code != 0:
        raise SparqError(f"llama.cpp could not evaluate {n} tokens: {code}")
    session.tokens.extend(tokens)
    rows = (lib.llama_get_logits_ith(session.ctx, i) for i in range(n))
    return [int(np.ctypeslib.as_array(row, shape=(session.n_vocab,)).argmax()) for row in rows]


def _time(
    target: engine.Session, guesser: engine.Session, case: Case, begins: int
) -> dict[str, Any]:
    """One reply: its time, its tokens, and how many were drafted and accepted."""
    engine.rewind(target, case.n_depth)
    engine.rewind(guesser, case.n_depth)
    engine.set_attention(target, case.spec)
    for n in (case.n_draft + 1, 1):  # llama.cpp plans its graphs anew for each attention
        _verify(target, [begins] * n)
        engine.rewind(target, case.n_depth)
    ngrams = _Ngrams([*target.tokens])
    ngrams.guess(1)  # what was read is indexed before the clock starts
    ngrams.tokens.append(begins)
    engine.reset_counters(target)
    reply, n_drafted, n_accepted = [begins], 0, 0
    started = time.perf_counter_ns()
    while len(reply) <= case.n_gen:
        n = min(case.n_draft, case.n_gen - len(reply))
        draft: list[int] = []
        if case.drafts == "model" and n > 0:
            unread = (target.tokens + reply[-1:])[len(guesser.tokens) :]
            draft = _guesses(guesser, unread, n)
        elif case.drafts == "ngram" and n > 0:
            draft = ngrams.guess(n)
        n_before = len(target.tokens)
        said = _verify(target, [reply[-1], *draft])
        n_right = _n_same(draft, said)
        engine.rewind(target, n_before + 1 + n_right)
        engine.rewind(guesser, n_before + 1 + n_right)
        reply += said[: n_right + 1]
        ngrams.tokens += said[: n_right + 1]
        n_drafted, n_accepted = n_drafted + len(draft), n_accepted + n_right
    spent = time.perf_counter_ns() - started
    counters = engine.info(target).counters
    return {
        "ns": spent,
        "n_said": len(reply) - 1,
        "n_drafted": n_drafted,
        "n_accepted": n_accepted,
        "counters": {x: int(counters.get(x, 0)) for x in COUNTERS},
        "tokens": reply[1 : case.n_gen + 1],
    }


def table(recs: Sequence[Record]) -> str:
    """Tokens per second of all runs, each with its own models and text."""
    return "\n\n".join(_table(list(run.values())) for run in records.by_run(recs))


def _table(recs: Sequence[Record]) -> str:
    found: dict[int, dict[tuple[str, str], Record]] = {}
    for rec in recs:
        case = records.read_case(Case, rec)
        stock = f"llama.cpp `-fa {int(case.flash)}`"
        name = stock if case.spec.method == "off" else str(case.spec)
        found.setdefault(case.n_depth, {})[name, case.drafts] = rec
    case, env = records.read_case(Case, recs[0]), recs[0]["env"]
    rows = []
    for depth, here in sorted(found.items()):
        for (name, kind), rec in here.items():
            rate = rec["n_said"] / records.spread(rec["samples_ns"])[0] * 1e9
            share = rec["n_accepted"] / rec["n_drafted"] if rec["n_drafted"] else None
            rows.append([
                f"{depth:,}",
                name,
                kind,
                f"{rate:.1f}",
                "" if share is None else f"{share:.2f}",
                f"{rec['n_said'] / (rec['n_said'] - rec['n_accepted']):.2f}",
                f"{rec['n_same']} of {case.n_gen}",
            ])  # fmt: skip
    about = (
        f"{recs[0]['model_name']}, {case.n_gen} tokens after so many of the text {case.text[:8]}, "
        f"drafts of {case.n_draft} tokens, {case.n_threads} threads, {env['machine']['cpu']}; "
        f"medians of {case.n_samples}, in turns. The last column: how many tokens of the reply are "
        "those without drafts."
    )
    head = ["positions", "attention", "drafts", "tokens/s", "accepted", "tokens per step", "same"]
    return f"{about}\n\n{markdown(head, rows)}"


MEASUREMENT = runner.Measurement(
    name="drafts",
    about="Tokens per second with drafts of a smaller model and of n-grams, and without.",
    options=OPTIONS,
    groups=groups,
    measure=measure,
    table=table,
)
