"""calibrate: what is measured, how bytes are shared out, where the result is and who uses it."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from pyorch import engine, paths
from pyorch.attention import saved
from pyorch.attention.bytes import cache_bytes
from pyorch.attention.spec import AttentionSpec, parse_spec
from pyorch.bench import records
from pyorch.calibrate import meter, search
from pyorch.cli import calibrate as command
from pyorch.errors import SparqError
from pyorch.models.geometry import geometry
from pyorch.models.gguf_file import read_gguf
from pyorch.progress import silent

if TYPE_CHECKING:
    from conftest import Run

    from pyorch.progress import Progress

pytestmark = pytest.mark.usefixtures("native_lib_dir")

TEXT = "".join(np.random.default_rng(0).choice(list("abcdefgh "), 3000))
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
    for module in (saved, search):  # not that of the library
        here = SimpleNamespace(cache=lambda: tmp_path / "cache", locked=paths.locked)
        monkeypatch.setattr(module, "paths", here)
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
            spent, found = (x[np.arange(3), got].sum() for x in (cost, kl))
            assert spent <= budget
            # no choice that costs no more is better: prices find all corners of the hull
            assert found <= kls[costs <= spent].min() + 1e-9


class Formula:
    """A meter of three layers whose errors do not add up: the KL is the square of their sum.

    Bytes: rows, a scan of 1/1000 per rank, 1/100 for the mean of V; a dense layer reads all.
    With top_p two thirds of the rows are read, more in one context than in the next, and a higher p
    is better.
    """

    layers = [0, 1, 2]
    weight = np.array([0.002, 0.03, 0.005])

    def one(
        self, k: np.ndarray, rank: np.ndarray, spec: AttentionSpec
    ) -> tuple[np.ndarray, np.ndarray]:
        dense = k >= 1
        error = np.where(dense, 0, self.weight * np.maximum(1 / k - 1, 0) ** 0.5 * (1 + 8 / rank))
        kl = error.sum(-1) ** 2 * (0.5 if spec.mean_v == "on" else 1)
        kl *= 1 + 0.001 * (16 if spec.local is None else spec.local)
        if spec.top_p is not None:
            kl *= 2 - spec.top_p
        rows = k * (1 if spec.top_p is None else 2 / 3)
        cost = rows + rank / 1000 + 0.01 * (spec.mean_v == "on")
        return kl, np.where(dense, 1, cost).mean(-1)

    def measure(self, specs: list[AttentionSpec], which: list[int], progress: object) -> list:
        out = []
        for spec in specs:
            k = np.array([spec.k_layers[il].k for il in self.layers])
            kl, share = self.one(k, np.array(spec.rank_layers, float), spec)
            wobble = 0.05 * (-1.0) ** np.array(which) * (spec.top_p is not None)
            out.append(meter.Measured(np.full(len(which), kl), share * (1 + wobble)))
        self.seen.append((len(specs), list(which)))
        return out

    def __init__(self) -> None:
        self.seen: list[tuple[int, list[int]]] = []


def formula_search(share: float, mean_v: str = "off") -> tuple[search.Search, search.Point]:
    base = AttentionSpec("sparq", ratio=1 / 8, min_ctx=0, min_k=1, mean_v=mean_v)
    s = search.Search(Formula(), 2, 2048, 64, share)  # type: ignore[arg-type]
    start = s.to_share(search.Point(np.full(3, 0.1), np.full(3, 16), base))
    return s, start


def test_rounds_find_the_joint_optimum() -> None:
    """Against all ranks and k on a grid, where the errors of layers do not add up."""
    for share in (0.06, 0.125, 0.4):
        s, p = formula_search(share)
        kls = [s.measure([p])[0][0]]
        for half, step in enumerate(search.STEPS):
            p = s.round(p, step, half % 2)
            kl, read = s.measure([p])
            assert read[0] <= search.MAX_SHARE * share and kl[0] <= kls[-1]
            kls.append(kl[0])
        assert p.base.local == 4, "the better window"
        grid = np.array([*np.geomspace(0.004, 0.9, 40), 1.0])
        ranks = np.array(list(itertools.product((4, 8, 16, 32, 64), repeat=3)))[:, None, None]
        k0, k2 = grid[:, None], grid
        k1 = 3 * share - ranks.sum(-1) / 1000 - k0 - k2
        k = np.stack(np.broadcast_arrays(k0, np.where(k1 < 0.004, 1e-9, k1), k2), -1)
        best = Formula().one(k, ranks, p.base)[0].min()
        assert kls[-1] < 1.05 * best
        assert kls[-1] < 0.8 * kls[0]


def candidate(name: str, *kl: float, share: float = 0.1) -> search.Candidate:
    found = meter.Measured(np.array(kl), np.full(len(kl), share))
    return search.Candidate(name, AttentionSpec(), found)


def test_only_what_is_clearly_worse_is_not_searched() -> None:
    best, noisy = candidate("best", 1, 9, 2, 8), candidate("noisy", 9, 1, 8, 3)
    always = candidate("always worse", 1.1, 9.1, 2.2, 8.1)  # by little, in every context
    assert [c.name for c in search.near_best([noisy, best, always])] == ["noisy", "best"]
    assert [c.name for c in search.near_best([always, best])] == ["best"]
    perhaps = candidate("perhaps", 1, 9.2, 2.4, 8.4)  # two standard errors are not enough of four
    assert [c.name for c in search.near_best([perhaps, best])] == ["perhaps", "best"]


def test_uniform_stays_unless_another_is_clearly_better() -> None:
    uniform = candidate("uniform", 1, 9, 2, 8)
    lucky = candidate("lucky", 1.2, 7.5, 2.2, 8.1)  # better on average, by one context
    better = candidate("better", 0.9, 8.9, 1.8, 7.9)
    dearer = candidate("dearer", 0.5, 8, 1, 7, share=0.2)
    assert lucky.kl < better.kl < uniform.kl
    assert search._least([uniform, lucky]) is uniform
    assert search._least([uniform, better]) is better
    assert search._least([uniform, lucky, better, dearer]) is better


def test_with_top_p_the_bytes_that_were_read_count() -> None:
    s, p = formula_search(0.125)
    q = s.to_share(replace(p, base=replace(p.base, top_p=0.9)))
    assert q.k == pytest.approx(1.5 * p.k, rel=0.01), "two thirds of them are read"
    best = s.round(q, 2.0, 0)
    assert s.measure([best])[1][0] <= search.MAX_SHARE * s.share
    assert best.base.top_p == pytest.approx(1 - 0.1 / 3), "the better p"


def test_half_of_the_contexts_propose_and_all_decide() -> None:
    s, p = formula_search(0.125)
    s = replace(s, n_contexts=8)
    for half, which in enumerate(([0, 1, 2, 3], [4, 5, 6, 7])):
        seen = s.meter.seen  # type: ignore[attr-defined]
        seen.clear()
        s.round(p, 2.0, half)
        assert seen[0] == (1 + 4 * 3, which), "this point, and 4 changes of each layer"
        assert [list(range(8))] * 2 == [w for n, w in seen[1:] if n > 1]


def test_what_is_too_dear_gets_cheaper() -> None:
    """At rank 64 the scores alone read too much; half of all ranks has to go at once."""
    s, p = formula_search(0.04)
    p = s.to_share(replace(p, rank=np.full(3, 64)))
    assert s.measure([p])[1][0] > 1.2 * s.share
    p = s.round(p, 4.0, 0)
    assert s.measure([p])[1][0] <= search.MAX_SHARE * s.share


def test_what_reads_more_does_not_win() -> None:
    s, p = formula_search(0.125)
    more = replace(p, k=p.k * 1.05)
    assert s.measure([more])[0][0] < s.measure([p])[0][0]
    assert s.best([p, more])[0] is p


def test_a_shared_setting_changes_for_more_than_chance(monkeypatch: pytest.MonkeyPatch) -> None:
    s, p = formula_search(0.125)
    for local, taken in ((14, False), (2, True)):  # 0.2 % and 1.4 % better
        monkeypatch.setattr(search, "LOCAL", (None, local))
        assert s.round(p, 1.0001, 0).base.local == (local if taken else None)


def test_points_cost_the_same(model: Path) -> None:
    """As the library counts: whatever the weights of the layers and the mean of V."""
    text = TEXT[:2000]
    with engine.load(model, n_ctx=512, n_threads=1, n_sequences=2) as session:
        m = meter.Meter(session, meter.contexts(session, text, 2, 512, 4))
        base = AttentionSpec("sparq", ratio=1 / 4, min_ctx=0, min_k=1)
        (uniform,) = m.measure([base], [0, 1], lambda *_: None)
        share = float(uniform.share.mean())
        s = search.Search(m, 2, 512, session.geometry.head_dim_k, share)
        n = session.geometry.n_layer
        for mean_v, weight in itertools.product(("on", "off"), (1.0, 3.0)):
            k = np.full(n, 0.1) * weight ** np.arange(n)
            p = search.Point(k, np.full(n, 2), replace(base, mean_v=mean_v))
            assert s.measure([s.to_share(p)])[1][0] == pytest.approx(share, rel=0.005)
        dense = s.to_share(search.Point(np.array([1.0, *k[1:]]), np.full(n, 2), base))
        assert str(dense.spec.k_layers[0]) == "dense"


def test_contexts_repeat_themselves(tiny: Path) -> None:
    with engine.load(tiny, n_ctx=512, n_threads=1) as session:
        made = meter.contexts(session, TEXT, 4, 512, 8)
        places = set()
        for i, c in enumerate(made):
            tokens = [*c.prompt, *c.rest]
            assert len(tokens) == 512 and len(c.rest) == 8
            tail = engine.detokenize(session, tokens[-meter.N_CUE - 8 :])
            head = engine.detokenize(session, tokens[: -meter.N_CUE - 8])
            assert (tail in head) == (i % 2 == 1)
            places.add(head.find(tail))
        assert len(places - {-1, 0}) == 2, "passages from different places"
        with pytest.raises(SparqError, match="the text has 3001 tokens|need"):
            meter.contexts(session, TEXT, 2, 4000, 8)


def test_meter_measures_what_one_session_alone_gives(tiny: Path) -> None:
    """KL from dense to sparse in double precision, and the bytes, each in a session of its own."""
    text = TEXT[:2000]
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

    with engine.load(tiny, n_ctx=512, n_threads=1, n_sequences=2) as session:
        made = meter.contexts(session, text, 2, 512, 3)
        m = meter.Meter(session, made)
        got = m.measure([parse_spec(s) for s in specs], [1, 0], lambda *_: None)
        again = m.measure([parse_spec(specs[0])], [0, 1], lambda *_: None)[0]
    assert got[0].kl.tolist() == again.kl.tolist()[::-1], "in the order asked for"
    for spec, measured in zip(specs, got, strict=True):
        for c, kl, share in zip((1, 0), measured.kl, measured.share, strict=True):
            p, _ = alone(made[c], "off")
            q, bytes_read = alone(made[c], spec)
            assert kl == pytest.approx((np.exp(p) * (p - q)).sum(1).mean(), rel=1e-3, abs=1e-7)
            assert share == pytest.approx(bytes_read) and share < 0.6


def test_contexts_are_decoded_together_and_sparse(tiny: Path) -> None:
    """One llama_decode per token for all of them, of which every layer counts a sparse call; an
    earlier search in the session changes nothing."""
    spec = parse_spec("sparq,ratio=1/8,min_ctx=0,min_k=1")
    found, shown = [], []
    with engine.load(tiny, n_ctx=512, n_threads=1, n_sequences=4) as session:
        made = meter.contexts(session, TEXT, 4, 512, 3)
        for _ in range(2):
            m = meter.Meter(session, made)
            found.append(m.measure([spec], range(4), lambda *x: shown.append(x))[0])
            info = engine.info(session)
            assert info.counter("steps") == 4 * 3 and info.sparse_share == 1
        m.measure([spec], [1, 2], lambda *x: shown.append(x))
        assert engine.info(session).counter("steps") == 4 * 3, "known"
        assert m.work == m.reading + 6 * 3, "what is known is counted too"
        others = meter.Meter(session, made[::-1])
        for rank in (4, 8):
            spec = parse_spec(f"sparq,rank={rank},topk=30,min_ctx=0")
            mine, theirs = (x.measure([spec], range(4), silent)[0].kl for x in (m, others))
            assert mine == pytest.approx(theirs[::-1], abs=1e-6), "they share the session"
        with pytest.raises(SparqError, match="5 contexts need as many sequences"):
            meter.Meter(session, [*made, made[0]])
    assert found[0].kl == pytest.approx(found[1].kl, abs=1e-6) and (found[0].kl > 1e-4).all()
    done, totals = zip(*shown, strict=True)
    assert set(totals) == {round(m.reading) + 4 * 3}
    assert list(done[: len(done) // 2]) == sorted(set(done)), "prompts are seen to be read"


def test_the_caches_of_all_contexts_have_to_fit(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = read_gguf(tiny)
    f16 = engine.cache_type("f16")
    three = 3 * cache_bytes(geometry(file), 512, f16, f16)
    monkeypatch.setenv("SPARQ_MEMORY_LIMIT", str(three))  # weights need not fit
    engine.load(tiny, n_ctx=512, n_threads=1, n_sequences=3).close()
    with pytest.raises(SparqError, match="for the cache"):
        engine.load(tiny, n_ctx=512, n_threads=1, n_sequences=4)


def test_the_progress_of_a_search_is_one(model: Path) -> None:
    """It grows from reading the contexts to the end, towards a total that is known from the first
    measurement on; an interrupted search goes on from where it was."""
    text = TEXT[:2000]
    shown: list[tuple[int, int]] = []
    labels = []

    @contextmanager
    def bar(label: str) -> Iterator[Progress]:
        labels.append(label)
        yield lambda *x: shown.append(x)

    options: dict[str, Any] = {"n_pos": 512, "n_contexts": 2, "n_tokens": 2, "bar": bar}
    with engine.load(model, n_ctx=512, n_threads=1, n_sequences=2) as session:
        names = [c["name"] for c in search.run(session, text, ratio=1 / 8, **options)["candidates"]]
        assert sum("round 2" in n for n in names) == 2, "one of mean_v goes on, and then top_p"
        assert labels == ["calibrating"]
        done, totals = zip(*shown, strict=True)
        assert list(done) == sorted(done) and 0.85 < done[-1] / totals[-1] <= 1
        assert len(set(totals)) == 1 and done[0] < 0.3 * totals[0]
        (file,) = (model.parent / "cache" / "calibrated").glob("*.jsonl")
        lines = file.read_text().splitlines(keepends=True)
        file.write_text("".join(lines[: len(lines) // 2]))
        shown.clear()
        search.run(session, text, ratio=1 / 8, **options)
    assert shown[0][0] > 0.3 * totals[0]


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
    with pytest.raises(SparqError, match="is not calibrated for ratio 1/8") as e:
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
    with pytest.raises(SparqError, match=r"1/5 \(q4\); there are results for"):
        saved.resolve(parse_spec("sparq,ratio=1/5,calibrated"), model)
    with pytest.raises(SparqError, match="belongs to sparq, not to topk"):
        saved.resolve(parse_spec("topk,calibrated"), model)
    plain = AttentionSpec("sparq", ratio=1 / 8)
    assert saved.resolve(plain, model) is plain
    saved.save(model, {**RESULT, "ratio": 1 / 16, "calibrated": {"top_q": 0.5}})
    with pytest.raises(SparqError, match="unknown setting 'top_q'"):  # it is not left out quietly
        saved.resolve(parse_spec("sparq,ratio=1/16,calibrated"), model)


def test_a_folder_that_cannot_be_written(model: Path, tmp_path: Path) -> None:
    model.with_name("m.gguf.sparq.json").mkdir()  # in the way of the file
    file = saved.save(model, RESULT)
    assert file.parent == tmp_path / "cache" / "calibrated"
    assert saved.resolve(parse_spec("sparq,calibrated"), model).rank_layers == (8, 4)
    assert not list(model.parent.glob("*.new"))


def test_a_damaged_file(model: Path) -> None:
    saved.save(model, RESULT).write_text('{"schema": 1')
    with pytest.raises(SparqError, match="is damaged"):
        saved.resolve(parse_spec("sparq,calibrated"), model)


# ---- the command ----


def test_large_models_decode_fewer_tokens(model: Path) -> None:
    found = []
    for size in (7e6, 0.5e9, 8e9):
        with model.open("r+b") as f:
            f.truncate(int(size))  # a hole after the tensors, no blocks
        found.append(command.sizes(read_gguf(model).n_bytes))
    assert found == [(8, 64), (8, 8), (4, 16)]


def test_calibrate_and_use(
    run: Run, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Measured, kept, drawn, used; and what an interrupted run measured is not measured again."""
    monkeypatch.setattr(search, "STEPS", (2.0,))
    monkeypatch.setattr(search, "STEPS_P", (1.4,))
    text = tmp_path / "text.txt"
    text.write_text(TEXT[:2000])
    args = ("calibrate", "-m", model, "--text", text, "--ctx", 512, "-t", 1)
    args = (*args, "--contexts", 4, "--tokens", 2)
    first = run(*args)
    assert first.code == 0, first.err
    assert "uniform" in first.out and "top-p" in first.out and str(model) in first.err

    assert run(*args, "--show").out == first.out
    result = saved.find(model, 1 / 8, "q4")
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
    assert run(*args).code == 0 and measured == 1
    assert saved.find(model, 1 / 8, "q4")["candidates"] == result["candidates"]
    with monkeypatch.context() as changed:  # what the meter measures
        changed.setitem(records.VERSIONS, "calibrate", 2)
        assert run(*args).code == 0
    assert measured > 10, "nothing of before is taken"

    use = ("generate", "-m", model, "-p", "x" * 600, "-n", 3, "--json")
    for budget in ("calibrated", "top-p"):
        done = run(*use, "-a", f"sparq,ratio=1/8,min_ctx=0,budget={budget}")
        assert done.code == 0, done.err
        asked = AttentionSpec("sparq", ratio=1 / 8, budget=budget, min_ctx=0)
        want = saved.resolve(asked, model)
        used = parse_spec(json.loads(done.out)["attention"]["spec"])
        assert (used.k_layers, used.rank_layers) == (want.k_layers, want.rank_layers)
    assert run(*use, "--ratio", "1/9", "--budget", "calibrated").code == 1
    explained = run("explain", "-m", model, "--ratio", "1/8", "--budget", "calibrated", "--json")
    assert json.loads(explained.out)["spec"] == str(
        saved.resolve(AttentionSpec("sparq", ratio=1 / 8, budget="calibrated"), model)
    )


def test_errors(run: Run, model: Path, tmp_path: Path) -> None:
    shown = run("calibrate", "-m", model, "--show")
    assert shown.code == 1 and "is not calibrated" in shown.err
    (tmp_path / "short.txt").write_text("too short")
    short = run("calibrate", "-m", model, "--text", tmp_path / "short.txt", "--ctx", 512)
    assert short.code == 2 and "the text has" in short.err and "hint:" in short.err
    assert run("calibrate", "-m", model, "--text", tmp_path / "none.txt").code == 1
    assert run("calibrate", "-m", model, "--ratio", "2").code == 2
    odd = run("calibrate", "-m", tmp_path / "none.gguf", "--contexts", "5")
    assert odd.code == 2 and "--contexts 5 is odd" in odd.err and "4 or 6" in odd.err
    dense = run("calibrate", "-m", tmp_path / "none.gguf", "--ratio", "1")
    assert dense.code == 2 and "ratio 1 is dense attention" in dense.err
