"""llama-server with the weights on a device that is not there (fake_device.cpp), and K and V of its
slots in memory."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fake_device
import pytest
from server import serving
from test_server import N_LAYER, N_SLOT, SERVERS, SPECS, complete


def test_slots_with_kv_in_memory(
    native_lib_dir: Path,
    server_dir: Path,
    tiny: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Replies of unlike settings, alone and together, are those of a server whose layers are here:
    with all of K and V in memory, and with those of one layer."""
    fake = fake_device.build(tmp_path, Path(server_dir))
    monkeypatch.setenv("GGML_BACKEND_PATH", str(fake))
    line = ("-m", tiny, "-t", 1, "-np", N_SLOT, "-c", 4096, "-b", 64, "-ub", 64, "-lv", 4)
    line += ("--no-kv-unified", "--fit", "off", "--sparse-attn", SERVERS)
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
        found.append([[x["content"] for x in replies] for replies in (alone, together)])
        assert all(len(text) > 10 for text in found[-1][0])
    assert found[0][0] == found[0][1] and found == [found[0]] * 3
