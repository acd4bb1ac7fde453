"""The rates of prompts: what is counted, and what `explain --prompts` says of them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from tiny_gguf import write_tiny_gguf

from pyorch import engine
from pyorch.bench import prompt_rate
from pyorch.bench.prompt_rate import PromptRate
from pyorch.cli.explain import command
from pyorch.errors import SparqError
from pyorch.models import synth
from pyorch.models.geometry import geometry
from pyorch.models.gguf_file import read_gguf
from pyorch.models.layers import Windows


@pytest.fixture
def model(tmp_path: Path) -> Path:
    sizes = {"n_layer": 2, "n_embd": 64, "n_ff": 64, "n_head": 4, "n_head_kv": 2, "head_dim": 32}
    path = tmp_path / "m.gguf"
    synth.write(path, synth.shape_like("tinyllama-1.1b", **sizes, n_vocab=512, tokenizer="bytes"))
    return path


def test_operations_are_those_of_what_tokens_see(model: Path) -> None:
    """A token sees itself and those before it, at most its window."""
    geo = geometry(read_gguf(model))
    windows = (64, 0)
    wanted = sum(
        2 * 4 * (32 + 32) * min(i, window or i) for window in windows for i in range(101, 301)
    )
    found = prompt_rate.attention_operations(replace(geo, windows=Windows(windows)), 200, 100)
    assert found == pytest.approx(wanted, rel=0.01)
    assert prompt_rate.weights_operations(geo, 10) == pytest.approx(
        2 * 10 * (2 * 64 * (2 * 6 * 32 + 3 * 64)), rel=0.02
    )


def test_a_text_takes_as_long_as_its_parts(model: Path) -> None:
    geo, rate = geometry(read_gguf(model)), PromptRate.guessed(1e9)
    parts = sum(rate.attention_s(geo, 512, n, "f32") for n in range(0, 4096, 512))
    assert rate.attention_s(geo, 4096, 0, "f32") == pytest.approx(parts)
    assert rate.weights_s(geo, 4096) == pytest.approx(8 * rate.weights_s(geo, 512))


def test_explain_measures_prompts(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_rate, "DEPTH", 1024)
    took = dict(zip(("as in the file", "rearranged", "f32", "fast"), (2, 4, 8, 6), strict=True))
    times, really = iter([*took.values()] * 2), prompt_rate._time

    def timed(session: engine.Session) -> float:
        really(session)  # but its noise is not what this is about
        return next(times)

    monkeypatch.setattr(prompt_rate, "_time", timed)
    monkeypatch.setattr(synth, "folder", lambda: tmp_path / "made")

    def explain(*args: str) -> Any:
        line = ["-m", str(model), "--ctx", "4096", "-t", "1", *args]
        return CliRunner().invoke(command, line, catch_exceptions=False).stdout

    assert "prompt" not in json.loads(explain("--json"))
    found = json.loads(explain("--prompts", "--json"))["prompt"]
    assert found["tokens"] == 512 and found["attention_s"].keys() == {"f32", "fast", "sparse"}
    assert found["weights_s"] > 1.5 * found["weights_s_no_repack"] > 0
    attention = found["attention_s"]
    assert attention["f32"] / attention["fast"] == pytest.approx((8 - 4) / (6 - 4))
    assert attention["fast"] / attention["sparse"] == pytest.approx(prompt_rate.SPARSE_GAIN)
    (made,) = (tmp_path / "made").glob("*.gguf")
    written = made.stat().st_mtime_ns
    shown = explain("--prompts")
    assert "with --no-repack" in shown and "(reading as measured" in shown
    assert made.stat().st_mtime_ns == written, "the small model is written once"


def test_a_busy_machine_is_no_rate() -> None:
    with pytest.raises(SparqError, match="make no sense"):
        prompt_rate._rate(1e9, 0)


def test_explain_says_which_weights_it_can_measure(tmp_path: Path) -> None:
    other = write_tiny_gguf(tmp_path / "f32.gguf")
    refused = CliRunner().invoke(command, ["-m", str(other), "--prompts"]).exception
    assert isinstance(refused, SparqError) and "weights of f32" in refused.message
    assert "q4_K" in refused.hint
