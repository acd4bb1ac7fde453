"""Every method on the demo model by real decode steps, against what the library really did."""

from __future__ import annotations

import signal
from pathlib import Path

import numpy as np
import oracles
import pytest
import tiny as tiny_models
from test_select import n_read, oracle_of
from trace_session import trace, untrace

from pyorch import engine, policies
from pyorch.attention.spec import parse_spec
from pyorch.errors import SparqError
from pyorch.policies import h2o
from pyorch.policies.base import Heads
from pyorch.policies.oracle import OracleSelector

N_PROMPT, N_STEP = 200, 12

METHODS = [
    "oracle,k=20",
    "oracle,k=50,page=16",
    "flexgen,k=20",
    "low-rank,k=20,rank=8",
    "oracle,k=20,mean_v=on",
    "low-rank,k=20,rank=8,mean_v=on",
    "sparq-tau,k=20,rank=8,mean_v=on",
    "sparq-tau,k=20,rank=8,tau=sqrt-r,mean_v=on",
    "quest,k=50",
    "page-mean-std,k=70",
    "lm-infinite,k=30",
    "streaming-llm,k=30",
    "h2o,k=20",
    "keyformer,k=20",
    "alisa,k=20",
]
RATIOS = [f"{name},ratio=1/8" for name in policies.POLICIES if name != "flexgen"]
RATIOS += ["flexgen,ratio=5/8"]


def tokens_of(session: engine.Session, text: str, n: int = N_PROMPT + N_STEP) -> list[int]:
    return engine.tokenize(session, text)[:n]


def decode(session: engine.Session, tokens: list[int]) -> np.ndarray:
    """Prefill anew all tokens but N_STEP, decode these: their logits (N_STEP, n_vocab)."""
    engine.rewind(session, 0)
    engine.prefill(session, tokens[:-N_STEP])
    return decoded(session, tokens[-N_STEP:])


def decoded(session: engine.Session, tokens: list[int]) -> np.ndarray:
    """Logits after each of these tokens, one at a time."""
    out = []
    for t in tokens:
        engine.decode(session, t)
        out.append(engine.logits(session))
    return np.array(out)


@pytest.mark.parametrize("line", METHODS)
def test_positions_and_bytes_read_are_the_oracle_s(
    demo: engine.Session, text: str, line: str
) -> None:
    """And those of a rewound session are the same."""
    tokens, policy = tokens_of(demo, text), policies.parse(line)
    assert isinstance(policy, policies.Policy)
    policies.switch(demo, policy)
    record = trace(demo)
    try:
        once = decode(demo, tokens)
    finally:
        untrace(demo)
    check_bytes(demo, policy)
    assert len(record.reads) == demo.geometry.n_layer
    for layer, (address, reads) in enumerate(record.reads.items()):
        queries = np.concatenate(record.prompt[address])
        assert len(queries) == N_PROMPT
        scale = reads[0].q.shape[1] ** -0.5
        oracle = oracle_of(policy, queries, reads[0].k, scale, layer)
        oracle.prompt(queries, reads[0].k[:N_PROMPT])
        for read in reads:
            want = oracle.choose(read.q, read.k)
            assert read.cells == want or oracle.margin < 1e-3, f"layer {layer}"
            check_output(read, oracle, line)
            oracle.follow(read.cells)
    engine.rewind(demo, N_PROMPT)
    assert np.array_equal(once, decoded(demo, tokens[N_PROMPT:]))


def check_bytes(demo: engine.Session, policy: policies.Policy) -> None:
    """Those counted are those of the method's formula."""
    counted, geo = policies.counted_bytes(demo), demo.geometry
    assert policies.counters(demo).calls_sparse == N_STEP * geo.n_layer
    assert policies.counters(demo).steps == N_STEP
    d_k, d_v = geo.head_dim_k, geo.head_dim_v
    heads = Heads(geo.n_head[0], geo.n_head_kv[0], d_k, d_v, 2 * d_k, 2 * d_v)
    lengths = range(N_PROMPT + 1, N_PROMPT + N_STEP + 1)
    read = [policy.bytes_read(n_read(policy, n, heads), n, heads) for n in lengths]
    n_kv = geo.n_layer * heads.n_head_kv
    assert counted.read == pytest.approx(n_kv * np.mean(read))
    assert counted.dense == pytest.approx(n_kv * heads.row * np.mean(lengths))
    assert engine.info(demo).counter("bytes_dense") == pytest.approx(counted.dense * N_STEP)


def test_sparq_tau_is_sparq(demo: engine.Session, text: str) -> None:
    """With eq. 9 it reads what the library's own SparQ reads, and says the same."""
    tokens, reads_of, logits = tokens_of(demo, text), [], []
    rule = "k=20,rank=8,mean_v=off"  # the library weighs the mean of V otherwise than eq. 10
    for line in (f"sparq,{rule},shadow=f16,min_ctx=0", f"sparq-tau,{rule}"):
        policies.switch(demo, policies.parse(line))
        reads = trace(demo)
        try:
            logits.append(decode(demo, tokens))
        finally:
            untrace(demo)
        reads_of.append([read.cells for layer in reads.reads.values() for read in layer])
    native, ours = reads_of
    assert len(native) == N_STEP * demo.geometry.n_layer
    assert np.mean([a == b for a, b in zip(native, ours, strict=True)]) > 0.98
    assert np.abs(logits[0] - logits[1]).max() < 0.02 * logits[0].std()


def check_output(read, oracle: oracles.Oracle, line: str) -> None:
    """Attention over the positions that were read, and over no other."""
    for head in range(oracle.n_head):
        cells = read.cells[head // oracle.group]
        over = None if line.startswith("flexgen") else cells  # its softmax is over all
        weights = oracle.scores(read.q, read.k, head, over)
        v = read.v[:, head // oracle.group].astype(float)
        want = sum(weights[p] * v[p] for p in cells)
        if line.endswith("mean_v=on"):
            alpha = oracle.alpha(read.q, read.k, head, cells)
            want = alpha * want + (1 - alpha) * v.mean(axis=0)
        assert np.allclose(read.out[head], want, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("line", RATIOS)
def test_a_ratio_is_that_share_of_the_bytes(demo: engine.Session, text: str, line: str) -> None:
    """From below, and by less than a page of positions."""
    method = policies.parse(line)
    policies.switch(demo, method)
    decode(demo, tokens_of(demo, text))
    page = getattr(method, "page", 1)
    share = policies.counted_bytes(demo).share
    slack = 1.1 * page / N_PROMPT
    own = page / N_PROMPT  # the token's own page is read whatever it costs
    assert method.ratio - slack <= share <= method.ratio + (own if page > 1 else 1e-9)


@pytest.mark.parametrize("name", policies.POLICIES)
def test_reading_all_is_dense(demo: engine.Session, text: str, name: str) -> None:
    tokens = tokens_of(demo, text)
    policies.switch(demo, policies.parse("dense"))
    dense = decode(demo, tokens)
    rank = ",rank=8" if name in ("low-rank", "sparq-tau") else ""
    policies.switch(demo, policies.parse(f"{name},k=100000{rank}"))
    got = decode(demo, tokens)
    assert np.abs(got - dense).max() < 0.005 * dense.std()  # other orders of the same sums
    policies.switch(demo, policies.parse(f"{name},k=20{rank}"))
    assert np.abs(decode(demo, tokens) - dense).max() > 0.1 * dense.std()


def test_a_prompt_read_before_is_asked_for(demo: engine.Session, text: str) -> None:
    policies.switch(demo, policies.parse("off"))
    engine.rewind(demo, 0)
    tokens = tokens_of(demo, text)
    engine.prefill(demo, tokens[:-1])
    policies.switch(demo, policies.parse("h2o,k=20"))
    with pytest.raises(SparqError, match="before it was asked for"):
        engine.decode(demo, tokens[-1])


def test_one_prefill_serves_all_methods(demo_model: Path, demo: engine.Session, text: str) -> None:
    """keep_queries: switched to after the prompt, or before it, in any order: the same."""
    tokens = tokens_of(demo, text)
    lines = ["h2o,k=20", "sparq,ratio=1/8,min_ctx=0", "alisa,k=20", "keyformer,k=20", "h2o,k=30"]
    options = {"n_ctx": 512, "n_threads": 1, "keep_queries": True}
    with policies.open_session(demo_model, policies.parse(lines[1]), **options) as s:
        engine.prefill(s, tokens[:N_PROMPT])
        for line in lines:
            engine.rewind(s, N_PROMPT)
            policies.switch(s, policies.parse(line))
            got = decoded(s, tokens[N_PROMPT:])
            policies.switch(demo, policies.parse(line))
            assert np.array_equal(got, decode(demo, tokens))


@pytest.mark.parametrize("line", ["h2o,k=20", "keyformer,k=20", "alisa,k=20"])
def test_another_prompt_after_a_rewind(
    demo: engine.Session, demo_model: Path, text: str, line: str
) -> None:
    """Half of the prompt stays; what was known of the other half does not.

    The new prompt ends where the decoded tokens of the old one did.
    """
    tokens = tokens_of(demo, text, 2 * N_PROMPT + 2 * N_STEP)
    n = N_PROMPT + N_STEP
    other = tokens[:100] + tokens[-(n - 100) - N_STEP :]
    with policies.open_session(demo_model, line, n_ctx=512, n_threads=1) as fresh:
        want = decode(fresh, other)
    policies.switch(demo, line)
    decode(demo, [*tokens[:n], *other[-N_STEP:]])  # a prompt of the same length
    decode(demo, tokens[:n])
    engine.rewind(demo, 100)
    engine.prefill(demo, other[100:-N_STEP])
    got = decoded(demo, other[-N_STEP:])
    assert np.abs(got - want).max() < 0.01 * want.std()


@pytest.mark.parametrize("where", ["select", "node"])
def test_ctrl_c_waits_for_the_end_of_the_token(
    demo: engine.Session, text: str, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """An exception in a callback of C code would be lost. The session goes on as if nothing was."""
    tokens = tokens_of(demo, text)
    policies.switch(demo, policies.parse("oracle,k=20"))
    want = decode(demo, tokens)
    engine.rewind(demo, N_PROMPT)
    pressed = []
    owner, name = (OracleSelector, "select") if where == "select" else (demo.watch, "node")
    plain = getattr(owner, name)

    def press(*args):
        if not pressed:
            pressed.append(signal.raise_signal(signal.SIGINT))
        return plain(*args)

    monkeypatch.setattr(owner, name, press)
    with pytest.raises(KeyboardInterrupt):
        engine.decode(demo, tokens[N_PROMPT])
    assert pressed and len(demo.tokens) == N_PROMPT + 1
    assert np.array_equal(decoded(demo, tokens[N_PROMPT + 1 :])[-1], want[-1])
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("line", ["oracle,k=20", "sparq,ratio=1/8,min_ctx=0,min_k=1"])
def test_measuring_what_is_read_changes_nothing(demo: engine.Session, text: str, line: str) -> None:
    """The method is asked as ever meanwhile, and after it."""
    tokens = tokens_of(demo, text)
    policies.switch(demo, line)
    want = decode(demo, tokens)
    got, masses = engine.measure_mass(demo, lambda: decode(demo, tokens))
    assert 0 < min(masses) < max(masses) < 1
    assert np.array_equal(got, want) and np.array_equal(decode(demo, tokens), want)


def test_bytes_that_nobody_counted_are_refused(demo: engine.Session, text: str) -> None:
    """Nothing was selected, or the library read something else."""
    policies.switch(demo, policies.parse("oracle,k=20"))
    engine.rewind(demo, 0)
    engine.prefill(demo, tokens_of(demo, text))
    with pytest.raises(SparqError, match="oracle,k=20"):
        policies.counted_bytes(demo)
    decode(demo, tokens_of(demo, text))
    policies.counters(demo).positions_read += 1
    with pytest.raises(SparqError, match="oracle,k=20"):
        policies.counted_bytes(demo)


@pytest.mark.parametrize("positions", [[5, 5], [7, 3], [3, 10_000], [-1, 3], []])
def test_a_bad_choice_is_refused(
    demo: engine.Session, text: str, monkeypatch: pytest.MonkeyPatch, positions: list[int]
) -> None:
    bad = np.array([positions, positions], int).reshape(2, -1)
    monkeypatch.setattr(OracleSelector, "select", lambda *_: bad)
    policies.switch(demo, policies.parse("oracle,k=20"))
    with pytest.raises(SparqError, match="oracle,k=20: chose"):
        decode(demo, tokens_of(demo, text))


def test_more_than_the_selection_holds_is_refused(demo: engine.Session, text: str) -> None:
    policies.switch(demo, policies.parse("oracle,k=512"))
    with pytest.raises(SparqError, match="oracle,k=512"):
        decode(demo, tokens_of(demo, text, 512))
    policies.switch(demo, policies.parse("oracle,ratio=0.99"))
    decode(demo, tokens_of(demo, text, 512))
    assert policies.counted_bytes(demo).share > 0.98


def test_native_methods_are_the_library_s(
    demo: engine.Session, text: str, demo_model: Path
) -> None:
    """Bit for bit what a session without a watch gives."""
    tokens = tokens_of(demo, text)
    for line in ("off", "sparq,ratio=1/8,min_ctx=0,min_k=8", "topk,k=20,min_ctx=0"):
        policies.switch(demo, policies.parse(line))
        got = decode(demo, tokens)
        with engine.load(demo_model, n_ctx=512, n_threads=1, attention=line) as plain:
            assert np.array_equal(got, decode(plain, tokens))


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("orakel", "orakel"),
        ("oracle,ratio=1/8,k=3", "ratio and k"),
        ("oracle,k=0", "k 0"),
        ("oracle,ratio=3", "3"),
        ("oracle,k=x", "k 'x'"),
        ("oracle,sinks=3", "sinks"),
        ("lm-infinite,sinks=-1", "sinks -1"),
        ("streaming-llm,k=4", "k 4"),
        ("lm-infinite,ratio", "ratio"),
        ("keyformer,recent=0", "recent"),
        ("keyformer,seed=-1", "seed"),
        ("low-rank,seed=-1", "seed"),
        ("quest,page=0", "page 0"),
        ("low-rank,k=20", "rank"),
        ("low-rank,rank=0", "rank"),
        ("oracle,mean_v=yes", "mean_v"),
    ],
)
def test_bad_settings_are_refused(line: str, fault: str) -> None:
    with pytest.raises(SparqError) as e:
        policies.parse(line)
    assert fault in e.value.message


def test_a_ratio_below_what_choosing_costs_is_refused(demo: engine.Session, text: str) -> None:
    for line in ("flexgen,ratio=1/2", "quest,ratio=1/20", "low-rank,ratio=1/8,rank=16"):
        policies.switch(demo, policies.parse(line))
        with pytest.raises(SparqError, match=line):
            decode(demo, tokens_of(demo, text))


def test_settings_have_one_canonical_line() -> None:
    for line in (
        "oracle,ratio=1/8,mean_v=on",
        "lm-infinite,k=30",
        "streaming-llm,ratio=1/2,sinks=6",
    ):
        assert str(policies.parse(line)) == line
    assert str(policies.parse("oracle")) == "oracle,ratio=1/8"
    assert policies.parse("oracle") == policies.POLICIES["oracle"]()
    assert policies.parse("sparq,ratio=1/8") == parse_spec("sparq,ratio=1/8")


# ---- other models ----


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory):
    """tiny(arch): a model file of four layers with random weights."""
    folder = tmp_path_factory.mktemp("models")

    def write(arch: str) -> Path:
        return tiny_models.write(folder / f"{arch}.gguf", arch, n_layer=4, **SIZES.get(arch, {}))

    return write


SIZES = {"mpt": {"n_head": 6, "n_head_kv": 2}, "gptneox": {"n_head_kv": 4}}


@pytest.mark.parametrize(
    ("arch", "n_sparse", "types"),
    [
        ("llama", 4, "f16"),
        ("llama", 4, "q8_0"),  # q and K are rotated
        ("gptneox", 4, "f16"),  # no KV head is shared
        ("mpt", 4, "f16"),  # ALiBi
        ("gemma2", 2, "f16"),  # soft-capped; two layers have a window
    ],
)
def test_the_attention_of_the_prompt_is_that_of_the_library(
    tiny, arch: str, n_sparse: int, types: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row of it, made from captured queries, has the logits that SCORE made of the same token."""
    tokens = np.random.default_rng(0).integers(3, 259, 300).tolist()
    rows: dict[int, list[np.ndarray]] = {}
    plain = h2o.H2OSelector.select

    def select(self, step):
        rows.setdefault(self.heads.index, []).append(step.logits.copy())
        return plain(self, step)

    monkeypatch.setattr(h2o.H2OSelector, "select", select)
    cache = {"type_k": types, "type_v": types}
    with policies.open_session(
        tiny(arch), policies.parse("h2o,k=50"), n_ctx=512, n_threads=1, **cache
    ) as s:
        engine.prefill(s, tokens[:290])
        decoded(s, tokens[290:])
        assert sorted(rows) == list(range(n_sparse))
        monkeypatch.undo()
        policies.switch(s, policies.parse("h2o,k=50"))
        prompts = []
        monkeypatch.setattr(h2o.H2O, "start", lambda self, heads, prompt: prompts.append(prompt))
        with pytest.raises(AttributeError):  # there is no selector
            engine.decode(s, 5)
        *_, block = prompts[0].blocks()
        for got, want in zip(np.moveaxis(block, 2, 0)[-10:], rows[0], strict=True):
            spread, n_pos = want.max() - want.min(), want.shape[2]
            assert np.abs(got[:, :, :n_pos] - want).max() < 0.004 * spread  # q in f16


@pytest.mark.parametrize("line", ["oracle,k=20", "h2o,k=20"])
def test_attention_on_a_gpu_is_refused(
    demo_model: Path, text: str, monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    with policies.open_session(demo_model, line, n_ctx=512, n_threads=1) as s:
        monkeypatch.setattr(s.watch, "is_host", lambda buffer: False)
        with pytest.raises(SparqError, match="on a GPU"):
            decode(s, tokens_of(s, text))


def test_learned_sinks_are_refused(tiny) -> None:
    for line in ("oracle,k=20", "h2o,k=20"):
        with (
            policies.open_session(
                tiny("gpt-oss"), policies.parse(line), n_ctx=512, n_threads=1
            ) as s,
            pytest.raises(SparqError, match="learned sinks"),
        ):
            engine.prefill(s, list(range(3, 253)))
            engine.decode(s, 5)
