"""`sparq-cpp bench`: llama-bench's lists, rows that did not run are refused, all five formats."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from bench_options import options
from click.testing import CliRunner

from pyorch import paths
from pyorch.attention import saved
from pyorch.attention.spec import AttentionSpec, parse_spec
from pyorch.cli import clean
from pyorch.cli.bench import KNOWN, attention_time, command, measurement, speed
from pyorch.cli.bench.speed import SpeedCase
from pyorch.cli.types import Numbers
from pyorch.errors import SparqError
from pyorch.measure import records, room
from pyorch.measure.turns import OFF, Side
from pyorch.models import synth
from pyorch.models.geometry import Geometry
from pyorch.models.layers import Windows

pytestmark = pytest.mark.usefixtures("native_lib_dir")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("512", [512]),
        ("0,16", [0, 16]),
        ("1-4", [1, 2, 3, 4]),
        ("1024-4096+1024", [1024, 2048, 3072, 4096]),
        ("4096-131072*2", [4096, 8192, 16384, 32768, 65536, 131072]),
        ("1-10*3,7", [1, 3, 9, 7]),
    ],
)
def test_numbers_are_those_of_llama_bench(text: str, expected: list[int]) -> None:
    assert Numbers().convert(text, None, None) == expected


@pytest.mark.parametrize(
    "text", ["", "x", "1-", "1-2*1", "0-4*2", "1-4+0", "-3", "1.5", "1,,2", "0-10000000000", "5-1"]
)
def test_numbers_refuse_what_has_no_end_or_meaning(text: str) -> None:
    with pytest.raises(SparqError) as e:
        Numbers().convert(text, None, None)
    assert e.value.exit_code == 2


CPU = room.Place()
CASE = SpeedCase(
    model_filename="m.gguf",
    model_type="m",
    model_size=10,
    model_n_params=10,
    n_threads=1,
    type_k="f16",
    type_v="f16",
    numa="",
    n_prompt=0,
    n_gen=4,
    n_depth=2048,
    library="sparq",
    flash_attn=True,
    spec=parse_spec("sparq,ratio=1/8"),
    repetitions=3,
)


def planned(model: Path, *args: str, **more: Any) -> list[list[SpeedCase]]:
    """What `sparq-cpp bench` would measure of a model."""
    return speed.groups(options(speed.MEASUREMENT, "-m", str(model), "-t", "1", *args, **more))


def test_where_layers_lie_is_recorded_and_arrives_where_the_model_is_loaded(
    bench: Callable[..., Any],
) -> None:
    """The tests' library has no GPU, and says so."""
    assert "n_gpu_layers" not in records.case_of(CASE)
    assert records.case_of(replace(CASE, n_gpu_layers=0))["n_gpu_layers"] == 0
    for args, message in (
        (["-ngl", "7"], "7 layers cannot go to a GPU"),
        (["-ts", "3,1"], "--tensor-split shares layers among machines"),
    ):
        refused = bench("-d", "2048", *args).exception
        assert isinstance(refused, SparqError) and message in refused.message


def test_another_calibration_is_another_case(model: Path, tmp_path: Path) -> None:
    """And no other case has a new key."""
    path = tmp_path / "m.gguf"
    path.write_bytes(model.read_bytes())
    result = {"ratio": 0.125, "shadow": "q4", "time": "1", "calibrated": {"k_layers": "64:128"}}
    args = ["-d", "2048", "-a", "sparq,ratio=1/8,calibrated", "-a", "sparq,ratio=1/8"]
    with pytest.raises(SparqError, match="not calibrated for ratio 1/8"):
        planned(path, *args)
    cases = []
    for k_layers in ("64:128", "64:128", "128:64"):
        result["calibrated"] = {"k_layers": k_layers}
        saved.save(path, result)
        (group,) = planned(path, *args)
        cases.append([records.case_of(c) for c in group])
    assert cases[0] == cases[1] != cases[2]
    *others, ours, plain = zip(*cases, strict=True)
    assert [c["spec"] for c in ours] == ["sparq,ratio=1/8,budget=calibrated"] * 3
    assert all(c == same[0] and "calibration" not in c for same in (*others, plain) for c in same)


@pytest.mark.parametrize(
    "of", [speed.MEASUREMENT, attention_time.MEASUREMENT], ids=lambda of: of.name
)
def test_committed_cases_are_read_and_written_alike(of: measurement.Measurement) -> None:
    """Their settings of attention are objects in between. Fields that came later may be added. And
    they have the keys by which they are found again."""
    files = sorted((paths.REPOSITORY / "bench" / "results").glob(f"*/{of.file}"))
    recs = [rec for file in files for rec in records.load_all(file)]
    assert recs
    for rec in recs:
        case = records.read_case(of.case, rec)
        written = records.case_of(case)
        assert isinstance(case.spec, AttentionSpec) and rec["case"].items() <= written.items()
        stamp, version = rec["env"]["stamps"].get(case.library, case.library), rec.get("version", 0)
        assert records.key(rec["bench"], written, stamp, version) == rec["key"]


def test_a_row_of_ours_is_refused_unless_it_ran() -> None:
    prompt = replace(CASE, n_gen=0, n_prompt=speed.N_BATCH + 64)
    dense = replace(CASE, spec=parse_spec("dense"))
    speed.check_calls(CASE, {"calls_sparse": 4 * 3 * 2}, 2)
    speed.check_calls(dense, {"calls_dense_op": 4 * 3 * 2}, 2)
    speed.check_calls(prompt, {"groups_sealed": 4 * 3 * 2}, 2)
    speed.check_calls(replace(CASE, library="stock", spec=OFF), {}, 0)
    for case, counters in (
        (CASE, {}),
        (CASE, {"calls_sparse": 4 * 3 * 2 - 1}),
        (CASE, {"calls_dense_op": 4 * 3 * 2}),
        (dense, {"calls_sparse": 4 * 3 * 2}),
        (prompt, {"groups_sealed": 4 * 3 * 2 - 1}),
    ):
        with pytest.raises(SparqError, match="not reported"):
            speed.check_calls(case, counters, 2)


def test_bytes_of_layers_with_a_window_are_predicted() -> None:
    """Of four layers two see 512 positions at most; ours count the other two by themselves."""
    geo = Geometry(
        arch="gemma2", name="", n_layer=4, n_embd=0, n_head=(4,) * 4, n_head_kv=(2,) * 4,
        head_dim_k=32, head_dim_v=32, n_ctx_train=0, is_mla=False, n_params=0, weight_bytes=0,
        weight_bytes_per_token=0,
    )  # fmt: skip
    row = 2 * (32 + 32) * 2  # of a position: KV heads, K and V, f16
    n_pos = CASE.n_depth + 2.5  # the mean over four tokens
    stock = replace(CASE, library="stock", spec=OFF)
    assert speed.kv_bytes(stock, geo, {}) == 4 * n_pos * row
    windows = replace(geo, windows=Windows((512, 0, 512, 0)))
    read = 2 * n_pos * row + 2 * 512 * row
    assert speed.kv_bytes(stock, windows, {}) == read
    assert speed.kv_bytes(CASE, windows, {"steps": 4, "bytes_read": 4000}) == 1000 + 2 * 512 * row
    assert speed.kv_bytes(replace(CASE, n_prompt=512, n_gen=0), windows, {}) == 0


def test_rows_compare_with_the_faster_stock() -> None:
    stock = replace(CASE, library="stock", spec=OFF)
    recs = [
        record(replace(stock, flash_attn=False), ms=20, kv=60),
        record(stock, ms=30, kv=60),
        record(CASE, ms=5, kv=10),
    ]
    first, second, ours = speed.rows(recs)
    assert (first["speedup"], second["speedup"], ours["speedup"]) == (1, 20 / 30, 4)
    assert ours["roofline_speedup"] == (40 + 60) / (40 + 10)
    assert ours["roofline_share"] == pytest.approx((40 + 10) * 1e6 / 20e9 / 5e-3)
    assert ours["avg_ns"] == 4 * 5e6 and ours["avg_ts"] == pytest.approx(200)
    assert ours["test"] == "tg4 @ d2048"
    assert ours["n_batch"] == ours["n_ubatch"] == 8, "memory is set aside for few tokens at once"
    (prompt,) = speed.rows([record(replace(CASE, n_prompt=64, n_gen=0), ms=5, kv=0)])
    assert prompt["n_batch"] == 512
    (line,) = (x for x in speed.markdown(recs).splitlines() if "sparq" in x)
    assert line.endswith("| 4.00x | 2.00x | 50 % |")  # no columns of the paper's


def record(case: SpeedCase, ms: float, kv: int) -> records.Record:
    return records.record(
        "speed",
        records.case_of(case),
        "s",
        samples_ns=[int(ms * 1e6)] * 12,
        counters={},
        bytes_weights=40 * 10**6,
        bytes_kv=kv * 10**6,
        layers_sparse=2,
        n_layer=2,
        bandwidth_bytes_per_s=[20e9],
        env={
            "machine": {"cpu": "C", "cores": 2},
            "commit": "c",
            "dirty": False,
            "pin": "p",
            "isa": ["avx2"],
            "stamps": {"stock": "a", "sparq": "b"},
        },
    )


@pytest.fixture
def bench(model: Path, tmp_path: Path, stock: None) -> Callable[..., Any]:
    """Runs the command on the small model with few, short tests."""

    def run(*args: str) -> Any:
        few = ["-m", str(model), "-r", "2", "-t", "1", "--out", str(tmp_path)]
        few += [] if "-n" in args else ["-n", "3"]
        return CliRunner().invoke(command, [*few, *args], standalone_mode=False)

    return run


def test_bench_writes_every_format_from_one_measurement(
    bench: Callable[..., Any], tmp_path: Path
) -> None:
    table = bench("-d", "2048").stdout
    assert table.count("| tg3 @ d2048 |") == 3 and "`sparq,ratio=1/8`" in table
    before = (tmp_path / "speed.jsonl").read_text()

    lines = json.loads(bench("-d", "2048", "-o", "json").stdout)
    for form, n in (("csv", 4), ("jsonl", 3)):
        assert len(bench("-d", "2048", "-o", form).stdout.splitlines()) == n
    assert (tmp_path / "speed.jsonl").read_text() == before  # nothing was measured again
    assert [r["library"] for r in lines] == ["stock", "stock", "sparq"]
    assert [r["flash_attn"] for r in lines] == [False, True, True]
    assert lines[2]["calls_sparse"] == 2 * 3 * 2 and len(lines[2]["samples_ns"]) == 6
    assert lines[0]["roofline_speedup"] == 1 < lines[2]["roofline_speedup"]
    assert lines[2]["type_k"] == "f16" and lines[2]["sparse_attn"] == "sparq,ratio=1/8"


def test_bench_reads_a_text_before(bench: Callable[..., Any], tmp_path: Path) -> None:
    book = tmp_path / "book.txt"
    book.write_text("a word and another, " * 600)
    line = ("-d", "1280", "--text", str(book), "--no-repack", "-nkvo", "-p", "640", "-o", "jsonl")
    result = bench(*line)
    lines = [json.loads(x) for x in result.stdout.splitlines()]
    assert not any(r["kv_offload"] for r in lines)
    assert {(r["text"], r["repack"]) for r in lines} == {
        (hashlib.sha256(book.read_bytes().strip()).hexdigest()[:16], False)
    }
    assert [r["test"] for r in lines] == ["pp640 @ d1280"] * 3 + ["tg3 @ d1280"] * 3
    assert lines[2]["counters"]["groups_sealed"] >= 2 * 2 * 2
    assert lines[2]["counters"]["calls_prefill"] == 2 * 640 * 2
    assert lines[5]["counters"]["calls_sparse"] == 2 * 3 * 2
    for text, message in (("a word", "tokens, but"), ("\n", "no text in it")):
        book.write_text(text)
        refused = bench("-d", "1280", "--text", str(book)).exception
        assert isinstance(refused, SparqError) and message in refused.message


def test_bench_begins_with_an_empty_cache(bench: Callable[..., Any]) -> None:
    lines = bench("-d", "0", "-n", "0", "-p", "640", "-o", "jsonl").stdout.splitlines()
    assert [json.loads(x)["test"] for x in lines] == ["pp640"] * 3
    # with its warm-up, in a context of one block of 256
    lines = bench("-d", "254", "-n", "1", "-a", "dense", "-o", "jsonl").stdout.splitlines()
    assert [json.loads(x)["test"] for x in lines] == ["tg1 @ d254"] * 3
    spec = "sparq,ratio=1/8,min_ctx=0"
    lines = bench("-d", "0", "-n", "3", "-a", spec, "-o", "jsonl").stdout.splitlines()
    last = json.loads(lines[-1])
    # two repetitions of three tokens, of which the first counts as the prompt
    assert last["counters"]["calls_sparse"] == 2 * (3 - 1) * last["n_layer"]


def test_a_rival_takes_turns(bench: Callable[..., Any], tmp_path: Path) -> None:
    rival = tmp_path / "other-1"
    rival.write_text(f"#!/bin/sh\nexec {sys.executable} -m pyorch.measure.process --stock\n")
    rival.chmod(0o755)
    line = ("-d", "2048", "--rival", str(rival), "-o", "jsonl")
    lines = [json.loads(x) for x in bench(*line).stdout.splitlines()]
    assert [(r["library"], r["flash_attn"]) for r in lines] == [
        ("stock", 0), ("stock", 1), ("other-1", 0), ("other-1", 1), ("sparq", 1),
    ]  # fmt: skip
    assert lines[2]["stamp"] == "other-1" and len(lines[2]["samples_ns"]) == 6
    best = min(r["median_ns"] for r in lines[:2])
    assert lines[4]["speedup"] == pytest.approx(best / lines[4]["median_ns"], rel=1e-4)


def test_a_sparse_row_that_ran_dense_is_refused(
    bench: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is measured, and if nobody had known, afterwards."""
    for depth in ("0,2048", "1023"):  # a warm-up token is taken back: the first sees 1,024
        refused = bench("-d", depth).exception
        assert isinstance(refused, SparqError) and refused.exit_code == 2
        assert "stays dense at" in refused.message and not [*tmp_path.iterdir()]
    monkeypatch.setattr(speed, "check", lambda group: None)
    refused = bench("-d", "512").exception
    assert isinstance(refused, SparqError) and "calls_sparse is 0" in refused.message
    assert not records.load(tmp_path / "speed.jsonl")


def test_a_failing_group_takes_no_other_along(
    bench: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is named, the exit code tells, and the next run measures it."""
    monkeypatch.setattr(speed, "check", lambda group: None)
    done = bench("-d", "512,2048")
    assert isinstance(done.exception, SparqError) and done.exception.hint
    assert "n_depth 512: not measured" in done.stderr and "tg3 @ d2048" in done.stdout
    file = tmp_path / "speed.jsonl"
    assert {r["case"]["n_depth"] for r in records.load_all(file)} == {2048}
    assert bench("-d", "512,2048", "-a", "dense").exception is None
    assert {r["case"]["n_depth"] for r in records.load_all(file)} == {512, 2048}


@pytest.mark.parametrize(
    ("args", "fault"),
    [
        (["-n", "0", "-d", "64"], "-n 0"),
        (["-fa", "0", "-ctv", "q8_0", "-d", "64"], "q8_0"),
        (["--attn-only", "-d", "2048"], "--model"),
        (["--like", "llama3-8b"], "--like"),
        (["--layers", "100000000"], "100000000"),
        # llama-bench's
        *(([f"-{word}", "512"], f"-{word}") for word in ("pg", "ub", "b", "mmp", "-no-warmup")),
    ],
)
def test_bench_refuses(bench: Callable[..., Any], args: list[str], fault: str) -> None:
    error = bench(*args).exception
    assert error.exit_code == 2 and fault in str(error)
    assert set(KNOWN.split()) <= {
        name for p in command.params for name in (*p.opts, *p.secondary_opts)
    }


def test_what_does_not_fit_is_refused_before_it_begins(
    bench: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPARQ_MEMORY_LIMIT", str(1 << 30))
    refused = bench("-d", "2048").exception
    assert isinstance(refused, SparqError) and "3 processes" in refused.message


def test_synthetic_weights_are_written_only_after_asking(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SPARQ_CACHE", str(tmp_path))
    refused = CliRunner().invoke(command, ["--layers", "2"]).exception
    assert isinstance(refused, SparqError) and "--yes" in refused.hint
    assert "llama2-7b-2-q8_0-v" in refused.message and "(427 MiB)" in refused.message
    file = room.Synthetic("llama2-7b", 2, "q8_0").path
    file.parent.mkdir(parents=True)
    file.write_bytes(b"x")
    assert synth.written() == [file]
    removed = CliRunner().invoke(clean.command, ["bench", "--yes"])
    assert removed.exit_code == 0 and not file.exists()


def test_layers_that_fit_do_not_depend_on_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same machine plans the same cases; another depth has fewer layers."""

    def layers(n_depth: int, quant: str = "q8_0", place: room.Place = CPU, n_stock: int = 2) -> int:
        stock = [Side(library="stock", flash_attn=bool(fa), spec=OFF) for fa in (1, 0)]
        who = [*stock[:n_stock], CASE]
        cache = speed.room_for(n_depth, 16), "f16", "f16"
        return place.fitting("llama2-7b", quant, who, cache)

    monkeypatch.setattr(records, "machine", lambda: {"memory_gib": 24.0})
    monkeypatch.setattr(room, "of_nodes", lambda *kinds: None)
    monkeypatch.setattr(room, "rearranged_types", lambda: {"q4_0", "q4_k"})
    for depth, free in ((4096, 1 << 30), (4096, 1 << 40), (131072, 1 << 30)):
        monkeypatch.setenv("SPARQ_MEMORY_LIMIT", str(free))
        assert layers(depth) == (32 if depth == 4096 else 1)
    # each process has its own copy of weights that llama.cpp rearranges
    for quant, repack, expected in (("q4_0", True, 16), ("q4_0", False, 32), ("q4_k_m", True, 16)):
        assert layers(4096, quant, room.Place(repack=repack)) == expected
    # of a GPU: each process has the weights, too
    for gpu_gib, n_gpu_layers, expected in ((79.6, None, 16), (139.8, None, 32), (139.8, 0, 4)):
        machine = {"memory_gib": 24.0, "gpu": "G", "gpu_gib": gpu_gib}
        monkeypatch.setattr(records, "machine", lambda machine=machine: machine)
        assert layers(46080, "f16", room.Place(n_gpu_layers), 1) == expected
    monkeypatch.setattr(records, "machine", lambda: {"memory_gib": 24.0})
    monkeypatch.setattr(room, "of_nodes", lambda *kinds: 12 << 30)  # bound to a part of the memory
    assert layers(4096) == 8
