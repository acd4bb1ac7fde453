"""llama-server with the weights on a device that is not there (fake_device.cpp), and K and V of its
slots in memory."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fake_device
import pytest
from server import complete as answered
from server import serving
from test_documents import SPARSE, reading
from test_server import N_LAYER, N_SLOT, SERVERS, SPECS, complete
from test_server_documents import COMMON, MAPPED

from pyorch import engine
from pyorch.engine import document_file


def test_slots_with_kv_in_memory(
    native_lib_dir: Path,
    server_dir: Path,
    tiny: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Replies of unlike settings are those of a server whose layers are here: with all of K and V
    in memory, and with those of one layer. Together as many calls are sparse; llama.cpp reads
    their prompts then, and rounds otherwise in other batches, so the texts may differ."""
    fake = fake_device.build(tmp_path, Path(server_dir))
    monkeypatch.setenv("GGML_BACKEND_PATH", str(fake))
    spec = f"{SERVERS},gpu_min_mb=0"
    line = ("-m", tiny, "-t", 1, "-np", N_SLOT, "-c", 4096, "-b", 64, "-ub", 64, "-lv", 4)
    line += ("--no-kv-unified", "--fit", "off", "--sparse-attn", spec, "--device", "FAKE0")
    found = []
    for more, in_memory in ((("-ngl", 0), ""), (("-nkvo",), ""), ((), "1")):
        monkeypatch.setenv("SPARQ_KV_IN_MEMORY", in_memory)
        log = tmp_path / "log"
        with serving(server_dir, log, *line, *more) as url, ThreadPoolExecutor(N_SLOT) as pool:
            alone = [complete(url, seed, spec) for seed, spec in enumerate(SPECS)]
            together = list(pool.map(lambda x, url=url: complete(url, *x), enumerate(SPECS)))
        layers = f"offloaded {0 if '-ngl' in more else N_LAYER + 1}/{N_LAYER + 1} layers to GPU"
        said = log.read_text(errors="replace")
        assert layers in said and ("FAKE0 KV buffer size" in said) == (in_memory == "1")
        found.append([x["content"] for x in alone])
        assert all(len(text) > 10 for text in found[-1])
        for one, other in zip(alone, together, strict=True):
            a, b = (x["timings"]["sparse_attn"] for x in (one, other))
            assert a["calls_sparse"] == b["calls_sparse"]
        assert [x["timings"]["sparse_attn"]["calls_sparse"] > 0 for x in together[:2]] == [True] * 2
    assert found == [found[0]] * 3


def test_a_document_with_kv_in_memory(
    server_dir: Path, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is opened, and not read again, wherever K and V lie, and what follows is the same."""
    with engine.load(tiny, attention=SPARSE, n_ctx=2048) as s:
        book = engine.read_document(s, tmp_path / "book.kv", reading(1100))
    (tmp_path / "list").write_text(document_file.listed([book]))
    monkeypatch.setenv("SPARQ_DOCUMENTS", str(tmp_path / "list"))
    monkeypatch.setenv("GGML_BACKEND_PATH", str(fake_device.build(tmp_path, server_dir)))
    line = ("-m", tiny, *COMMON, *MAPPED, "--fit", "off", "--device", "FAKE0", "--cache-ram", 0)
    line += ("--sparse-attn", f"{SPARSE},gpu_min_mb=0", "-lv", 4)
    found = []
    for more, in_memory in ((("-ngl", 0), ""), (("-nkvo",), ""), ((), "1")):
        monkeypatch.setenv("SPARQ_KV_IN_MEMORY", in_memory)
        with serving(server_dir, log := tmp_path / "log", *line, *more) as url:
            got = answered(url, document_file.content(book)[1] + " who?")
        said = log.read_text(errors="replace")
        assert ("FAKE0 KV buffer size" in said) == (in_memory == "1")
        assert got["timings"]["prompt_n"] == 5
        assert got["timings"]["sparse_attn"]["calls_sparse"] > 0
        found.append(got["content"])
    assert found == [found[0]] * 3 and len(found[0]) > 10
