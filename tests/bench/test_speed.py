"""`sparq-cpp bench`: llama-bench's lists, rows that did not run are refused, all five formats."""

from __future__ import annotations

import csv
import hashlib
import io
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from pyorch import engine, paths
from pyorch.attention import saved
from pyorch.attention.spec import AttentionSpec, parse_spec
from pyorch.bench import attention, bandwidth, output, records, speed
from pyorch.bench import plan as planning
from pyorch.bench.plan import Case, SpeedPlan, Synthetic
from pyorch.bench.worker import Subject
from pyorch.cli import cli, models
from pyorch.cli.bench import command
from pyorch.cli.types import Numbers
from pyorch.errors import SparqError
from pyorch.models import cards, synth
from pyorch.models.geometry import Geometry
from pyorch.models.gguf_file import read_gguf
from pyorch.models.layers import Windows
from pyorch.native import probe

pytestmark = pytest.mark.usefixtures("native_lib_dir")


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("512", [512]),
        ("0,16", [0, 16]),
        ("1-4", [1, 2, 3, 4]),
        ("1024-4096+1024", [1024, 2048, 3072, 4096]),
        ("4096-131072*2", [4096, 8192, 16384, 32768, 65536, 131072]),
        ("1-10*3,7", [1, 3, 9, 7]),
    ],
)
def test_numbers_are_those_of_llama_bench(text: str, wanted: list[int]) -> None:
    assert Numbers().convert(text, None, None) == wanted


@pytest.mark.parametrize(
    "text", ["", "x", "1-", "1-2*1", "0-4*2", "1-4+0", "-3", "1.5", "1,,2", "0-10000000000", "5-1"]
)
def test_numbers_refuse_what_has_no_end_or_meaning(text: str) -> None:
    with pytest.raises(SparqError) as e:
        Numbers().convert(text, None, None)
    assert e.value.exit_code == 2


Planned = Callable[..., tuple[SpeedPlan, str]]
OFF = AttentionSpec("off")
CASE = Case(
    model_filename="m.gguf",
    model_type="m",
    model_size=10,
    model_n_params=10,
    n_threads=1,
    type_k="f16",
    type_v="f16",
    n_prompt=0,
    n_gen=4,
    n_depth=2048,
    library="sparq",
    flash_attn=True,
    spec=parse_spec("sparq,ratio=1/8"),
    repetitions=3,
)


def test_layers_on_a_gpu_are_recorded_where_they_are_given(
    model: Path, stock: None, tmp_path: Path
) -> None:
    """And arrive where the model is loaded: the tests' library has no GPU, and says so."""
    assert "n_gpu_layers" not in records.case_of(CASE)
    assert records.case_of(replace(CASE, n_gpu_layers=0))["n_gpu_layers"] == 0
    assert "rope" not in records.case_of(CASE)
    plan = SpeedPlan(models=[model], n_depth=[2048], n_gpu_layers=7)
    with pytest.raises(SparqError, match="7 layers cannot go to a GPU"):
        speed.run(plan, tmp_path / "x.jsonl", lambda done, total: None)
    plan = SpeedPlan(models=[model], n_depth=[2048], tensor_split=[3, 1])
    with pytest.raises(SparqError, match="--tensor-split shares layers among machines"):
        speed.run(plan, tmp_path / "x.jsonl", lambda done, total: None)


def test_another_calibration_is_another_case(model: Path, tmp_path: Path) -> None:
    """And no other case has a new key, or takes no turns with it."""
    path = tmp_path / "m.gguf"
    path.write_bytes(model.read_bytes())
    result = {"ratio": 0.125, "shadow": "q4", "time": "1", "calibrated": {"k_layers": "64:128"}}
    specs = [parse_spec(s) for s in ("sparq,ratio=1/8,calibrated", "sparq,ratio=1/8")]
    plan = SpeedPlan(models=[path], specs=specs)
    with pytest.raises(SparqError, match="not calibrated for ratio 1/8"):
        list(plan.groups())
    found = []
    for k_layers in ("64:128", "64:128", "128:64"):
        result["calibrated"] = {"k_layers": k_layers}
        saved.save(path, result)
        ((_, group),) = plan.groups()
        found.append([records.case_of(c) for c in group])
    assert found[0] == found[1] != found[2]
    *others, ours, plain = zip(*found, strict=True)
    assert [c["spec"] for c in ours] == ["sparq,ratio=1/8,budget=calibrated"] * 3
    assert all(c == same[0] and "calibration" not in c for same in (*others, plain) for c in same)
    recs = [dict(record(c, ms=5, kv=10), case=records.case_of(c), run="new") for c in group]
    assert [r["speedup"] for r in output.rows(recs)] == [1] * 4
    older = [dict(rec, case=case, run="old") for rec, case in zip(recs, found[0], strict=True)]
    assert records.latest(older + recs) == recs


def test_keys_of_recorded_cases_stay() -> None:
    """A record that is there already is found again, unless its measurement has a new version."""
    assert records.version_of(speed.BENCH) == 1, "records are measured again: new keys, below"
    assert records.key(speed.BENCH, records.case_of(CASE), "s") == "f5a0d1857d4e042a"
    heads = attention.Case(
        "llama2-7b", 2, 32, 32, 128, 4096, 1, "sparq", True, AttentionSpec("dense"), 10, 1
    )
    assert records.key(attention.BENCH, records.case_of(heads), "s") == "beb95f911c1d5665"
    assert records.case_of(replace(heads, numa="isolate"))["numa"] == "isolate"


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("speed", Case),
        ("growth", Case),
        ("attention", attention.Case),
    ],
)
def test_committed_cases_are_read_and_written_alike(name: str, kind: type[Case]) -> None:
    """Their settings of attention are objects in between. Fields that came later may be added. And
    they have the keys by which they are found again."""
    files = sorted((paths.REPOSITORY / "bench" / "results").glob(f"*/{name}.jsonl"))
    recs = [rec for file in files for rec in records.load_all(file)]
    assert recs
    for rec in recs:
        case = records.read_case(kind, rec)
        written = records.case_of(case)
        assert isinstance(case.spec, AttentionSpec) and rec["case"].items() <= written.items()
        stamp, version = rec["env"]["stamps"][case.library], rec.get("version", 0)
        assert records.key(rec["bench"], written, stamp, version) == rec["key"]


def test_a_row_of_ours_is_refused_unless_it_ran() -> None:
    prompt = replace(CASE, n_gen=0, n_prompt=speed.N_BATCH + 64)
    dense = replace(CASE, spec=parse_spec("dense"))
    speed.refuse_idle(CASE, {"calls_sparse": 4 * 3 * 2}, 2)
    speed.refuse_idle(dense, {"calls_dense_op": 4 * 3 * 2}, 2)
    speed.refuse_idle(prompt, {"groups_sealed": 3 * 2}, 2)
    speed.refuse_idle(replace(CASE, library="stock", spec=OFF), {}, 0)
    for case, counters in (
        (CASE, {}),
        (CASE, {"calls_sparse": 4 * 3 * 2 - 1}),
        (CASE, {"calls_dense_op": 4 * 3 * 2}),
        (dense, {"calls_sparse": 4 * 3 * 2}),
        (prompt, {"groups_sealed": 3 * 2 - 1}),
    ):
        with pytest.raises(SparqError, match="not reported"):
            speed.refuse_idle(case, counters, 2)


def test_a_prompt_of_ours_says_whose_attention_it_is() -> None:
    """No call of it is sparse, whatever the method; a row of tokens is by its settings alone."""
    prompt = replace(CASE, n_gen=0, n_prompt=512)
    cases = [
        prompt,
        replace(prompt, spec=parse_spec("topk,ratio=1/8")),
        replace(prompt, spec=parse_spec("dense")),
        replace(prompt, library="stock", spec=OFF),
        CASE,
    ]
    found = [record(c, ms=5, kv=0) for c in cases]
    found[1]["counters"]["calls_prefill"] = 512
    assert [output.label(r) for r in output.rows(found)] == [
        "sparq,ratio=1/8, llama.cpp's prefill",
        "topk,ratio=1/8, our prefill",
        "dense, llama.cpp's prefill",
        "stock -fa 1",
        "sparq,ratio=1/8",
    ]


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
    first, second, ours = output.rows(recs)
    assert (first["speedup"], second["speedup"], ours["speedup"]) == (1, 20 / 30, 4)
    assert ours["roofline_speedup"] == (40 + 60) / (40 + 10)
    assert ours["roofline_share"] == pytest.approx((40 + 10) * 1e6 / 20e9 / 5e-3)
    assert ours["avg_ns"] == 4 * 5e6 and ours["avg_ts"] == pytest.approx(200)
    assert output.test(ours) == "tg4 @ d2048"
    assert ours["n_batch"] == ours["n_ubatch"] == 8, "memory is set aside for few tokens at once"
    (prompt,) = output.rows([record(replace(CASE, n_prompt=64, n_gen=0), ms=5, kv=0)])
    assert prompt["n_batch"] == 512
    (line,) = (x for x in output.summary(recs).splitlines() if "sparq" in x)
    assert "| 20.0 | 5.0 | 4.00x | 2.00x | 50 % |" in line  # no columns of the paper's


def test_a_table_tells_its_rows_apart() -> None:
    """What all rows share stands below it, or nowhere."""
    first = record(CASE, ms=5, kv=10)
    second = record(replace(CASE, text="0123", repack=False, numa="distribute"), ms=5, kv=10)
    second["env"] |= {"commit": "d", "dirty": True}
    for table in (output.markdown, output.summary):
        text = table([first, second])
        assert "| positions before | weights | numa |" in text and "GPU" not in text
        read = "a text (ours), random K and V (llama.cpp)"
        assert "random K and V | rearranged | none |" in text
        assert f"{read} | as in the file | distribute |" in text
        assert text.endswith(f"random K and V or {read}; p, c, d and changes.")
        alone = table([second, second])
        assert "numa" not in alone and alone.endswith(f"before: {read}; p, d and changes.")


def test_a_known_file_has_its_cards_title(
    bench: Callable[..., Any], model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = hashlib.sha256(model.read_bytes()).hexdigest()
    monkeypatch.setattr(cards.Card, "known_files", (cards.File("x", model.stat().st_size, digest),))
    first = cards.load(cards.names()[0]).title
    assert f"| {first} |" in bench("-d", "0", "-a", "off").stdout


def record(case: Case, ms: float, kv: int) -> records.Record:
    return records.record(
        speed.BENCH,
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
            "stamps": {"stock": "a", "sparq": "b"},
        },
    )


@pytest.fixture
def bench(model: Path, tmp_path: Path, stock: None) -> Callable[..., Any]:
    """Runs the command on the small model with few, short tests."""

    def run(*args: str) -> Any:
        few = ["-m", str(model), "-r", "2", "-t", "1", "--out", str(tmp_path)]
        few += [] if "-n" in args else ["-n", "3"]
        return CliRunner().invoke(command, [*few, *args])

    return run


def test_bench_writes_every_format_from_one_measurement(
    bench: Callable[..., Any], tmp_path: Path
) -> None:
    table = bench("-d", "2048").stdout
    assert table.count("| tg3 @ d2048 |") == 3 and "`sparq,ratio=1/8`" in table
    before = (tmp_path / "speed.jsonl").read_text()

    rows = list(csv.DictReader(io.StringIO(bench("-d", "2048", "-o", "csv").stdout)))
    as_json = json.loads(bench("-d", "2048", "-o", "json").stdout)
    lines = [json.loads(x) for x in bench("-d", "2048", "-o", "jsonl").stdout.splitlines()]
    assert (tmp_path / "speed.jsonl").read_text() == before  # nothing was measured again
    assert as_json == lines and len(rows) == len(lines) == 3
    assert [r["library"] for r in rows] == ["stock", "stock", "sparq"]
    assert [r["flash_attn"] for r in rows] == ["0", "1", "1"]
    assert lines[2]["calls_sparse"] == 2 * 3 * 2 and len(lines[2]["samples_ns"]) == 6
    assert lines[0]["roofline_speedup"] == 1 < lines[2]["roofline_speedup"]
    assert lines[2]["type_k"] == "f16" and lines[2]["sparse_attn"] == "sparq,ratio=1/8"
    assert "| best stock, ms |" in bench("-d", "2048", "-o", "summary").stdout


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
    assert [output.test(r) for r in lines] == ["pp640 @ d1280"] * 3 + ["tg3 @ d1280"] * 3
    assert lines[2]["counters"]["groups_sealed"] >= 2 * 2 * 2
    assert lines[2]["counters"]["calls_prefill"] == 2 * 640 * 2
    assert lines[5]["counters"]["calls_sparse"] == 2 * 3 * 2
    book.write_text("a word")
    short = bench("-d", "1280", "--text", str(book))
    assert isinstance(short.exception, SparqError) and "tokens, but" in short.exception.message


def test_ours_reads_a_text_and_stock_needs_none(model: Path) -> None:
    text = "a word and another, " * 20
    subject = Subject()
    subject.open(str(model), n_ctx=512, n_threads=1)
    session = subject._session
    tokens = engine.tokenize(session.model, text)
    for stock in (True, False):  # the flag alone: one process cannot hold both libraries
        subject.stock = stock
        subject.fill(n_pos=100, seed=1)
        subject.read(text, n_pos=100, n=9)
        assert (session.tokens == tokens[:100]) != stock
        assert subject._tokens(9, seed=1) == tokens[100:109]
    with pytest.raises(SparqError, match=f"has {len(tokens)} tokens, but {len(tokens) + 1} are"):
        subject.read(text, n_pos=100, n=len(tokens) - 99)
    subject.close()


def test_a_text_needs_a_model_that_reads_it_here(model: Path) -> None:
    for line in (["--like", "llama2-7b"], ["-m", str(model), "--rpc", "127.0.0.1:1"]):
        refused = CliRunner().invoke(command, ["--text", "book.txt", *line]).exception
        assert isinstance(refused, SparqError) and refused.message.startswith("--text needs")


def test_an_empty_text_is_not_random_numbers(bench: Callable[..., Any], tmp_path: Path) -> None:
    (empty := tmp_path / "book.txt").write_text("\n")
    refused = bench("-d", "1280", "--text", str(empty)).exception
    assert isinstance(refused, SparqError) and "there is no text in it" in refused.message


def test_bench_begins_with_an_empty_cache(bench: Callable[..., Any]) -> None:
    lines = bench("-d", "0", "-n", "0", "-p", "640", "-o", "jsonl").stdout.splitlines()
    assert [output.test(json.loads(x)) for x in lines] == ["pp640"] * 3
    spec = "sparq,ratio=1/8,min_ctx=0"
    lines = bench("-d", "0", "-n", "3", "-a", spec, "-o", "jsonl").stdout.splitlines()
    last = json.loads(lines[-1])
    # two repetitions of three tokens, of which the first counts as the prompt
    assert last["counters"]["calls_sparse"] == 2 * (3 - 1) * last["n_layer"]


def test_the_warm_up_fits_where_the_test_fits(bench: Callable[..., Any]) -> None:
    """One token after 254 positions: the context is one block of 256."""
    lines = bench("-d", "254", "-n", "1", "-a", "dense", "-o", "jsonl").stdout.splitlines()
    assert [output.test(json.loads(x)) for x in lines] == ["tg1 @ d254"] * 3


def test_bench_refuses_a_sparse_row_that_ran_dense(
    bench: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(records, "resume", lambda *_, **__: pytest.fail("measured"))
        result = bench("-d", "0,2048")
    assert isinstance(result.exception, SparqError) and result.exception.exit_code == 2
    assert "stays dense at 2 positions: not above min_ctx" in result.exception.message
    result = bench("-d", "1023")  # the warm-up token is taken back: 1,024 is what the first sees
    assert "stays dense at 1024 positions: not above min_ctx" in result.exception.message
    monkeypatch.setattr(speed, "check", lambda planned: None)  # as if nobody had known
    result = bench("-d", "512")
    assert isinstance(result.exception, SparqError)
    assert "calls_sparse is 0" in result.exception.message
    assert not records.load(tmp_path / "speed.jsonl")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["-n", "0", "-d", "64"], "nothing to measure"),
        (["-fa", "0", "-ctv", "q8_0", "-d", "64"], "without flash attention"),
        (["--attn-only", "-d", "2048"], "--model has no meaning"),
        (["-ctk", "q3_K"], "unknown"),
        (["-fa", "maybe"], "unknown --flash-attn 'maybe'"),
        (["-t", "600"], "--threads 600 is out of range"),
        (["-t", "1-1024*2"], "--threads 1024 is out of range"),
        (["-a", "dense", "--ratio", "1/4"], "--ratio cannot be combined with -a"),
        (["--like", "llama3-8b"], "--like has no meaning with --model"),
        (["--layers", "1"], "--layers has no meaning with --model"),
        (["--quant", "f16"], "--quant has no meaning with --model"),
        (["--layers", "100000000"], "--layers 100000000 is out of range"),
    ],
)
def test_bench_refuses_in_one_line(
    bench: Callable[..., Any], args: list[str], message: str
) -> None:
    result = bench(*args)
    assert isinstance(result.exception, SparqError)
    assert result.exception.exit_code == 2 and message in result.exception.message


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> Planned:
    """What the command would measure, and what it says before."""
    plans: list[SpeedPlan] = []

    def run(plan: SpeedPlan, *_: Any, **__: Any) -> Any:
        plans.append(plan)
        raise SparqError("enough")

    monkeypatch.setattr(speed, "run", run)

    def of(*args: str) -> tuple[SpeedPlan, str]:
        said = CliRunner().invoke(cli, ["bench", "--yes", *args]).output
        return plans.pop(), said

    return of


def test_threads_are_those_that_the_library_runs(
    planned: Planned, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert planned("-t", "1-512*512")[0].threads == [1, 512]
    monkeypatch.setattr(probe, "cores", lambda: 768)
    assert planned()[0].threads == [512]


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ("on", [True]),
        ("off", [False]),
        ("true,disabled,1", [True, False]),
        ("auto", [False, True]),
        ("-1", [False, True]),
    ],
)
def test_flash_attention_is_named_as_in_llama_bench(
    planned: Planned, given: str, wanted: list[bool]
) -> None:
    assert planned("-fa", given)[0].flash_attn == wanted


@pytest.mark.parametrize(
    ("variables", "line", "specs", "like"),
    [
        ("RATIO=1/4", "-a dense", ["dense"], "llama2-7b"),
        ("ATTN=dense", "--ratio 1/4", ["sparq,ratio=1/4"], "llama2-7b"),
        ("ATTN=dense RATIO=1/4", "", ["dense"], "llama2-7b"),
        ("MODEL=m.gguf", "--like llama3-8b", ["sparq,ratio=1/8"], "llama3-8b"),
    ],
)
def test_what_the_line_says_displaces_variables(
    planned: Planned,
    monkeypatch: pytest.MonkeyPatch,
    variables: str,
    line: str,
    specs: list[str],
    like: str,
) -> None:
    for variable in variables.split():
        monkeypatch.setenv(*f"SPARQ_BENCH_{variable}".split("=", 1))
    plan, _ = planned(*line.split())
    assert [str(s) for s in plan.specs] == specs
    assert list(plan.like) == [like] and not plan.models


def test_a_stock_row_that_cannot_be_is_noted(planned: Planned) -> None:
    why = "no stock -fa 0 beside -ctv q8_0: llama.cpp quantises V only with flash attention"
    assert why in planned("-ctv", "f16,q8_0")[1]
    assert "no stock" not in planned("-ctv", "bf16")[1] + planned("-ctv", "q8_0", "-fa", "1")[1]


def test_threads_are_charged_for_what_their_buffers_take(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """64 threads would take 16 GiB where there is plenty, and take a quarter of what is free."""
    monkeypatch.setattr(speed, "memory_of", lambda *_: (32 << 30, False))
    for module in (speed, bandwidth):
        monkeypatch.setattr(module, "available_memory", lambda: 6 << 30)
    group = [replace(CASE, library="stock", spec=OFF, n_threads=64), replace(CASE, n_threads=64)]
    speed._check_memory(group, model)
    with pytest.raises(SparqError, match=r"only 6.* of memory is available"):
        speed._check_memory([replace(c, n_depth=1 << 24) for c in group], model)


@pytest.mark.parametrize(("rearranges", "repack"), [(True, True), (True, False), (False, True)])
def test_processes_are_charged_for_weights_of_their_own(
    model: Path, monkeypatch: pytest.MonkeyPatch, rearranges: bool, repack: bool
) -> None:
    types = {t.type.lower() for t in read_gguf(model).tensors} if rearranges else set()
    monkeypatch.setattr(planning, "rearranged_types", lambda: types)
    packed: list[bool] = []
    monkeypatch.setattr(speed, "needs", lambda *args: packed.append(args[5]) or 0)
    speed._check_memory([replace(CASE, repack=repack)], model)
    assert packed == [rearranges and repack]


def test_bench_says_what_does_not_fit_before_it_begins(
    bench: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPARQ_MEMORY_LIMIT", str(1 << 30))
    result = bench("-d", "2048")
    assert isinstance(result.exception, SparqError)
    assert "3 processes with 2052 positions" in result.exception.message


def test_the_time_left_knows_the_cache_and_the_threads(model: Path) -> None:
    def cost(**changes: Any) -> int:
        return planning.cost(model, [replace(CASE, model_size=10**9, **changes)])

    assert cost(n_depth=1 << 20) > cost() > cost(n_threads=2) > cost(n_threads=8)
    assert cost(n_threads=8) == cost(n_threads=64)
    assert cost(text="0123") > 2 * cost()


def test_synthetic_weights_are_written_only_after_asking(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, planned: Planned
) -> None:
    monkeypatch.setenv("SPARQ_CACHE", str(tmp_path))
    result = CliRunner().invoke(command, ["--layers", "2"])
    assert isinstance(result.exception, SparqError)
    assert "llama2-7b-2-q8_0-v" in result.exception.message
    assert "(427 MiB)" in result.exception.message and "--yes" in result.exception.hint
    plan, _ = planned("--layers", "2")
    ((file, n_bytes),) = plan.to_write().items()
    assert not file.exists() and n_bytes > 4e8  # asked for, not yet written

    file.parent.mkdir(parents=True)
    file.write_bytes(b"x")
    assert plan.to_write() == {} and synth.written() == [file]
    removed = CliRunner().invoke(models.command, ["rm", "synthetic", "--yes"])
    assert removed.exit_code == 0 and "1 bytes" in removed.output
    assert not file.exists()


def test_layers_that_fit_do_not_depend_on_what_is_free(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The same machine plans the same cases; another depth has fewer layers."""

    def layers(plan: SpeedPlan) -> int:
        ((source, _),) = plan._caches()
        assert isinstance(source, Synthetic)
        return source.n_layer

    monkeypatch.setattr(records, "machine", lambda: {"memory_gib": 24.0})
    monkeypatch.setattr(planning, "of_nodes", lambda *kinds: None)
    monkeypatch.setattr(planning, "rearranged_types", lambda: {"q4_0", "q4_k"})
    for depth, free in ((4096, 1 << 30), (4096, 1 << 40), (131072, 1 << 30)):
        monkeypatch.setenv("SPARQ_MEMORY_LIMIT", str(free))
        assert layers(SpeedPlan(n_depth=[depth])) == (32 if depth == 4096 else 1)

    monkeypatch.setattr(
        planning, "of_nodes", lambda *kinds: 12 << 30
    )  # bound to a part of the memory
    assert layers(SpeedPlan(n_depth=[4096])) == 8
    monkeypatch.setattr(planning, "of_nodes", lambda *kinds: None)

    # each process has its own copy of weights that llama.cpp rearranges
    for quant, repack, wanted in (("q4_0", True, 16), ("q4_0", False, 32), ("q4_k_m", True, 16)):
        assert layers(SpeedPlan(quant=quant, repack=repack, n_depth=[4096])) == wanted

    # of a GPU: each process has the weights, too
    plan = SpeedPlan(quant="f16", flash_attn=[True], n_depth=[46080])
    for gpu_gib, layers_on_gpu, wanted in ((79.6, None, 16), (139.8, None, 32), (139.8, 0, 4)):
        machine = {"memory_gib": 24.0, "gpu": "G", "gpu_gib": gpu_gib}
        monkeypatch.setattr(records, "machine", lambda found=machine: found)
        assert layers(replace(plan, n_gpu_layers=layers_on_gpu)) == wanted
