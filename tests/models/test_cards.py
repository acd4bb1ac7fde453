"""Cards: the geometry is that of the published model, and files are known by their content."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pyorch import engine
from pyorch.attention.cost import split
from pyorch.attention.placement import Cache
from pyorch.attention.spec import parse_spec
from pyorch.errors import SparqError
from pyorch.models import cards, layers, synth

NAMES = cards.names()
CARDS = [cards.load(name) for name in NAMES]
Run = Callable[..., Any]


@pytest.mark.parametrize("c", CARDS, ids=NAMES)
def test_a_card_fits_together(c: cards.Card) -> None:
    assert len(c.kinds) == c.n_layer and set(c.kinds) <= set("fwr-") and set(c.kinds) & set("fw")
    assert (c.n_swa > 0) == ("w" in c.kinds) and c.n_head % c.n_head_kv == 0
    assert (c.rope_base > 0) == (c.positions == "rope")
    assert c.note or not c.n_latent
    assert c.evidence or not c.settings
    assert bool(c.gguf) == bool(c.quant) and not (c.gguf and c.package)
    if c.settings:
        s = split(parse_spec(c.settings), c.n_ctx, c.head_dim)
        assert not s.dense and s.topk < c.n_ctx  # it does something at the model's own length


@pytest.mark.parametrize(
    ("name", "n"),
    [
        ("deepseek-v3", 37e9),
        ("gemma-4-26b-a4b-it", 3.8e9),
        ("gpt-oss-120b", 5.13e9),
        ("gpt-oss-20b", 3.61e9),
        ("lfm2-8b-a1b", 1.5e9),
        ("llama2-7b", 6.607e9),  # without its embedding
        ("nemotron-3-nano-30b-a3b", 3.2e9),
    ],
)
def test_weights_that_a_token_reads(name: str, n: float) -> None:
    """As published, which is rounded and may count embeddings."""
    read = cards.load(name).geometry.weight_bytes_per_token
    assert read == pytest.approx(n * cards.Q4_K_M_BITS / 8, rel=0.04)


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
        ("glm-4.7-flash", 2 * 47 * 576 / 1024),  # one vector for K and V of all heads
    ],
)
def test_kv_bytes_of_known_models(name: str, kib: float) -> None:
    c, f16 = cards.load(name), engine.cache_type("f16")
    cache = Cache(c.geometry, None, (f16, f16), 1, swa_full=True)
    assert c.kv_bytes == cache.kv_bytes() == kib * 1024


def test_architectures_are_those_of_the_pinned_source(unpacked: Callable[[str], Path]) -> None:
    """The pinned llama.cpp has a name and a graph for each."""
    folder = unpacked("src")
    names = dict(
        re.findall(r'\{ *(LLM_ARCH_\w+), *"([^"]+)"', (folder / "llama-arch.cpp").read_text())
    )
    model = (folder / "llama-model.cpp").read_text()
    built = {names[a] for a in re.findall(r"case (LLM_ARCH_\w+):\s+return new ", model)}
    assert {c.architecture for c in CARDS} <= built


@pytest.mark.parametrize("c", CARDS, ids=NAMES)
def test_layers_are_those_that_llama_cpp_would_find(c: cards.Card) -> None:
    """By the rule of the architecture, or by the card's own list where files have a list."""
    kinds, arch, geo = c.kinds, c.architecture, c.geometry
    keys: dict[str, Any] = {"attention.sliding_window": c.n_swa} if c.n_swa else {}
    if arch == "gemma4":  # whose files list what others have by rule
        keys["attention.sliding_window_pattern"] = [kind == "w" for kind in kinds]
    sizes = layers.windows(arch, c.n_layer, keys).sizes or (0,) * c.n_layer
    assert sizes == tuple(map(geo.windows.of, range(c.n_layer)))
    if arch in layers.INTERVALS:
        assert layers.recurrent(arch, c.n_layer, {}) == [kind == "r" for kind in kinds]
    own = {"attention.shared_kv_layers": max(c.n_layer - c.n_own_cache, 0)}
    assert layers.n_own_cache(arch, c.n_layer, own) == min(c.n_own_cache, c.n_layer)


@pytest.mark.parametrize("c", CARDS, ids=NAMES)
def test_synthetic_models_have_the_geometry_of_the_card(c: cards.Card) -> None:
    if c.architecture not in synth.ARCHITECTURES:
        with pytest.raises(SparqError, match=c.architecture):
            synth.shape_like(c.name)
        return
    shape = synth.shape_like(c.name)
    assert 4 * shape.n_layer * shape.n_head_kv * shape.head_dim == c.kv_bytes
    head = c.n_vocab * c.n_embd * c.tied  # a synthetic model never ties its head
    n_params = synth.file_bytes(shape, "f16") / 2
    rounding = 0.01 if c.n_params % 10**7 == 0 else 0.001
    assert n_params == pytest.approx(c.n_params + head, rel=rounding)


# ---- files ----


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder of cards."""
    monkeypatch.setattr(cards.paths, "data", lambda _: tmp_path)
    return tmp_path


def text_of(name: str) -> str:
    return (cards.paths.REPOSITORY / "models" / f"{name}.toml").read_text()


@pytest.mark.parametrize("name", ["llama3-8", "../models/llama3-8b"])
def test_an_unknown_card(name: str) -> None:
    with pytest.raises(SparqError) as e:
        cards.load(name)
    assert e.value.exit_code == 2 and name in e.value.message and "llama3-8b" in e.value.hint


@pytest.mark.parametrize(
    "change",
    [
        lambda text: "",
        lambda text: "not toml",
        lambda text: text.replace("n_layer", "layers"),
        lambda text: text + "more = 1\n",
        lambda text: 'like = "c"\n' + text,
    ],
)
def test_a_damaged_card_is_named(folder: Path, change: Callable[[str], str]) -> None:
    (folder / "a.toml").write_text(change(text_of("llama3.1-8b")))
    with pytest.raises(SparqError, match=r"a\.toml"):
        cards.load("a")


def test_a_card_that_is_like_another(folder: Path) -> None:
    """It has no file of the other, and only what it states itself differs."""
    (folder / "a.toml").write_text(text_of("llama3.2-3b"))
    (folder / "b.toml").write_text('title = "B"\nlike = "a"\n[geometry]\nn_ctx = 512\n')
    a, b = cards.load("a"), cards.load("b")
    assert b == replace(a, name="b", title="B", n_ctx=512, gguf="", quant="", files=())


def test_files_are_known_by_their_hash() -> None:
    files = [*cards.known()]
    assert len({f.sha256 for _, f in files}) == len(files) > 0
    for c, f in files:
        assert re.fullmatch("[0-9a-f]{64}", f.sha256) and cards.of_hash(f.sha256[:16]) == c
    assert cards.of_hash("0" * 16) is None


# ---- the commands ----


def test_show_knows_a_file_by_its_content(
    tiny: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run("models", "show", tiny)[0] == 1
    known = cards.File("x.gguf", tiny.stat().st_size, hashlib.sha256(tiny.read_bytes()).hexdigest())
    load = cards.load
    monkeypatch.setattr(
        cards, "load", lambda n: replace(load(n), files=(known,) if n == "llama2-7b" else ())
    )
    shown = run("models", "show", tiny)[1]
    assert shown.startswith("Llama 2 7B\n") and known.sha256[:12] in shown
    assert re.search(r"\n  ratio +1/4\n", shown)
