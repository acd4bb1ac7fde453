"""The attention settings: what people write, and that the library has the same."""

from __future__ import annotations

import ctypes
from dataclasses import fields
from pathlib import Path

import pytest

from pyorch import native
from pyorch.attention import spec as settings
from pyorch.attention.cost import split
from pyorch.attention.spec import (
    AttentionSpec,
    LayerK,
    check_against_model,
    parse_ratio,
    parse_spec,
)
from pyorch.errors import SparqError

library = pytest.mark.usefixtures("native_lib_dir")


@pytest.mark.parametrize(
    ("text", "value"),
    [("1/8", 0.125), ("0.125", 0.125), ("12.5%", 0.125), (" 1/3 ", 1 / 3), ("1", 1), ("100%", 1)],
)
def test_ratio(text: str, value: float) -> None:
    assert parse_ratio(text) == pytest.approx(value, rel=1e-12)


@pytest.mark.parametrize(
    "text",
    ["0", "-1/8", "1.5", "101%", "", "%", "1/0", "a", "1/8/2", "nan", "inf", "1e999", "1_0%"]
    + ["1e999999999", "1e-999999999", "1E999999999%", "1/1e999999999"],
)
def test_no_ratio(text: str) -> None:
    with pytest.raises(SparqError, match="ratio") as e:
        parse_ratio(text)
    assert e.value.exit_code == 2 and e.value.hint


def written(function: str, *args: bytes) -> tuple[int, str]:
    """What a function of the library returns and writes."""
    buf = ctypes.create_string_buffer(8192)
    code = getattr(native.load().llama_cpp._lib, function)(*args, buf, ctypes.c_size_t(len(buf)))
    return code, buf.value.decode()


@library
def test_the_table_is_what_the_library_says() -> None:
    """If not: `make spec-table`."""
    file = Path(settings.__file__).with_name("spec.json")
    assert file.read_text("utf-8") == written("llama_sparse_attn_keys")[1]
    assert {f.name for f in fields(AttentionSpec)} - {"method"} == settings.KEYS.keys()


@library
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
        ("sparq,k_layers=64:12.5%:dense:7%,rank_layers=8:8:16:+8", None),
        ("sparq,ratio=1/8,ramp-down", "sparq,ratio=1/8,budget=ramp-down"),
        ("sparq,flat", "sparq,rank=32,topk=512"),
        ("sparq,flat,top_p=90%", "sparq,rank=32,topk=512,top_p=0.9"),
        ("sparq,shadow=q8", "sparq,ratio=1/8,shadow=q8"),
        ("topk,gpu_min_mb=0,k=64", "topk,topk=64,gpu_min_mb=0"),
        ("dense,prompt=f32", None),
        ("dense,prompt=fast,sinks=4", "dense"),
        ("sparq,ratio=1,prompt=f32", "dense,prompt=f32"),
        ("sparq,ratio=1/4,verify=exact", None),
        ("topk,k=64,verify=sparse", "topk,topk=64"),
        ("sparq,ratio=1/8,top_p=0.9375,cap=2.5,prompt=f32", None),
        ("sparq,ratio=1/8,top_p=0.9,cap=1.6666666666666667", None),  # ceil(300 cap) is 500, not 501
    ],
)
def test_spec(line: str, canonical: str | None) -> None:
    """And the library reads what we write, and what we were given."""
    spec = parse_spec(line)
    assert parse_spec(str(spec)) == spec
    if canonical is not None:
        assert str(spec) == canonical
    for text in (line, str(spec)):
        code, theirs = written("llama_sparse_attn_parse", text.encode())
        assert code >= 0, theirs
        assert parse_spec(theirs) == spec


@library
@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("spark,ratio=1/8", "method"),
        ("", "method"),
        ("sparq,ration=1/8", "ration"),
        ("sparq,ratio", "ratio"),
        ("dense,ratio=1/8", "ratio"),
        ("off,ramp", "budget"),
        ("dense,prompt=f32,sinks=0", "sinks"),
        ("sparq,verify=maybe", "verify"),
        ("sparq,cap=2", "cap"),
        ("sparq,ratio=1,rank=8", "rank"),
        ("sparq,rank=0", "rank"),
        ("sparq,rank=6_4", "rank"),
        ("sparq,sinks=-1", "sinks"),
        ("sparq,min_ctx=3000000000", "min_ctx"),
        ("sparq,budget=rampe", "budget"),
        ("sparq,topk=8,local=6", "topk"),
        ("topk,rank=4", "rank"),
        ("topk,mean_v=on", "mean_v"),
        ("topk,k_layers=1:x", "k_layers"),
        ("topk,k_layers=1:101%", "k_layers"),
        ("topk,k_layers=1:0", "k_layers"),
        ("topk,k_layers=0%", "k_layers"),
        ("sparq,rank_layers=8:0", "rank_layers"),
        ("sparq,rank_layers=²:8", "rank_layers"),
        ("sparq,top_p=1.1", "top_p"),
        ("sparq,top_p=0.9,cap=0.5", "cap"),
        ("sparq,flat,ratio=1/8", "ratio"),
        ("topk,flat", "rank"),
        ("sparq,ratio=1/4,rank=32,topk=128", "ratio"),
        ("topk,k_layers=64:64,topk=128", "topk"),
        ("topk,k_layers=64:64,ramp", "budget"),
        ("sparq,rank=8,rank=16", "rank"),
        ("sparq,ramp,budget=ramp", "budget"),
        ("sparq,ratio=1e999", "ratio"),
    ],
)
def test_wrong_spec(line: str, name: str) -> None:
    """Both refuse it, and name what is wrong."""
    with pytest.raises(SparqError) as e:
        parse_spec(line)
    assert name in e.value.message and e.value.hint
    assert e.value.exit_code == 2 and "\n" not in e.value.message
    code, theirs = written("llama_sparse_attn_parse", line.encode())
    message, _, hint = theirs.partition("\n")
    assert code < 0 and (name in message or "=" not in line) and hint


@pytest.mark.parametrize("budget", settings.CALIBRATED)
def test_a_calibrated_budget_has_its_own_choices(budget: str) -> None:
    assert parse_spec(f"sparq,{budget}") == AttentionSpec("sparq", budget=budget)
    for more in ("rank=8", "k_layers=64:64", "top_p=0.9", "ratio=1"):
        with pytest.raises(SparqError, match="budget"):
            parse_spec(f"sparq,{budget},{more}")


@pytest.mark.parametrize(
    ("line", "by_hand"),
    [
        ("sparq,flat", AttentionSpec("sparq", budget="flat")),
        ("dense", AttentionSpec("sparq", ratio=1.0)),
        ("sparq,k_layers=64:12.5%:dense,rank_layers=8:8:8",
         AttentionSpec("sparq", k_layers=(LayerK(64), LayerK(0.125, True), LayerK(1, True)),
                       rank_layers=(8, 8, 8))),
    ],
)  # fmt: skip
def test_settings_by_hand_are_those_of_a_line(line: str, by_hand: AttentionSpec) -> None:
    assert by_hand == parse_spec(line)
    assert parse_spec(str(by_hand)) == by_hand


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


def test_what_does_not_fit_a_model_is_refused() -> None:
    check_against_model(AttentionSpec("sparq", rank=64, topk=128), 64)
    check_against_model(parse_spec("sparq,k_layers=64:64"), 64, 2)
    for line in ("sparq,rank=65", "sparq,rank_layers=8:65", "topk,k_layers=1:2:3"):
        with pytest.raises(SparqError, match="65|3 entries for 2 layers") as e:
            check_against_model(parse_spec(line), 64, 2)
        assert e.value.hint


@pytest.mark.parametrize(
    ("line", "n_pos", "rank", "topk", "local"),
    [
        ("sparq,ratio=1/2", 16384, 64, 7104, 1776),  # r = d/2: 1/15 of the bytes; the rest for rows
        ("sparq,ratio=1/8", 16384, 64, 960, 240),  # half and half
        ("sparq,ratio=1/32", 16384, 16, 240, 60),
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
