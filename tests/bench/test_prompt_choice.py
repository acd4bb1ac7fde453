"""Ways to choose what a prompt reads: what each of them must find."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

sys.path.append(str(Path(__file__).parents[2] / "bench"))

import prompt_choice
from capture import Heads
from prompt_choice import WAYS, head_of, quality

from pyorch import paths
from pyorch.bench import records

DOCUMENT = paths.data("models") / "demo" / "document.txt"


@pytest.fixture
def head() -> prompt_choice.Head:
    """Tokens that ask alike, but for one that wants what no other wants."""
    rng = np.random.default_rng(1)
    k, v = rng.normal(size=(2, 1, 2048, 32)).astype(np.float32)
    q = np.repeat(rng.normal(size=(1, 1, 1, 32)), 512, axis=0) * 2
    q[300] = k[0, 700] * 3
    return head_of(Heads(q.astype(np.float32), k, v, 32**-0.5), 0, 0)


@pytest.mark.parametrize("name", WAYS)
def test_a_larger_share_reads_more(name: str, head: prompt_choice.Head) -> None:
    few, most = (WAYS[name](head, p) for p in (0.5, 0.99))
    assert (few <= most).all() and few.sum() < most.sum()
    assert few[:, :64].all() and few[:, -512:].all()  # what is always read


def test_the_oracle_reads_least(head: prompt_choice.Head) -> None:
    share = {name: quality(head, way(head, 0.95))[0] for name, way in WAYS.items()}
    alike = {n: s for n, s in share.items() if n.startswith(("blocks", "oracle"))}
    assert min(alike, key=alike.__getitem__) == "oracle"


def test_samples_find_their_share(head: prompt_choice.Head) -> None:
    (read,) = prompt_choice.sampled(head, 0.9)
    samples = head.p[16::32]
    assert 0.9 <= samples[:, read].sum(axis=1).mean() < 0.91


def test_all_read_is_exact(head: prompt_choice.Head) -> None:
    share, errors = quality(head, np.ones((1, len(head.k)), bool))
    assert share == 1 and errors.max() < 1e-5


def test_a_lone_wish_is_lost(head: prompt_choice.Head) -> None:
    """Mean queries do not see it, which is why the largest error is measured too."""
    _, errors = quality(head, prompt_choice.mean_queries(head, 0.9))
    assert errors.argmax() == 300


def test_a_run_has_all_ways(tmp_path: Path) -> None:
    args = ["--text", str(DOCUMENT), "--positions", "1024", "--contexts", "2"]
    result = CliRunner().invoke(
        prompt_choice.command, [*args, "--out", str(tmp_path)], catch_exceptions=False
    )
    assert result.exit_code == 0
    (rec,) = records.load_all(tmp_path / "prompt_choice.jsonl")
    ways = {f"{name}, {p}" for name in WAYS for p in prompt_choice.SHARES}
    assert all(set(s["ways"]) == ways for s in rec["samples"])
    assert "| mean, sampled | 0.99 |" in (tmp_path / "prompt_choice.md").read_text()
