"""Runs: resumed, compared, refused, shown."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from parrot import Parrot

from pyorch import engine, policies
from pyorch.attention import saved
from pyorch.cli.eval import command
from pyorch.errors import SparqError
from pyorch.evals import series, table
from pyorch.evals.decode import Decoder, Example, log_softmax
from pyorch.evals.fidelity import divergence
from pyorch.measure import records as bench_records

pytestmark = pytest.mark.usefixtures("native_lib_dir")

SPARSE = "sparq,ratio=1/4,min_ctx=0,min_k=1"
Run = Callable[..., Any]


def records(file: Path) -> list[dict[str, Any]]:
    return [r for r in map(json.loads, file.read_text().splitlines()) if "i" in r]


def test_what_is_killed_loses_and_repeats_nothing(
    run_eval: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whenever an answer begins, all before it are in the file, which may end anywhere."""
    rows = [
        {"id": f"q{i}", "title": "T", "context": f"Town {i}", "question": "Q?",
         "answers": {"text": ["x"]}}
        for i in range(40)
    ]  # fmt: skip
    (data := tmp_path / "rows.json").write_text(json.dumps(rows))
    args = ["squad", "--confusion", 0, "--data", data, "-n", 40, "--ctx", 256]
    args += ["-a", "off", "-a", SPARSE, "-o", "json"]
    file, answer, n = tmp_path / "out" / "squad.jsonl", Decoder.answer, 0

    def dies(*args: Any, **more: Any) -> bytes:
        nonlocal n
        assert len(records(file)) == n
        if n == 31:
            raise KeyboardInterrupt
        n += 1
        return answer(*args, **more)

    with monkeypatch.context() as m:
        m.setattr(Decoder, "answer", dies)
        assert run_eval(*args).exit_code and n == 31
    before = file.read_bytes()
    with file.open("ab") as f:  # what a line that was being written leaves
        f.write(b'{"schema":1,"key":"dea')
    shown = json.loads(run_eval(*args).stdout)
    after = file.read_bytes()
    assert after.startswith(before)
    found = {(r["method"], r["i"]): r["score"] for r in records(file)}
    assert len(records(file)) == len(found) == 80
    # the same scores as a run that was never cut short would have: those in the file
    for row in shown:
        assert row["scores"] == [found[row["method"], i] for i in range(40)]
    assert run_eval(*args).exit_code == 0 and file.read_bytes() == after


def test_a_longer_run_and_another_method_add_only_what_is_missing(
    run_eval: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "out" / "needle.jsonl"
    code = {"commit": "", "dirty": False}
    monkeypatch.setattr(bench_records, "_commit", lambda: code)

    def run(*args: object) -> list[dict[str, Any]]:
        result = run_eval("needle", "--ctx", 576, *args)
        assert result.exit_code == 0, result.output
        return records(file)

    first = run("-n", 3, "-a", "off")
    assert [r["i"] for r in first] == [0, 1, 2]
    more = run("-n", 5, "-a", "off", "-a", "dense")
    assert more[:3] == first and len(more) == 10
    assert run("-n", 4, "-a", "dense") == more
    # another seed is another setting
    assert len(run("-n", 2, "-a", "off", "--seed", 2)) == 12
    groups = series.by_setting(series.read(file))
    assert [[(str(s.method), len(s.scores)) for s in g] for g in groups] == [
        [("off", 5), ("dense", 5)],
        [("off", 2)],
    ]
    # what changed code adds makes all of its setting that of changed code, for good
    for dirty, more, last in ((1, [2], 0), (1, [3], 1), (0, [2, "--force"], 1)):
        code["dirty"] = bool(dirty)
        run("-a", "off", "--seed", 2, "-n", *more)
        assert [s.env["dirty"] for s in series.read(file)] == [0, 0, last]
    # another machine is another setting, whose times are not mixed with these
    other = bench_records.machine() | {"cpu": "another"}
    monkeypatch.setattr(bench_records, "machine", lambda: other)
    assert len(run("-n", 2, "-a", "off")) == len(run("-n", 2, "-a", "off")) == 17


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens each prefill reads."""
    sizes: list[int] = []
    whole = engine.prefill

    def prefill(s: engine.Session, tokens: list[int], **options: Any) -> None:
        sizes.append(len(tokens))
        whole(s, tokens, **options)

    monkeypatch.setattr(engine, "prefill", prefill)
    return sizes


def test_what_prompts_share_is_read_once_and_changes_no_answer(
    run_eval: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: list[int]
) -> None:
    args = ["repetition", "niah_many", "--ctx", 1792, "-a", "off", "-a", SPARSE]

    def answers() -> dict[tuple[str, ...], tuple[str, float]]:
        files = [tmp_path / "out" / f"{name}.jsonl" for name in ("repetition", "niah_many")]
        recs = [r | {"task": f.stem} for f in files for r in records(f)]
        return {(r["task"], r["id"], r["method"]): (r["said"], r["score"]) for r in recs}

    assert run_eval(*args, "-n", 10, "--questions", 5).exit_code == 0
    shared = answers()
    shown = run_eval(*args, "-n", 10, "--questions", 5).output
    assert " n = 2 texts: no interval below 6." in shown  # repetition's
    assert " n = 1 text: no interval below 6." in shown
    assert len(shared) == 40
    assert len(read) == 20
    assert sum(n > 1000 for n in read) == 3  # two passages' texts, one of needles
    assert sum(read) < 3 * 1792 + 17 * 200
    monkeypatch.setattr(engine, "align", lambda s, tokens: engine.rewind(s, 0) or tokens)
    assert run_eval(*args, "-n", 10, "--questions", 5, "--force").exit_code == 0
    assert answers() == shared


def test_a_document_is_not_read_again(
    run_eval: Run, tiny: Path, book: Path, tmp_path: Path, monkeypatch: Any, read: list[int]
) -> None:
    """Its passages are recited as if it had been read: the same answers, with the same numbers."""
    path = tmp_path / "book.kv"
    with engine.load(tiny, n_ctx=2048, attention=SPARSE) as s:
        text = book.read_text().split("***")[2][:1300]
        engine.read_document(s, path, engine.Reading("book", text, "plain"))
    args = ["repetition", "answers_repetition", "--document", path, "-n", 4, "-a", "dense"]
    args += ["-a", SPARSE, "--questions", 4]
    read.clear()

    def answers() -> list[tuple[Any, ...]]:
        done = run_eval(*args)
        assert done.exit_code == 0, done.output
        files = [tmp_path / "out" / f"{x}.jsonl" for x in ("repetition", "answers_repetition")]
        rows = [(r["id"], r["method"], r["said"], r["score"]) for f in files for r in records(f)]
        for file in files:
            file.unlink()
        return rows

    opened = answers()
    assert len(opened) == 16 and read and max(read) < 100
    monkeypatch.setattr(engine, "open_document", lambda *_: None)
    assert answers() == opened and max(read) > 1300
    done = run_eval("needle", "--document", path)
    assert isinstance(done.exception, SparqError) and done.exception.exit_code == 2
    assert "needle does not ask about a document" in str(done.exception)
    assert "repetition and answers_repetition do" in done.exception.hint


def test_answers_are_compared_with_dense_that_read_the_same(run_eval: Run, tmp_path: Path) -> None:
    """`dense` is the reference itself; `off` decodes what our exact attention has read."""
    args = ["answers_niah_many", "answers_repetition", "--questions", 2, "--ctx", 1792, "-n", 2]
    result = run_eval(*args, "-a", "dense", "-a", "off", "-a", SPARSE, "-o", "json")
    assert result.exit_code == 0, result.output
    for i in (0, 3):
        dense, off, sparse = json.loads(result.stdout)[i : i + 3]
        assert dense["scores"] == [0, 0] and dense["more"] == {"top1_agreement": 1}
        assert 0 < off["score"] < 0.05 * sparse["score"]


def test_methods_see_the_same_and_off_is_dense(run_eval: Run, tmp_path: Path) -> None:
    """Prompts are read in f32: in 8 bits, the default with VNNI, `dense` is farther from `off`."""
    args = ["fidelity", "--ctx", 320, "-n", 3, "-a", "off", "-a", "dense,prompt=f32", "-a", SPARSE]
    result = run_eval(*args, "-o", "json")
    assert result.exit_code == 0, result.output
    off, dense, sparse = json.loads(result.stdout)
    assert off["scores"] == [0, 0, 0] and off["more"] == {"top1_agreement": 1, "mass_read": 1}
    assert off["by_layer"] == {"mass_read": [1, 1]}
    assert 0.2 < min(sparse["by_layer"]["mass_read"]) < 1
    assert 0 < dense["score"] < 1e-4 < sparse["score"]
    assert off["bytes_per_token"] == dense["bytes_per_token"]
    # of 320 positions: the mean of V takes a tenth
    assert sparse["share_of_dense"] == pytest.approx(0.37, abs=0.1)
    by_id = {}
    for r in records(tmp_path / "out" / "fidelity.jsonl"):
        by_id.setdefault(r["id"], set()).add(r["counters"]["steps"])
    # the library counts steps for all but `off`
    assert all(steps == {0, 64} for steps in by_id.values())


def test_stretches_of_a_short_text_are_one(run_eval: Run) -> None:
    """Eight windows of 1,700 out of 11,000 tokens are not eight texts."""
    args = ["repetition", "--ctx", 2048, "-n", 8, "-a", "off"]
    (row,) = json.loads(run_eval(*args, "-o", "json").stdout)
    assert row["n"] == 8 > 5 >= row["texts"] and row["score_low"] is None
    assert "no interval below 6." in run_eval(*args).stdout


def test_llama_cpp_s_other_attention_tells_what_rounding_does(
    run_eval: Run, tmp_path: Path
) -> None:
    """Without flash attention, from the prompt on."""
    args = ["fidelity", "needle", "--ctx", 576, "-n", 2, "-a", "off", "-a", "stock-fa0"]
    shown = run_eval(*args, "-a", "dense")
    assert shown.exit_code == 0, shown.output
    assert "| `llama.cpp -fa 0` |" in shown.stdout
    off, fa0, dense, *_ = json.loads(run_eval(*args, "-a", "dense", "-o", "json").stdout)
    assert fa0["method"] == "stock-fa0" and fa0["model"] == off["model"]
    assert off["score"] == 0 < fa0["score"] < 1e-3 and fa0["score"] != dense["score"]
    assert fa0["tokens_per_s"] > 0 and fa0["bytes_per_token"] == off["bytes_per_token"]


def test_where_a_model_lies_and_its_rope_are_part_of_a_setting(
    run_eval: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without an option a setting is as ever. A method in Python takes no model of its own."""
    placed, load = [], engine.load_model

    def noted(path: Path, **options: Any) -> engine.Model:
        placed.append((options["numa"], options["kv_offload"]))
        return load(path, **options)

    monkeypatch.setattr(engine, "load_model", noted)
    line = ("needle", "-n", 1, "--ctx", 576, "-a", "off", "-a", "h2o,ratio=1/4")
    rope = ("--rope-scaling", "linear", "--rope-scale", 2)
    for options in ((), ("--numa", "isolate", "--no-kv-offload", *rope)):
        done = run_eval(*line, *options)
        assert done.exit_code == 0, done.output
    assert placed == [("", None), ("isolate", False)]
    lines = (tmp_path / "out" / "needle.jsonl").read_text().splitlines()
    usual, other = (r["case"] for r in map(json.loads, lines) if "case" in r)
    scaled = {"scaling": "linear", "freq_scale": 0.5}
    assert other == usual | {"numa": "isolate", "kv_offload": False, "rope": scaled}
    assert not {"numa", "kv_offload", "rope"} & usual.keys()


def test_divergence_against_its_definition() -> None:
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(2, 5, 7)).astype(np.float32) * 4
    kl = 0.0
    for x, y in zip(a.astype(float), b.astype(float), strict=True):
        p, q = np.exp(x) / np.exp(x).sum(), np.exp(y) / np.exp(y).sum()
        kl += sum(pi * np.log(pi / qi) for pi, qi in zip(p, q, strict=True)) / 5
    agree = np.mean([x.argmax() == y.argmax() for x, y in zip(a, b, strict=True)])
    assert divergence(log_softmax(a), b) == pytest.approx((kl, agree))
    assert divergence(log_softmax(a), a) == (0, 1)


@pytest.mark.parametrize(
    ("args", "fault"),
    [
        (["neddle"], "neddle"),
        (["needle", "--ctx", 100], "--ctx"),
        (["needle", "--ctx", 576, "--chat"], "chat template"),
        (["squad", "--data", "absent.json"], "absent.json"),
        (["needle", "--data", "x.json"], "x.json"),
        (["needle", "--ctx", 5000], "5000"),
        (["needle", "--ctx", 576, "-a", "sparc"], "sparc"),
        (["needle", "--ctx", 576, "-a", "stock-fa0,ratio=1/2"], "stock-fa0"),
        (["needle", "--ctx", 576, "-n", 1, "-a", "sparq,ratio=1/8"], "sparq"),  # dense to 1024
        (["repetition", "--ctx", 576], "--ctx 576"),
    ],
)
def test_faults_are_named_and_nothing_is_shown(
    run_eval: Run, args: list[object], fault: str
) -> None:
    result = run_eval(*args)
    assert isinstance(result.exception, SparqError) and result.stdout == ""
    assert fault in result.exception.message and result.exception.hint


def test_a_text_that_does_not_fit_is_said_before_anything_runs(
    run_eval: Run, tmp_path: Path
) -> None:
    rows = [
        {"id": f"a{n}", "title": "T", "context": "c" * 700 * n, "question": "Q?",
         "answers": {"text": ["x"]}}
        for n in (1, 2)
    ]  # fmt: skip
    data = tmp_path / "rows.json"
    data.write_text(json.dumps(rows))
    args = ["squad", "--data", data, "--confusion", 0, "-n", 2]
    result = run_eval(*args, "--ctx", 1024)
    assert "1 of 2 examples do not fit: up to" in result.exception.message
    enough = result.exception.hint.split()[1]
    assert not (tmp_path / "out").exists()
    assert run_eval(*args, "--ctx", enough, "-a", "off").exit_code == 0
    data.write_text(json.dumps({"text": "a page of a few words"}))
    result = run_eval("wikitext", "--data", data)
    assert isinstance(result.exception, SparqError) and "wikitext" in result.exception.message


def test_ratios_go_to_the_methods_that_have_none(run_eval: Run) -> None:
    args = ["needle", "--ctx", 576, "-n", 1, "--ratio", "1/2,1/4", "--exact", "-o", "json"]
    result = run_eval(*args, "-a", "off", "-a", "sparq", "-a", "topk,ratio=1/8")
    exact = "min_ctx=0,min_k=1"
    assert [r["method"] for r in json.loads(result.stdout)] == [
        "off",
        *(f"{m},{exact}" for m in ("sparq,ratio=1/2", "sparq,ratio=1/4", "topk,ratio=1/8")),
    ]


def test_tables_and_packed_results_say_the_same(run_eval: Run, tmp_path: Path) -> None:
    args = ["needle", "fidelity", "--ctx", 576, "-n", 4, "-a", "off", "-a", "dense", "-a", SPARSE]
    shown = run_eval(*args)
    assert "**needle**" in shown.stdout and "`sparq,ratio=1/4`" in shown.stdout
    out, packed = tmp_path / "out", tmp_path / "packed"

    def call(*line: object) -> Any:
        return CliRunner().invoke(command, [str(x) for x in line])

    again = call("table", out)
    assert again.stdout == shown.stdout
    assert call("pack", out, packed).exit_code == 0
    assert call("table", packed).stdout == again.stdout
    long, short = (json.loads(call("table", d, "-o", "json").stdout) for d in (out, packed))
    for a, b in zip(long, short, strict=True):
        assert a["scores"] == pytest.approx(b["scores"], rel=1e-5)  # six digits are kept
        assert a["about"] == b["about"] and a["bytes_per_token"] == b["bytes_per_token"]
    (packed / "needle.jsonl").unlink()
    assert "fidelity.jsonl is there already" in call("pack", out, packed).exception.message
    assert not (packed / "needle.jsonl").exists(), "all or nothing"
    rows = list(csv.DictReader(call("table", out, "-o", "csv").stdout.splitlines()))
    methods = ["off", "dense", SPARSE]
    assert [(r["task"], r["method"]) for r in rows] == [
        (task, m) for task in ("needle", "fidelity") for m in methods
    ]
    assert float(rows[3]["top1_agreement"]) == 1 and rows[0]["top1_agreement"] == ""
    only = call("table", out, "fidelity").stdout
    assert only in again.stdout and "needle" not in only
    (packed / "needle.jsonl").write_text('{"schema":1,"key":"x","setting":"y","i":0}\n')
    assert "a record without its setting" in call("table", packed).exception.message
    assert "no results in" in call("table", tmp_path / "nothing").exception.message


def scored(method: str, scores: list[float], n_steps: int = 10, n_bytes: int = 100) -> Any:
    case = {"task": "needle", "model": {"name": "m"}, "ctx": 576}
    counters = {"steps": n_steps, "bytes_read": n_bytes, "bytes_dense": 1000}
    n = len(scores)
    about, seconds = [{}] * n, np.full(n, 0.5)
    of = policies.parse(method), np.arange(n), n, np.array(scores)
    return series.Series("s", case, {}, 1, *of, seconds, counters, about)


def test_rows_are_paired_with_the_first() -> None:
    off = scored("off", [1, 1, 0, 1, 1, 1, 0, 1], 0)
    row, other = table.rows([off, scored(SPARSE, [1, 0, 0, 1, 1, 0, 0, 1])])
    assert (row.score, row.difference, row.share_of_dense) == (0.75, 0, 1)
    assert row.bytes_per_token == 100  # what the other counted as dense
    assert other.difference == -0.25
    # Student's t of 7 degrees of freedom times the standard error
    half = 2.3646 * 0.4629 / np.sqrt(8)
    assert other.difference_high == pytest.approx(-0.25 + half, abs=1e-4)
    assert other.bytes_per_token == 10 and other.tokens_per_s == 2
    # fewer examples are compared with the same examples
    assert table.rows([off, scored(SPARSE, [1, 0, 0])])[1].difference == pytest.approx(-1 / 3)
    # latent attention on a GPU is llama.cpp's own, which counts steps alone
    off.counters["bytes_dense"] = 0
    assert np.isnan(table.rows([off])[0].share_of_dense)


def test_each_method_of_a_table_has_a_line_of_its_own() -> None:
    """None may take another's place: line and ratio together name a method."""
    exact = "min_ctx=0,min_k=1"
    eighth = ("", ",min_k=16", ",min_k=1", ",min_ctx=0", f",{exact}", f",mean_v=on,{exact}")
    lines = [f"sparq,ratio=1/8{more}" for more in eighth]
    lines += [f"sparq,ratio=1/4,{exact}", "sparq,rank=8,topk=64", "oracle,ratio=1/8", "off"]
    lines += ["topk,ratio=1/8,min_ctx=0,min_k=10"]
    methods = [policies.parse(line) for line in lines]
    for name in (table.label, lambda m: (table.line_of(m), table.ratio_of(m))):
        assert len({name(m) for m in methods}) == len(methods)


def test_a_model_that_ends_is_not_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    parrot = Parrot(b"one. two")
    decoder = Decoder(parrot.install(monkeypatch))
    assert decoder.answer(Example("x", [5], 99)) == b"one. two"
    assert len(parrot.asked) == 9  # the prompt's last token, and all that was said
    parrot = Parrot(b"one. two")
    assert Decoder(parrot.install(monkeypatch)).answer(Example("x", [5], 99), stop=(".",)) == b"one"


def test_another_calibration_is_another_method(
    run_eval: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is taken for it that is not, and their scores are not one mean."""
    line = "sparq,ratio=1/4,min_ctx=0,budget=calibrated"
    result = run_eval("needle", "--ctx", 576, "-n", 1, "-a", "off", "-a", line)
    assert "is not calibrated for ratio 1/4" in result.exception.message
    for rank, n in ((8, 3), (9, 2), (8, 2)):
        layers = {"calibrated": {"k_layers": "40:40", "rank_layers": f"{rank}:{rank}"}}
        monkeypatch.setattr(saved, "find", lambda *_, layers=layers: layers)
        result = run_eval("needle", "--ctx", 576, "-n", n, "-a", "off", "-a", line)
        assert result.exit_code == 0, result.output
    meant = [f"k_layers=40:40,rank_layers={rank}:{rank}" for rank in (8, 9)]
    series.pack(series.read(tmp_path / "out" / "needle.jsonl"), tmp_path / "packed")
    for folder in (tmp_path / "out", tmp_path / "packed"):
        off, *both = series.read(folder / "needle.jsonl")
        assert [(str(s.method), len(s.scores)) for s in both] == [(line, 3), (line, 2)]
        assert all(text in s.meaning for text, s in zip(meant, both, strict=True))
        shown = table.markdown([off, *both])
        assert all(text in shown for text in meant) and "calibrated" not in shown
        assert "calibrated" in table.markdown([off, both[0]])


def test_an_interrupted_run_is_shown_by_the_examples_that_both_have(
    run_eval: Run, tmp_path: Path
) -> None:
    """Equal answers differ by nothing, whichever a run has reached; `pack` keeps no such folder."""
    args = ["needle", "--ctx", 576, "-a", "off", "-a", "dense", "-n", 8]
    assert run_eval(*args).exit_code == 0
    out = tmp_path / "out"
    file = out / "needle.jsonl"
    lines = [json.loads(x) for x in file.read_text().splitlines()]
    for x in lines:
        if "i" in x:
            x["score"] = float(x["i"] in (3, 7))

    def shown(kept: Callable[[dict[str, Any]], bool], *line: object) -> Any:
        text = [json.dumps(x) for x in lines if "i" not in x or kept(x)]
        file.write_text("\n".join(text) + "\n")
        return CliRunner().invoke(command, [str(x) for x in line])

    def some(x: dict[str, Any]) -> bool:
        return x["method"] == "off" or x["i"] in (3, 7)

    off, dense = json.loads(shown(some, "table", out, "-o", "json").stdout)
    assert dense["numbers"] == [3, 7] and off["numbers"] == list(range(8))
    assert dense["difference"] == 0 and (off["missing"], dense["missing"]) == (0, 6)
    lacking = "**Incomplete**, examples missing: `dense` 6 of 8."
    assert lacking in shown(some, "table", out).stdout
    # the last examples are missing, of all methods alike: only the line of what was asked tells
    text = shown(lambda x: x["i"] < 5, "table", out).stdout
    assert "examples missing: `off` 3 of 8, `dense` 3 of 8." in text
    packed = shown(lambda x: x["i"] < 5, "pack", out, tmp_path / "packed")
    assert "needle, off" in packed.exception.message and not (tmp_path / "packed").exists()
    # methods without a common example
    text = shown(lambda x: (x["method"] == "off") == (x["i"] > 3), "table", out, "-o", "json")
    assert json.loads(text.stdout)[1]["difference"] is None
    # the run goes on with what is missing, and then it is whole
    assert run_eval(*args).exit_code == 0
    assert "Incomplete" not in CliRunner().invoke(command, ["table", str(out)]).stdout


def test_results_of_an_earlier_version_are_shown_as_such(
    run_eval: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = ["needle", "--ctx", 576, "-n", 1, "-a", "off", "-a", "dense"]
    old = " Measured by an earlier version of the evaluation."
    assert old not in run_eval(*args).stdout
    monkeypatch.setitem(bench_records.VERSIONS, "eval needle", 2)
    assert old in CliRunner().invoke(command, ["table", str(tmp_path / "out")]).stdout
    assert old not in run_eval(*args).stdout, "it is measured again"
