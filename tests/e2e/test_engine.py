"""The engine on a tiny random model, and on the demo model where it matters that text has sense."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny as tiny_models
from cpu import has_fast
from tiny import text_of, write_tiny_gguf

import pyorch
from pyorch import engine, paths
from pyorch.attention.cost import GROUP, layer_costs
from pyorch.attention.spec import AttentionSpec, parse_spec
from pyorch.engine import Rope, Sampling
from pyorch.engine.sampling import REPEAT_LAST_N
from pyorch.engine.text import TextStream
from pyorch.errors import SparqError
from pyorch.measure import state

SPARSE = "sparq,rank=8,topk=64,min_ctx=0"


def greedy(session: engine.Session, prompt: list[int] | str, n: int = 24) -> list[int]:
    return [p.token for p in engine.generate(session, prompt, max_tokens=n, ignore_eog=True)]


# ---- text ----


@pytest.mark.parametrize("where", ["docs/commands.md", "docs/methods.md", "pyorch"])
def test_the_example_runs(
    tiny: Path, demo_model: Path, where: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first lines of Python that a reader sees, with a small model in place of theirs."""
    if where == "pyorch":
        example = (pyorch.__doc__ or "").partition("\n\n")[2]
    elif not paths.in_checkout():
        pytest.skip("the documents are not installed")
    else:
        text = (paths.REPOSITORY / where).read_text("utf-8")
        (example,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    model = demo_model if where == "docs/methods.md" else tiny  # h2o needs a text with sense
    ours, n = re.subn(r'"[\w-]+\.gguf"', f"{str(model)!r}", example)
    ours = re.sub(r"n_ctx=\d+", "n_threads=1", ours)
    assert n == 1
    exec(compile(ours, where, "exec"), {"prompt": text_of(100)})
    assert capsys.readouterr().out


def test_text_survives_tokens(session: engine.Session) -> None:
    text = "Grüße, 世界! 🙂 a  b"
    tokens = engine.tokenize(session, text)
    assert tokens[0] == session.lib.llama_vocab_bos(session.vocab)
    assert engine.detokenize(session, tokens) == text


def test_ctrl_c_ends_a_count_of_tokens(
    session: engine.Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the piece of the text that is at hand."""
    tokenize, pieces = session.lib.llama_tokenize, []

    def interrupted(*args: Any) -> int:
        pieces.append(args)
        os.kill(os.getpid(), signal.SIGINT)
        return tokenize(*args)

    monkeypatch.setattr(session.lib, "llama_tokenize", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.check_text(session, "word " * 1_000_000, 10**6)
    assert len(pieces) == 1


def test_stream_gives_whole_characters_only(session: engine.Session) -> None:
    stream = TextStream(session, stop=[])
    tokens = engine.tokenize(session, "é世🙂", add_special=False)
    assert len(tokens) == 2 + 3 + 4  # one per byte: most end inside a character
    parts = [stream.add(t)[0] for t in tokens]
    assert [p for p in parts if p] == ["é", "世", "🙂"]


def test_stream_holds_back_what_may_begin_a_stop_string(session: engine.Session) -> None:
    stream = TextStream(session, stop=["\nUser:", "END"])
    shown, met = "", False
    for token in engine.tokenize(session, "fine EN\nUs \nUser: no", add_special=False):
        text, met = stream.add(token)
        shown += text
        assert "\nU" not in shown[-3:]  # never shown before it is certain
        if met:
            break
    assert met and shown == "fine EN\nUs "


# ---- prefill, decode, generate ----


def test_generate_is_the_same_from_a_warm_cache(session: engine.Session) -> None:
    prompt = engine.tokenize(session, text_of(700))
    cold = greedy(session, prompt)
    assert greedy(session, prompt) == cold
    assert greedy(session, text_of(700)) == cold  # a text is tokenised
    assert len(cold) == 24


def test_a_penalty_counts_the_last_64_tokens_of_prompt_and_reply(session: engine.Session) -> None:
    prompt = engine.tokenize(session, text_of(100))

    def penalised(penalty: float, n: int = 80) -> list[int]:
        """The definition: greedy, logits of the last 64 tokens moved down."""
        tokens = list(prompt)
        engine.prefill(session, engine.align(session, tokens))
        for _ in range(n):
            x = engine.logits(session)
            recent = np.unique(tokens[-REPEAT_LAST_N:])
            x[recent] = np.where(x[recent] > 0, x[recent] / penalty, x[recent] * penalty)
            tokens.append(int(x.argmax()))
            engine.decode(session, tokens[-1])
        return tokens[len(prompt) :]

    def generated(penalty: float) -> list[int]:
        sampling = Sampling(repeat_penalty=penalty)
        pieces = engine.generate(session, prompt, max_tokens=80, sampling=sampling, ignore_eog=True)
        return [p.token for p in pieces]

    assert generated(1.5) == penalised(1.5) != generated(1)
    assert generated(1) == penalised(1)


def test_full_context(tiny: Path) -> None:
    with engine.load(tiny, n_ctx=256, n_threads=1) as s:
        with pytest.raises(SparqError, match="300 tokens.* 256"):
            list(engine.generate(s, list(range(3, 259)) + [5] * 44))
        prompt = engine.tokenize(s, text_of(250))
        pieces = list(engine.generate(s, prompt, max_tokens=100, ignore_eog=True))
        assert pieces[-1].finish == "context"
        assert len(s.tokens) == s.n_ctx
        with pytest.raises(SparqError, match="257 tokens.* 256"):
            engine.decode(s, 5)


@pytest.mark.parametrize("by", ["flag", "Ctrl-C"])
@pytest.mark.parametrize("attention", ["off", SPARSE])
def test_stopping_within_a_batch(tiny: Path, attention: str, by: str) -> None:
    """Nothing of the batch stays, and the session goes on as one that never began it."""
    with engine.load(tiny, n_threads=2, n_batch=650, attention=attention) as s:
        prompt = engine.tokenize(s, text_of(1300))[:1300]
        engine.prefill(s, prompt)
        expected = greedy(s, prompt)
        engine.rewind(s, 0)

        engine.prefill(s, prompt[:650])
        asked = 0

        def should_stop() -> bool:
            nonlocal asked
            asked += 1
            if asked == 20:
                if by == "flag":
                    return True
                os.kill(os.getpid(), signal.SIGINT)
            return False

        with nullcontext() if by == "flag" else pytest.raises(KeyboardInterrupt):
            engine.prefill(s, prompt[650:], should_stop=should_stop)
        assert asked == 20
        assert s.tokens == prompt[:650]
        engine.prefill(s, prompt[650:])
        assert greedy(s, prompt) == expected


@pytest.mark.parametrize("arch", ["mamba", "lfm2"])
def test_stopping_where_a_batch_cannot_be_taken_back(tmp_path: Path, arch: str) -> None:
    """A recurrent state forgets all of the text, and the next prompt starts anew."""
    model = tiny_models.write(tmp_path / "m.gguf", arch, n_layer=4)
    with engine.load(model, n_threads=1, n_batch=64, n_ctx=512) as s:
        prompt = [3 + i * 7 % 250 for i in range(200)]
        expected = greedy(s, prompt)
        engine.rewind(s, 0)
        done, asked = 0, 0

        def progress(n: int, _: int) -> None:
            nonlocal done
            done = n

        def should_stop() -> bool:
            nonlocal asked
            asked += done > 0
            return asked == 10

        engine.prefill(s, prompt, progress=progress, should_stop=should_stop)
        assert (done, asked, s.tokens) == (64, 10, [])
        assert greedy(s, prompt) == expected


@pytest.mark.parametrize("n_reply", [20, 700])
@pytest.mark.parametrize("arch", ["mamba", "lfm2", "gemma3", "gpt-oss"])
def test_a_reply_is_taken_back(tmp_path: Path, arch: str, n_reply: int) -> None:
    """Of the prompt only its end is read again, which may differ, and what follows is as if the
    reply had never been. Windows reach back over a short reply by themselves."""
    model = tiny_models.write(tmp_path / "m.gguf", arch, n_layer=6)
    with engine.load(model, n_threads=1, n_ctx=2048) as s:
        prompt = [3 + i * 7 % 250 for i in range(900)]
        changed = [*prompt[:-5], *range(60, 90)]
        engine.prefill(s, prompt[:868], ends=False)  # in the same batches
        engine.prefill(s, changed[868:])
        wanted = engine.logits(s)
        engine.rewind(s, 0)

        engine.prefill(s, prompt)
        for i in range(n_reply):
            engine.decode(s, 5 + i % 200)
        rest = engine.align(s, changed)
        has_windows = arch in ("gemma3", "gpt-oss")
        assert len(rest) == (30 if has_windows and n_reply == 20 else 57)
        engine.prefill(s, rest)
        assert s.tokens == changed
        if has_windows:  # other batches, or in other cells: sums in another order
            np.testing.assert_allclose(engine.logits(s), wanted, atol=0.02)
        else:
            assert np.array_equal(engine.logits(s), wanted)


# ---- attention ----


def logits_with(session: engine.Session, prompt: list[int], spec: str) -> np.ndarray:
    """Logits of the last prompt token, decoded alone so that attention is `spec`."""
    engine.set_attention(session, spec)
    engine.prefill(session, engine.align(session, prompt))
    return engine.logits(session)


@pytest.mark.parametrize("method", ["dense", SPARSE])
def test_a_fast_prompt_is_counted(
    session: engine.Session, method: str, native_lib_dir: Path
) -> None:
    """By default, where the CPU has products of few bits; and never with prompt=f32."""
    here = has_fast(ctypes.CDLL(str(next(native_lib_dir.glob("libggml-cpu.*")))))
    prompt = engine.tokenize(session, text_of(1500))
    exact = logits_with(session, prompt, f"{method},prompt=f32")
    assert engine.info(session).counter("blocks_fast") == 0
    engine.rewind(session, 0)
    fast = logits_with(session, prompt, method)
    assert (engine.info(session).counter("blocks_fast") > 0) == here
    assert np.array_equal(exact, fast) == (not here)


@pytest.mark.parametrize(
    "line",
    [
        "sparq,ratio=1/8",
        "sparq,ratio=1/4,budget=ramp",
        "sparq,ratio=1/4,budget=ramp-down",
        "sparq,k_layers=dense:20%,rank_layers=4:16,mean_v=on",
        "sparq,rank=8,topk=300",
        "sparq,ratio=1/8,mean_v=on",
        "sparq,ratio=1/8,shadow=q8",
        "sparq,ratio=1/16,shadow=q4",
        "topk,ratio=1/8",
        "dense",
    ],
)
@pytest.mark.parametrize("types", [("f16", "f16"), ("q8_0", "q8_0"), ("q8_0", "f16")])
def test_byte_model_agrees_with_the_library(tiny: Path, line: str, types: tuple[str, str]) -> None:
    """`explain` and the library share one formula: rows exactly, bytes within the unsealed tail
    (here one position)."""
    spec = parse_spec(line)
    with engine.load(tiny, n_threads=1, type_k=types[0], type_v=types[1], attention=spec) as s:
        prompt = engine.tokenize(s, text_of(2176))
        engine.prefill(s, prompt[:-1])
        engine.reset_counters(s)
        engine.decode(s, prompt[-1])
        info = engine.info(s)
        element = [engine.cache_type(t).bytes_per_element for t in types]
        costs = layer_costs(s.geometry, spec, len(prompt), *element)
        assert info.counter("bytes_dense") == sum(c.bytes_dense for c in costs)
        rows = sum(c.split.topk * c.n_head_kv for c in costs)
        assert info.counter("positions_read") == rows
        expected = sum(c.bytes_read for c in costs)
        assert info.counter("bytes_read") == pytest.approx(expected, rel=0.01)
        if spec.method == "sparq":
            assert info.shadow_bytes == s.settings.shadow_bytes()


def test_top_p_reads_less_within_its_cap(session: engine.Session) -> None:
    """Fewer rows with a smaller p, up to cap times k with p near 1, and never fewer than forced."""
    prompt = engine.tokenize(session, text_of(2176))
    engine.prefill(session, prompt[:-1])

    def rows(keys: str) -> int:
        engine.rewind(session, len(prompt) - 1)
        engine.set_attention(session, "sparq,rank=16,topk=200,local=50,min_ctx=0" + keys)
        engine.reset_counters(session)
        engine.decode(session, prompt[-1])
        return engine.info(session).counter("positions_read") // sum(session.geometry.n_head_kv)

    assert rows("") == rows(",top_p=1") == 200
    counts = [rows(f",top_p={p},cap=4") for p in (1e-6, 0.1, 0.3, 0.9999)]
    assert counts == sorted(counts) and counts[0] == 54 < counts[2] < counts[3] == 800


@pytest.mark.parametrize("shadow", ["f16", "q8", "q4"])
def test_a_restored_state_is_sealed_at_once(tiny: Path, tmp_path: Path, shadow: str) -> None:
    """When it is loaded, by whatever call, or SparQ is turned on: no token seals it."""
    spec, got, n_pos = f"sparq,rank=8,topk=64,min_ctx=0,shadow={shadow}", [], 10 * GROUP + 10
    for when in ("read", "turned on", "turned on again", "a sequence loaded"):
        first = "off" if when == "turned on" else spec
        with engine.load(tiny, n_ctx=2048, n_threads=2, attention=first) as s:
            if when == "turned on again":
                engine.set_attention(s, "off")
            state.fill(s, n_pos, seed=4)
            n_group = 10 * s.geometry.n_layer
            if when.startswith("turned on"):
                assert engine.info(s).counter("groups_sealed") == 0
                engine.set_attention(s, spec)
            elif when == "a sequence loaded":  # as llama-server does with its slots
                file = str(tmp_path / "sequence").encode()
                tokens, n = (ctypes.c_int32 * 2048)(), ctypes.byref(ctypes.c_size_t())
                assert s.lib.llama_state_seq_save_file(s.ctx, file, 0, tokens, n_pos)
                engine.reset_counters(s)
                assert s.lib.llama_state_seq_load_file(s.ctx, file, 0, tokens, 2048, n)
            assert engine.info(s).counter("groups_sealed") == n_group
            assert seal(s) == 0 and n_wrong(s) == 0
            engine.reset_counters(s)
            engine.decode(s, 70)
            assert engine.info(s).counter("groups_sealed") == 0
            got.append((engine.logits(s), engine.info(s).counter("bytes_score")))
    for logits, n_bytes in got[1:]:
        assert np.array_equal(logits, got[0][0]) and n_bytes == got[0][1]


@pytest.mark.parametrize("shadow", ["f16", "q8", "q4"])
def test_a_full_cache(tiny: Path, shadow: str) -> None:
    spec, n_ctx = f"sparq,rank=8,topk=64,min_ctx=0,shadow={shadow}", 1024
    with engine.load(tiny, n_ctx=n_ctx, n_threads=2, attention=spec) as s:
        state.fill(s, n_ctx - 1, seed=4)
        for n_sealed in (n_ctx // GROUP - 1, 0):
            engine.decode(s, 70)  # fills the last cell, whose group the next token would seal
            assert engine.info(s).counter("groups_sealed") == n_sealed * s.geometry.n_layer
            assert seal(s) == s.geometry.n_layer and n_wrong(s) == 0
            engine.reset_counters(s)
            engine.rewind(s, n_ctx - 1)


def called(s: engine.Session, name: str) -> int:
    function = s.lib._lib[f"llama_sparse_attn_{name}"]
    function.restype, function.argtypes = ctypes.c_int64, [ctypes.c_void_p]
    return function(s.ctx)


def n_wrong(s: engine.Session) -> int:
    """Of the tensors of the shadow, those that differ from what K and V give."""
    return called(s, "check")


def seal(s: engine.Session) -> int:
    """Seal what waits. Returns how many groups that were, summed over layers."""
    return called(s, "seal")


def test_the_environment_variable_is_for_other_programs(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the engine makes has the attention it is told, or none."""
    for text in ("topk,k=100", "nonsense"):
        monkeypatch.setenv("SPARQ_ATTN", text)
        with engine.load(tiny, n_threads=1) as s:
            assert engine.info(s).spec == "off"


# ---- load ----


def test_load_refuses_what_cannot_work(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, options in {
        "5000": {"n_ctx": 5000},
        "'x'": {"numa": "x"},
        "rank 33": {"attention": AttentionSpec("sparq", rank=33, topk=100)},
        "f17": {"type_k": "f17"},
    }.items():
        with pytest.raises(SparqError, match=name) as error:
            engine.load(tiny, **options)
        assert error.value.hint
    monkeypatch.setenv("SPARQ_MEMORY_LIMIT", "1000000")
    with pytest.raises(SparqError, match="977 KiB") as error:
        engine.load(tiny)
    assert "--ctx" in error.value.hint


def test_memory_is_checked_with_the_shadow(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Enough for 2 MiB of cache; with half as much of shadow only if the cache is quantised."""
    spec = SPARSE + ",shadow=f16,mean_v=off"
    monkeypatch.setenv("SPARQ_MEMORY_LIMIT", str((2 << 20) + (200 << 10)))  # weights need no room
    engine.load(tiny, n_threads=1).close()
    with pytest.raises(SparqError, match="2 MiB .* 1.01 MiB") as error:
        engine.load(tiny, attention=spec)
    assert "shadow=q4" in error.value.hint
    engine.load(tiny, n_threads=1, type_k="q8_0", type_v="q8_0", attention=spec).close()
    with engine.load(tiny, n_threads=1) as s:
        monkeypatch.setenv("SPARQ_MEMORY_LIMIT", "1000000")
        with pytest.raises(SparqError, match="1.01 MiB.* 977 KiB"):
            engine.set_attention(s, spec)
        monkeypatch.setenv("SPARQ_MEMORY_LIMIT", str((1 << 20) + (16 << 10)))
        engine.set_attention(s, spec)
        monkeypatch.setenv("SPARQ_MEMORY_LIMIT", "1000000")
        engine.set_attention(s, spec)  # it is there already


def test_a_context_beyond_the_training(tmp_path: Path) -> None:
    """Positions that the model was not trained on are decoded, sparsely, and the scale counts."""
    model = write_tiny_gguf(tmp_path / "m.gguf", n_ctx=512)
    found = []
    for rope in (
        Rope("linear", freq_scale=1 / 4),
        Rope("linear", freq_scale=1 / 2),
        Rope("yarn", freq_scale=1 / 4),
        Rope("yarn", freq_scale=1 / 4, yarn_orig_ctx=64),
        Rope(freq_base=5e4),
    ):
        with engine.load(model, n_ctx=2048, n_threads=1, attention=SPARSE, rope=rope) as s:
            engine.prefill(s, engine.tokenize(s, text_of(1200)))
            engine.reset_counters(s)
            engine.decode(s, 70)
            assert engine.info(s).counter("calls_sparse") == s.geometry.n_layer
            assert all(np.abs(engine.logits(s) - other).max() > 0.01 for other in found), rope
            found.append(engine.logits(s))
    assert np.isfinite(found).all()


def test_settings_of_rope() -> None:
    for rope in (Rope(), Rope("yarn", freq_scale=0.25, yarn_orig_ctx=4096, freq_base=5e4)):
        assert Rope.parse(str(rope)) == rope
    for wrong in ({"scaling": "longer"}, {"freq_scale": 0}, {"yarn_orig_ctx": -1}):
        with pytest.raises(SparqError, match=next(iter(wrong))):
            Rope(**wrong)


def test_numa_strategies(tiny: Path) -> None:
    """Set in a process of their own: the first one counts, for good."""
    code = "import sys; from pyorch import engine; engine.load(sys.argv[1], numa=sys.argv[2])"
    for name in engine.NUMA:
        done = subprocess.run([sys.executable, "-c", code, tiny, name], capture_output=True)
        assert (done.returncode, done.stderr) == (0, b"")  # the library's log is silent by default


def test_files_that_llama_cpp_does_not_load(tmp_path: Path) -> None:
    """What it says is told."""
    path = write_tiny_gguf(tmp_path / "m.gguf", arch="llama9")
    with pytest.raises(SparqError, match="unknown model architecture: 'llama9'"):
        engine.load(path)
    path = write_tiny_gguf(tmp_path / "m.gguf")
    path.write_bytes(path.read_bytes().replace(b"blk.1.attn_q", b"blk.1.attn_x"))
    with pytest.raises(SparqError, match="blk.1.attn_q"):
        engine.load(path)
