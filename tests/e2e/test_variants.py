"""Every kind of attention that reaches our hook, with the oracle looking at each node (nodes.py).

And every kind that must stay dense, with the reason.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny as tiny_models
from llama import (
    Context,
    Model,
    SpecError,
    Token,
    from_child,
    keep_log,
    log_text,
    python_environment,
)
from nodes import Watch
from quick import pairwise

N_PROMPT, N_STEP = 330, 12
SPARQ = "sparq,rank=8,topk=40,min_ctx=0,shadow=f16"
# what rounding may change of a prompt and replies, as a share of the spread
NEAR = {"f32": 0.03, "fast": 0.25}
NEAR_PROMPT = {"f32": 0.02, "fast": 0.25}  # of a prompt alone
TOPK = "topk,k=40,min_ctx=0"

GetModel = Callable[..., Model]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> GetModel:
    """model(arch, **sizes): a loaded tiny model; the same arguments, the same model."""
    folder = tmp_path_factory.mktemp("models")
    loaded: dict[str, Model] = {}

    def get(arch: str = "llama", **sizes: int) -> Model:
        name = "-".join([arch, *(f"{k}{v}" for k, v in sizes.items())])
        if name not in loaded:
            loaded[name] = Model(
                tiny_models.write(folder / f"{name}.gguf", arch, **{"n_layer": 4, **sizes})
            )
        return loaded[name]

    return get


def prompt(n: int = N_PROMPT, seq: int = 0, seed: int = 3) -> list[Token]:
    rng = np.random.default_rng(seed + seq)
    return [(int(t), i, seq) for i, t in enumerate(rng.integers(3, 259, n))]


def steps(ctx: Context, n: int = N_STEP, first: int = N_PROMPT) -> np.ndarray:
    """Decode n single tokens: logits (n, n_vocab)."""
    out = []
    for i in range(n):
        assert ctx.decode([(7 + 5 * i, first + i, 0)]) == 0
        out.append(ctx.logits())
    return np.array(out)


def run(model: Model, spec: str, **options) -> np.ndarray:
    """Prefill and decode, checked by the oracle: logits (n, n_vocab) of the decoded tokens."""
    with Context(model, watch=Watch(), **options) as ctx:
        ctx.set_sparse(spec)
        assert ctx.decode(prompt()) == 0
        logits = steps(ctx)
        assert np.isfinite(logits).all()
        assert ctx.check_shadow() <= 0
        return logits


def spread(a: np.ndarray, b: np.ndarray) -> float:
    """Largest difference in units of the spread of b."""
    return float(np.abs(a - b).max() / b.std())


# ---- architectures ----

# arch, sizes, layers that are sparse (of 4); tests/archs has all others
ALL = [0, 1, 2, 3]
ARCHITECTURES = [
    ("llama", {}, ALL),
    ("llama", {"n_head_kv": 4}, ALL),  # MHA
    ("llama", {"n_head": 3, "n_head_kv": 1, "head_dim": 80}, ALL),  # MQA, odd sizes
    ("llama", {"n_head": 2, "n_head_kv": 1, "head_dim": 256}, ALL),
    ("mpt", {"n_head_kv": 4}, ALL),
    ("mpt", {"n_head": 6, "n_head_kv": 2}, ALL),  # ALiBi, heads that are no power of two
    ("deepseek2-unpacked", {}, ALL),  # longer keys than values
    ("gemma2", {}, [1, 3]),  # the others have a sliding window
    ("gpt-oss", {}, [1, 3]),
    ("lfm2", {}, [1, 3]),  # the others are convolutions
]


@pytest.mark.parametrize(
    ("arch", "sizes", "sparse"),
    ARCHITECTURES,
    ids=[f"{a}-{'-'.join(map(str, s.values()))}" for a, s, _ in ARCHITECTURES],
)
def test_architecture_matches_the_oracle(
    model: GetModel, arch: str, sizes: dict[str, int], sparse: list[int]
) -> None:
    m = model(arch, **sizes)
    with Context(m) as ctx:
        assert ctx.decode(prompt()) == 0
        dense = steps(ctx)
    codes = [SPARQ.replace("f16", bits) for bits in ("q8", "q4")]
    for spec in (SPARQ, SPARQ + ",mean_v=on,local=0,sinks=0", TOPK, *codes):
        watch = Watch()
        with Context(m, watch=watch) as ctx:
            ctx.set_sparse(spec)
            assert ctx.decode(prompt()) == 0
            assert not watch.attends, "prefill went through the sparse op"
            assert watch.prefilled == ctx.info()["counters"]["calls_prefill"] > 0
            logits = steps(ctx)
            info = ctx.info()
            assert ctx.check_shadow() == (-1 if spec == TOPK else 0)
        assert np.isfinite(logits).all()
        assert spread(logits, dense) > 0.05, (
            "sparse attention changed nothing: the test would not see a fault"
        )
        reasons = {x["il"]: x["reason"] for x in info["layers"]}
        assert [il for il, why in reasons.items() if not why] == sparse
        if arch in ("gemma2", "gpt-oss"):
            assert {reasons[il] for il in (0, 2)} == {"sliding-window layer"}
            assert info["counters"]["stock_reasons"].keys() <= {"prefill", "sliding-window layer"}
        assert info["active"] and info["layers_sparse"] == len(sparse)
        assert info["counters"]["calls_sparse"] == N_STEP * len(sparse)
        assert {a.layer for a in watch.attends} == set(sparse)
        for a in watch.attends:
            assert (a.softcap > 0) == (arch == "gemma2")
            assert (a.max_bias > 0) == (arch == "mpt")
            assert a.has_sinks == (arch == "gpt-oss")
            assert a.mean_v == (spec != TOPK)
            assert a.rank == (0 if spec == TOPK else 8)


@pairwise(
    kind=ARCHITECTURES,
    how=list(NEAR),
    spec=["dense", "sparq,rank=4,topk=100000,min_ctx=0,mean_v=on"],
)
def test_reading_everything_equals_llama_cpp(
    model: GetModel, kind: tuple[str, dict[str, int], list[int]], how: str, spec: str
) -> None:
    """Our exact attention against llama.cpp's own, which accumulates V in f16."""
    arch, sizes, _ = kind
    with Context(model(arch, **sizes)) as ctx:
        assert ctx.decode(prompt()) == 0
        want = steps(ctx)
    assert spread(run(model(arch, **sizes), f"{spec},prompt={how}"), want) < NEAR[how]


@pytest.mark.parametrize(("arch", "types", "reason"), [
    ("mamba", {}, "this architecture has no plain KV cache"),
    ("llama", {"type_k": "q5_1"}, "K or V of a type without a kernel"),
    ("llama", {"type_v": "q5_1"}, "K or V of a type without a kernel"),
])  # fmt: skip
def test_other_attention_stays_dense_and_says_why(
    model: GetModel, arch: str, types: dict[str, str], reason: str
) -> None:
    logits = []
    for spec in ("off", SPARQ):
        with Context(model(arch), **types) as ctx:
            ctx.set_sparse(spec)
            ctx.decode(prompt())
            logits.append(steps(ctx))
            info = ctx.info()
    assert np.array_equal(*logits)
    assert info["layers_sparse"] == info["counters"]["calls_sparse"] == 0
    if not types:  # of no layer
        assert not info["active"] and info["reason"] == reason
        return
    assert {x["reason"] for x in info["layers"]} == {reason}
    assert info["counters"]["stock_reasons"] == {reason: 4 * (N_PROMPT + N_STEP)}


# ---- latent attention ----

LATENT = "multi-head latent attention"


@pytest.mark.parametrize("type_k", ["f16", "bf16", "q8_0"])
@pytest.mark.parametrize("spec", ["dense", SPARQ, TOPK])
def test_latent_attention_is_exact_and_ours(model: GetModel, spec: str, type_k: str) -> None:
    """One row for all heads, whose front is V: the oracle looks at each node of each step."""
    m, types = model("deepseek2", head_dim=64), {"type_k": type_k, "type_v": type_k}
    with Context(m, **types) as ctx:
        ctx.decode(prompt())
        want = steps(ctx)
    watch = Watch()
    with Context(m, watch=watch, **types) as ctx:
        ctx.set_sparse(spec)
        ctx.decode(prompt())
        assert not watch.attends
        logits = steps(ctx)
        info, own = ctx.info(), ctx.info(0)
    assert spread(logits, want) < 0.1  # stock quantises q as well
    assert len(watch.attends) == 4 * N_STEP and not any(a.is_sparse for a in watch.attends)
    counters = info["counters"]
    assert not info["active"] and info["reason"] == LATENT
    assert {x["reason"] for x in info["layers"]} == {LATENT} and info["layers_sparse"] == 0
    assert counters["calls_dense_op"] == 4 * N_STEP and counters["calls_sparse"] == 0
    assert counters["stock_reasons"] == {"prefill": 4 * N_PROMPT}
    n_seen = sum(N_PROMPT + i + 1 for i in range(N_STEP))
    row = (2 * 64 + 32) * {"f16": 2, "bf16": 2, "q8_0": 34 / 32}[type_k]
    assert counters["bytes_attend"] == counters["bytes_dense"] == 4 * n_seen * row
    assert own["calls_dense"] == 4 * N_STEP and own["calls_sparse"] == 0
    assert own["bytes_read"] == own["bytes_dense"] == 4 * n_seen * row


@pytest.mark.parametrize("unified", [True, False])
def test_latent_replies_beside_a_prompt(model: GetModel, unified: bool) -> None:
    """Two replies and a piece of a prompt in one batch give what each gives alone."""
    m = model("deepseek2")
    batches = [[(50, 330, 0)], prompt(40, 2), [(50, 200, 1)]]
    with Context(m, watch=Watch(), n_ctx=3072, n_seq=3, unified=unified) as ctx:
        ctx.set_sparse(SPARQ)
        ctx.decode(prompt(330, 0))
        ctx.decode(prompt(200, 1))
        alone = []
        for batch in batches:
            ctx.decode(batch)
            alone.append(ctx.logits())
        for batch in batches:
            ctx.seq_rm(batch[0][2], batch[0][1])
        n_before = ctx.info()["counters"]["calls_dense_op"]
        ctx.decode([token for batch in batches for token in batch], logits="all")
        for i, want in zip((0, 40, 41), alone, strict=True):
            assert spread(ctx.logits(i), want) < 0.02
        assert ctx.info()["counters"]["calls_dense_op"] == n_before + 4 * 2


# ---- caches ----


@pytest.mark.parametrize("type_k", ["f16", "bf16", "f32"])
@pytest.mark.parametrize("type_v", ["f16", "bf16", "f32"])
def test_cache_types_are_sparse(model: GetModel, type_k: str, type_v: str) -> None:
    for heads in ({}, {"n_head_kv": 4}):
        run(model(**heads), SPARQ, type_k=type_k, type_v=type_v)


@pytest.mark.parametrize("head_dim", [32, 64])  # K and V in heads of 64 are rotated (Hadamard)
@pytest.mark.parametrize(
    ("type_k", "type_v"), [("q8_0", "q8_0"), ("q4_0", "q4_0"), ("q8_0", "f16"), ("f16", "q4_0")]
)
def test_quantised_caches_are_sparse(
    model: GetModel, type_k: str, type_v: str, head_dim: int
) -> None:
    m, types = model(head_dim=head_dim), {"type_k": type_k, "type_v": type_v}
    for spec in (SPARQ, SPARQ.replace("f16", "q4") + ",mean_v=on", TOPK):
        run(m, spec, **types)
    results = []
    for spec in ("off", "dense", f"sparq,rank={head_dim},topk=4096,min_ctx=0"):
        with Context(m, watch=Watch(), **types) as ctx:
            ctx.decode(prompt())
            ctx.set_sparse(spec)
            results.append(steps(ctx))
    assert all(spread(x, results[0]) < 0.1 for x in results[1:])  # stock quantises q as well


def test_min_ctx_is_a_promise(model: GetModel) -> None:
    """No sparse call before the context is longer than min_ctx, and some soon after."""
    watch = Watch()
    with Context(model(), watch=watch) as ctx:
        ctx.set_sparse("sparq,rank=8,topk=40,min_ctx=300")
        ctx.decode(prompt(250))
        steps(ctx, 50, first=250)
        assert watch.attends and not any(a.is_sparse for a in watch.attends)
        ctx.decode([(t, 300 + i, 0) for i, (t, *_) in enumerate(prompt(260, 1))])
        watch.clear()
        steps(ctx, 5, first=560)
        assert all(a.is_sparse for a in watch.attends)


# ---- settings ----


@pytest.mark.parametrize("how", NEAR)
@pytest.mark.parametrize("spec", [SPARQ, SPARQ + ",mean_v=on", TOPK, "dense"])
def test_prefill_is_exact(model: GetModel, spec: str, how: str) -> None:
    """Logits of every prompt token are those of `off` within rounding, over several ubatches."""
    results = []
    for s in ("off", f"{spec},prompt={how}"):
        with Context(model(n_head_kv=4), n_ubatch=128) as ctx:
            ctx.set_sparse(s)
            rows = []
            for part in (prompt()[:200], prompt()[200:]):
                assert ctx.decode(part, logits="all") == 0
                rows += [ctx.logits(i) for i in range(len(part))]
            results.append(np.array(rows))
            counters = ctx.info().get("counters", {})
    assert spread(results[1], results[0]) < NEAR_PROMPT[how]
    assert counters["calls_prefill"] == 4 * N_PROMPT and counters["calls_stock"] == 0


@pytest.mark.parametrize(
    ("spec", "options", "fault"),
    [
        ("dense", {"flash": False}, "flash"),
        (SPARQ, {"flash": False}, "flash"),
        ("sparq,rank=33", {}, "rank"),
        ("topk,k_layers=8:8", {}, "k_layers"),
        ("sparq,rnk=3", {}, "rnk"),
    ],
)
def test_what_is_refused_changes_nothing(
    model: GetModel, spec: str, options: dict[str, bool], fault: str
) -> None:
    with Context(model(), watch=Watch(), **options) as ctx:
        before = "off" if options else SPARQ
        ctx.set_sparse(before)
        with pytest.raises(SpecError, match=f"{fault}.*\n."):  # and a hint
            ctx.set_sparse(spec)
        ctx.decode(prompt())
        steps(ctx, 2)
        info = ctx.info()
        assert info["active"] == (not options)
        assert options or (info["spec"], info["counters"]["calls_sparse"]) == (SPARQ, 8)


# ---- the environment variable ----

PROGRAM = """
import ctypes, json, sys
import llama_cpp
llm = llama_cpp.Llama(sys.argv[1], n_ctx=1024, seed=1, **json.loads(sys.argv[2]))
llm.eval([3 + 7 * i % 250 for i in range(400)])
out = []
for i in range(8):
    llm.eval([40 + i])
    out.append(llama_cpp.llama_get_logits_ith(llm.ctx, -1)[: llm.n_vocab()])
info = llama_cpp.llama_cpp._lib.llama_get_sparse_attn_info
info.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t]
text = ctypes.create_string_buffer(1 << 16)
info(llm.ctx, text, len(text))
print(json.dumps({"logits": out, "info": json.loads(text.value)}))
"""


def program(model: Path, spec: str | None, **options: Any) -> subprocess.CompletedProcess[str]:
    """An ordinary program of llama-cpp-python, which knows nothing of us but the variable."""
    argv: Sequence[str] = [sys.executable, "-c", PROGRAM, str(model), json.dumps(options)]
    env = python_environment(**({} if spec is None else {"SPARQ_ATTN": spec}))
    return subprocess.run(argv, env=env, capture_output=True, text=True, timeout=300)


def test_the_variable_makes_an_unmodified_program_sparse(tmp_path: Path) -> None:
    """With off it is as if it were not set; a wrong one ends the program, also where it hides what
    the library prints."""
    file = tiny_models.write(tmp_path / "m.gguf", "llama", n_layer=3)
    plain, sparse, off = (program(file, spec) for spec in (None, SPARQ, "off"))
    for done in (plain, sparse, off):
        assert done.returncode == 0, done.stderr
    a, b = json.loads(plain.stdout), json.loads(sparse.stdout)
    assert not a["info"]["active"] and a == json.loads(off.stdout)
    assert b["info"]["active"] and b["info"]["counters"]["calls_sparse"] == 8 * 3
    assert spread(np.array(b["logits"]), np.array(a["logits"])) > 0.05
    for options in ({}, {"verbose": False}):
        wrong = program(file, "sparq,rnk=8", **options)
        assert wrong.returncode != 0 and not wrong.stdout
        assert options or ("SPARQ_ATTN" in wrong.stderr and "rnk" in wrong.stderr)


@pytest.mark.parametrize("text", ["0, 3", "0,x", "-1", ",0", "0;3", "4294967296"])
def test_kv_in_memory_is_a_list_of_layers(
    model: GetModel, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That a layer is not there is only said."""
    monkeypatch.setenv("SPARQ_KV_IN_MEMORY", text)
    with pytest.raises(RuntimeError):
        Context(model())
    assert "SPARQ_KV_IN_MEMORY" in log_text()
    for text, said in (("0,4", True), ("0,3", False)):
        monkeypatch.setenv("SPARQ_KV_IN_MEMORY", text)
        log = keep_log()
        Context(model()).close()
        assert ("SPARQ_KV_IN_MEMORY" in "".join(log)) == said


def test_numbers_do_not_follow_the_locale(tmp_path: Path) -> None:
    """A program with decimal commas: the same line is read, and written, with points."""
    if not shutil.which("localedef"):
        pytest.skip("no localedef")
    made = ["localedef", "-i", "de_DE", "-f", "UTF-8", str(tmp_path / "de_DE.UTF-8")]
    subprocess.run(made, check=True, capture_output=True)
    turned = tiny_models.make("llama")
    turned.keys["rope.freq_base"] = 10000.5
    model = tiny_models.save(turned, tmp_path / "m.gguf")
    found = from_child("-c", _LOCALE, model, LOCPATH=str(tmp_path))
    assert found[:3] == ["0,5", "sparq,ratio=0.125,top_p=0.9", "ratio"]
    assert "10000.5" in found[3], "the kind of a document's K"


_LOCALE = """
import ctypes, json, locale, sys
from llama import Context, Model, bindings
parse, text = bindings()._lib.llama_sparse_attn_parse, ctypes.create_string_buffer(200)
locale.setlocale(locale.LC_ALL, "de_DE.UTF-8")
found = [locale.str(0.5)]
assert parse(b"sparq,ratio=0.125,top_p=0.9", text, 200) > 0
found.append(text.value.decode())
assert parse(b"sparq,ratio=0,125", text, 200) < 0 and parse(b"sparq,top_p=0x1", text, 200) < 0
assert parse(b"sparq,ratio=a", text, 200) < 0
found.append(text.value.decode().split()[0])
with Context(Model(sys.argv[1]), n_ctx=256) as ctx:
    kind = bindings()._lib.llama_sparse_document_kind
    assert kind(ctypes.c_void_p(ctx.handle), text, 200) > 0
print(json.dumps([*found, text.value.decode().partition("\\n")[0]]))
"""
