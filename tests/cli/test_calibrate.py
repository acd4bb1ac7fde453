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
from pyorch.attention import saved
from pyorch.attention.spec import AttentionSpec, parse_spec
from pyorch.calibrate import meter, search
from pyorch.errors import SparqError

if TYPE_CHECKING:
    from conftest import Run

pytestmark = pytest.mark.usefixtures("native_lib_dir")

TEXT = "".join(np.random.default_rng(0).choice(list("abcdefgh "), 6000))
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
    """A copy of the tiny model, and a cache folder of its own for measurements."""
    monkeypatch.setattr(search, "paths", SimpleNamespace(cache=lambda: tmp_path / "cache"))
    return Path(shutil.copy(tiny, tmp_path / "m.gguf"))


# ---- numbers ----


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
            spent, best = (x[np.arange(3), got].sum() for x in (cost, kl))
            assert spent <= budget
            # no choice that costs no more is better: prices find all corners of the hull
            assert best <= kls[costs <= spent].min() + 1e-9


class Formula:
    """A meter of three layers whose errors do not add up: the KL is the square of their sum.

    Bytes: rows, a scan of 1/1000 per rank, 1/100 for the mean of V; a dense layer reads all. With
    top_p two thirds of the rows are read.
    """

    layers = [0, 1, 2]
    weight = np.array([0.002, 0.03, 0.005])

    def one(
        self, k: np.ndarray, rank: np.ndarray, spec: AttentionSpec
    ) -> tuple[np.ndarray, np.ndarray]:
        dense = k >= 1
        error = np.where(dense, 0, self.weight * np.maximum(1 / k - 1, 0) ** 0.5 * (1 + 8 / rank))
        kl = error.sum(-1) ** 2 * (0.5 if spec.mean_v == "on" else 1)
        rows = k * (1 if spec.top_p == 1 else 2 / 3)
        cost = rows + rank / 1000 + 0.01 * (spec.mean_v == "on")
        return kl, np.where(dense, 1, cost).mean(-1)

    def measure(self, spec: AttentionSpec, which: list[int]) -> meter.Measured:
        k = np.array([spec.k_layers[il].k for il in self.layers])
        kl, share = self.one(k, np.array(spec.rank_layers, float), spec)
        return meter.Measured(np.full(len(which), kl), float(share))


def formula_search(share: float) -> tuple[search.Search, search.Point]:
    base = AttentionSpec("sparq", ratio=1 / 8, min_ctx=0, min_k=1, mean_v="off")
    s = search.Search(Formula(), [0, 1], 2048, 64, share)  # type: ignore[arg-type]
    return s, s.to_share(search.Point(np.full(3, 0.1), np.full(3, 16), base))


@pytest.mark.parametrize("share", [0.06, 0.125, 0.4])
def test_two_rounds_come_near_the_joint_optimum(share: float) -> None:
    """Of all ranks and k on a grid, where the errors of layers do not add up."""
    s, p = formula_search(share)
    kls = [s.measure([p])[0][0]]
    for step in search.STEPS:
        p = s.round(p, step)
        kl, read = s.measure([p])
        assert read[0] <= search.MAX_SHARE * share and kl[0] <= kls[-1]
        kls.append(kl[0])
    grid = np.array([*np.geomspace(0.004, 0.9, 40), 1.0])
    ranks = np.array(list(itertools.product((4, 8, 16, 32, 64), repeat=3)))[:, None, None]
    k0, k2 = grid[:, None], grid
    k1 = 3 * share - ranks.sum(-1) / 1000 - k0 - k2
    k = np.stack(np.broadcast_arrays(k0, np.where(k1 < 0.004, 1e-9, k1), k2), -1)
    best = Formula().one(k, ranks, p.base)[0].min()
    assert kls[-1] < 1.05 * best and kls[-1] < 0.8 * kls[0]


@pytest.mark.parametrize("change", [{}, {"mean_v": "on"}, {"top_p": 0.9}])
def test_points_are_brought_to_equal_bytes(change: dict) -> None:
    s, p = formula_search(0.125)
    q = s.to_share(replace(p, base=replace(p.base, **change)))
    assert s.measure([q])[1][0] == pytest.approx(0.125, rel=0.005)
    more = replace(q, k=q.k * 1.05)
    assert s.measure([more])[0][0] < s.measure([q])[0][0]
    assert s.best([q, more]) is q, "what reads more does not win"


def measured(*kl: float, share: float = 0.1) -> meter.Measured:
    return meter.Measured(np.array(kl), share)


def test_uniform_stays_unless_another_is_clearly_better() -> None:
    uniform = measured(1, 9, 2, 8, 1, 9)
    better = measured(0.9, 8.8, 1.8, 7.9, 0.8, 8.5)  # by little, in every context
    lucky = measured(1.1, 3, 2.1, 8.1, 1.1, 9.2)  # less on average, by one context
    dearer = measured(0.5, 8, 1, 7, 0.5, 8, share=0.2)
    few = [replace(m, kl=m.kl[:5]) for m in (uniform, better)]
    assert lucky.kl.mean() < better.kl.mean() < uniform.kl.mean()
    assert search.chosen({"uniform": uniform, "lucky": lucky, "dearer": dearer}) == "uniform"
    assert search.chosen({"uniform": uniform, "lucky": lucky, "better": better}) == "better"
    assert search.chosen(dict(zip("ub", few, strict=True))) == "u", "five tell nothing"


# ---- measurements ----


def test_contexts_do_not_overlap_and_half_repeat_themselves(tiny: Path) -> None:
    with engine.load(tiny, n_ctx=512, n_threads=1) as session:
        made = meter.contexts(session, TEXT, 10, 512, 8)
        at = []
        for i, c in enumerate(made):
            tokens = [*c.prompt, *c.rest]
            assert len(tokens) == 512 and len(c.rest) == 8
            text = engine.detokenize(session, tokens).strip()
            own = text[: 512 - 8 - meter.N_CUE - 20]
            at.append((TEXT.index(own), len(own)))
            tail = engine.detokenize(session, tokens[-meter.N_CUE - 8 :])
            assert (tail in text[: -len(tail)]) == (i % 2 == 1)
        assert all(a + n <= b for (a, n), (b, _) in itertools.pairwise(at))
        with pytest.raises(SparqError) as e:
            meter.contexts(session, TEXT, 12, 512, 8)
        assert e.value.exit_code == 2
        fits = int(e.value.hint.rpartition(" ")[2])
        assert len(meter.contexts(session, TEXT, 12, fits, 8)) == 12, "as the hint says"


def test_meter_measures_what_one_session_alone_gives(tiny: Path, tmp_path: Path) -> None:
    """KL from dense to sparse in double precision, and the bytes, each in a session of its own; and
    what is known from a file is not measured again."""
    specs = ["sparq,ratio=1/8,min_ctx=0,min_k=1", "sparq,rank=1,topk=20,min_ctx=0,mean_v=on"]

    def alone(c: meter.Context, spec: str) -> tuple[np.ndarray, float]:
        with engine.load(tiny, n_ctx=512, n_threads=1) as session:
            engine.prefill(session, c.prompt[:-1])
            engine.set_attention(session, spec)
            rows = []
            for token in [c.prompt[-1], *c.rest[:-1]]:
                engine.decode(session, token)
                x = engine.logits(session).astype(np.float64)
                rows.append(x - x.max() - np.log(np.exp(x - x.max()).sum()))
            info = engine.info(session)
            dense = info.counter("bytes_dense")
            return np.array(rows), info.counter("bytes_read") / dense if dense else 1.0

    file = tmp_path / "known.jsonl"
    with engine.load(tiny, n_ctx=512, n_threads=1, n_sequences=2) as session:
        made = meter.contexts(session, TEXT, 2, 512, 3)
        m = meter.Meter(session, made, file)
        for spec in specs:
            got = m.measure(parse_spec(spec), [1, 0])
            assert engine.info(session).sparse_share == 1
            for c, kl in zip((1, 0), got.kl, strict=True):
                (p, _), (q, share) = alone(made[c], "off"), alone(made[c], spec)
                assert kl == pytest.approx((np.exp(p) * (p - q)).sum(1).mean(), rel=1e-3, abs=1e-7)
                assert got.share == pytest.approx(share) and share < 0.6
        lines = file.read_text()
        file.write_text(lines[:-20])  # killed while it wrote
        again = meter.Meter(session, made, file)
        for spec in specs:
            again.measure(parse_spec(spec), [1, 0])
        assert len(file.read_text().splitlines()) == 2
        assert file.read_text().splitlines()[0] == lines.splitlines()[0]
        with pytest.raises(SparqError):
            meter.Meter(session, [*made, made[0]])


# ---- where results are ----


def test_results_are_of_the_content(model: Path, tmp_path: Path) -> None:
    saved.save(model, RESULT).rename(tmp_path / "copy.gguf.sparq.json")
    copy = Path(shutil.copy(model, tmp_path / "copy.gguf"))
    assert saved.load(copy) == [RESULT]
    raw = bytearray(model.read_bytes())
    raw[-1] ^= 1
    copy.write_bytes(raw)
    assert saved.load(copy) == []


def test_results_are_found_again(model: Path) -> None:
    spec = parse_spec("sparq,calibrated")
    with pytest.raises(SparqError) as e:
        saved.resolve(spec, model)
    assert "sparq-cpp calibrate" in e.value.hint
    file = saved.save(model, RESULT)
    assert file == model.with_name("m.gguf.sparq.json")
    saved.save(model, {**RESULT, "ratio": 1 / 4, "calibrated": {"mean_v": "off"}})
    want = "sparq,ratio=1/8,mean_v=on,min_k=30,k_layers=10%:dense,rank_layers=8:4"
    assert str(saved.resolve(spec, model)) == want
    got = saved.resolve(parse_spec("sparq,mean_v=off,min_k=1,budget=top-p"), model)
    assert (got.mean_v, got.min_k, got.top_p, got.cap) == ("off", 1, 0.99, 1.5), "as given"
    four = saved.resolve(parse_spec("sparq,ratio=1/4,calibrated"), model)
    assert str(four) == "sparq,ratio=1/4,mean_v=off"
    with pytest.raises(SparqError, match="1/5"):
        saved.resolve(parse_spec("sparq,ratio=1/5,calibrated"), model)
    with pytest.raises(SparqError, match="sparq"):
        saved.resolve(parse_spec("topk,calibrated"), model)
    plain = AttentionSpec("sparq", ratio=1 / 8)
    assert saved.resolve(plain, model) is plain
    saved.save(model, {**RESULT, "ratio": 1 / 16, "calibrated": {"top_q": 0.5}})
    with pytest.raises(SparqError, match="top_q"):  # it is not left out quietly
        saved.resolve(parse_spec("sparq,ratio=1/16,calibrated"), model)


def test_a_folder_that_cannot_be_written(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPARQ_CACHE", str(tmp_path / "cache"))
    model.with_name("m.gguf.sparq.json").mkdir()  # in the way of the file
    file = saved.save(model, RESULT)
    assert file.parent == tmp_path / "cache" / "calibrated"
    assert saved.resolve(parse_spec("sparq,calibrated"), model).rank_layers == (8, 4)
    assert not list(model.parent.glob("*.new"))


def test_a_damaged_file(model: Path) -> None:
    saved.save(model, RESULT).write_text('{"schema": 1')
    with pytest.raises(SparqError, match="damaged"):
        saved.resolve(parse_spec("sparq,calibrated"), model)


# ---- the command ----


def test_calibrate_and_use(run: Run, model: Path, tmp_path: Path) -> None:
    """Measured, kept, drawn and used."""
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    args = ("calibrate", "-m", model, "--text", text, "--ctx", 512, "-t", 1)
    first = run(*args, "--contexts", 8, "--tokens", 2)
    assert first.code == 0, first.err
    assert "uniform" in first.out and "top-p" in first.out and str(model) in first.err
    assert run(*args, "--show").out == first.out
    result = saved.find(model, 1 / 8, "q4")
    shares = [c["share"] for c in result["candidates"]]
    assert max(shares) < 1.1 * min(shares), "at equal bytes"
    assert {len(c["kl_contexts"]) for c in result["candidates"]} == {6}

    saved.save(model, {**result, "calibrated": FOUND, "top-p": FOUND})
    use = ("generate", "-m", model, "-p", "x" * 600, "-n", 3, "--json")
    for budget in ("calibrated", "top-p"):
        done = run(*use, "-a", f"sparq,ratio=1/8,min_ctx=0,budget={budget}")
        assert done.code == 0, done.err
        used = parse_spec(json.loads(done.out)["attention"]["spec"])
        assert (str(used.k_layers[1]), used.rank_layers) == ("dense", (8, 4))
    assert run(*use, "--ratio", "1/9", "--budget", "calibrated").code == 1
    explained = run("explain", "-m", model, "--ratio", "1/8", "--budget", "calibrated", "--json")
    assert json.loads(explained.out)["spec"] == str(
        saved.resolve(AttentionSpec("sparq", ratio=1 / 8, budget="calibrated"), model)
    )
