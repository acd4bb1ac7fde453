"""Batches of prompts and replies: each token of a prompt exact, each decoded token sparse, counted.

And each as if its sequence were alone, within rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import tiny as tiny_models
from llama import Context, Model, Token, bindings, tokens
from nodes import Watch
from quick import pairwise

N_LAYER, N_PROMPT, N_SEQ, N_CTX = 3, 330, 4, 1024
SPECS = {  # prompt=f32, since blocks of few bits in a unified cache hold other sequences too
    "f16": "sparq,rank=8,topk=40,min_ctx=0,prompt=f32,shadow=f16",
    "q4": "sparq,rank=8,topk=40,min_ctx=0,prompt=f32,shadow=q4",
    "mean_v": "sparq,rank=8,topk=40,min_ctx=0,prompt=f32,shadow=f16,mean_v=on",
    "top_p": "sparq,rank=8,topk=40,min_ctx=0,prompt=f32,shadow=f16,top_p=0.9,cap=2",
    "topk": "topk,k=40,min_ctx=0,prompt=f32",
}
FAST = "sparq,rank=8,topk=40,min_ctx=0,shadow=f16"  # the default, where each has a cache of its own
MODES = [pytest.param(True, id="unified"), pytest.param(False, id="split")]


def context(model: Model, spec: str, unified: bool, **options) -> Context:
    n_ctx = N_CTX * (1 if unified else N_SEQ)
    watch = Watch(checks="top_p" not in spec)  # of which the oracle knows nothing
    ctx = Context(model, n_ctx=n_ctx, n_seq=N_SEQ, unified=unified, watch=watch, **options)
    ctx.set_sparse(spec)
    return ctx


def calls(ctx: Context) -> tuple[int, int]:
    """Calls that were sparse, and exact ones in prompts, per layer; there are no others."""
    c = ctx.info()["counters"]
    assert c["calls_stock"] == 0
    assert c["calls_sparse"] % N_LAYER == (c["calls_prefill"] + c["calls_dense_op"]) % N_LAYER == 0
    assert c["steps"] * N_LAYER == c["calls_sparse"]
    return c["calls_sparse"] // N_LAYER, (c["calls_prefill"] + c["calls_dense_op"]) // N_LAYER


def alone(model: Model, spec: str, unified: bool, parts: Sequence[list[Token]]) -> np.ndarray:
    """Logits after these calls for one sequence; the last of each asks for them."""
    with context(model, spec, unified) as ctx:
        for part in parts:
            assert ctx.decode(part) == 0
        return ctx.logits()


def near(a: np.ndarray, b: np.ndarray) -> None:
    assert np.abs(a - b).max() < 0.02 * b.std() and a.argmax() == b.argmax()


# what each sequence does in the call: "r" decodes a token, "p" reads a prompt, "f" its first token
# only, "e" the last one of a prompt whose others were read before
ORDERS = ["rp", "pr", "rpr", "prp", "rfr", "rer", "er", "fr", "rppr"]


@pytest.mark.parametrize("order", ORDERS)
def test_a_mixed_batch_of_few_bits(order: str, model: Model) -> None:
    test_a_mixed_batch(order, FAST, False, model)


@pairwise(order=ORDERS, spec=SPECS, unified={"unified": True, "split": False})
def test_a_mixed_batch(order: str, spec: str, unified: bool, model: Model) -> None:
    n_new = {"r": 1, "p": 90, "f": 1, "e": 1}
    n_done = {"r": N_PROMPT, "p": 0, "f": 0, "e": 200}
    with context(model, spec, unified) as ctx:
        for seq, kind in enumerate(order):
            if n_done[kind]:
                goes_on = "none" if kind == "e" else "last"
                assert ctx.decode(tokens(seq, n_done[kind]), goes_on) == 0
        for step in range(2):  # the second time the graphs may be reused
            ctx.reset_counters()
            first = [n_done[k] + step * n_new[k] for k in order]
            batch = [t for s, k in enumerate(order) for t in tokens(s, n_new[k], first[s])]
            kinds = order if step == 0 else order.replace("f", "r").replace("e", "r")
            assert ctx.decode(batch) == 0
            n_reply = kinds.count("r")
            assert calls(ctx) == (n_reply, len(batch) - n_reply)
            assert ctx.check_shadow() <= 0
            last = -1
            for seq, kind in enumerate(order):
                last += n_new[kind]
                parts = [tokens(seq, n_done[kind])] if n_done[kind] else []
                parts += [tokens(seq, n_new[kind], n_done[kind] + i * n_new[kind]) for i in (0, 1)]
                if kind == "e":  # one prompt
                    parts = [parts[0] + parts[1], parts[2]]
                if "q4" in spec and unified:
                    continue  # codes share a scale with those of other sequences
                want = alone(model, spec, unified, parts[: len(parts) - 1 + step])
                near(ctx.logits(last), want)


@pytest.mark.parametrize("unified", MODES)
def test_a_prompt_in_pieces_is_exact(unified: bool, model: Model) -> None:
    """Whatever the pieces, beside a reply: they do not ask for logits until the prompt ends."""
    spec = SPECS["f16"]
    exact = alone(model, "dense,prompt=f32", unified, [tokens(1, 200)])
    for pieces in ([199, 1], [1, 199], [64, 64, 71, 1], [1, 1, 1, 197]):
        with context(model, spec, unified) as ctx:
            assert ctx.decode(tokens(0, N_PROMPT)) == 0
            done = 0
            for i, n in enumerate(pieces):
                ctx.reset_counters()
                piece = tokens(1, n, done)
                asks = [True, *[False] * (n - 1), i == len(pieces) - 1]
                assert ctx.decode(tokens(0, 1, N_PROMPT + i) + piece, asks) == 0
                assert calls(ctx) == (1, n)
                done += n
            near(ctx.logits(), exact)


def test_what_is_embedded_is_exact_in_any_pieces(model: Model) -> None:
    """All of its tokens have an output, which a prompt's have not."""
    with context(model, SPECS["f16"], False) as ctx:
        bindings().llama_set_embeddings(ctx.handle, True)
        ctx.say_prompt(0)
        ctx.reset_counters()
        assert ctx.decode(tokens(0, 200), "all") == 0
        assert ctx.decode(tokens(0, 1, 200), "all") == 0
        assert calls(ctx) == (0, 201)


@pytest.mark.parametrize("unified", MODES)
def test_the_kind_of_a_token_follows_its_sequence(unified: bool, model: Model) -> None:
    """Through a copy, a cut, a shift and a restored state."""
    with context(model, SPECS["f16"], unified) as ctx:

        def one(seq: int, position: int) -> tuple[int, int]:
            ctx.reset_counters()
            assert ctx.decode([(7, position, seq)]) == 0
            return calls(ctx)

        assert one(0, 0) == (0, 1)  # the first token of all
        ctx.seq_rm(0, -1, -1)
        assert ctx.decode(tokens(0, 200), "none") == 0
        ctx.seq_cp(0, 1)
        assert one(1, 200) == (0, 1)  # the end of its prompt, copied or not
        assert one(0, 200) == (0, 1)
        assert one(0, 201) == one(1, 201) == (1, 0)
        ctx.seq_rm(0, 200, -1)
        assert one(0, 200) == (0, 1)  # the last token of the prompt again
        assert one(0, 201) == (1, 0)
        ctx.seq_rm(0, 10, 50)
        ctx.seq_add(0, 50, -1, -40)
        assert one(0, 162) == (1, 0)
        ctx.seq_rm(0, 160, -1)
        assert one(0, 160) == (0, 1)  # it was moved there
        state = ctx.get_state(0)
        assert ctx.set_state(state, 2) > 0
        assert one(2, 161) == (1, 0)
        ctx.seq_rm(2, 100, -1)
        assert one(2, 100) == (1, 0)  # of a restored text it is not known
        ctx.reset_counters()
        assert ctx.decode([(7, 101 + i, 2) for i in range(4)], "all") == 0  # a draft
        assert calls(ctx) == (0, 4)
        ctx.seq_rm(2, 103, -1)
        assert one(2, 103) == (1, 0)


def test_what_is_read_while_attention_is_off_is_known(model: Model) -> None:
    """Not before it was first on: the shadow of the cache is made then."""
    for earlier in (True, False):
        with context(model, SPECS["f16"], True) if earlier else Context(model, n_ctx=1024) as ctx:
            ctx.set_sparse("off")
            assert ctx.decode(tokens(0, N_PROMPT), "none") == 0
            ctx.set_sparse(SPECS["f16"])
            ctx.reset_counters()
            assert ctx.decode(tokens(0, 1, N_PROMPT)) == 0
            assert calls(ctx) == ((0, 1) if earlier else (1, 0))


@pytest.mark.parametrize("unified", MODES)
def test_layers_with_sinks_and_windows(unified: bool, tmp_path: Path) -> None:
    """gpt-oss: PREFILL reads the prompt, and llama.cpp the replies of layers with a window, as
    where no prompt is beside them: in f32 although prompts have few bits."""
    path = tiny_models.write(tmp_path / "m.gguf", "gpt-oss", n_layer=4)
    with Model(path) as m, context(m, FAST, unified) as ctx:
        for seq in (0, 2):
            assert ctx.decode(tokens(seq, N_PROMPT)) == 0
        ctx.reset_counters()
        prompt = tokens(1, 40)
        assert ctx.decode(tokens(0, 1, N_PROMPT) + prompt + tokens(2, 1, N_PROMPT)) == 0
        c = ctx.info()["counters"]
        assert c["calls_sparse"] == c["calls_stock"] == 2 * 2
        assert c["calls_prefill"] == 4 * len(prompt)
        assert c["stock_reasons"] == {"sliding-window layer": 2 * 2}
        assert {layer["reason"] for layer in ctx.info()["layers"]} == {"", "sliding-window layer"}
        near(ctx.logits(), alone(m, FAST, unified, [tokens(2, N_PROMPT), tokens(2, 1, N_PROMPT)]))
