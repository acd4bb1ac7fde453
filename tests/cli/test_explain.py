"""explain: what kinds of layers a model has, what a token reads, and which speed-up to expect."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Run = Callable[..., Any]
ROOT = Path(__file__).parents[2]


def explain(run: Run, model: object, *more: object) -> dict[str, Any]:
    args = ("explain", "-m", model, "--ctx", 8192, "--ratio", "1/8", "--json", *more)
    facts: dict[str, Any] = json.loads(run(*args).out)
    return facts


def test_a_hybrid_gains_little(run: Run) -> None:
    """16 of 64 layers have K and V: 4 heads of 256 elements of 2 bytes, each twice."""
    r = explain(run, "qwen3.6-27b")
    kinds = {"full": 16, "latent": 0, "window": 0, "recurrent": 48, "other": 0}
    assert r["layer_kinds"] == kinds
    weights = r["weight_bytes_per_token"]
    for x in r["lengths"]:
        kv = 16 * 2 * 4 * 256 * 2 * x["positions"]
        assert x["attention_share"] == pytest.approx(kv / (kv + weights))
        limit = (kv + weights) / (kv / 8 + weights)
        assert x["speedup"] == pytest.approx(limit, rel=0.02)
        assert x["speedup"] == pytest.approx(x["token_s_dense"] / x["token_s"])
        assert x["token_s_dense"] == pytest.approx((kv + weights) / r["bandwidth"])
    assert r["attention_share_dense"] == pytest.approx(r["lengths"][0]["attention_share"])
    assert r["speedup_token"] == pytest.approx(r["lengths"][0]["speedup"])


def test_a_context_that_is_longer_than_the_training(run: Run) -> None:
    r = explain(run, "llama2-7b")
    beyond = {x["positions"]: x["beyond_training"] for x in r["lengths"]}
    assert beyond.pop(4096) is False and all(beyond.values())
    assert "beyond the 4096" in run("explain", "-m", "llama2-7b", "--ctx", 8192).err
    ratio = json.loads(run("explain", "llama2-7b", "--json").out)["spec"]
    assert ratio == "sparq,ratio=1/4", "its card's, and that of 1/8 in others"


@pytest.mark.parametrize(
    ("model", "spec"),
    [
        ("glm-4.7-flash", "sparq"),  # latent attention
        ("deepseek-v3", "sparq"),
        ("llama3-8b", "dense"),
        ("llama3-8b", "sparq,min_ctx=16384"),
    ],
)
def test_layers_that_stay_dense_have_a_reason_and_gain_nothing(
    run: Run, model: str, spec: str
) -> None:
    r = json.loads(run("explain", "-m", model, "-a", spec, "-c", 8192, "--json").out)
    assert all(x["dense"] and x["reason"] for x in r["layers"])
    assert r["speedup_token"] == r["lengths"][0]["speedup"] == 1
    assert r["attention_bytes_per_token"] == r["attention_bytes_per_token_dense"]
    assert (r["layer_kinds"]["latent"] == len(r["layers"])) == (model != "llama3-8b")


def test_windows_are_told_apart(run: Run) -> None:
    r = explain(run, "gemma-4-26b-a4b-it")
    kinds = {"full": 5, "latent": 0, "window": 25, "recurrent": 0, "other": 0}
    assert r["layer_kinds"] == kinds
    heads = {(x["n_head_kv"], x["bytes_dense"], x["counted"]) for x in r["layers"]}
    assert heads == {(8, 1024 * 8 * 256 * 2 * 2, False), (2, 8192 * 2 * 512 * 2 * 2, True)}


def test_the_table_of_the_docs(run: Run) -> None:
    table = run("models", "table").out
    shown = (ROOT / "docs" / "models.md").read_text("utf-8").partition("## The table")[2]
    some = [line for line in shown.splitlines() if line.startswith("|")]
    assert len(some) > 4 and set(some) < set(table.splitlines())
    hybrid = next(line for line in table.splitlines() if "`qwen3.6-27b`" in line)
    assert hybrid.endswith("| 3 %, 1.03x | 12 %, 1.10x | 36 %, 1.36x |")
