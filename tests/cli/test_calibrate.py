"""calibrate: what is measured, how bytes are shared out, where the result is and who uses it."""

from __future__ import annotations

import itertools
import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from pyorch import engine
from pyorch.attention import calibrate, meter, search
from pyorch.attention.spec import AttentionSpec, make_spec, parse_spec
from pyorch.errors import SparqError

if TYPE_CHECKING:
    from conftest import Run

FOUND = {"mean_v": "on", "k_layers": "10%:dense", "rank_layers": "8:4", "min_k": 30}
RESULT = {
    "ratio": 1 / 8,
    "shadow": "q4",
    "time": "2026-01-01T00:00:00Z",
    "calibrated": FOUND,
    "top-p": {**FOUND, "top_p": 0.99, "cap": 1.5},
}


@pytest.fixture
def model(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the tiny model, and a cache folder of its own for results."""
    for module in (calibrate, search):  # not that of the library
        here = SimpleNamespace(cache=lambda: tmp_path / "cache")
        monkeypatch.setattr(module, "paths", here)
    return Path(shutil.copy(tiny, tmp_path / "m.gguf"))


# ---- numbers ----


def test_curve_goes_through_what_was_measured() -> None:
    k, kl = np.array([0.01, 0.04, 0.16]), np.array([0.1, 0.2, 0.025])
    at = np.array([0.0025, 0.01, 0.04, 0.08, 0.16, 0.64, 1.0])
    got = search.curve(k, kl, at)
    assert got[[1, 2, 4]] == pytest.approx([0.1, 0.1, 0.025]), "noise that rises is flat"
    assert got[3] == pytest.approx(0.05) and got[5] == pytest.approx(0.025 / 4)
    assert got[0] == pytest.approx(0.1) and got[6] == 0


def test_allocation_is_the_best_there_is() -> None:
    """Against all choices, where the curves are convex; within the budget in any case."""
    rng = np.random.default_rng(0)
    for _ in range(20):
        cost = np.cumsum(rng.uniform(0.1, 1, (3, 6)), axis=1)
        slope = np.sort(rng.uniform(0.1, 3, (3, 6)), axis=1)[:, ::-1]
        kl = 20 - np.cumsum(slope * np.diff(cost, prepend=0, axis=1), axis=1)
        every = np.array(list(itertools.product(range(6), repeat=3)))
        costs, kls = (x[np.arange(3), every].sum(1) for x in (cost, kl))
        for budget in np.quantile(costs, (0.2, 0.5, 0.8)):
            got = search.allocate(kl, cost, budget)
            spent, found = (x[np.arange(3), got].sum() for x in (cost, kl))
            assert spent <= budget
            # no choice that costs no more is better: prices find all corners of the hull
            assert found <= kls[costs <= spent].min() + 1e-9


def test_all_candidates_cost_the_same(tiny: Path) -> None:
    with engine.load(tiny, n_ctx=512, n_threads=1) as session:
        base = make_spec("sparq", ratio=1 / 8, min_ctx=0, min_k=1)
        types = [engine.cache_type("f16")] * 2
        share = float(search.Budget(session, base, 2048, types, [0, 1]).costs(base).sum())
        assert share == pytest.approx(1 / 8, rel=0.03)
        for mean_v in ("on", "off"):
            mode = replace(base, mean_v=mean_v)
            budget = search.Budget(session, mode, 2048, types, [0, 1], share)
            k, rank = budget.uniform()
            for weight in ((1, 1), (1, 5), (0.2, 1)):
                spec = budget.fit(k * weight, rank)
                assert budget.costs(spec).sum() == pytest.approx(share, rel=0.01)
                assert spec.mean_v == mean_v
        dense = budget.fit(np.array([1.0, 0.1]), rank)
        assert dense.k_layers is not None and dense.k_layers.startswith("dense:")


def test_contexts_repeat_themselves(tiny: Path) -> None:
    text = "".join(np.random.default_rng(0).choice(list("abcdefgh "), 3000))
    with engine.load(tiny, n_ctx=512, n_threads=1) as session:
        made = meter.contexts(session, text, 4, 512, 8)
        for i, c in enumerate(made):
            tokens = [*c.prompt, *c.rest]
            assert len(tokens) == 512 and len(c.rest) == 8
            tail = engine.detokenize(session, tokens[-meter.N_CUE - 8 :])
            head = engine.detokenize(session, tokens[: -meter.N_CUE - 8])
            assert (tail in head) == (i % 2 == 1)
        with pytest.raises(SparqError, match="the text has 3001 tokens|need"):
            meter.contexts(session, text, 2, 4000, 8)


# ---- where results are ----


def test_hash_is_of_the_content(model: Path, tmp_path: Path) -> None:
    before = calibrate.model_hash(model)
    assert calibrate.model_hash(shutil.copy(model, tmp_path / "copy.gguf")) == before
    raw = bytearray(model.read_bytes())
    raw[-1] ^= 1  # not among the samples of a large file, but of a small one
    model.write_bytes(raw)
    assert len(raw) > 1 << 18 or calibrate.model_hash(model) != before
    model.write_bytes(raw + b"x")
    assert calibrate.model_hash(model) != before
    with pytest.raises(SparqError, match=r"none\.gguf"):
        calibrate.model_hash(tmp_path / "none.gguf")


def test_results_are_found_again(model: Path) -> None:
    spec = parse_spec("sparq,calibrated")
    with pytest.raises(SparqError, match="is not calibrated for ratio 1/8") as e:
        calibrate.resolve(spec, model)
    assert "sparq-cpp calibrate" in e.value.hint
    file = calibrate.save(model, RESULT)
    assert file == model.with_name("m.gguf.sparq.json")
    calibrate.save(model, {**RESULT, "ratio": 1 / 4, "calibrated": {"mean_v": "off"}})
    want = "sparq,ratio=1/8,mean_v=on,min_k=30,k_layers=10%:dense,rank_layers=8:4"
    assert str(calibrate.resolve(spec, model)) == want
    got = calibrate.resolve(parse_spec("sparq,mean_v=off,min_k=1,budget=top-p"), model)
    assert (got.mean_v, got.min_k, got.top_p, got.cap) == ("off", 1, 0.99, 1.5), "as given"
    four = calibrate.resolve(parse_spec("sparq,ratio=1/4,calibrated"), model)
    assert str(four) == "sparq,ratio=1/4,mean_v=off"
    with pytest.raises(SparqError, match=r"1/5 \(q4\); there are results for"):
        calibrate.resolve(parse_spec("sparq,ratio=1/5,calibrated"), model)
    with pytest.raises(SparqError, match="belongs to sparq, not to topk"):
        calibrate.resolve(parse_spec("topk,calibrated"), model)
    plain = AttentionSpec("sparq", ratio=1 / 8)
    assert calibrate.resolve(plain, model) is plain


def test_results_of_another_model_do_not_count(model: Path) -> None:
    calibrate.save(model, RESULT)
    with model.open("ab") as f:
        f.write(b"x")
    with pytest.raises(SparqError, match="not calibrated"):
        calibrate.resolve(parse_spec("sparq,calibrated"), model)


def test_a_folder_that_cannot_be_written(model: Path, tmp_path: Path) -> None:
    model.with_name("m.gguf.sparq.json").mkdir()  # in the way of the file
    file = calibrate.save(model, RESULT)
    assert file.parent == tmp_path / "cache" / "calibrated"
    assert calibrate.resolve(parse_spec("sparq,calibrated"), model).rank_layers == "8:4"
    assert not list(model.parent.glob("*.new"))


def test_a_damaged_file(model: Path) -> None:
    calibrate.save(model, RESULT).write_text('{"schema": 1')
    with pytest.raises(SparqError, match="is damaged"):
        calibrate.resolve(parse_spec("sparq,calibrated"), model)


# ---- the command ----


def test_calibrate_and_use(
    run: Run, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Measured, kept, drawn, used; and what an interrupted run measured is not measured again."""
    monkeypatch.setattr(search, "FACTORS", (1 / 2, 2))
    monkeypatch.setattr(search, "TOP_P", (0.999,))
    monkeypatch.setattr(search, "CAPS", (1.05, 2.0))
    text = tmp_path / "text.txt"
    text.write_text("".join(np.random.default_rng(0).choice(list("abcdefgh "), 2000)))
    args = ("calibrate", "-m", model, "--text", text, "--ctx", 512, "-t", 1)
    args = (*args, "--contexts", 4, "--tokens", 2)
    first = run(*args)
    assert first.code == 0, first.err
    assert "uniform" in first.out and "top-p" in first.out and str(model) in first.err

    result = json.loads(run(*args, "--show", "--json").out)
    kl = {c["name"]: c["kl"] for c in result["candidates"]}
    assert kl[result["chosen"]] == min(x for n, x in kl.items() if not n.startswith("top-p")), (
        "the best one is taken, uniform among them"
    )
    shares = [c["share"] for c in result["candidates"]]
    assert max(shares) < 1.1 * min(shares), "at equal bytes"

    measured = 0
    plain = meter.Meter._run

    def count(*a: object) -> object:
        nonlocal measured
        measured += 1
        return plain(*a)  # type: ignore[arg-type]

    monkeypatch.setattr(meter.Meter, "_run", count)
    (file,) = (tmp_path / "cache" / "calibrated").glob("*.jsonl")
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines[:-3]) + lines[-3][:20])  # killed while it wrote
    again = run(*args, "--json")
    assert measured == 3 and json.loads(again.out)["candidates"] == result["candidates"]

    use = ("generate", "-m", model, "-p", "x" * 600, "-n", 3, "--ratio", "1/8", "--min-ctx", 0)
    for budget in ("calibrated", "top-p"):
        done = run(*use, "--budget", budget, "--json")
        assert done.code == 0, done.err
        want = calibrate.resolve(make_spec(ratio=1 / 8, budget=budget, min_ctx=0), model)
        used = parse_spec(json.loads(done.out)["attention"]["spec"])
        assert (used.k_layers, used.rank_layers) == (want.k_layers, want.rank_layers)
    assert run(*use[:-4], "--ratio", "1/9", "--budget", "calibrated").code == 1
    explained = run("explain", "-m", model, "--ratio", "1/8", "--budget", "calibrated", "--json")
    assert json.loads(explained.out)["spec"] == str(
        calibrate.resolve(make_spec(ratio=1 / 8, budget="calibrated"), model)
    )


def test_errors(run: Run, model: Path, tmp_path: Path) -> None:
    shown = run("calibrate", "-m", model, "--show")
    assert shown.code == 1 and "is not calibrated" in shown.err
    (tmp_path / "short.txt").write_text("too short")
    short = run("calibrate", "-m", model, "--text", tmp_path / "short.txt", "--ctx", 512)
    assert short.code == 2 and "the text has" in short.err and "hint:" in short.err
    assert run("calibrate", "-m", model, "--text", tmp_path / "none.txt").code == 1
    assert run("calibrate", "-m", model, "--ratio", "2").code == 2
