"""Where K and V lie beside weights on a GPU, and what is said of it. No GPU is needed: its facts
are given."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pyorch.attention.placement import MARGIN, Cache, Rates, layers_on_gpu
from pyorch.attention.spec import AttentionSpec, parse_spec
from pyorch.cli import gpu, serve
from pyorch.cli.options import LoadOptions
from pyorch.engine.settings import batch_size, settings_for
from pyorch.errors import SparqError
from pyorch.ggml import CACHE_TYPES
from pyorch.models import cards
from pyorch.models.gguf_file import read_gguf
from pyorch.text import human_bytes

Run = Callable[..., Any]
F16 = (CACHE_TYPES["f16"], CACHE_TYPES["f16"])
RATES = Rates(memory=40e9, gpu=1000e9, link=10e9)
LLAMA = cards.load("llama3-8b").geometry  # 32 layers, 8 KV heads of 128
N_POS = 131072
LAYER = 8 * 128 * 2 * 2 * N_POS  # K and V
EIGHTH = parse_spec("sparq,ratio=1/8,gpu_min_mb=0")


def cache(spec: AttentionSpec | None = EIGHTH, **more: Any) -> Cache:
    return Cache(LLAMA, spec, F16, N_POS, **more)


def test_all_layers_go_where_they_fit() -> None:
    one = cache(parse_spec("topk,k=64")).layer_bytes()
    assert one == dict.fromkeys(range(32), LAYER)  # no shadow
    mask = 2 * 512 * N_POS
    few = cache(parse_spec("topk,k=64"))
    assert few.in_memory(32 * LAYER + mask, range(32)) == ()
    # a prompt then needs the place of one layer
    assert len(few.in_memory(32 * LAYER + mask - 1, range(32))) == 2
    assert few.in_memory(0, range(32)) == few.in_memory(-1, range(32)) == tuple(range(32))
    assert few.in_memory(16 * LAYER + mask, range(16, 32)) == ()
    assert few.in_memory(-1, ()) == ()  # none is on the GPU, or those there share K and V


@pytest.mark.parametrize("n_kept", [1, 7, 16, 30])
def test_layers_that_are_kept_are_spread(n_kept: int) -> None:
    """Whichever half of the layers a second GPU has, it has about half of those that fit."""
    size = cache().layer_bytes()[0]
    assert LAYER * 1.13 < size < LAYER * 1.16  # with the transposed K and the sums of V
    free = 2 * 512 * N_POS + (1 + n_kept) * size
    stay = cache().in_memory(free, range(32))
    assert len(stay) == 32 - n_kept
    kept = set(range(32)) - set(stay)
    assert abs(2 * len([il for il in kept if il < 16]) - n_kept) <= 1


def test_sequences_and_a_shadow_that_may_come_are_counted() -> None:
    assert cache(n_sequences=3).layer_bytes()[5] == 3 * cache().layer_bytes()[5]
    later = cache(AttentionSpec("sparq")).layer_bytes()
    assert cache(None).layer_bytes() == cache(AttentionSpec("off")).layer_bytes() == later


def test_layers_that_save_the_most_go_first() -> None:
    """With swa_full a session keeps all positions in layers with a window, of which a token reads
    few."""
    geo = cards.load("gemma-3-4b-it").geometry
    made = Cache(geo, EIGHTH, F16, 32768, swa_full=True)
    full = [il for il in geo.kv_layers if not geo.windows.of(il)]
    sizes = made.layer_bytes()
    stay = made.in_memory(sum(sizes[il] for il in full) * 2, geo.kv_layers)
    assert stay and not set(stay) & set(full)
    cut = replace(made, swa_full=False).layer_bytes()
    assert all((cut[il] < sizes[il]) == (il not in full) for il in sizes)


def test_the_time_of_a_token() -> None:
    weights = LLAMA.weight_bytes_per_token / RATES.gpu
    dense = cache(parse_spec("dense,prompt=f32"))
    assert dense.token_s(N_POS, RATES, ()) == pytest.approx(weights + 32 * LAYER / RATES.gpu)
    some = weights + 22 * LAYER / RATES.gpu + 10 * LAYER / RATES.memory
    assert dense.token_s(N_POS, RATES, range(10)) == pytest.approx(some)
    crossing = weights + 32 * LAYER / RATES.link  # llama.cpp copies them to the GPU
    assert cache(None).token_s(N_POS, RATES, range(32)) == pytest.approx(crossing)
    eighth = cache().token_s(N_POS, RATES, range(32)) - weights
    assert eighth == pytest.approx(32 * LAYER / 8 / RATES.memory, rel=0.02)
    short = replace(cache(parse_spec("sparq,ratio=1/8")), n_ctx=8192)  # 34 MB: dense on a GPU
    there = weights + 32 * LAYER / 16 / RATES.gpu
    assert short.token_s(8192, RATES, ()) == pytest.approx(there)
    assert short.token_s(8192, RATES, range(32)) < weights + 32 * LAYER / 16 / RATES.memory / 7


def test_which_layers_llama_cpp_puts_on_a_gpu() -> None:
    """The output counts as one, and is the first to go."""
    assert layers_on_gpu(4, None) == layers_on_gpu(4, 99) == range(4)
    assert layers_on_gpu(4, 3) == range(2, 4) and not layers_on_gpu(4, 1)
    assert not layers_on_gpu(4, 0)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """No measurement of this machine."""
    monkeypatch.setattr("pyorch.cli.explain.product_rate", lambda: 1e11)


def a_gpu(n_bytes: float) -> gpu.Facts:
    return gpu.Facts(["RTX 0000"], int(n_bytes), RATES)


def explained(run: Run, *more: object) -> list[dict[str, Any]]:
    line = ("explain", "-m", "llama3-8b", "--ctx", N_POS, "-a", str(EIGHTH), "--json")
    found: list[dict[str, Any]] = json.loads(run(*line, *more).out).get("places", [])
    return found


def test_explain_tells_both_places(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "facts", lambda bandwidth: a_gpu(16e9))
    there, some, none = explained(run)
    assert [x["name"] for x in (there, some, none)] == ["there", "as many as fit", "in memory"]
    assert [x["fits"] for x in (there, some, none)] == [False, True, True]
    assert none["needed"] == LLAMA.weight_bytes and none["in_memory"] == [*range(32)]
    assert there["needed"] - none["needed"] == sum(cache().layer_bytes().values())
    assert there["token_s"] < some["token_s"] < none["token_s"]
    assert some["needed"] + cache().layer_bytes()[0] < 16e9
    assert explained(run, "-nkvo") == [none] and explained(run, "-kvo") == [there]
    text = run("explain", "-m", "llama3-8b", "--ctx", N_POS, "-a", str(EIGHTH)).out
    assert "weights on RTX 0000, and K and V" in text and text.count("does not fit") >= 1
    assert f"{human_bytes(none['needed'])}, at most {1 / none['token_s']:.1f} tokens/s" in text


@pytest.mark.parametrize(("n_bytes", "fits"), [(80e9, [True, True]), (3e9, [False, False])])
def test_explain_with_much_room_and_with_none(
    n_bytes: float, fits: Sequence[bool], run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many as fit are all, or none; and weights that do not fit leave no way at all."""
    monkeypatch.setattr(gpu, "facts", lambda bandwidth: a_gpu(n_bytes))
    found = explained(run)
    assert [x["name"] for x in found] == ["there", "in memory"]
    assert [x["fits"] for x in found] == fits


def test_explain_without_a_gpu(run: Run) -> None:
    assert explained(run) == []
    done = run("explain", "-m", "llama3-8b", "-nkvo")
    assert "no GPU is here, so K and V lie in memory" in done.err and "RTX" not in done.out


def test_the_line_that_is_said() -> None:
    text = gpu.in_memory_text(cache(), (3, 4, 5), RATES)
    rate = 1 / cache().token_s(N_POS, RATES, (3, 4, 5))
    assert text == (
        "note: K and V of 3 of 32 layers do not fit on the GPU and stay in memory: "
        f"at most {rate:.1f} tokens/s after 131072 positions; "
        "--kv-offload keeps them on the GPU anyway"
    )
    exact = gpu.in_memory_text(cache(None), (3, 4, 5), None)
    assert "tokens/s" not in exact and exact.endswith("for each token, -a dense and --ratio do not")


def test_llama_server_is_told(
    tiny: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = read_gguf(tiny)
    settings = settings_for(file, n_ctx=1024, n_sequences=2, attention="sparq")
    served = serve.Served(file, settings, "m", "127.0.0.1", 1, None, LoadOptions(), [])
    free = 0

    def no_compiler(n_threads: int) -> float:
        raise SparqError("no C and C++ compiler found")

    monkeypatch.setattr(gpu, "apart", lambda function, *of: function(*of))
    monkeypatch.setattr(gpu, "free", lambda: free)
    monkeypatch.setattr("pyorch.bench.bandwidth.measured", no_compiler)
    assert serve._kv_in_memory(served, tmp_path) == {}  # a build without CUDA
    (tmp_path / "libggml-cuda.so").touch()
    free = MARGIN
    assert serve._kv_in_memory(served, tmp_path) == {}
    free = 0
    n_layer = len(settings.cache(serve.geometry(file)).layer_bytes())
    every = ",".join(map(str, range(n_layer)))
    assert serve._kv_in_memory(served, tmp_path) == {"SPARQ_KV_IN_MEMORY": every}
    said = capsys.readouterr().err
    assert f"K and V of {n_layer} of {n_layer} layers do not fit" in said and "tokens/s" not in said
    for kv_offload in (True, False):
        given = replace(served, load=LoadOptions(kv_offload=kv_offload))
        assert serve._kv_in_memory(given, tmp_path) == {}


def test_where_nothing_can_be_measured_no_rate_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def unwritable(n_threads: int) -> float:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("pyorch.bench.bandwidth.measured", unwritable)
    assert gpu.rates(2) is None


def test_a_gpu_is_asked_by_a_process_of_its_own() -> None:
    assert gpu.apart(os.getpid) != os.getpid()


def card_row(n_gib: int, name: str) -> str:
    """A row of docs/gpu.md, of the weights and the geometry on a model's card."""
    card = cards.load(name)
    geo = card.geometry
    free = int(0.95 * n_gib * 2**30) - MARGIN - geo.weight_bytes

    def made(n_pos: int) -> tuple[dict[int, int], tuple[int, ...]]:
        one = Cache(geo, parse_spec("sparq,ratio=1/8"), F16, n_pos, batch_size(n_pos))
        return one.layer_bytes(), one.in_memory(free, geo.kv_layers)

    longest = max(n for n in range(1024, N_POS + 1, 1024) if not made(n)[1])
    sizes, stay = made(N_POS)
    size, there = human_bytes(geo.weight_bytes), len(sizes) - len(stay)
    rest = human_bytes(sum(sizes[il] for il in stay))
    row = (f"{n_gib} GB", card.title, size, f"{longest:,}", f"{there} of {len(sizes)}", rest)
    return f"| {' | '.join(row)} |"


@pytest.mark.parametrize(
    ("n_gib", "name"), [(8, "llama3.1-8b"), (12, "llama3.1-8b"), (24, "qwen3.6-27b")]
)
def test_the_cards_of_the_docs(n_gib: int, name: str) -> None:
    page = (Path(__file__).parents[2] / "docs" / "gpu.md").read_text("utf-8")
    assert card_row(n_gib, name) in page.splitlines()
