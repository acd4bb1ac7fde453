"""Which layers have a window: as the pinned source says, and as the library counts."""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny as tiny_models

from pyorch import engine
from pyorch.attention.cost import layer_costs
from pyorch.attention.placement import Cache
from pyorch.attention.spec import parse_spec
from pyorch.ggml import CACHE_TYPES
from pyorch.models.geometry import geometry
from pyorch.models.gguf_checks import TEXTLESS, WHOLE_ROPE
from pyorch.models.gguf_file import read_gguf
from pyorch.models.layers import INTERVALS, WHY_DENSE, WINDOWS, Windows, recurrent, windows

pytestmark = pytest.mark.usefixtures("native_lib_dir")

# no model of ours: drafts of another model, an encoder, and caches of another kind
OTHERS = {"deepseek4", "dflash", "gemma4-assistant", "gemma-embedding", "modern-bert"}
F16 = (CACHE_TYPES["f16"],) * 2
LENGTH = "attention.sliding_window"


def test_tables_are_those_of_the_source(unpacked: Callable[[str], Path]) -> None:
    upstream = unpacked("src")
    arch = (upstream / "llama-arch.cpp").read_text()
    names = {k.lower(): n for k, n in re.findall(r'{ LLM_ARCH_(\w+), +"([\w.-]+)" +}', arch)}
    with_window, whole_rope, periods, intervals = set(), set(), {}, {}
    for file in sorted((upstream / "models").glob("*.cpp")):
        text = file.read_text()
        found = re.search(r"void llama_model_(\w+)::load_arch_hparams.*?\n}", text, re.DOTALL)
        if found is None:
            continue
        name, body = names.get(found[1]), found[0]
        if re.search(r"swa_type += LLAMA_SWA_TYPE_(STANDARD|CHUNKED|SYMMETRIC)", body):
            with_window.add(name)
        if m := re.search(r"load_swa_pattern\(ml, (\d+)(.*true)?\)", body):
            periods[name] = (int(m[1]), bool(m[2]))
        if m := re.search(r"full_attn_interval = (\d+);", body):
            intervals[name] = int(m[1])
        if re.search(r"^ *GGML_ASSERT\(n_embd_head == n_rot\);", text, re.MULTILINE):
            whole_rope.add(name)
    assert with_window == set(WINDOWS) | OTHERS
    ours = {a: (r.period, r.dense_first) for a, r in WINDOWS.items() if r.period}
    assert ours == {a: x for a, x in periods.items() if a not in OTHERS}
    assert intervals == INTERVALS
    assert whole_rope == WHOLE_ROPE
    model = (upstream / "llama-model.cpp").read_text()
    no_cache = re.search(r"::create_memory\(.*?res = nullptr", model, re.DOTALL)
    diffusion = re.search(r"bool llm_arch_is_diffusion.*?return true", arch, re.DOTALL)
    assert no_cache and diffusion
    cases = [set(re.findall(r"LLM_ARCH_(\w+)", found[0])) for found in (no_cache, diffusion)]
    textless = {names[name.lower()] for name in cases[0] - cases[1]}
    assert textless | {"llama-embed", "t5encoder"} == TEXTLESS


@pytest.mark.parametrize(
    ("arch", "n_layer", "keys", "sizes"),
    [
        ("gemma2", 4, {}, [4096, 0, 4096, 0]),
        ("gemma3", 7, {LENGTH: 512}, [512] * 5 + [0, 512]),
        ("gemma3", 3, {LENGTH: 512, f"{LENGTH}_pattern": 2}, [512, 0, 512]),
        ("gemma3", 2, {LENGTH: 512, f"{LENGTH}_pattern": [0, 1]}, [0, 512]),
        ("gemma3", 2, {}, []),
        ("gemma4", 3, {LENGTH: 8, f"{LENGTH}_pattern": [True, False]}, [8, 0, 0]),
        ("cohere2moe", 5, {LENGTH: 8}, [0, 8, 8, 8, 0]),
        ("llama4", 4, {LENGTH: 0}, []),
        ("llama4", 4, {}, [8192, 8192, 8192, 0]),
        ("exaone4", 4, {LENGTH: 8}, []),
        ("lfm2", 2, {LENGTH: 8}, [8, 8]),
        ("phi3", 4, {LENGTH: 2047}, []),  # llama.cpp has it switched off
        ("llama", 4, {LENGTH: 4096}, []),  # files of Mistral 7B v0.1
    ],
)
def test_windows(arch: str, n_layer: int, keys: dict[str, Any], sizes: list[int]) -> None:
    assert windows(arch, n_layer, keys).sizes == tuple(sizes)


def test_what_a_token_sees() -> None:
    sliding, chunked = Windows((8, 0)), Windows((8, 0), chunked=True)
    assert [sliding.visible(0, n) for n in (1, 8, 9, 20)] == [1, 8, 8, 8]
    assert [chunked.visible(0, n) for n in (1, 8, 9, 20)] == [1, 8, 1, 4]
    assert sliding.visible(1, 20) == chunked.visible(1, 20) == 20


def test_recurrent_layers() -> None:
    assert recurrent("qwen35", 5, {}) == [True, True, True, False, True]
    assert recurrent("qwen35", 2, {"full_attention_interval": 2}) == [True, False]
    assert recurrent("qwen35", 2, {"attention.recurrent_layers": [False, True]}) == [False, True]
    assert recurrent("llama", 2, {}) == [False, False]
    assert recurrent("nemotron_h", 3, {"feed_forward_length": [0, 96, 0]}) == [False, True, False]


@pytest.mark.parametrize(
    ("arch", "full", "n_elements"),
    [
        ("gemma3", False, 2 * 64 * 2 * (4096 + 6 * 768)),  # 64 + 512, in blocks of 256
        ("gemma3", True, 2 * 64 * 2 * 7 * 4096),
        ("deepseek2", False, 0),  # K alone
    ],
)
def test_memory_is_what_the_library_takes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, arch: str, full: bool, n_elements: int
) -> None:
    sizes = {"head_dim": 64} if n_elements else {}
    file = tiny_models.write(tmp_path / "m.gguf", arch, n_layer=7, **sizes)
    caplog.set_level(logging.INFO, "pyorch.llama")
    spec = parse_spec("sparq,ratio=1/8")
    with engine.load(file, n_ctx=4096, n_threads=1, swa_full=full, attention=spec) as s:
        geo, predicted, shadow = s.geometry, s.settings.kv_bytes(), s.settings.shadow_bytes()
    mib = map(float, re.findall(r"llama_kv_cache: size = +([\d.]+) MiB", caplog.text))
    assert sum(mib) == pytest.approx(predicted / 2**20, abs=0.005)
    if n_elements:
        assert predicted == 2 * n_elements
        return
    costs = layer_costs(geo, spec, 4096)
    assert sum(c.bytes_dense for c in costs) == sum(c.bytes_read for c in costs) == predicted
    assert not any(c.ours for c in costs) and shadow == 0


def test_a_file_that_llama_cpp_saved_is_read(tmp_path: Path) -> None:
    """It has the keys of latent attention in files of all architectures, as zeros."""
    m = tiny_models.make("llama", n_layer=2)
    plain = geometry(read_gguf(tiny_models.save(m, tmp_path / "a.gguf")))
    m.keys |= {"attention.key_length_mla": 0, "attention.value_length_mla": 0}
    assert geometry(read_gguf(tiny_models.save(m, tmp_path / "b.gguf"))) == plain


def test_nothing_is_promised_where_the_library_runs_dense(tmp_path: Path) -> None:
    """make test-archs compares the reasons with the library's own."""
    file = tiny_models.write(tmp_path / "m.gguf", "llama", n_layer=2)
    llama, spec = geometry(read_gguf(file)), parse_spec("sparq,ratio=1/8")
    assert all(c.ours and not c.split.dense for c in layer_costs(llama, spec, 4096))
    for arch, why in WHY_DENSE.items():
        geo = dataclasses.replace(llama, arch=arch)
        costs = layer_costs(geo, spec, 4096)
        assert {(c.split.reason, c.ours) for c in costs} == {(why, False)}
        assert sum(c.bytes_read for c in costs) == sum(c.bytes_dense for c in costs)
        dense, sparse = (Cache(g, spec, F16, 4096).shadow_bytes() for g in (geo, llama))
        assert dense == 0 < sparse


def test_recurrent_layers_are_known_by_their_weights(tmp_path: Path) -> None:
    """A layer without K and V has a state, or a feed-forward block alone."""
    m = tiny_models.make("llama", n_layer=4)
    m.keys["attention.head_count_kv"] = [0, 2, 0, 0]
    m.matrix("blk.0.ssm_in.weight", m.n_embd, 8)
    m.matrix("blk.2.shortconv.in_proj.weight", m.n_embd, 8)
    m.matrix("blk.1.ssm_in.weight", m.n_embd, 8)  # beside attention, as in Falcon H1
    geo = geometry(read_gguf(tiny_models.save(m, tmp_path / "m.gguf")))
    assert geo.kv_layers == [1] and geo.n_recurrent == 2


def test_a_row_is_read_of_the_embeddings_of_layers(tmp_path: Path) -> None:
    m = tiny_models.make("gemma3", n_layer=2)
    without = geometry(read_gguf(tiny_models.save(m, tmp_path / "a.gguf")))
    m.matrix("per_layer_token_embd.weight", 64, 260)
    geo = geometry(read_gguf(tiny_models.save(m, tmp_path / "b.gguf")))
    assert geo.weight_bytes == without.weight_bytes + 64 * 260 * 4
    assert geo.weight_bytes_per_token == without.weight_bytes_per_token


def test_layers_that_only_predict_have_no_cache(tmp_path: Path) -> None:
    m = tiny_models.make("llama", n_layer=3)
    m.keys["nextn_predict_layers"] = 1
    geo = geometry(read_gguf(tiny_models.save(m, tmp_path / "m.gguf")))
    assert geo.kv_layers == [0, 1] and geo.n_recurrent == 0
    of_a_layer = sum(4 * x.size for name, x in m.tensors.items() if name.startswith("blk.2."))
    embedding = 4 * m.tensors["token_embd.weight"].size
    assert geo.weight_bytes_per_token == geo.weight_bytes - of_a_layer - embedding
    assert dataclasses.replace(geo, n_own_cache=1).kv_layers == [0, 1]
