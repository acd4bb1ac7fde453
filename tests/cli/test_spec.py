"""The attention settings: what people write, and that the library agrees."""

from __future__ import annotations

import ctypes
import inspect
import re
from dataclasses import fields, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from pyorch import native, paths
from pyorch.attention.bytes import split
from pyorch.attention.spec import (
    _LEAST,
    _NAMES,
    BUDGETS,
    CALIBRATED,
    METHODS,
    AttentionSpec,
    LayerK,
    check_against_model,
    parse_ratio,
    parse_spec,
)
from pyorch.cli.options import AttentionOptions
from pyorch.errors import SparqError

pytestmark = pytest.mark.usefixtures("native_lib_dir")


@pytest.mark.parametrize(
    ("text", "value"),
    [("1/8", 0.125), ("0.125", 0.125), ("12.5%", 0.125), (" 1/3 ", 1 / 3), ("1", 1), ("100%", 1)],
)
def test_ratio(text: str, value: float) -> None:
    assert parse_ratio(text) == pytest.approx(value, rel=1e-12)


@pytest.mark.parametrize(
    "text",
    ["0", "-1/8", "1.5", "101%", "", "%", "1/0", "a", "1/8/2", "nan", "inf", "1e999"]
    + ["1e999999999", "1e-999999999", "1E999999999%", "1/1e999999999"],
)
def test_no_ratio(text: str) -> None:
    with pytest.raises(SparqError, match="ratio") as e:
        parse_ratio(text)
    assert e.value.exit_code == 2


def library_parse(line: str) -> tuple[int, str]:
    lib = native.load().llama_cpp._lib
    buf = ctypes.create_string_buffer(512)
    code = lib.llama_sparse_attn_parse(line.encode(), buf, ctypes.c_size_t(len(buf)))
    return code, buf.value.decode()


@pytest.mark.parametrize(
    ("line", "canonical"),
    [
        ("off", "off"),
        ("dense", "dense"),
        ("sparq", "sparq,ratio=1/8"),
        ("sparq,ratio=12.5%", "sparq,ratio=1/8"),
        ("sparq, rank=32 , k=128", "sparq,rank=32,topk=128"),
        ("sparq,rank=32", "sparq,ratio=1/8,rank=32"),
        ("sparq,ratio=1", "dense"),
        ("topk,k=512,ramp", "topk,topk=512,budget=ramp"),
        ("topk,min_ctx=0", "topk,ratio=1/8,min_ctx=0"),
        ("sparq,ratio=0.2,mean_v=on,sinks=0,local=16,min_k=1", None),
        ("topk,k_layers=64:64:128", None),
        ("sparq,k_layers=64:12.5%:dense,rank_layers=8:8:16", None),
        ("sparq,ratio=1/8,ramp-down", "sparq,ratio=1/8,budget=ramp-down"),
        ("sparq,flat", "sparq,rank=32,topk=512"),
        ("sparq,calibrated", "sparq,ratio=1/8,budget=calibrated"),
        ("sparq,budget=top-p,top_p=0.9,cap=4", "sparq,ratio=1/8,top_p=0.9,cap=4"),
        ("sparq,shadow=q8", "sparq,ratio=1/8,shadow=q8"),
        ("topk,gpu_min_mb=0,k=64", "topk,topk=64,gpu_min_mb=0"),
        ("dense,prompt=f32", None),
        ("dense,prompt=fast", "dense"),
        ("sparq,ratio=1,prompt=f32", "dense,prompt=f32"),
        ("dense,prompt=sparse,prompt_p=0.9", None),
        ("dense,prompt=sparse,prompt_p=0.99", "dense,prompt=sparse"),
        ("sparq,ratio=1,prompt=sparse,prompt_p=0.5", "dense,prompt=sparse,prompt_p=0.5"),
        ("sparq,ratio=1/3,min_k=1", None),
        ("sparq,ratio=1/4,verify=exact", None),
        ("topk,k=64,verify=sparse", "topk,topk=64"),
        ("sparq,rank=32,topk=128,local=16,sinks=0,min_ctx=0,mean_v=on", None),
        ("sparq,ratio=1/8,top_p=0.9375,cap=2.5,prompt=f32", None),
        ("sparq,ratio=1/8,top_p=0.9,cap=1.6666666666666667", None),  # ceil(300 cap) is 500, not 501
    ],
)
def test_spec(line: str, canonical: str | None) -> None:
    """And the library reads what we write."""
    spec = parse_spec(line)
    assert parse_spec(str(spec)) == spec
    if canonical is not None:
        assert str(spec) == canonical
    code, theirs = library_parse(str(spec))
    if spec.budget == "calibrated":  # which it leaves to us to measure
        assert code < 0 and "sparq-cpp calibrate" in theirs
        return
    assert code >= 0, theirs
    assert parse_spec(theirs) == spec


@pytest.mark.parametrize(
    ("line", "message", "hint"),
    [
        ("spark,ratio=1/8", "unknown method 'spark'", "sparq"),
        ("", "unknown method ''", "one of"),
        ("sparq,ration=1/8", "unknown attention setting 'ration'", "ratio"),
        ("sparq,ratio", "has no value", "ratio="),
        ("dense,ratio=1/8", "dense reads everything, so ratio", "sparq"),
        ("off,rank=5", "off reads everything, so rank", "sparq"),
        ("off,ramp", "off reads everything, so budget", "sparq"),
        ("off,prompt=fast", "off reads everything, so prompt", "sparq"),
        ("dense,prompt=fast,sinks=0", "dense reads everything, so sinks", "sparq"),
        ("dense,verify=exact", "dense reads everything, so verify", "sparq"),
        ("sparq,verify=maybe", "unknown verify 'maybe'", "exact"),
        ("dense,prompt=slow", "unknown prompt 'slow'", "f32"),
        ("dense,prompt=sparse,prompt_p=0", "prompt_p 0.0 is not above 0", "prompt_p=0.99"),
        ("sparq,prompt_p=0.9", "prompt_p belongs to prompt=sparse", "prompt=sparse"),
        ("off,prompt_p=0.9", "off reads everything, so prompt_p", "sparq"),
        ("sparq,ratio=1,rank=8", "ratio 1 is dense attention, so rank", "one of the two"),
        ("topk,ratio=1,k=64", "ratio 1 is dense attention, so topk", "one of the two"),
        ("topk,ratio=1,ramp", "ratio 1 is dense attention, so budget ramp", "leave out budget"),
        ("sparq,rank=0", "rank 0 is below 1", ""),
        ("sparq,rank=2.5", "rank '2.5' is not a whole number", ""),
        ("sparq,sinks=-1", "sinks -1 is below 0", ""),
        ("sparq,budget=rampe", "unknown budget 'rampe'", "ramp"),
        ("sparq,mean_v=maybe", "unknown mean_v 'maybe'", "auto"),
        ("sparq,shadow=q5", "unknown shadow 'q5'", "q"),
        ("sparq,topk=8,local=6", "topk 8 leaves no room beside sinks 4 and local 6", ""),
        ("topk,k=4", "topk 4 leaves no room beside sinks 4 and local 0", ""),
        ("topk,rank=4", "rank belongs to sparq", ""),
        ("topk,k_layers=1:x", "k_layers: 'x' is not a k", "64:12.5%"),
        ("topk,k_layers=1:101%", "k_layers: '101%' is not a k", "dense"),
        ("topk,k_layers=1:0", "k_layers: '0' is not a k", "dense"),
        ("topk,k_layers=1:2.5", "k_layers: '2.5' is not a k", "dense"),
        ("sparq,rank_layers=8:0", "rank_layers '8:0'", "8:8"),
        ("topk,rank_layers=8:8", "rank belongs to sparq", ""),
        ("sparq,rank_layers=²:8", "rank_layers '²:8' is not a list", "8:8"),
        ("sparq,top_p=0", "top_p 0.0 is not above 0", ""),
        ("sparq,top_p=1.1", "top_p 1.1 is not above 0 and at most 1", ""),
        ("sparq,top_p=x", "top_p 'x' is not a number", ""),
        ("sparq,cap=4", "cap is 1 or more, and belongs to top_p", ""),
        ("sparq,top_p=0.9,cap=0.5", "cap is 1 or more", ""),
        ("sparq,top_p=1,cap=4", "cap is 1 or more, and belongs to top_p", ""),
        ("sparq,min_ctx=3000000000", "min_ctx 3000000000 is above 1,000,000,000", ""),
        ("sparq,calibrated,rank=8", "budget calibrated chooses k and rank, so rank", "ratio"),
        ("sparq,flat,ratio=1/8", "budget flat is sparq,rank=32,topk=512, and cannot", "sparq,flat"),
        ("topk,flat", "topk=512, and cannot be combined with topk", "flat"),
        ("sparq,r=8", "unknown attention setting 'r'", "r"),
        ("sparq,mean-v=on", "unknown attention setting 'mean-v'", "mean_v"),
        (
            "sparq,ratio=1/4,rank=32,topk=128",
            "topk and rank are given, so ratio",
            "leave out ratio",
        ),
        ("topk,ratio=1/4,k=128", "topk is given, so ratio would change nothing", "leave out ratio"),
        ("topk,k_layers=64:64,topk=128", "k_layers has the topk of every layer, so topk", "topk"),
        (
            "sparq,rank_layers=8:8,rank=8",
            "rank_layers has the rank of every layer, so rank",
            "rank",
        ),
        (
            "topk,k_layers=64:64,ramp",
            "k_layers has the topk of every layer, so budget ramp",
            "ramp",
        ),
        ("sparq,rank=8,rank=16", "rank is given twice", "leave out one"),
        ("topk,k=64,topk=64", "topk is given twice", "leave out one"),
        ("sparq,ramp,budget=ramp", "budget is given twice", "leave out one"),
        ("topk,shadow=f16", "not with a transposed copy, so shadow", "leave out shadow"),
        ("sparq,ratio=1e999", "ratio", ""),
        ("sparq,gpu_min_mb=-1", "gpu_min_mb", ""),
        ("topk,k_layers=0%", "k_layers: '0%' is not a k", "dense"),
        ("sparq,cap=x", "cap 'x' is not a number", ""),
    ],
)
def test_wrong_spec(line: str, message: str, hint: str) -> None:
    with pytest.raises(SparqError) as e:
        parse_spec(line)
    assert message in e.value.message and hint in e.value.hint
    assert e.value.exit_code == 2 and "\n" not in e.value.message
    code, message = library_parse(line)
    assert code < 0 and "\n" in message  # with a hint


def test_a_word_that_is_no_budget_is_told_as_it_is() -> None:
    assert library_parse("sparq,ramp,foo")[1].startswith("not a key=value pair: foo\n")


def test_a_setting_is_known_everywhere() -> None:
    """To Python and its docstring, to the parser of the library and its documentation, and on the
    command line."""
    ours = {f.name for f in fields(AttentionSpec)} - {"method"}
    folder = paths.data("ggml_ops") / "llama"
    parser, header = (
        (folder / name).read_text("utf-8") for name in ("sparse-spec.cpp", "llama-sparse.h")
    )
    rows = re.findall(r'^ {8}(?:\{ |\w+ *\()"(\w+)",', parser, re.MULTILINE)
    assert sorted(rows) == sorted(ours)
    text = header.partition("// A spec is one line")[2].partition("// Errors are text")[0]
    lines = re.findall(r"^//   ([a-z]\w*(?:, \w+)*)(?: \(or k\))? ", text, re.MULTILINE)
    assert {name for line in lines for name in line.split(", ")} == ours
    described = re.findall(r"^(\w+)  ", inspect.getdoc(AttentionSpec) or "", re.MULTILINE)
    assert sorted(described) == sorted(ours)
    options = {f.name.removeprefix("attn_") for f in fields(AttentionOptions)} - {"attn", "method"}
    assert options < ours


def test_the_library_has_the_same_words_and_bounds() -> None:
    """As its errors say."""

    def words(line: str) -> set[str]:
        code, message = library_parse(line)
        assert code < 0
        found = re.search(r"(?:is not|write) (.*? or [\w-]+)", message)
        assert found is not None, message
        return set(re.split(", | or ", found[1]))

    assert words("x") == set(METHODS)
    assert words("sparq,x=1") == {f.name for f in fields(AttentionSpec)} - {"method"}
    for name in ("mean_v", "shadow", "prompt", "verify"):
        assert words(f"sparq,{name}=x") == set(_NAMES[name])
    assert words("sparq,budget=x") == set(BUDGETS) - set(CALIBRATED)
    for name, least in _LEAST.items():
        code, message = library_parse(f"sparq,{name}={least - 1}")
        assert code < 0 and message.startswith(f"{name} must be at least {least}: ")
    header = (paths.data("ggml_ops") / "llama" / "llama-sparse.h").read_text("utf-8")
    for name in ("mean_v", "shadow", "prompt", "verify"):
        found = re.search(rf"^//   {name} +(\w+(?: \| \w+)+) ", header, re.MULTILINE)
        assert found is not None and set(found[1].split(" | ")) == set(_NAMES[name])


# of each setting: words or numbers inside and outside its bounds, and its default
VALUES = {
    "ratio": ["1/8", "1", "0", "2", "0.5/2", "1 / 4", "12.5 %", "1_0%", "x"],
    "local": ["16"],
    "mean_v": [],
    "shadow": [],
    "budget": [],
    "top_p": ["0", "0.5", "1", "1.1", "5e-1", "nan"],
    "cap": ["0.5", "1", "4", "1000000", "1000001", "inf"],
    "k_layers": ["0", "1", "64", "+8", "dense", "100%", "1: 12.5%:dense", "101%", "0%", ""],
    "rank_layers": ["0", "1", "8: 8", "+8", ""],
    "prompt": [],
    "prompt_p": ["0", "0.5", "0.99", "1", "1.1"],
    "verify": [],
}
VALUES["k_layers"] += ["1000000000", "1000000001"]
VALUES["rank_layers"] += ["1000000000", "1000000001"]
for _name, _least in _LEAST.items():
    _default = getattr(AttentionSpec, _name)
    _numbers = (
        _least - 1,
        _least,
        5,
        64,
        10**9,
        10**9 + 1,
        *([] if _default is None else [_default]),
    )
    VALUES.setdefault(_name, []).extend(map(str, _numbers))
    VALUES[_name] += ["+64", "6_4", "64.0", "1e2", "x", ""]
for _name in ("mean_v", "shadow", "budget", "prompt", "verify"):
    VALUES[_name] += [*sorted(set(_NAMES[_name]) - set(CALIBRATED)), "x"]


def test_both_parsers_take_the_same() -> None:
    """Each setting alone and every two of them, with every method, to the same settings."""
    assert set(VALUES) == {f.name for f in fields(AttentionSpec)} - {"method"}
    settings = [(name, f"{name}={value}") for name, values in VALUES.items() for value in values]
    lines = [[text] for _, text in settings]
    lines += [[a, b] for (x, a), (y, b) in combinations(settings, 2) if x != y]
    n_taken = 0
    for method in METHODS:
        for parts in lines:
            line = ",".join([method, *parts])
            code, theirs = library_parse(line)
            try:
                ours = parse_spec(line)
            except SparqError as e:
                assert code < 0, (line, theirs, e.message)
            else:
                assert code >= 0, (line, theirs)
                # the ratio at which lists were measured is ours alone
                same = ours if ours.takes_ratio else replace(ours, ratio=None)
                assert parse_spec(theirs) == same, line
                n_taken += 1
    assert n_taken > 1000


def test_defaults_are_one_number() -> None:
    """In the library, in what its header says, in Python, and in docs/gpu.md."""
    folder = paths.data("ggml_ops") / "llama"
    header = (folder / "llama-sparse.h").read_text("utf-8")
    entries = re.split(r"^//   (?=\w)", header, flags=re.M)  # a key of a spec, and what it does
    said = {
        entry.split()[0]: float(found[1])
        for entry in entries
        if (found := re.search(r"default ([\d.]+)[;,)]", entry))
    }
    native_spec = (folder / "sparse-spec.h").read_text("utf-8")
    set_to = dict(re.findall(r"^ +\w+ +(\w+) *= (\d[\d.]*);", native_spec, re.M))
    assert set(said) == {"sinks", "min_k", "min_ctx", "gpu_min_mb", "top_p", "cap", "prompt_p"}
    assert said == {key: float(set_to[key]) for key in said}
    ours = AttentionSpec("sparq", ratio=1 / 8)
    assert said == {key: getattr(ours, key) or 1 for key in said}  # without top_p all is read
    gpu = (Path(__file__).parents[2] / "docs" / "gpu.md").read_text("utf-8")
    assert f" {ours.gpu_min_mb:,} MB" in gpu


def test_the_library_knows_flat() -> None:
    assert library_parse("sparq,flat")[1] == str(parse_spec("sparq,flat"))
    for line in ("topk,flat", "sparq,flat,ratio=1/8", "sparq,budget=flat,k_layers=1:2"):
        code, message = library_parse(line)
        assert code < 0 and message.startswith("budget flat is sparq,rank=32,topk=512,")


@pytest.mark.parametrize(
    ("line", "by_hand"),
    [
        ("off", AttentionSpec()),
        ("sparq", AttentionSpec("sparq")),
        ("topk", AttentionSpec("topk")),
        ("sparq,rank=32", AttentionSpec("sparq", rank=32)),
        ("sparq,rank=8,k=64", AttentionSpec("sparq", rank=8, topk=64)),
        ("dense", AttentionSpec("sparq", ratio=1.0)),
        ("sparq,top-p,top_p=0.9", AttentionSpec("sparq", budget="top-p", top_p=0.9)),
        ("sparq,k_layers=64:12.5%:dense,rank_layers=8:8:8",
         AttentionSpec("sparq", k_layers=(LayerK(64), LayerK(0.125, True), LayerK(1, True)),
                       rank_layers=(8, 8, 8))),
    ],
)  # fmt: skip
def test_settings_by_hand_are_those_of_a_line(line: str, by_hand: AttentionSpec) -> None:
    assert by_hand == parse_spec(line)
    assert parse_spec(str(by_hand)) == by_hand


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"method": "spark"}, "unknown method 'spark'"),
        ({"ratio": 3}, "ratio 3 is not above 0 and at most 1"),
        ({"ratio": float("nan")}, "ratio nan is not above 0"),
        ({"ratio": "1/8"}, "ratio '1/8' is not a number"),
        ({"rank": 2.5}, "rank 2.5 is not a whole number"),
        ({"topk": "64"}, "topk '64' is not a whole number"),
        ({"sinks": -1}, "sinks -1 is below 0"),
        ({"rank": 8, "budget": "calibrated"}, "budget calibrated chooses k and rank"),
        ({"k_layers": (LayerK(2, True),)}, "is not a k"),
        ({"k_layers": ("64",)}, "is not a k"),
        ({"rank_layers": (8, 0)}, "rank_layers: 0 is not a rank"),
        ({"method": "dense", "sinks": 0}, "dense reads everything, so sinks"),
        ({"method": "topk", "rank": 8}, "rank belongs to sparq"),
    ],
)
def test_no_wrong_settings_can_be_made(values: dict[str, Any], message: str) -> None:
    """What no line could say; and of the rest, which lines make, one of each kind."""
    with pytest.raises(SparqError) as e:
        AttentionSpec(**{"method": "sparq", **values})
    assert message in e.value.message and e.value.exit_code == 2
    if values.get("method", "sparq") == "sparq":
        with pytest.raises(SparqError):
            replace(AttentionSpec("sparq"), **values)


@pytest.mark.parametrize(
    ("line", "at_a_quarter"),
    [
        ("sparq,min_ctx=0", "sparq,ratio=1/4,min_ctx=0"),
        ("sparq,rank=16", "sparq,ratio=1/4,rank=16"),
        ("sparq,rank=16,topk=64", "sparq,ratio=1/4"),
        ("topk,k=64,sinks=8", "topk,ratio=1/4,sinks=8"),
        ("sparq,ratio=1/8,k_layers=64:64,rank_layers=8:8,top_p=0.9", "sparq,ratio=1/4,top_p=0.9"),
        ("sparq,calibrated", "sparq,ratio=1/4,budget=calibrated"),
    ],
)
def test_another_ratio_takes_effect(line: str, at_a_quarter: str) -> None:
    spec = parse_spec(line)
    assert str(spec.at_ratio(1 / 4)) == at_a_quarter and spec.at_ratio(1 / 4).takes_ratio
    assert spec.at_ratio(1) == AttentionSpec("dense")
    assert not AttentionSpec("dense").takes_ratio


def test_rank_above_the_head_size() -> None:
    check_against_model(AttentionSpec("sparq", rank=64, topk=128), 64)
    with pytest.raises(SparqError, match="rank 65 is above the model's head size 64"):
        check_against_model(AttentionSpec("sparq", rank=65, topk=128), 64)


def test_lists_of_another_length_than_the_model() -> None:
    spec = parse_spec("sparq,k_layers=64:64,rank_layers=8:8:8")
    with pytest.raises(SparqError, match="k_layers has 2 entries for 3 layers"):
        check_against_model(spec, 64, 3)
    with pytest.raises(SparqError, match="rank_layers has 3 entries for 2 layers"):
        check_against_model(spec, 64, 2)
    check_against_model(parse_spec("sparq,k_layers=64:64"), 64, 2)


@pytest.mark.parametrize(
    ("line", "n_pos", "rank", "topk", "local"),
    [
        ("sparq,ratio=1/2", 16384, 64, 7136, 1784),  # r = d/2: 1/15 of the bytes; the rest for rows
        ("sparq,ratio=1/8", 16384, 64, 992, 248),  # half and half
        ("sparq,ratio=1/32", 16384, 16, 248, 62),
        ("sparq,ratio=1/8", 1200, 64, 128, 32),  # never below min_k
        ("sparq,rank=32,topk=128", 4096, 32, 128, 32),  # the paper's recipe
        ("sparq,rank=32,topk=128,local=7", 4096, 32, 128, 7),
        ("sparq,ratio=1/8,shadow=f16", 16384, 16, 1024, 256),  # half and half, four times the bits
        ("topk,ratio=1/8", 16384, 128, 2048, 512),  # scores from all of K
    ],
)
def test_split(line: str, n_pos: int, rank: int, topk: int, local: int) -> None:
    s = split(parse_spec(line), n_pos, head_dim=128)
    assert (s.rank, s.topk, s.local, s.dense) == (rank, topk, local, False)


@pytest.mark.parametrize(
    ("line", "n_pos"),
    [("sparq,ratio=1/8", 1024), ("sparq,rank=32,topk=4096", 4000), ("dense", 9000), ("off", 9000)],
)
def test_split_dense(line: str, n_pos: int) -> None:
    s = split(parse_spec(line), n_pos, head_dim=128)
    assert s.dense and s.reason and s.topk == n_pos


def test_ramps_keep_the_total() -> None:
    for cached in (range(32), range(3, 32, 4)):
        up, down = (
            [split(parse_spec(line), 8192, 128, il=il, cached=cached).topk for il in cached]
            for line in ("topk,k=512,budget=ramp", "topk,k=512,budget=ramp-down")
        )
        assert up == sorted(up) == down[::-1] and up[-1] >= (len(cached) - 4) * up[0]
        assert sum(up) == pytest.approx(512 * len(cached), rel=0.01)


def test_split_of_lists() -> None:
    spec = parse_spec("sparq,ratio=1/8,k_layers=64:12.5%:dense:1%,rank_layers=8:16:4:2")
    s = [split(spec, 4096, 128, il=il) for il in range(4)]
    assert [x.topk for x in s] == [64, 512, 4096, 128], "min_k bounds shares, not numbers"
    assert [x.rank for x in s] == [8, 16, 128, 2] and [x.dense for x in s] == [0, 0, 1, 0]
