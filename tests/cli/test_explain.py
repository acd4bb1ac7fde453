"""explain: what kinds of layers a model has, and which speed-up to expect of it."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny as tiny_models

from pyorch import engine
from pyorch.attention.spec import parse_spec
from pyorch.cli.lengths import COMMON, token_bytes
from pyorch.models import cards

Run = Callable[..., Any]
ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """No measurement of this machine."""
    monkeypatch.setattr("pyorch.bench.bandwidth.measured", lambda n_threads: 1e10)
    monkeypatch.setattr("pyorch.cli.explain.product_rate", lambda: 1e11)


def explain(run: Run, model: object, *more: object) -> dict[str, Any]:
    args = ("explain", "-m", model, "--ctx", 8192, "--ratio", "1/8", "--json", *more)
    return json.loads(run(*args).out)


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
    assert r["attention_share_dense"] == pytest.approx(r["lengths"][0]["attention_share"])
    said = r["expectation"]
    assert "1.03 times as fast at 8,192 positions, 1.12 times at 32,768, 1.45 times at " in said
    assert "little up to 32,768: K and V are at most 12 % of what a token reads" in said
    assert "only 16 of 64 layers read every position" in said
    text = run("explain", "-m", "qwen3.6-27b", "--ctx", 8192, "--ratio", "1/8").out
    assert "of these layers 16 read every position, 48 are recurrent" in text
    assert "16 of 3-63" in text and "roofline of bytes" in text
    assert " ".join(said.split()) in " ".join(text.split())


def test_a_model_that_gains(run: Run) -> None:
    said = explain(run, "llama3.2-3b-instruct")["expectation"]
    assert said.startswith("Tokens are at most 1.4") and "little" not in said


def test_only_lengths_that_a_model_was_trained_for(run: Run) -> None:
    said = explain(run, "qwen3-8b")["expectation"]
    assert "at 32,768" in said and "at 131,072" not in said


def test_a_model_that_was_trained_on_little(run: Run) -> None:
    """None of the usual lengths is one that our commands would take."""
    r = explain(run, "llama2-7b")
    first = r["lengths"][0]
    assert first["positions"] == 4096 and not first["beyond_training"]
    said = f"Tokens are at most {first['speedup']:.2f} times as fast at 4,096 positions."
    assert r["expectation"] == said and first["speedup"] > 1.2
    done = run("explain", "-m", "llama2-7b", "--ctx", 8192, "--ratio", "1/8")
    assert "8192 is beyond the 4096 positions" in done.err
    assert "chat, generate and serve refuse it" in done.err


def test_why_a_speed_up_is_little(run: Run) -> None:
    """61 % of the bytes are K and V: their share is not why."""
    told = json.loads(run("explain", "-m", "smollm2-1.7b", "--ratio", "3/4", "--json").out)
    first, said = told["lengths"][0], told["expectation"]
    assert first["speedup"] < 1.2 and first["attention_read"] == pytest.approx(0.75, abs=0.03)
    assert said.endswith(f"{100 * first['attention_read']:.0f} % of K and V are read.")


def test_the_reason_is_that_of_the_lengths_that_are_named(run: Run) -> None:
    """At --ctx the layers are sparse, at 8,192 positions they are not."""
    spec = "sparq,ratio=1/8,min_ctx=16384"
    told = json.loads(run("explain", "-m", "llama3-8b", "-a", spec, "-c", 32768, "--json").out)
    assert told["speedup_token"] > 1
    assert told["expectation"] == (
        "No speed-up up to 8,192 positions: no layer is sparse (not above min_ctx 16384)."
    )


def test_more_threads_than_cores_are_no_faster(run: Run) -> None:
    def seconds(threads: int) -> float:
        return explain(run, "llama3-8b", "-t", threads)["lengths"][0]["read_s"]

    n_cores = engine.usable_cores()
    assert seconds(512) == seconds(n_cores) == pytest.approx(seconds(1) / n_cores)


def test_what_a_line_of_top_p_says(run: Run) -> None:
    for more, said in (("", ""), (",cap=4", ", or up to 4 times as many")):
        spec = f"sparq,ratio=1/8,top_p=0.9{more}"
        told = run("explain", "-m", "llama3-8b", "-a", spec, "-t", 1).out
        assert f"  (top-p 0.9: a head reads fewer positions{said})\n" in told
        assert "measured now, 1 thread\n" in told


def test_latent_attention_stays_dense(run: Run) -> None:
    for name in ("glm-4.7-flash", "deepseek-v3"):
        r = explain(run, name)
        assert "No speed-up" in r["expectation"] and "latent attention" in r["expectation"]
        n_layer = cards.load(name).n_layer
        assert r["layer_kinds"]["latent"] == n_layer and r["layer_kinds"]["full"] == 0
        told = run("explain", "-m", name).out
        assert "of these layers all have latent attention and stay dense" in told
        assert {x["speedup"] for x in r["lengths"]} == {1.0} and not any(
            x["counted"] for x in r["layers"]
        )


def test_attention_that_is_off_gains_nothing(run: Run) -> None:
    r = json.loads(run("explain", "-m", "llama3-8b", "-a", "dense", "--json").out)
    assert r["expectation"] == "No speed-up: no layer is sparse (dense)."


def test_the_defaults_of_the_options_are_its_own(run: Run) -> None:
    said = " ".join(run("explain", "--help").out.split())
    assert "12.5%. [default: 1/8]" in said and "layers on the workers of --rpc" in said
    assert "12.5%. [default: all]" in " ".join(run("chat", "--help").out.split())


def test_windows_are_told_apart(run: Run) -> None:
    r = explain(run, "gemma-4-26b-a4b-it")
    kinds = {"full": 5, "latent": 0, "window": 25, "recurrent": 0, "other": 0}
    assert r["layer_kinds"] == kinds
    heads = {(x["n_head_kv"], x["bytes_dense"]) for x in r["layers"]}
    assert heads == {(8, 1024 * 8 * 256 * 2 * 2), (2, 8192 * 2 * 512 * 2 * 2)}


def test_a_file_of_a_hybrid(run: Run, tmp_path: Path) -> None:
    file = tiny_models.write(tmp_path / "m.gguf", "lfm2", n_layer=6)
    r = explain(run, file)
    assert r["layer_kinds"]["full"] + r["layer_kinds"]["recurrent"] == 6
    assert r["layer_kinds"]["full"] == len(r["layers"]) > 0 < r["layer_kinds"]["recurrent"]


@pytest.mark.parametrize("name", cards.names())
def test_every_card_can_be_explained(run: Run, name: str) -> None:
    card = cards.load(name)
    result = run("explain", "-m", name, "--ratio", "1/8", "--ctx", 4096)
    assert result.code == 0 and result.out.startswith(f"{card.title} ({card.architecture})")


def test_the_table_of_the_docs(run: Run) -> None:
    table = run("models", "table").out
    shown = (ROOT / "docs" / "models.md").read_text("utf-8").partition("## The table")[2]
    some = [line for line in shown.splitlines() if line.startswith("|")]
    assert len(some) > 12 and set(some) < set(table.splitlines())
    rows = [line.split("`")[1] for line in table.splitlines()[2:]]
    assert rows == list(cards.names())
    hybrid = next(line for line in table.splitlines() if "`qwen3.6-27b`" in line)
    assert hybrid.endswith("| 3 %, 1.03x | 12 %, 1.12x | 36 %, 1.45x |") and len(COMMON) == 3


def records(path: str) -> list[dict[str, Any]]:
    text = (ROOT / "bench" / "results" / path).read_text("utf-8")
    return [json.loads(line) for line in text.splitlines()]


def predicted(card: str, spec: str, n_pos: int, bits: float) -> float:
    """With weights of so many bits."""
    geo = cards.load(card).geometry
    weights, dense, read = token_bytes(geo, parse_spec(spec), n_pos)
    weights = int(weights * bits / cards.Q4_K_M_BITS)
    return (weights + dense) / (weights + read)


def test_the_prediction_holds_on_the_cpu() -> None:
    """A real model on two cores, 4,096 to 32,000 positions, beside our own exact attention in the
    same run: within 5 %."""
    times: dict[tuple[str, int], dict[str, float]] = {}
    for r in records("amd-epyc-2-cores/token_rate/speed.jsonl"):
        case = r["case"]
        if case["library"] == "sparq":
            of_run = times.setdefault((r["run"], case["n_depth"]), {})
            of_run[case["spec"]] = statistics.median(r["samples_ns"])
    n = 0
    for (_, depth), by_spec in times.items():
        for spec in by_spec.keys() - {"dense"}:
            limit = predicted("qwen2.5-coder-1.5b-instruct", spec, depth, cards.Q4_K_M_BITS)
            assert by_spec["dense"] / by_spec[spec] == pytest.approx(limit, rel=0.05)
            n += 1
    assert n == 15


@pytest.mark.parametrize("gpu", ["h100", "h200"])
def test_the_prediction_is_a_limit_on_a_gpu(gpu: str) -> None:
    """Llama 2 7B's geometry in f16: a token takes more than bytes there."""
    times = {}
    for r in records(f"nvidia-{gpu}-intel-xeon-16-cores/gpu_tokens.jsonl"):
        case = r["case"]
        if case["like"] == "llama2-7b" and case["n_layer"] == 32:
            times[case["n_depth"], case["spec"]] = statistics.median(r["samples_ns"])
    sparse = [(depth, spec) for depth, spec in times if spec != "off"]
    assert len(sparse) >= 4
    for depth, spec in sparse:
        measured = times[depth, "off"] / times[depth, spec]
        assert 0.5 < measured / predicted("llama2-7b", spec, depth, 16) < 1
