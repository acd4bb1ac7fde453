"""Where K and V lie beside weights on a GPU, and who is told. No GPU is needed: its memory is
given."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pyorch import native
from pyorch.attention.placement import MARGIN, Cache, Rates, layers_on_gpu
from pyorch.attention.spec import AttentionSpec, parse_spec
from pyorch.cli import gpu, serve
from pyorch.cli.loading import session_options
from pyorch.cli.options import ContextOptions, LoadOptions
from pyorch.engine.settings import SessionOptions, settings_for
from pyorch.errors import SparqError
from pyorch.ggml import CACHE_TYPES
from pyorch.models import cards
from pyorch.models.gguf_file import read_gguf
from pyorch.native.devices import Device

Run = Callable[..., Any]
F16 = (CACHE_TYPES["f16"], CACHE_TYPES["f16"])
LLAMA = cards.load("llama3-8b").geometry  # 32 layers, 8 KV heads of 128
N_POS = 131072
LAYER = 8 * 128 * 2 * 2 * N_POS  # K and V
EIGHTH = parse_spec("sparq,ratio=1/8,gpu_min_mb=0")
SLOW_GPU, FAST_GPU = Rates(1e8, 1e10, 0), Rates(1e12, 1e10, 0)


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


def test_layers_that_gain_lie_in_memory_where_a_gpu_lacks_our_kernels() -> None:
    """Those with a window read all of it anywhere. What a layer waits may cost more than it
    gains."""
    made = Cache(cards.load("gemma-3-4b-it").geometry, EIGHTH, F16, 32768)
    full = tuple(il for il in made.geo.kv_layers if not made.geo.windows.of(il))
    same = Rates(1e10, 1e10, 0)  # the GPU reads main memory
    room = sum(made.layer_bytes().values()) * 2
    assert made.in_memory(room, made.geo.kv_layers, same) == full
    assert made.in_memory(room, made.geo.kv_layers, replace(same, wait=1)) == ()
    assert made.in_memory(room, made.geo.kv_layers, FAST_GPU) == ()
    assert set(made.in_memory(0, made.geo.kv_layers, same)) == set(made.geo.kv_layers)
    assert made.in_memory(room, full[:2], same) == full[:2]


def test_which_layers_llama_cpp_puts_on_a_gpu() -> None:
    """The output counts as one, and is the first to go."""
    assert layers_on_gpu(4, None) == layers_on_gpu(4, 99) == range(4)
    assert layers_on_gpu(4, 3) == range(2, 4) and not layers_on_gpu(4, 1)
    assert not layers_on_gpu(4, 0)


def explained(run: Run, *more: object) -> dict[str, Any] | None:
    line = ("explain", "-m", "llama3-8b", "--ctx", N_POS, "-a", str(EIGHTH), "--json")
    found: dict[str, Any] | None = json.loads(run(*line, *more).out).get("gpu")
    return found


@pytest.mark.parametrize(
    ("n_bytes", "option", "n_there", "fits"),
    [
        (16e9, None, range(1, 32), True),
        (16e9, "-nkvo", [0], True),
        (16e9, "-kvo", [32], False),
        (80e9, None, [32], True),
        (3e9, None, [0], False),  # not even the weights
    ],
)
def test_explain_tells_what_fits(
    n_bytes: float, option: str | None, n_there: range, fits: bool, run: Run, monkeypatch
) -> None:
    rtx = Device("RTX 0000", 0, int(n_bytes) + MARGIN)
    monkeypatch.setattr(gpu, "asked", lambda *_: ([rtx], None))
    found = explained(run, *([option] if option else []))
    assert found and found["names"] == ["RTX 0000"] and found["free"] == n_bytes
    there = set(range(32)) - set(found["in_memory"])
    assert len(there) in n_there and found["fits"] == fits
    size = cache().layer_bytes()[0]
    assert found["needed"] == LLAMA.weight_bytes + len(there) * size
    text = run("explain", "-m", "llama3-8b", "--ctx", N_POS, *([option] if option else [])).out
    assert "RTX 0000" in text


@pytest.mark.parametrize(
    ("rates", "option", "is_sparse"),
    [(SLOW_GPU, None, True), (FAST_GPU, None, False), (FAST_GPU, "-nkvo", True)],
)
def test_explain_where_a_gpu_lacks_our_kernels(
    rates: Rates, option: str | None, is_sparse: bool, run: Run, monkeypatch
) -> None:
    radeon = Device("Radeon", 0, integrated=True, kernels=False)
    monkeypatch.setattr(gpu, "asked", lambda *_: ([radeon], rates))
    line = ("explain", "-m", "llama3-8b", "--ctx", N_POS, "-a", str(EIGHTH))
    facts = json.loads(run(*line, "--json", *([option] if option else [])).out)
    assert len(facts["gpu"]["in_memory"]) == 32 * is_sparse
    assert len(facts["gpu"]["exact"]) == 32 * (not is_sparse)
    assert (facts["speedup_token"] > 1) == is_sparse == (facts["lengths"][2]["speedup"] > 1)
    assert "Radeon" in run(*line).out


def test_explain_without_a_gpu(run: Run) -> None:
    assert explained(run) is None
    assert "no GPU" in run("explain", "-m", "llama3-8b", "-nkvo").err


def test_llama_server_is_told(
    tiny: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = read_gguf(tiny)
    settings = settings_for(file, SessionOptions(n_ctx=1024, n_sequences=2, attention="sparq"))
    served = serve.Served(file, settings, "m", "127.0.0.1", 1, None, LoadOptions(), [])
    free: int = 0
    rates: Rates | None = None
    monkeypatch.setattr(gpu, "apart", lambda function: function())
    monkeypatch.setattr(gpu, "asked", lambda *_: ([Device("RTX", 0, free)], rates))
    assert serve._kv_in_memory(served) == {}  # a build for the CPU
    monkeypatch.setattr(native, "gpus", lambda: [Device("RTX", 0)])
    free = 2 * MARGIN
    assert serve._kv_in_memory(served) == {}
    free = MARGIN
    n_layer = len(settings.layer_bytes())
    every = ",".join(map(str, range(n_layer)))
    assert serve._kv_in_memory(served) == {"SPARQ_KV_IN_MEMORY": every}
    assert f"{n_layer} of {n_layer} layers" in capsys.readouterr().err
    free, rates = 2 * MARGIN, SLOW_GPU
    assert serve._kv_in_memory(served) == {"SPARQ_KV_IN_MEMORY": every}
    free, rates = 2 * MARGIN, FAST_GPU
    assert serve._kv_in_memory(served) == {}
    assert f"0 of {n_layer} layers" in capsys.readouterr().err
    free, rates = MARGIN, None
    with monkeypatch.context() as m, pytest.raises(SparqError, match="m.gguf|tiny"):
        m.setenv("SPARQ_MEMORY_LIMIT", "1000")
        serve._kv_in_memory(served)
    for kv_offload in (True, False):
        given = replace(served, load=LoadOptions(kv_offload=kv_offload))
        assert serve._kv_in_memory(given) == {}


@pytest.mark.parametrize(
    ("load", "integrated", "fits"),
    [
        ({}, False, True),
        ({"kv_offload": True}, False, True),
        ({"kv_offload": False}, False, False),
        ({"n_gpu_layers": 1}, False, False),  # the output alone
        ({}, True, False),
        ({"kv_offload": True}, True, False),
    ],
)
def test_what_a_gpu_holds_takes_no_main_memory(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, load: dict[str, Any], integrated: bool, fits: bool
) -> None:
    device = Device("one that is not there", 0, 0, integrated)
    monkeypatch.setattr(native, "gpus", lambda: [device])
    monkeypatch.setenv("SPARQ_MEMORY_LIMIT", "1000")
    options = session_options(None, ContextOptions(ctx=1024), LoadOptions(**load))
    with nullcontext() if fits else pytest.raises(SparqError, match="--ctx|memory"):
        settings_for(read_gguf(tiny), options)


def test_a_gpu_is_asked_by_a_process_of_its_own() -> None:
    assert gpu.apart(os.getpid) != os.getpid()
    with pytest.raises(SparqError) as e:
        gpu.apart(os.abort)
    assert e.value.hint
