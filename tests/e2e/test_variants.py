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

import numpy as np
import pytest
import tiny as tiny_models
from llama import Context, Model, SpecError, Token, keep_log, log_text, python_environment
from nodes import Watch
from quick import pairwise

N_PROMPT, N_STEP = 330, 12
SPARQ = "sparq,rank=8,topk=40,min_ctx=0,shadow=f16"
NEAR = {
    "f32": 0.03,
    "fast": 0.25,
}  # what rounding may change of a prompt and replies, as a share of the spread
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

# arch, sizes, layers that are sparse (of 4)
ARCHITECTURES = [
    ("llama", {}, [0, 1, 2, 3]),
    ("llama", {"n_head_kv": 4}, [0, 1, 2, 3]),  # MHA: mean value on by itself
    ("llama", {"n_head": 3, "n_head_kv": 1, "head_dim": 80}, [0, 1, 2, 3]),  # MQA, odd sizes
    ("llama", {"n_head": 2, "n_head_kv": 1, "head_dim": 256}, [0, 1, 2, 3]),
    ("qwen2", {}, [0, 1, 2, 3]),
    ("qwen3", {}, [0, 1, 2, 3]),
    ("gptneox", {"n_head_kv": 4}, [0, 1, 2, 3]),
    ("mpt", {"n_head_kv": 4}, [0, 1, 2, 3]),
    (
        "mpt",
        {"n_head": 6, "n_head_kv": 2},
        [0, 1, 2, 3],
    ),  # ALiBi, a number of heads that is no power of two
    ("openelm", {}, [0, 1, 2, 3]),  # heads differ from layer to layer
    ("deepseek2-unpacked", {}, [0, 1, 2, 3]),  # longer keys than values
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
            logits = steps(ctx)
            info = ctx.info()
            assert ctx.check_shadow() == (-1 if spec == TOPK else 0)
        assert np.isfinite(logits).all()
        assert spread(logits, dense) > 0.05, (
            "sparse attention changed nothing: the test would not see a fault"
        )
        assert [x["il"] for x in info["layers"] if x["state"] == "sparse"] == sparse
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
    kind=ARCHITECTURES[:4] + ARCHITECTURES[7:],
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


def test_sliding_window_layers_say_why_they_are_dense(model: GetModel) -> None:
    for arch in ("gemma2", "gpt-oss"):
        with Context(model(arch)) as ctx:
            ctx.set_sparse(SPARQ)
            ctx.decode(prompt())
            steps(ctx, 2)
            info = ctx.info()
        reasons = {x["il"]: x["reason"] for x in info["layers"]}
        assert reasons == {0: "sliding-window layer", 1: "", 2: "sliding-window layer", 3: ""}
        assert info["counters"]["stock_reasons"] == {"sliding-window layer": 2 * 2}


@pytest.mark.parametrize("types", [{}, {"type_k": "q8_0", "type_v": "q8_0"}])
@pytest.mark.parametrize("arch", ["gemma2", "gpt-oss"])
def test_prompts_of_sliding_window_layers_are_ours(
    model: GetModel, arch: str, types: dict[str, str]
) -> None:
    """Looked at by the oracle."""
    watch = Watch()
    with Context(model(arch), watch=watch, n_ubatch=128, **types) as ctx:
        ctx.set_sparse("dense")
        assert ctx.decode(prompt()) == 0
        counters = ctx.info()["counters"]
    assert watch.prefilled == counters["calls_prefill"] == 4 * N_PROMPT
    assert counters["calls_stock"] == 0


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
    m, batches = model("deepseek2"), []
    for seq, n in enumerate((330, 200)):
        batches.append([(50, n, seq)])
    batches.insert(1, prompt(40, 2))
    with Context(m, watch=Watch(), n_ctx=3072, n_seq=3, unified=unified) as ctx:
        ctx.set_sparse(SPARQ)
        ctx.decode(prompt(330, 0))
        ctx.decode(prompt(200, 1))
        alone = []
        for batch in batches:
            ctx.decode(batch)
            alone.append(ctx.logits())
        for seq, n in ((0, 330), (1, 200), (2, 0)):
            ctx.seq_rm(seq, n)
        n_before = ctx.info()["counters"]["calls_dense_op"]
        together = [token for batch in batches for token in batch]
        ctx.decode(together, logits="all")
        at = [0, 40, 41]
        for i, want in zip(at, alone, strict=True):
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


@pytest.mark.parametrize("unified", [True, False])
@pytest.mark.parametrize("arch", ["llama", "gemma2", "lfm2"])
def test_several_sequences(model: GetModel, arch: str, unified: bool) -> None:
    """Sequences of different lengths, decoded together, give what each gives alone."""
    m, lengths = model(arch), (330, 200, 77)
    # in a unified cache blocks of few bits hold other sequences too, and round otherwise
    spec = f"{SPARQ},prompt=f32" if unified else SPARQ
    alone = []
    for seq, n in enumerate(lengths):
        with Context(m, watch=Watch()) as ctx:
            ctx.set_sparse(spec)
            ctx.decode([(t, p, 0) for t, p, _ in prompt(n, seq)])
            ctx.decode([(50, n, 0)])
            alone.append(ctx.logits())
    watch = Watch()
    with Context(m, watch=watch, n_ctx=3072, n_seq=3, unified=unified) as ctx:
        ctx.set_sparse(spec)
        for seq, n in enumerate(lengths):
            ctx.decode(prompt(n, seq))
        assert not watch.attends
        ctx.decode([(50, n, seq) for seq, n in enumerate(lengths)], logits="all")
        together = [ctx.logits(i) for i in range(3)]
    assert watch.attends and all(a.is_sparse for a in watch.attends)
    for a, b in zip(together, alone, strict=True):
        assert spread(a, b) < 0.02


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


def test_a_token_of_several_sequences(model: GetModel) -> None:
    """A prompt that two sequences share is one set of cells; each then goes its own way."""
    watch = Watch()
    with Context(model(), watch=watch, n_seq=2) as ctx:
        ctx.set_sparse(SPARQ)
        ctx.decode(prompt())
        ctx.seq_cp(0, 1)
        for i in range(4):
            assert (
                ctx.decode([(60 + i, N_PROMPT + i, 0), (90 + i, N_PROMPT + i, 1)], logits="all")
                == 0
            )
        assert watch.attends and all(a.is_sparse for a in watch.attends)
        assert not np.array_equal(ctx.logits(0), ctx.logits(1))


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


def test_flash_attention_off_is_refused_with_a_hint(model: GetModel) -> None:
    with Context(model(), flash=False) as ctx:
        for spec in ("dense", SPARQ, TOPK):
            with pytest.raises(SpecError) as error:
                ctx.set_sparse(spec)
            message, hint = str(error.value).split("\n")
            assert "flash attention" in message and "flash_attn=True" in hint
        ctx.set_sparse("off")
        assert ctx.decode(prompt(20)) == 0
        assert not ctx.info()["active"]


@pytest.mark.parametrize(("spec", "message", "hint"), [
    ("sparq,rank=33", "rank is above the head size of the model: 33 > 32", "at most 32"),
    ("topk,k_layers=8:8", "k_layers has 2 entries for 4 layers", "one for each layer"),
    ("sparq,rnk=3", "unknown key: rnk", "write ratio, rank, topk"),
])  # fmt: skip
def test_refused_spec_changes_nothing(model: GetModel, spec: str, message: str, hint: str) -> None:
    with Context(model(), watch=Watch()) as ctx:
        ctx.set_sparse(SPARQ)
        with pytest.raises(SpecError) as error:
            ctx.set_sparse(spec)
        assert str(error.value).startswith(message) and hint in str(error.value).split("\n")[1]
        assert ctx.info()["spec"] == SPARQ
        ctx.decode(prompt())
        steps(ctx, 2)
        assert ctx.info()["counters"]["calls_sparse"] == 8


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


def program(
    model: Path, spec: str | None, options: dict | None = None
) -> subprocess.CompletedProcess[str]:
    """An ordinary program of llama-cpp-python, which knows nothing of us but the variable."""
    argv: Sequence[str] = [sys.executable, "-c", PROGRAM, str(model), json.dumps(options or {})]
    env = python_environment(**({} if spec is None else {"SPARQ_ATTN": spec}))
    return subprocess.run(argv, env=env, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.write(tmp_path_factory.mktemp("model") / "m.gguf", "llama", n_layer=3)


def test_variable_makes_an_unmodified_program_sparse(file: Path) -> None:
    plain, sparse = program(file, None), program(file, SPARQ)
    assert plain.returncode == 0, plain.stderr
    assert sparse.returncode == 0, sparse.stderr
    assert "turning flash attention on" in sparse.stderr  # the class has it off by default
    a, b = json.loads(plain.stdout), json.loads(sparse.stdout)
    assert not a["info"]["active"]
    assert b["info"]["active"] and b["info"]["counters"]["calls_sparse"] == 8 * 3
    assert spread(np.array(b["logits"]), np.array(a["logits"])) > 0.05


def test_variable_off_is_as_if_not_set(file: Path) -> None:
    plain, off = program(file, None), program(file, "off")
    assert off.returncode == 0, off.stderr
    assert json.loads(plain.stdout) == json.loads(off.stdout)
    assert "flash attention on" not in off.stderr


@pytest.mark.parametrize(
    ("options", "said"),
    [({}, "unknown key: rnk"), ({"verbose": False}, "Failed to create llama_context")],
)
def test_wrong_variable_stops_the_program(file: Path, options: dict, said: str) -> None:
    """verbose=False hides what the library prints, but it must not run dense."""
    run = program(file, "sparq,rnk=8", options)
    assert run.returncode != 0 and not run.stdout and said in run.stderr
    assert options or ("SPARQ_ATTN" in run.stderr and "write ratio, rank, topk" in run.stderr)


def test_wrong_variable_fails_context_creation(
    model: GetModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPARQ_ATTN", "sparq,rank=999")
    m = model()
    with pytest.raises(RuntimeError):
        Context(m)
    assert "SPARQ_ATTN: rank is above the head size" in log_text()


@pytest.mark.parametrize("text", ["0, 3", "0,x", "-1", ",0", "0;3", "4294967296"])
def test_kv_in_memory_is_a_list_of_layers(
    model: GetModel, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPARQ_KV_IN_MEMORY", text)
    with pytest.raises(RuntimeError):
        Context(model())
    assert "SPARQ_KV_IN_MEMORY: not the number of a layer: '" in log_text()
    assert "hint: write it as in 0,3,7" in log_text()


def test_kv_in_memory_of_a_layer_that_is_not_there(
    model: GetModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPARQ_KV_IN_MEMORY", "0,4")
    log = keep_log()
    Context(model()).close()
    assert "SPARQ_KV_IN_MEMORY: there is no layer 4; the last one is 3" in "".join(log)
    monkeypatch.setenv("SPARQ_KV_IN_MEMORY", "0,3")
    log = keep_log()
    Context(model()).close()
    assert "SPARQ_KV_IN_MEMORY" not in "".join(log)


def test_numbers_do_not_follow_the_locale(tmp_path: Path) -> None:
    """A program with decimal commas: the same line is read, and written, with points."""
    if not shutil.which("localedef"):
        pytest.skip("no localedef")
    made = ["localedef", "-i", "de_DE", "-f", "UTF-8", str(tmp_path / "de_DE.UTF-8")]
    subprocess.run(made, check=True, capture_output=True)
    run = subprocess.run(
        [sys.executable, "-c", _LOCALE],
        env=python_environment(LOCPATH=str(tmp_path)),
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    assert run.stdout.split() == ["0,5", "sparq,ratio=0.125,top_p=0.9", "ratio"]


_LOCALE = """
import ctypes, locale
from llama import bindings
parse, text = bindings()._lib.llama_sparse_attn_parse, ctypes.create_string_buffer(200)
locale.setlocale(locale.LC_ALL, "de_DE.UTF-8")
print(locale.str(0.5))
assert parse(b"sparq,ratio=0.125,top_p=0.9", text, 200) > 0
print(text.value.decode())
assert parse(b"sparq,ratio=0,125", text, 200) < 0 and parse(b"sparq,top_p=0x1", text, 200) < 0
assert parse(b"sparq,ratio=a", text, 200) < 0
print(text.value.decode().split()[0])
"""
