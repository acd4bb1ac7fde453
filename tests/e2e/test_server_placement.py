"""llama-server with the weights on a device, and K and V of its slots in memory: a device that is
not there (fake_device.cpp), or one of Vulkan where the build has it (`make test-vulkan`)."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fake_device
import pytest
import tiny as tiny_models
from on_vulkan import needs_vulkan
from server import ask, serving
from server import complete as answered
from test_documents import SPARSE, reading
from test_server import N_LAYER, N_SLOT, SERVERS, SPECS, complete
from test_server_documents import COMMON, MAPPED
from test_server_drafts import drafts
from tiny import text_of

from pyorch import engine
from pyorch.engine import document_file


@pytest.fixture(params=["FAKE0", pytest.param("Vulkan0", marks=needs_vulkan)])
def device(
    request: pytest.FixtureRequest, server_dir: Path, tmp_path: Path, monkeypatch: Any
) -> str:
    if request.param == "FAKE0":
        monkeypatch.setenv("GGML_BACKEND_PATH", str(fake_device.build(tmp_path, server_dir)))
    return str(request.param)


# Vulkan's shaders for many tokens compile for a minute; with fewer tokens than slots it crashes
BATCH = {"FAKE0": ("-ub", 64), "Vulkan0": ("-ub", 16)}
F32 = ("-ctk", "f32", "-ctv", "f32")  # rounded, K would make more of the last bits of Vulkan's
PLACES = ((("-ngl", 0), ""), (("-nkvo",), ""), ((), "1"))  # options, and layers in memory


def places(device: str) -> tuple[tuple[tuple[object, ...], str], ...]:
    """Without kernels of ours a layer that is not in memory reads everything: another text."""
    return PLACES if device == "FAKE0" else PLACES[:2]


def test_slots_with_kv_in_memory(
    device: str, server_dir: Path, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replies of unlike settings are those of a server whose layers are here: with all of K and V
    in memory, and with those of one layer. Together as many calls are sparse; llama.cpp reads
    their prompts then, and rounds otherwise in other batches, so the texts may differ."""
    spec = f"{SERVERS},gpu_min_mb=0"
    line = ("-m", tiny, "-t", 1, "-np", N_SLOT, "-c", 4096, "-b", 64, "-lv", 4, *F32)
    line += ("--no-kv-unified", "--fit", "off", "--sparse-attn", spec, "--device", device)
    line += BATCH[device]
    found = []
    for more, in_memory in places(device):
        monkeypatch.setenv("SPARQ_KV_IN_MEMORY", in_memory)
        log = tmp_path / "log"
        with serving(server_dir, log, *line, *more) as url, ThreadPoolExecutor(N_SLOT) as pool:
            alone = [complete(url, seed, spec) for seed, spec in enumerate(SPECS)]
            together = list(pool.map(lambda x, url=url: complete(url, *x), enumerate(SPECS)))
        layers = f"offloaded {0 if '-ngl' in more else N_LAYER + 1}/{N_LAYER + 1} layers to GPU"
        said = log.read_text(errors="replace")
        assert layers in said and (f"{device} KV buffer size" in said) == (in_memory == "1")
        n_same = None if device == "FAKE0" else 4  # Vulkan rounds otherwise
        found.append([x["content"][:n_same] for x in alone])
        assert all(len(x["content"]) > 10 for x in alone)
        for one, other in zip(alone, together, strict=True):
            a, b = (x["timings"]["sparse_attn"] for x in (one, other))
            assert a["calls_sparse"] == b["calls_sparse"]
        assert [x["timings"]["sparse_attn"]["calls_sparse"] > 0 for x in together[:2]] == [True] * 2
    assert found == [found[0]] * len(found)


def test_documents_and_slots_that_were_saved_with_kv_in_memory(
    device: str, server_dir: Path, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are opened, and not read again, wherever K and V lie, and what follows is the same."""
    with engine.load(tiny, attention=SPARSE, n_ctx=2048, n_gpu_layers=0) as s:
        book = engine.read_document(s, tmp_path / "book.kv", reading(1100))
    (tmp_path / "list").write_text(document_file.listed([book]))
    monkeypatch.setenv("SPARQ_DOCUMENTS", str(tmp_path / "list"))
    line = ("-m", tiny, *COMMON, *MAPPED, "--fit", "off", "--device", device, "--cache-ram", 0)
    line += ("--sparse-attn", f"{SPARSE},gpu_min_mb=0", "-lv", 4, "--slot-save-path", tmp_path)
    line += BATCH[device]
    found = []
    for more, in_memory in places(device):
        monkeypatch.setenv("SPARQ_KV_IN_MEMORY", in_memory)
        with serving(server_dir, log := tmp_path / "log", *line, *more) as url:
            asked = document_file.content(book)[1] + " who?"
            got = answered(url, asked, id_slot=0)
            ask(f"{url}/slots/0?action=save", {"filename": "kept"})
            ask(f"{url}/slots/1?action=restore", {"filename": "kept"})
            goes_on = answered(url, asked + got["content"] + "so", id_slot=1)
        said = log.read_text(errors="replace")
        assert (f"{device} KV buffer size" in said) == (in_memory == "1")
        assert got["timings"]["prompt_n"] == 5 and goes_on["timings"]["prompt_n"] < 30
        assert all(x["timings"]["sparse_attn"]["calls_sparse"] > 0 for x in (got, goes_on))
        found.append([got["content"], goes_on["content"]])
    assert found == [found[0]] * len(found) and len(found[0][0]) > 10


def test_drafts_with_kv_in_memory(device: str, server_dir: Path, tmp_path: Path) -> None:
    """Their tokens are verified by sparse attention, and the text is that without."""
    model = tiny_models.write(tmp_path / "m.gguf", "llama", n_layer=2, weights="Q8_0")
    line = ("-m", model, *COMMON, "--fit", "off", "--device", device, "-nkvo", *F32)
    line += ("--cache-ram", 0, "--sparse-attn", f"{SPARSE},gpu_min_mb=0", *BATCH[device])
    with serving(server_dir, tmp_path / "log", *line) as url:
        want = answered(url, text_of(300), n_predict=80)
    with serving(server_dir, tmp_path / "log", *line, *drafts("itself", {"target": model})) as url:
        got = answered(url, text_of(300), n_predict=80)
    own, steps = got["timings"]["sparse_attn"], want["timings"]["sparse_attn"]["steps"]
    assert got["timings"]["draft_n_accepted"] > 20 and own["verified"] > 50
    assert own["calls_sparse"] == 2 * own["steps"] >= 2 * steps > 0
    assert got["content"] == want["content"]
