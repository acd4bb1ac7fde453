"""The deciding part of each method, a function of arrays, against its oracle.

Methods with a memory run for some steps, with a selector on arrays of this file.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import oracle as alibi
import oracles
import pytest

from pyorch import policies
from pyorch.policies import keyformer, low_rank, pages
from pyorch.policies.base import Heads, Policy, Selector, Step, top
from pyorch.policies.prompt import Prompt, _Layer


def keys_and_queries(
    n: int, n_head: int, n_head_kv: int, d: int, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """q (n, n_head, d) and k (n, n_head_kv, d)."""
    rng = np.random.default_rng(seed)
    q, k = rng.normal(size=(n, n_head, d)), rng.normal(size=(n, n_head_kv, d))
    return q.astype(np.float32), k.astype(np.float32)


def logits_of(q: np.ndarray, k: np.ndarray, scale: float) -> np.ndarray:
    """q (n_head, d), k (n, n_head_kv, d) to (n_head_kv, group, n)."""
    group = len(q) // k.shape[1]
    rows = [k[:, h // group] @ q[h] * np.float32(scale) for h in range(len(q))]
    return np.stack(rows).reshape(k.shape[1], group, -1)


def sets(positions: np.ndarray) -> list[set[int]]:
    """Of (n_head_kv, n); each row ascending, without repetition."""
    assert (np.diff(positions, axis=1) > 0).all()
    return [set(row.tolist()) for row in positions]


def test_top_takes_the_lower_of_equals() -> None:
    assert top(np.array([1.0, 2, 2, 2, 0]), 2).tolist() == [1, 2]
    assert top(np.array([5.0, 5, 5]), 0).tolist() == []
    assert top(np.array([3.0, 1]), 9).tolist() == [0, 1]


# ---- methods with a memory ----


def selector(policy: Policy, q: np.ndarray, k: np.ndarray, n: int, scale: float) -> Selector:
    """After a prompt of n positions of q (all, n_head, d), k (all, n_head_kv, d)."""
    layer = _Layer(q[:n].astype(np.float16), (scale, 0.0, 0.0))
    return policy.start(heads_of(q, k), Prompt(layer, n, k[:n]))


def heads_of(q: np.ndarray, k: np.ndarray) -> Heads:
    d = k.shape[2]
    return Heads(q.shape[1], k.shape[1], d, d, 2.0 * d, 2.0 * d)


def n_read(policy: Policy, n_pos: int, heads: Heads) -> int:
    """The number of positions that a token reads: k, or the whole pages that fit beside its own."""
    k, page = policy.k_at(n_pos, heads), getattr(policy, "page", 1)
    own = (n_pos - 1) % page + 1
    return own + max(k - own, 0) // page * page


def step_at(i: int, q: np.ndarray, k: np.ndarray, scale: float) -> Step:
    """The token of position i."""
    return Step(
        i + 1,
        logits_of(q[i], k[: i + 1], scale),
        q[i].reshape(k.shape[1], -1, k.shape[2]),
        scale,
        lambda a, b: k[a:b],
    )


def oracle_of(
    policy: Policy, q: np.ndarray, k: np.ndarray, scale: float, layer: int = 0
) -> oracles.Oracle:
    """Made of the settings alone; q (any, n_head, d) and k (any, n_head_kv, d) for their sizes."""
    heads = replace(heads_of(q, k), index=layer)
    base = (heads.n_head, heads.n_head_kv, lambda n: n_read(policy, n, heads), scale)
    match policy.name:
        case "lm-infinite" | "streaming-llm":
            return oracles.Window(*base, sinks={"lm-infinite": 16, "streaming-llm": 4}[policy.name])
        case "oracle" if policy.page > 1:
            return oracles.ExactPages(*base, page=policy.page)
        case "oracle":
            return oracles.Exact(*base)
        case "flexgen":
            return oracles.TopOfV(*base)
        case "h2o":
            return oracles.Evicting(*base, local_of=lambda k: max(k // 4, 1))
        case "keyformer":
            noise = keyformer.gumbel(0, heads, 512).reshape(heads.n_head, -1).astype(float)
            return oracles.Keyformer(
                *base,
                local_of=lambda k: max(int(0.25 * k), 1),
                noise=lambda head, p: noise[head, p],
                tokens=policy.tokens,
            )
        case "alisa":
            return oracles.SparseWindow(*base)
        case "quest":
            parts, score = oracles.quest_parts, oracles.quest_score
            return oracles.Pages(*base, page=policy.page, parts=parts, score=score)
        case "page-mean-std":
            parts, score = oracles.mean_std_parts, oracles.mean_std_score
            return oracles.Pages(*base, page=policy.page, parts=parts, score=score)
        case "low-rank":
            matrix = low_rank.projection(heads.n_head_kv, heads.d_k, policy.rank, (0, heads.index))
            return oracles.Projected(*base, matrix=matrix, sinks=4)
        case "sparq-tau":
            return oracles.Components(*base, rank=policy.rank, tau=policy.tau, sinks=4)
    raise KeyError(policy.name)


# (prompt, steps, n_head, n_head_kv, d)
RUNS = [
    (1, 9, 2, 1, 8),
    (2, 5, 3, 3, 16),
    (37, 40, 4, 2, 16),
    (61, 30, 3, 1, 8),
    (129, 10, 6, 2, 24),
]
LINES = [
    "oracle,k=5",
    "oracle,k=1",
    "oracle,k=20,page=4",
    "oracle,k=3,page=5",
    "oracle,ratio=1/2,page=16,mean_v=off",
    "flexgen,k=9",
    "flexgen,k=1",
    "lm-infinite,k=30",
    "streaming-llm,k=9",
    "h2o,k=8",
    "h2o,k=1",
    "h2o,ratio=1/2",
    "keyformer,k=9",
    "keyformer,ratio=1/3,tokens=20",
    "alisa,k=9",
    "alisa,k=2",
    "alisa,ratio=1/2",
    "quest,k=20,page=4",
    "quest,k=3,page=5",
    "quest,ratio=2/3,page=16",
    "page-mean-std,k=21,page=7",
    "page-mean-std,ratio=1/2,page=8",
    "low-rank,k=9,rank=3",
    "low-rank,k=1,rank=5",
    "low-rank,k=30,rank=8",
    "sparq-tau,k=9,rank=3",
    "sparq-tau,k=1,rank=5,tau=sqrt-d",
    "sparq-tau,k=30,rank=8,tau=sqrt-r",
]


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("line", LINES)
def test_steps(line: str, run: tuple[int, int, int, int, int]) -> None:
    n, n_step, n_head, n_head_kv, d = run
    q, k = keys_and_queries(n + n_step, n_head, n_head_kv, d, seed=n)
    q = q.astype(np.float16).astype(np.float32)
    policy, scale = policies.parse(line), 0.3
    assert isinstance(policy, Policy)
    ours, oracle = selector(policy, q, k, n, scale), oracle_of(policy, q, k, scale)
    oracle.prompt(q[:n], k[:n])
    for i in range(n, n + n_step):
        want = oracle.choose(q[i], k[: i + 1])
        got = sets(ours.select(step_at(i, q, k, scale)))
        assert got == want or oracle.margin < 1e-4, f"position {i}"
        oracle.follow(got)


@pytest.mark.parametrize("name", ["h2o", "keyformer", "lm-infinite", "streaming-llm"])
def test_what_is_evicted_never_comes_back(name: str) -> None:
    """k grows with the text, and later rows want the old positions most."""
    n, n_step = 50, 150
    q, k = keys_and_queries(n + n_step, 4, 2, 16)
    q[n:] = 3 * np.repeat(k[:n_step], 2, axis=1)  # each asks for a position of the beginning
    policy = policies.parse(f"{name},ratio=1/4")
    assert isinstance(policy, Policy)
    ours = selector(policy, q, k, n, 0.3)
    gone: list[set[int]] = [set(), set()]
    for i in range(n, n + n_step):
        read = sets(ours.select(step_at(i, q, k, 0.3)))
        for h in (0, 1):
            assert not read[h] & gone[h]
            gone[h] = set(range(i + 1)) - read[h]
    assert len(gone[0]) > 100


def test_quest_s_bound_is_one() -> None:
    q, k = keys_and_queries(64, 3, 1, 16)
    policy = policies.parse("quest,k=1,page=8")
    parts = policy.summary(k.reshape(8, 8, 1, 16))
    bound = pages.page_logits(policy.weights(q[-1][None]), list(parts))[0]
    exact = logits_of(q[-1], k, 1.0)[0].reshape(3, 8, 8).max(axis=2)
    assert (bound >= exact - 1e-4).all()


def test_bounds_far_apart_keep_their_order() -> None:
    scores = np.tile(np.array([[0, -300, -150, -200, -400]], np.float32), (1, 2, 1))
    assert set(pages.select(scores, 16, 21, 4)[0].tolist()) == {*range(4), *range(8, 16), 20}


@pytest.mark.parametrize("max_bias", [0.0, 8.0])
@pytest.mark.parametrize("softcap", [0.0, 5.0])
def test_prompt_logits(max_bias: float, softcap: float) -> None:
    """In blocks, against one row and head at a time."""
    n, n_head, n_head_kv, d = 300, 6, 2, 8
    q, k = keys_and_queries(n, n_head, n_head_kv, d)
    q = q.astype(np.float16).astype(np.float32)
    prompt = Prompt(_Layer(q.astype(np.float16), (0.4, max_bias, softcap)), n, k)
    slopes = alibi.alibi_slopes(n_head, max_bias)
    for start, stop in ((0, None), (17, 18), (250, 299)):
        row = start
        for block in prompt.blocks(start, stop):
            n_rows, cols = block.shape[2:]
            for r in range(n_rows):
                for head in range(n_head):
                    x = k[: row + 1, head // 3].astype(float) @ q[row, head] * 0.4
                    if softcap:
                        x = softcap * np.tanh(x / softcap)
                    if max_bias:
                        x -= slopes[head] * (row - np.arange(row + 1))
                    got = block[head // 3, head % 3, r]
                    assert np.allclose(got[: row + 1], x, atol=1e-4)
                    assert np.isneginf(got[row + 1 :]).all() and len(got) == cols
                row += 1
        assert row == (n if stop is None else stop)
