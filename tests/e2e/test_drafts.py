"""Tokens that verify a draft: each has the bits that it has alone, and a rejected one leaves none.

The weights are of a type whose products have the same bits for several tokens as for one (Q8_0);
those of f32, f16 and others do not, whatever attention does.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tiny as tiny_models
from llama import Context, Model, Token, tokens
from quick import pairwise

N_LAYER, N_PROMPT, N_REPLY, N_CTX = 3, 330, 300, 1024
SPECS = {
    "q4": "sparq,rank=8,topk=40,min_ctx=0",
    "q8": "sparq,rank=8,topk=40,min_ctx=0,shadow=q8,mean_v=off",
    "f16": "sparq,rank=8,topk=40,min_ctx=0,shadow=f16",
    "top_p": "sparq,rank=8,topk=40,min_ctx=0,top_p=0.9,cap=2",
    "topk": "topk,k=40,min_ctx=0",
    "short": "sparq,rank=8,topk=40,min_ctx=512",  # positions 512 and on are sparse
    "many": "sparq,rank=8,topk=512,min_ctx=0",  # k is below n only from 513 positions on
}
MODES = [pytest.param(True, id="unified"), pytest.param(False, id="split")]
REPLY = tokens(0, N_PROMPT + N_REPLY)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    path = tmp_path_factory.mktemp("m") / "m.gguf"
    with Model(tiny_models.write(path, "llama", n_layer=N_LAYER, weights="Q8_0")) as m:
        yield m


def context(model: Model, spec: str, unified: bool, **options) -> Context:
    ctx = Context(model, n_ctx=N_CTX * (1 if unified else 2), n_seq=2, unified=unified, **options)
    ctx.set_sparse(spec)
    assert ctx.decode(REPLY[:N_PROMPT]) == 0
    ctx.reset_counters()
    return ctx


def one_by_one(model: Model, spec: str, unified: bool, n: int = N_REPLY) -> np.ndarray:
    """(n, n_vocab) logits of the reply, decoded as ever."""
    with context(model, spec, unified) as ctx:
        out = []
        for token in REPLY[N_PROMPT : N_PROMPT + n]:
            assert ctx.decode([token]) == 0
            out.append(ctx.logits())
        return np.array(out)


def verify(ctx: Context, at: int, n: int, n_wrong: int = 0) -> np.ndarray:
    """Logits (n, n_vocab) of the tokens from `at` on, with wrong guesses that are taken back."""
    draft: list[Token] = [(7 + i, at + n + i, 0) for i in range(n_wrong)]
    ctx.say_draft(0, at, n + n_wrong)
    assert ctx.decode(REPLY[at : at + n] + draft, "all") == 0
    logits = np.array([ctx.logits(i) for i in range(n)])
    if n_wrong:
        assert ctx.seq_rm(0, at + n, -1)
    return logits


@pairwise(spec=SPECS, unified={"unified": True, "split": False}, most=(8, 70))
def test_a_verified_token_has_the_bits_that_it_has_alone(
    spec: str, unified: bool, most: int, model: Model
) -> None:
    """Through sealed groups, with wrong guesses in them, and whatever the draft's length."""
    want = one_by_one(model, spec, unified)
    rng = np.random.default_rng(most)
    verified, at = 0, N_PROMPT
    with context(model, spec, unified) as ctx:
        while at < N_PROMPT + N_REPLY:
            n = min(int(rng.integers(1, most + 1)), N_PROMPT + N_REPLY - at)
            n_wrong = int(rng.choice([0, 0, 1, 3, most // 2]))
            got = verify(ctx, at, n, n_wrong)
            assert np.array_equal(got, want[at - N_PROMPT :][:n]), at
            assert ctx.check_shadow() <= 0
            verified += (n + n_wrong) * (n + n_wrong > 1)
            at += n
        counters, own = ctx.info()["counters"], ctx.info(0)
    assert counters["verified"] == own["verified"] == verified > N_REPLY // 2
    assert counters["calls_prefill"] == counters["calls_stock"] == 0
    if "min_ctx=512" in spec or "topk=512" in spec:
        assert 0 < counters["calls_sparse"] < counters["steps"] * N_LAYER
    else:
        assert counters["calls_sparse"] == counters["steps"] * N_LAYER


def test_a_graph_has_room_for_all_groups_that_a_draft_completes(tmp_path: Path) -> None:
    """With so many layers those are more nodes than llama.cpp itself makes room for."""
    path = tiny_models.write(tmp_path / "m.gguf", "llama", n_layer=40, weights="Q8_0")
    with Model(path) as deep, context(deep, SPECS["q4"], True) as ctx:
        verify(ctx, N_PROMPT, 260)
        assert ctx.info()["counters"]["verified"] == 260
        assert ctx.check_shadow() == 0


@pytest.mark.parametrize("unified", MODES)
def test_verify_exact_reads_them_as_a_prompt(unified: bool, model: Model) -> None:
    """The setting may change between two steps, of the context or of a sequence."""
    spec = SPECS["q4"]
    sets: list[Callable[[Context, str], None]] = [
        lambda ctx, s: ctx.set_sparse(s),
        lambda ctx, s: ctx.set_sequence(0, s),
    ]
    for change in sets:
        with context(model, spec, unified) as ctx:
            at = N_PROMPT
            for setting in ("", "", ",verify=exact", ",verify=exact", ",verify=sparse"):
                change(ctx, spec + setting)
                ctx.reset_counters()
                verify(ctx, at, 4)
                at += 4
                c = ctx.info()["counters"]
                exact = 4 if setting == ",verify=exact" else 0
                assert (c["verified"], c["steps"]) == (4 - exact, 4 - exact)
                assert c["calls_sparse"] == (4 - exact) * N_LAYER
                assert c["calls_prefill"] == exact * N_LAYER
                assert ctx.check_shadow() == 0


def test_only_what_was_said_to_be_a_draft_is_one(model: Model) -> None:
    with context(model, SPECS["q4"], True) as ctx:

        def sparse(at: int, asks: str | list[bool] = "all") -> int:
            """How many of four tokens from `at` on, which are taken back, counted as decoded."""
            ctx.reset_counters()
            assert ctx.decode(REPLY[at : at + 4], asks) == 0
            assert ctx.seq_rm(0, at, -1)
            c = ctx.info()["counters"]
            assert c["steps"] == c["verified"] and c["calls_sparse"] == c["steps"] * N_LAYER
            assert c["calls_prefill"] == (4 - c["steps"]) * N_LAYER
            return c["steps"]

        at = N_PROMPT
        assert sparse(at) == 0
        ctx.say_draft(1, at, 4)  # another sequence
        ctx.say_draft(7, at, 4)  # there is no such sequence
        assert sparse(at) == 0
        ctx.say_draft(0, at, 4)
        assert sparse(at) == 4
        assert sparse(at) == 4  # a call that found no room comes again
        assert sparse(at, "last") == 0  # a prompt asks for its last token only
        assert sparse(at, [True, True, False, True]) == 0
        ctx.say_draft(0, at, 3)  # one token is not of it
        assert sparse(at) == 0
        ctx.say_draft(0, at + 1, 4)
        assert sparse(at) == 0
        ctx.say_draft(0, at, 4)
        ctx.say_prompt(0)
        assert sparse(at) == 0
        ctx.say_draft(0, at, 4)
        ctx.set_sequence(0, "dense")  # which reads a prompt's products of several tokens once
        assert sparse(at) == 0
        ctx.set_sequence(0, None)
        assert sparse(at) == 0  # other settings, so it is forgotten
        assert ctx.decode(REPLY[at : at + 4], "none") == 0
        ctx.say_draft(0, at + 4, 4)
        assert sparse(at + 4) == 0  # the token before it was of a prompt


def test_a_step_that_failed_seals_nothing(model: Model) -> None:
    """Cells 384 and on are of the next group: the graph seals the one before while it runs."""
    want = one_by_one(model, SPECS["q4"], True, 80)
    with context(model, SPECS["q4"], True) as ctx:
        verify(ctx, N_PROMPT, 50)
        ctx.say_draft(0, N_PROMPT + 50, 8)
        ctx.abort_after(40)
        assert ctx.decode(REPLY[N_PROMPT + 50 :][:8], "all") == 2
        ctx.abort_after(None)
        assert ctx.check_shadow() == 0
        assert np.array_equal(verify(ctx, N_PROMPT + 50, 8), want[50:58])
