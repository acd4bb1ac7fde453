"""The numbers of the papers' analysis figures, against plain definitions."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import numpy as np
import pytest
import tiny as tiny_models

sys.path.append(str(Path(__file__).parents[2] / "bench"))

import attention_stats as stats
import capture

from pyorch import engine, paths

DEMO = paths.data("models") / "demo"
RNG = np.random.default_rng(0)


def rows(n: int = 50, m: int = 7) -> np.ndarray:
    return stats.softmax(3 * RNG.normal(size=(m, n)))


def test_mass_entropy_and_scores_needed() -> None:
    p = rows()
    for row, mass, nats, need in zip(
        p, stats.top_mass(p, 5), stats.entropy(p), stats.scores_for(p, 0.75), strict=True
    ):
        ordered = sorted(row, reverse=True)
        assert mass == pytest.approx(sum(ordered[:5]))
        assert nats == pytest.approx(-sum(x * math.log(x) for x in row))
        assert sum(ordered[:need]) >= 0.75 > sum(ordered[: need - 1])
    assert stats.entropy(np.full(8, 1 / 8)) == pytest.approx(math.log(8))


def test_near_zero_leaves_out_what_is_hidden() -> None:
    p = np.array([[0.5, 0.004, 0.496, 0.0, 0.0]])
    assert stats.share_below(p, 0.01, np.array([3])) == pytest.approx(1 / 3)


def test_idle_positions_are_idle_in_the_rows_of_all_heads() -> None:
    p = np.array([[[1, 2**-13, 2**-20, 2**-30, 0], [2**-30, 1, 2**-18, 2**-25, 0]]])
    one = [stats.share_below(p, 2.0**-b, np.array([[4]])).tolist() for b in (24, 16, 12)]
    assert one == [[[1 / 4, 2 / 4]], [[2 / 4, 3 / 4]], [[3 / 4, 3 / 4]]]
    both = [stats.share_idle(p, 2.0**-b, np.array([4])).tolist() for b in (24, 16, 12)]
    assert both == [[1 / 4], [2 / 4], [2 / 4]]


def test_components_are_the_largest_or_the_first() -> None:
    q = np.array([[1.0, -5.0, 3.0, 2.0]])
    assert stats.components(q, 2, "largest").tolist() == [[0, -5, 3, 0]]
    assert stats.components(q, 2, "first").tolist() == [[1, -5, 0, 0]]


def test_a_random_projection_to_all_directions_is_none() -> None:
    q = RNG.normal(size=(3, 8)).astype(np.float32)
    assert np.allclose(stats.projected(q, 8, np.random.default_rng(1)), q, atol=1e-5)
    small = stats.projected(q, 3, np.random.default_rng(1))
    assert np.linalg.matrix_rank(small, tol=1e-4) <= 3
    assert (np.linalg.norm(small, axis=1) < np.linalg.norm(q, axis=1)).all()


def test_overlap() -> None:
    a, b = np.array([[4.0, 3, 2, 1]]), np.array([[4.0, 1, 3, 2]])
    a, b = stats.best(a, 3), stats.best(b, 3)
    assert a.tolist() == [[0, 1, 2]] and b.tolist() == [[0, 2, 3]]
    assert stats.overlap(a, b, 2) == pytest.approx(0.5)
    assert stats.overlap(a, b, 1) == 1


def test_temperatures_are_those_of_the_paper() -> None:
    q = np.array([1.0, -5.0, 3.0, 2.0])
    assert stats.temperature(q, 2, "eq. 9") == pytest.approx(math.sqrt(4 * 8 / 11))
    assert stats.temperature(q, 2, "sqrt(d)") == 2
    assert stats.temperature(q, 2, "sqrt(r)") == pytest.approx(math.sqrt(2))


def test_correlation_ratio_is_zero_for_noise_and_known_for_a_mean() -> None:
    noise = RNG.normal(size=(40, 60, 30))
    for axis in range(3):
        assert abs(stats.correlation_ratio(noise, axis)) < 0.02
    # a mean of variance 1 along axis 1 beside noise of variance 3: eta^2 is 1/4 of it
    v = RNG.normal(size=(400, 1, 50)) + math.sqrt(3) * RNG.normal(size=(400, 60, 50))
    want = math.sqrt((1 + 3 / 60) / 4) - 60**-0.5
    assert stats.correlation_ratio(v, 1) == pytest.approx(want, abs=0.01)


def test_tails_of_a_gaussian_and_of_a_heavy_one() -> None:
    q = RNG.normal(size=(4000, 1, 64))
    gauss, heavy = stats.query_tails(q), stats.query_tails(np.sign(q) * np.abs(q) ** 2)
    assert abs(gauss["kurtosis"][0]) < 0.1 and gauss["tail"][0] == pytest.approx(1, abs=0.15)
    assert heavy["kurtosis"][0] > 3 and heavy["tail"][0] > 4


def test_all_components_agree_with_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    """r = d: agreement 1, and alpha is the true share at every temperature that is exact then."""
    monkeypatch.setattr(stats, "PARTS", (1,))
    monkeypatch.setattr(stats, "ALPHA_PART", 1)
    shapes = (64, 2, 2, 16), (2, 320, 16), (2, 320, 16)
    heads = capture.Heads(*(RNG.normal(size=s).astype(np.float32) for s in shapes), scale=0.25)
    got = stats.measure(heads, 3, np.random.default_rng(0))
    for choice in stats.CHOICES:
        assert got[f"agreement_{choice}_1"].shape == (2, len(stats.TOPS))
        assert got[f"agreement_{choice}_1"].min() > 0.99
    assert got["agreement_shared_1"].min() > 0.99
    assert (got["mass32_shared"] < got["mass32"]).all() and got["idle24"].shape == (4,)
    assert np.allclose(got["coverage"], got["coverage"][:, :1], atol=1e-5)


def test_a_model_is_measured_once(tmp_path: Path) -> None:
    file = tmp_path / "attention_stats.jsonl"
    text = [DEMO / "document.txt"]

    def run() -> list:
        return stats.run(
            DEMO / "demo.gguf", text, file, lambda *_: None, positions=[512], n_context=2, n_query=2
        )

    recs = run()
    assert [r["case"]["task"] for r in recs] == ["prose", "recite"]
    s = recs[0]["samples"]
    assert np.shape(s["mass32"]) == (5, 4) and 0.3 < np.mean(s["mass32"]) < 1
    assert stats.agreement(recs[0], "largest", "4") > stats.agreement(recs[0], "random", "4") + 0.1
    assert s["eta"]["S"] > 0.2 > abs(s["eta"]["d"])
    assert "| demo.gguf | 512 | recite |" in stats.markdown(recs)
    assert recs[0]["layers"] == [0, 1, 2, 3, 4] and np.shape(s["idle_shared"]["24"]) == (5, 2)
    before = file.read_text()
    run()
    assert file.read_text() == before


def test_layers_with_a_window_are_left_out(tmp_path: Path) -> None:
    """A tiny Gemma 3: the sixth of seven layers sees every position."""
    model = tiny_models.write(tmp_path / "m.gguf", "gemma3", n_layer=7)
    with engine.load_model(model) as loaded:
        found = capture.Capture(loaded, 512, 1)
        tokens = engine.tokenize(loaded, "x" * 320)[:320]
        (full,) = found.layers(tokens)
        (again,) = found.layers(tokens)
        found.session.close()
    assert full.q.shape == (64, 2, 2, 32) and full.k.shape == full.v.shape == (2, 320, 32)
    assert (full.q == again.q).all() and (full.k == again.k).all()
    recs = stats.run(
        model,
        [DEMO / "document.txt"],
        tmp_path / "attention_stats.jsonl",
        lambda *_: None,
        positions=[512],
        tasks=["prose"],
        n_context=2,
        n_query=2,
    )
    assert [(r["layers"], r["n_layer"], r["case"]["task"]) for r in recs] == [([5], 7, "prose")]
    assert len(recs[0]["samples"]["mass32"]) == 1
