"""What is sealed again after K and V change: the groups that changed, and no others; counted."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import pytest
import tiny as tiny_models
from cases import GROUP, SUM
from llama import Context, Model, Token, tokens
from nodes import Watch

N_LAYER, N_SEQ, N_PROMPT = 3, 3, 10 * GROUP + 10
SPEC = "sparq,rank=8,topk=64,min_ctx=0,mean_v=on"
SHADOWS = ["f16", "q4"]


def full(model: Model, shadow: str, unified: bool, n_prompt: int = N_PROMPT, **options) -> Context:
    """A context with a prompt in each sequence, all sealed."""
    ctx = Context(model, n_ctx=2048 * N_SEQ, n_seq=N_SEQ, unified=unified, **options)
    ctx.set_sparse(f"{SPEC},shadow={shadow}")
    for seq in range(N_SEQ):
        prompt: list[Token] = [(3 + (7 * i + seq) % 250, i, seq) for i in range(n_prompt)]
        assert ctx.decode(prompt) == 0
    ctx.seal()
    return ctx


def sealed_since(ctx: Context) -> int:
    """Groups per layer that were sealed since the last call, all but what was written last."""
    ctx.seal()
    n = ctx.info()["counters"]["groups_sealed"]
    ctx.reset_counters()
    assert ctx.check_shadow() == 0
    assert n % N_LAYER == 0
    return n // N_LAYER


@pytest.mark.parametrize("shadow", SHADOWS)
@pytest.mark.parametrize("unified", [True, False], ids=["unified", "split"])
def test_restoring_one_sequence(unified: bool, shadow: str, model: Model) -> None:
    """llama-server restores a slot at each load from its cache of prompts."""
    with full(model, shadow, unified) as ctx:
        assert sealed_since(ctx) >= N_SEQ * (N_PROMPT // GROUP)
        state = ctx.get_state(1)
        assert ctx.set_state(state, 1) > 0
        n = N_PROMPT // GROUP
        assert n <= sealed_since(ctx) <= n + 2
        assert ctx.set_state(state[: len(state) // 2], 1) == 0  # and a state that is refused
        assert sealed_since(ctx) == 0
        assert ctx.set_state(ctx.get_state()) > 0  # everything is everything: two are left
        assert sealed_since(ctx) >= 2 * (N_PROMPT // GROUP)


@pytest.mark.parametrize("shadow", SHADOWS)
def test_a_restored_sequence_beside_tokens_of_another(shadow: str, tmp_path: Path) -> None:
    """A part by each call, however long it is; what is left when it is read, by its own token."""
    n_prompt, n_part = 10 * GROUP + 10, 4  # 8 MiB of K and V are 4 groups of these layers
    sizes = {"n_layer": 8, "n_head": 4, "n_head_kv": 4, "head_dim": 128}
    path = tiny_models.write(tmp_path / "m.gguf", "llama", **sizes)
    with Model(path) as model, Context(model, n_ctx=1536 * 2, n_seq=2, unified=False) as ctx:
        ctx.set_sparse(f"{SPEC},shadow={shadow}")
        for seq, n in ((0, 100), (1, n_prompt)):
            assert ctx.decode([(3 + (7 * i + seq) % 250, i, seq) for i in range(n)]) == 0
        ctx.seal()
        saved, at, logits = ctx.get_state(1), 100, []
        for n_between in (0, 1, 5):
            assert ctx.set_state(saved, 1) > 0
            sealed = []
            for _ in range(n_between):
                ctx.reset_counters()
                assert ctx.decode([(5, at, 0)]) == 0
                sealed.append(ctx.info()["counters"]["groups_sealed"] // 8)
                at += 1
            assert sealed == [n_part, n_part, 10 - 2 * n_part, 0, 0][:n_between]
            ctx.reset_counters()
            assert ctx.decode([(6, n_prompt, 1)]) == 0
            assert ctx.info()["counters"]["groups_sealed"] // 8 >= 10 - n_part * (n_between + 1)
            logits.append(ctx.logits())
            assert ctx.check_shadow() == 0 and ctx.seal() == 0
        assert all(np.array_equal(logits[0], x) for x in logits[1:])


@pytest.mark.parametrize("unified", [True, False], ids=["unified", "split"])
def test_no_graph_of_a_token_seals(unified: bool, model: Model) -> None:
    """The next call does. That of a draft does, whose last tokens read the group."""
    watch = Watch(checks=False)
    with full(model, "q4", unified, watch=watch) as ctx:
        ctx.reset_counters()
        watch.clear()
        for i in range(N_PROMPT, N_PROMPT + GROUP):
            assert ctx.decode([(5, i, 1)]) == 0
        assert ctx.info()["counters"]["groups_sealed"] == N_LAYER and watch.sealed == 0
        first = N_PROMPT + GROUP
        ctx.say_draft(1, first, GROUP)
        assert ctx.decode([(5, first + i, 1) for i in range(GROUP)], logits="all") == 0
        assert watch.sealed == N_LAYER and ctx.check_shadow() == 0


@pytest.mark.parametrize("shadow", SHADOWS)
def test_shifting_one_sequence(shadow: str, model: Model) -> None:
    """Only cells that move are turned: those after what was cut, of that sequence."""
    with full(model, shadow, unified=False) as ctx:
        sealed_since(ctx)
        ctx.seq_rm(1, 640, 700)
        ctx.seq_add(1, 700, -1, -60)
        assert ctx.decode([(5, N_PROMPT - 60, 1)]) == 0
        assert 4 <= sealed_since(ctx) <= N_PROMPT // GROUP - 640 // GROUP
        ctx.seq_rm(1, 600, -1)  # a prefix is used again: what is written after it, no more
        assert ctx.decode([(5 + i % 200, 600 + i, 1) for i in range(200)]) == 0
        assert sealed_since(ctx) <= 200 // GROUP + 2


def test_shifting_a_quantised_cache(tmp_path: Path) -> None:
    """K is rounded anew where nothing moved, too: all of it is sealed again."""
    path = tiny_models.write(tmp_path / "m.gguf", "llama", n_layer=N_LAYER, head_dim=64)
    with Model(path) as model, full(model, "q4", False, type_k="q8_0", type_v="q8_0") as ctx:
        sealed_since(ctx)
        ctx.seq_rm(1, 640, 700)
        ctx.seq_add(1, 700, -1, -60)
        assert ctx.decode([(5, N_PROMPT - 60, 1)]) == 0
        assert sealed_since(ctx) >= 2 * (N_PROMPT // GROUP)


@pytest.mark.parametrize("shadow", SHADOWS)
def test_copying_one_sequence(shadow: str, model: Model) -> None:
    """From stream to stream: the bytes are copied, the shadow of the copy is made anew."""
    with full(model, shadow, unified=False) as ctx:
        sealed_since(ctx)
        ctx.seq_cp(0, 2)
        assert ctx.decode([(5, N_PROMPT, 2)]) == 0
        assert sealed_since(ctx) == N_PROMPT // GROUP


@pytest.mark.parametrize(("arch", "shadow"), [("gemma2", "f16"), ("lfm2", "q8"), ("lfm2", "q4")])
def test_the_check_sees_every_kind_of_cache(arch: str, shadow: str, tmp_path: Path) -> None:
    """With sliding windows and hybrid: a shadow is there, right, and made wrong it is found, by
    the library and by the oracle beside the node that reads it."""
    path = tiny_models.write(tmp_path / "m.gguf", arch, n_layer=4)
    watch = Watch()
    with Model(path) as model, Context(model, n_ctx=1024, watch=watch) as ctx:
        ctx.set_sparse(f"sparq,rank=8,topk=40,min_ctx=0,shadow={shadow}")
        assert ctx.decode(tokens(0, 330)) == 0
        assert ctx.decode(tokens(0, 1, 330)) == 0
        assert ctx.check_shadow() == 0 and watch.in_shadow[0].any()
        group = int(watch.in_shadow[0].argmax())
        at, bits = {
            "f16": (2 * GROUP * group + 1, 0x04),
            "q8": (GROUP * group, 0x80),
            "q4": (GROUP // 2 * group, 0x08),
        }[shadow]
        ctypes.c_uint8.from_address(watch.addresses["k_t"] + at).value ^= bits
        assert ctx.check_shadow() == 1
        with pytest.raises(AssertionError, match="k_t is stale"):
            ctx.decode(tokens(0, 1, 331))


def test_the_check_adds_up_the_totals(model: Model) -> None:
    """Which are most of what ATTEND reads for the mean of V."""
    watch = Watch(checks=False)
    with full(model, "f16", unified=True, watch=watch) as ctx:
        assert ctx.check_shadow() == 0
        total = watch.addresses["v_sum"] + watch.addresses["v_sum_stride"] * SUM
        ctypes.c_float.from_address(total).value += 1
        assert ctx.check_shadow() == 1
