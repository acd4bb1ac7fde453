"""Cards: the geometry gives the published sizes."""

from __future__ import annotations

import hashlib
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from pyorch import engine
from pyorch.attention.bytes import cache_bytes, split
from pyorch.attention.spec import parse_spec
from pyorch.cli import COMMANDS
from pyorch.cli.loading import first_ratio
from pyorch.cli.models import command
from pyorch.errors import SparqError
from pyorch.models import cards, layers, synth
from pyorch.native import source

NAMES = cards.names()
CARDS = [cards.load(name) for name in NAMES]


def of_standard_width(c: cards.Card) -> bool:
    """The transformer of the papers: heads as wide together as the model."""
    return c.n_head * c.head_dim == c.n_embd


def test_the_models_of_the_papers_have_cards() -> None:
    assert len({c.title for c in CARDS}) == len(CARDS) == 60
    for name in ("llama2-13b", "gemma-7b", "pythia-2.8b", "mpt-7b"):
        assert name in NAMES


# read from the repositories of the models themselves, before cards said where from
OWN = 29


def test_every_other_card_names_the_source_of_its_geometry() -> None:
    assert sum(not c.read_from for c in CARDS) == OWN


@pytest.mark.parametrize("c", CARDS, ids=NAMES)
def test_card_is_whole(c: cards.Card) -> None:
    assert re.fullmatch(r"[\w-]+/[\w.-]+", c.repository) and c.licence and c.evidence
    assert c.n_head % c.n_head_kv == 0 and c.ffn in ("gated", "plain")
    assert c.positions in ("rope", "learned", "alibi", "none")
    assert (c.rope_base > 0) == (c.positions == "rope")
    assert c.tokenizer in ("llama", "gpt2", "gemma4")
    assert bool(c.settings) == (c.latent is None) and (c.settings or c.note)
    assert bool(c.gguf) == bool(c.quant)
    assert not (c.gguf and c.package)
    assert not c.gguf or re.fullmatch(r"[\w-]+/[\w.-]+", c.gguf)
    sources = r"not measured|docs/quality\.md|arXiv \d{4}\.\d{5}\b.*(Table|Figure)"
    assert re.search(sources, c.evidence)
    if c.settings:
        assert c.settings == f"sparq,ratio={first_ratio(c.name)}"
        s = split(parse_spec(c.settings), c.n_ctx, c.head_dim)
        assert not s.dense and s.topk < c.n_ctx  # it does something at the model's own length


def digits(n: int) -> int:
    """The unit of the last digit that is not zero."""
    return next(10**k for k in range(12) if n % 10 ** (k + 1))


@pytest.mark.parametrize("c", CARDS, ids=NAMES)
def test_parameters_are_those_published(c: cards.Card) -> None:
    """Within half a unit of the last digit that was published; norms and biases are not counted."""
    rounded = digits(c.n_params) / 2 / c.n_params
    assert c.params == pytest.approx(c.n_params, rel=0.001 + min(rounded, 0.01))


# those that a token uses, as published
ACTIVE = {
    "deepseek-v3": 37e9,
    "gemma-4-26b-a4b-it": 3.8e9,
    "gpt-oss-120b": 5.13e9,
    "gpt-oss-20b": 3.61e9,
    "lfm2-8b-a1b": 1.5e9,
    "nemotron-3-nano-30b-a3b": 3.2e9,
}


@pytest.mark.parametrize("name", ACTIVE)
def test_parameters_that_a_token_reads(name: str) -> None:
    """As published, which is rounded and may count embeddings."""
    c = cards.load(name)
    n = c.params - c.idle_params
    assert n == pytest.approx(ACTIVE[name], rel=0.04)
    bits = cards.Q4_K_M_BITS
    assert c.geometry.weight_bytes_per_token == pytest.approx(n * bits / 8, rel=0.02)


# head size, longest context of the experiments, queries per KV head
TABLE_G1 = {
    "llama2-7b": (128, 4096, 1),
    "llama2-13b": (128, 4096, 1),
    "llama3-8b": (128, 8192, 4),
    "mistral-7b-v0.1": (128, 8192, 4),
    "gemma-7b": (256, 8192, 1),
    "pythia-1.4b": (128, 2048, 1),
    "pythia-2.8b": (80, 2048, 1),
    "pythia-6.9b": (128, 2048, 1),
}


def n_group_q(c: cards.Card) -> int:
    """Query heads that share a KV head."""
    return c.n_head // c.n_head_kv


@pytest.mark.parametrize("name", TABLE_G1)
def test_sparq_table_g1(name: str) -> None:
    c, (head_dim, longest, n_shared) = cards.load(name), TABLE_G1[name]
    assert (c.head_dim, n_group_q(c)) == (head_dim, n_shared)
    # Mistral's configuration says 32768, the paper went to 8192
    assert c.n_ctx == longest or (name == "mistral-7b-v0.1" and c.n_ctx > longest)


@pytest.mark.parametrize("c", CARDS, ids=NAMES)
def test_kv_of_a_position(c: cards.Card) -> None:
    """Equation 3: 2 d_h elements per KV head. Appendix C: C = 2 S d_m / g elements of a layer."""
    if set(c.kinds) == {"f"} and not c.latent:
        assert c.kv_bytes == 2 * c.n_layer * c.n_head_kv * 2 * c.head_dim
    if of_standard_width(c) and not c.latent:
        assert c.kv_elements * n_group_q(c) == 2 * c.n_embd
    f16 = engine.cache_type("f16")
    if not c.latent:
        assert cache_bytes(c.geometry, 1, f16, f16) == c.kv_bytes


# by hand: 2 bytes, K and V, layers, KV heads, head size
@pytest.mark.parametrize(
    ("name", "kib"),
    [
        ("llama2-7b", 512),
        ("llama2-70b", 320),
        ("llama3-8b", 128),
        ("qwen3.6-27b", 64),  # 16 layers of 4 heads of 256
        ("gemma-4-31b-it", 2 * 2 * (50 * 16 * 256 + 10 * 4 * 512) / 1024),
        ("gemma-4-e4b-it", 2 * 2 * 2 * (20 * 256 + 4 * 512) / 1024),  # of 24 layers
        ("nemotron-3-nano-30b-a3b", 6),
    ],
)
def test_kv_bytes_of_known_models(name: str, kib: float) -> None:
    assert cards.load(name).kv_bytes == kib * 1024


def test_architectures_are_those_of_the_pinned_source(tmp_path: Path) -> None:
    """The pinned llama.cpp has a name and a graph for each."""
    pin = source.read_pin()
    where = source.locate(pin)
    source.fetch(pin, where)
    source.unpack(where, f"{pin.folder}/src", tmp_path)
    names = dict(
        re.findall(r'\{ *(LLM_ARCH_\w+), *"([^"]+)"', (tmp_path / "llama-arch.cpp").read_text())
    )
    model = (tmp_path / "llama-model.cpp").read_text()
    built = {names[a] for a in re.findall(r"case (LLM_ARCH_\w+):\s+return new ", model)}
    assert {c.architecture for c in CARDS} <= built


def test_weights_that_a_token_reads() -> None:
    """Llama 2 7B without its embedding."""
    c, bits = cards.load("llama2-7b"), cards.Q4_K_M_BITS
    assert c.geometry.weight_bytes_per_token == pytest.approx(6.607e9 * bits / 8, rel=1e-3)


LISTED = {"gemma4": "attention.sliding_window_pattern"}  # whose files list what others have by rule


@pytest.mark.parametrize("c", CARDS, ids=NAMES)
def test_layers_are_those_that_llama_cpp_would_find(c: cards.Card) -> None:
    """By the rule of the architecture, or by the card's own list where files have a list."""
    kinds, arch = c.kinds, c.architecture
    geo = c.geometry
    assert len(kinds) == c.n_layer == len(geo.n_head_kv) == len(geo.n_head)
    assert geo.kv_layers == [il for il, kind in enumerate(kinds) if kind in "fw"]
    assert geo.n_recurrent == kinds.count("r")
    keys: dict[str, Any] = {"attention.sliding_window": c.n_swa} if c.n_swa else {}
    if arch in LISTED:
        keys[LISTED[arch]] = [kind == "w" for kind in kinds]
    sizes = layers.windows(arch, c.n_layer, keys).sizes or (0,) * c.n_layer
    assert sizes == tuple(map(geo.windows.of, range(c.n_layer)))
    if arch in layers.INTERVALS:
        assert layers.recurrent(arch, c.n_layer, {}) == [kind == "r" for kind in kinds]
    own = {"attention.shared_kv_layers": max(c.n_layer - c.n_own_cache, 0)}
    assert layers.n_own_cache(arch, c.n_layer, own) == min(c.n_own_cache, c.n_layer)


def test_latent_attention_has_the_geometry_of_its_files() -> None:
    geo = cards.load("glm-4.7-flash").geometry
    assert geo.is_mla and (geo.head_dim_k, geo.n_head_kv) == (576, (1,) * 47)


def test_unknown_and_damaged_cards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SparqError, match="unknown model 'llama3-8'") as e:
        cards.load("llama3-8")
    assert e.value.exit_code == 2 and e.value.hint == "did you mean llama3-8b?"
    with pytest.raises(SparqError, match="unknown model"):
        cards.load("../models/llama3-8b")
    text = (cards.paths.data("models") / "llama3.1-8b.toml").read_text()
    monkeypatch.setattr(cards.paths, "data", lambda _: tmp_path)
    for damaged in ("", "not toml", text.replace("n_layer", "layers"), text + "more = 1\n"):
        (tmp_path / "a.toml").write_text(damaged)
        with pytest.raises(SparqError, match="a.toml is damaged"):
            cards.load("a")
    for line, error in (
        ('layers = "ffx"', "layers has 'x'; its letters are f, w, r and -"),
        (f'layers = "{"f" * 31}"', "layers has 31 letters for 32 layers"),
        (f'layers = "{"r" * 32}"', "no layer in layers has attention"),
        (f'layers = "{"wf" * 16}"', "n_swa and layers 'w' need each other"),
        ("n_swa = 128", "n_swa and layers 'w' need each other"),
        (f'layers = "{"rf" * 16}"\nrecurrent_in = 8', "recurrent_out and layers 'r' need each"),
        ("head_dim_window = 64", "need layers 'w'"),
        ("latent = { kv = 512 }", "required"),
    ):
        (tmp_path / "a.toml").write_text(text.replace("n_embd", f"{line}\nn_embd", 1))
        with pytest.raises(SparqError, match="a.toml is damaged: ") as e:
            cards.load("a")
        assert error in str(e.value)
    (tmp_path / "a.toml").write_text(text)
    assert cards.load("a").n_layer == 32 and cards.load("a").known_files == ()
    (tmp_path / "a.toml").write_text(text.replace("[geometry]", 'quants = "x"\n[geometry]'))
    with pytest.raises(SparqError, match="a.toml is damaged"):
        cards.load("a")
    file = '[[files]]\nname = "x.gguf"\nn_bytes = 7\nsha256 = "00"\n'
    (tmp_path / "a.toml").write_text(text.replace("[geometry]", f"{file}[geometry]"))
    assert cards.load("a").files == (cards.File("x.gguf", 7, "00"),)


def test_a_card_that_is_like_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no file of the other, and only what it states itself differs."""
    text = (cards.paths.data("models") / "llama3.2-3b.toml").read_text()
    monkeypatch.setattr(cards.paths, "data", lambda _: tmp_path)
    (tmp_path / "a.toml").write_text(text)
    (tmp_path / "b.toml").write_text('title = "B"\nlike = "a"\n[geometry]\nn_ctx = 512\n')
    a, b = cards.load("a"), cards.load("b")
    assert b == replace(
        a, name="b", title="B", n_ctx=512, gguf="", quant="", files=(), package=None
    )
    (tmp_path / "b.toml").write_text('title = "B"\nlike = "c"\n')
    with pytest.raises(SparqError, match="b.toml is damaged: .*c.toml"):
        cards.load("b")


def test_files_are_known_by_size_and_content() -> None:
    files = [(c, f) for c in CARDS for f in c.known_files]
    assert len({f.sha256 for _, f in files}) == len(files) == 4
    for c, f in files:
        assert re.fullmatch("[0-9a-f]{64}", f.sha256) and f.name.endswith(".gguf")
        # the quantisations mix types, and Qwen's files hold the tied head once more
        assert 0.5 < f.n_bytes / c.n_params < 1.05
        assert cards.of_file(f.n_bytes, lambda f=f: f.sha256[:16]) == c
        assert cards.of_file(f.n_bytes, lambda: "0" * 16) is None
        assert cards.of_hash(f.sha256[:15]) is None
        assert cards.of_file(f.n_bytes + 1, lambda: pytest.fail("read")) is None
        assert (
            f.name.lower() in f"{c.repository.lower()}-{c.quant.lower()}.gguf"
            or c.package
            or (f.origin)
        )


def test_show_knows_a_file_by_its_content(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def show() -> Result:
        return CliRunner().invoke(command, ["show", str(tiny)])

    assert "no card knows a file of this content" in str(show().exception)
    known = cards.File("x.gguf", tiny.stat().st_size, hashlib.sha256(tiny.read_bytes()).hexdigest())
    load = cards.load
    monkeypatch.setattr(
        cards, "load", lambda n: replace(load(n), files=(known,) if n == "llama2-7b" else ())
    )
    shown = show().stdout
    assert shown.startswith("Llama 2 7B\n") and f"sha256 {known.sha256[:12]}.." in shown
    assert f"--model {tiny} --ratio 1/4" in shown


def test_command() -> None:
    run = CliRunner().invoke
    assert COMMANDS["models"][0] == "models"
    listed = run(command, []).stdout.splitlines()
    assert listed == run(command, ["list"]).stdout.splitlines()
    assert all(any(line.startswith(f"{n} ") for line in listed) for n in NAMES)
    shown = run(command, ["show", "llama2-7b"]).stdout
    assert "hf:TheBloke/Llama-2-7B-GGUF:Q4_K_M" in shown
    assert "sparq-cpp chat --model llama2-7b --ratio 1/4" in shown
    assert "none is known for certain; make one: sparq-cpp convert hf:cerebras/" in (
        run(command, ["show", "cerebras-gpt-6.7b"]).stdout
    )
    shown = run(command, ["show", "nemotron-3-nano-30b-a3b"]).stdout
    assert "6 read every position, 23 are recurrent, 23 are feed-forward only" in shown
    assert "geometry      config.json" in shown
    shown = run(command, ["show", "glm-4.7-flash"]).stdout
    assert "Stays dense: its attention is latent" in shown and "--ratio" not in shown
    assert "448 KiB per position" in run(command, ["show", "gemma-7b"]).stdout
    assert isinstance(run(command, ["show", "gema-7b"]).exception, SparqError)


@pytest.mark.parametrize("c", CARDS, ids=NAMES)
def test_synthetic_models_have_the_geometry_of_the_card(c: cards.Card) -> None:
    if c.architecture != "llama":
        with pytest.raises(SparqError, match=f"{c.name} is not a Llama but a {c.architecture}"):
            synth.shape_like(c.name)
        return
    shape = synth.shape_like(c.name)
    assert shape.kv_bytes == c.kv_bytes
    rows = c.n_vocab * c.n_embd * c.tied  # a synthetic model never ties its head
    n_params = synth.file_bytes(shape, "f16") / 2
    assert n_params == pytest.approx(c.params + rows, rel=0.001)
