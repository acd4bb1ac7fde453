"""Cards: the geometry gives the published sizes, and the numbers of the papers follow from it."""

from __future__ import annotations

import hashlib
import re
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from pyorch.attention.bytes import split
from pyorch.attention.spec import parse_spec
from pyorch.cli import COMMANDS
from pyorch.cli.loading import first_ratio
from pyorch.cli.models import command
from pyorch.errors import SparqError
from pyorch.models import cards, synth
from pyorch.native import source

NAMES = cards.names()
CARDS = [cards.load(name) for name in NAMES]


def named(*names: str) -> list[cards.Card]:
    return [cards.load(name) for name in names]


def of_standard_width(c: cards.Card) -> bool:
    """The transformer of the papers: heads as wide together as the model."""
    return c.n_head * c.head_dim == c.n_embd


def test_the_models_of_the_papers_have_cards() -> None:
    assert len({c.title for c in CARDS}) == len(CARDS) == 33
    for name in ("llama2-13b", "gemma-7b", "pythia-2.8b", "mpt-7b", "opt-30b", "gpt-j-6b"):
        assert name in NAMES


@pytest.mark.parametrize("c", CARDS, ids=NAMES)
def test_card_is_whole(c: cards.Card) -> None:
    assert re.fullmatch(r"[\w-]+/[\w.-]+", c.repository) and c.licence and c.evidence
    assert c.n_head % c.n_head_kv == 0 and c.ffn in ("gated", "plain")
    assert c.positions in ("rope", "learned", "alibi") and (c.rope_base > 0) == (
        c.positions == "rope"
    )
    assert c.tokenizer in ("llama", "gpt2")
    assert bool(c.settings) == c.loads and (c.loads or c.note)
    assert bool(c.gguf) == bool(c.quant) and (c.loads or not c.source)
    assert not (c.gguf and c.package)
    assert not c.gguf or re.fullmatch(r"[\w-]+/[\w.-]+", c.gguf)
    sources = r"not measured|docs/quality\.md|arXiv \d{4}\.\d{5}\b.*(Table|Figure)"
    assert re.search(sources, c.evidence)
    if c.settings:
        assert c.settings == f"sparq,ratio={first_ratio(c.name)}"
        s = split(parse_spec(c.settings), c.n_ctx, c.head_dim)
        assert not s.dense and s.topk < c.n_ctx  # it does something at the model's own length


@pytest.mark.parametrize("c", CARDS, ids=NAMES)
def test_parameters_are_those_published(c: cards.Card) -> None:
    """Norms and biases are not counted; one published count has two digits only."""
    assert c.params == pytest.approx(c.n_params, rel=0.01)
    if c.n_params % 100_000_000:
        assert c.params == pytest.approx(c.n_params, rel=0.001)


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
    assert c.kv_bytes == 2 * c.n_layer * c.n_head_kv * 2 * c.head_dim
    if of_standard_width(c):
        assert c.kv_elements * n_group_q(c) == 2 * c.n_embd
    else:
        assert c.name in ("gemma-7b", "gemma-3-270m", "gpt-oss-20b")


# by hand: 2 bytes, K and V, layers, KV heads, head size
@pytest.mark.parametrize(
    ("name", "kib"), [("llama2-7b", 512), ("llama2-70b", 320), ("llama3-8b", 128), ("opt-13b", 800)]
)
def test_kv_bytes_of_known_models(name: str, kib: int) -> None:
    assert cards.load(name).kv_bytes == kib * 1024


def rho(c: cards.Card, n_pos: int) -> float:
    return n_pos / (n_group_q(c) * c.n_embd)


def test_sparq_equation_1() -> None:
    """Share of K and V in what a token moves, rho / (rho + 6/B), from the card's own matrices.

    Exact for the paper's layer of 12 d_m^2 parameters; the gated one of Llama 2 is 1 % off.
    """
    plain = [c for c in CARDS if c.ffn == "plain"]
    assert len(plain) == 9
    for c in plain + named("llama2-7b", "llama2-13b"):
        for batch in (1, 16):
            kv = c.kv_elements * c.n_ctx * batch
            share = rho(c, c.n_ctx) / (rho(c, c.n_ctx) + 6 / batch)
            near = 1e-9 if c.ffn == "plain" else 0.01
            assert kv / (kv + c.layer_params) == pytest.approx(share, rel=near), c.name


@pytest.mark.parametrize(
    ("name", "n_pos", "expected_rho", "most"),
    [
        ("llama2-7b", 4096, 1, 7),
        ("llama2-70b", 4096, 1 / 16, 104),
        ("llama2-70b", 16384, 1 / 4, 32),
    ],
)
def test_sparq_appendix_c(name: str, n_pos: int, expected_rho: float, most: float) -> None:
    """The table: rho = S / (g d_m), and the arithmetic intensity g + 6/rho of a large batch (C2).

    The same from the card's own matrices, N/C + g (C1): 3 to 8 % above 12 d_m^2.
    """
    c = cards.load(name)
    assert rho(c, n_pos) == expected_rho
    assert n_group_q(c) + 6 / rho(c, n_pos) == most
    own = c.layer_params / (c.kv_elements * n_pos) + n_group_q(c)
    assert most <= own <= 1.08 * most


@pytest.mark.parametrize(("n_pos", "speedup"), [(4096, 6.4), (16384, 7.53)])
def test_sparq_equation_11(n_pos: int, speedup: float) -> None:
    """The theoretical speed-ups of section 6.1, r = 32 and k = 128 with the heads of Llama 2 7B."""
    d = cards.load("llama2-7b").head_dim
    assert (2 * n_pos * d + 2 * d) / (n_pos * 32 + 2 * 128 * d + 4 * d) == pytest.approx(
        speedup, rel=0.005
    )


def test_architectures_are_those_of_the_pinned_source(tmp_path: Path) -> None:
    """`loads` = the pinned llama.cpp has a name and a graph for it; the notes quote its errors."""
    pin = source.read_pin()
    where = source.locate(pin)
    source.fetch(pin, where, lambda _: None)
    source.unpack(where, f"{pin.folder}/src", tmp_path)
    names = dict(
        re.findall(r'\{ *(LLM_ARCH_\w+), *"([^"]+)"', (tmp_path / "llama-arch.cpp").read_text())
    )
    model = (tmp_path / "llama-model.cpp").read_text()
    built = {names[a] for a in re.findall(r"case (LLM_ARCH_\w+):\s+return new ", model)}
    assert {c.architecture: c.loads for c in CARDS} == {
        c.architecture: c.architecture in built for c in CARDS
    }
    for c in CARDS:
        if not c.loads:
            error = "unsupported" if c.architecture in names.values() else "unknown"
            said = f"{error} model architecture: '"
            assert said in model and f"{said}{c.architecture}'" in c.note


def test_weights_that_a_token_reads() -> None:
    """Llama 2 7B without its embedding; gpt-oss: 3.61 B active, as published."""
    c, bits = cards.load("llama2-7b"), cards.Q4_K_M_BITS
    assert c.geometry.weight_bytes_per_token == pytest.approx(6.607e9 * bits / 8, rel=1e-3)
    c = cards.load("gpt-oss-20b")
    assert c.geometry.weight_bytes_per_token == pytest.approx(3.61e9 * bits / 8, rel=2e-3)
    assert len(c.geometry.kv_layers) == 24 and c.geometry.n_head[0] > c.geometry.n_head_kv[0]


def test_unknown_and_damaged_cards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SparqError, match="unknown model 'llama3-8'") as e:
        cards.load("llama3-8")
    assert e.value.exit_code == 2 and e.value.hint == "did you mean llama3-8b?"
    with pytest.raises(SparqError, match="unknown model"):
        cards.load("../models/llama3-8b")
    text = (cards.paths.data("models") / "llama3-8b.toml").read_text()
    monkeypatch.setattr(cards.paths, "data", lambda _: tmp_path)
    for damaged in ("", "not toml", text.replace("n_layer", "layers"), text + "more = 1\n"):
        (tmp_path / "a.toml").write_text(damaged)
        with pytest.raises(SparqError, match="a.toml is damaged"):
            cards.load("a")
    (tmp_path / "a.toml").write_text(text)
    assert cards.load("a").n_layer == 32 and cards.load("a").known_files == ()
    (tmp_path / "a.toml").write_text(text.replace("[geometry]", 'quants = "x"\n[geometry]'))
    with pytest.raises(SparqError, match="a.toml is damaged"):
        cards.load("a")
    file = '[[files]]\nname = "x.gguf"\nn_bytes = 7\nsha256 = "00"\n'
    (tmp_path / "a.toml").write_text(text.replace("[geometry]", f"{file}[geometry]"))
    assert cards.load("a").files == (cards.File("x.gguf", 7, "00"),)


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


def test_layers_of_gemma_3_with_a_window() -> None:
    sizes = cards.load("gemma-3-270m").geometry.windows.sizes
    assert [il for il, n in enumerate(sizes) if n == 0] == [5, 11, 17] and set(sizes) == {0, 512}


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
    shown = run(command, ["show", "opt-13b"]).stdout
    assert "facebook/opt-13b" in shown and "unknown model architecture: 'opt'" in shown
    assert "settings" not in shown
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
