"""Reading GGUF headers: right numbers from good files, a `SparqError` from anything else."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tiny import write_tiny_gguf

from pyorch.errors import SparqError
from pyorch.models import memory
from pyorch.models.geometry import geometry
from pyorch.models.gguf_file import read_gguf


def test_geometry(tiny: Path) -> None:
    file = read_gguf(tiny)
    geo = geometry(file)
    assert (geo.arch, geo.name, geo.n_layer, geo.n_embd) == ("llama", "tiny", 2, 128)
    assert (geo.n_head, geo.n_head_kv) == ((4, 4), (2, 2))
    assert (geo.head_dim_k, geo.head_dim_v, geo.n_ctx_train) == (32, 32, 4096)
    assert geo.weight_bytes == 4 * geo.n_params
    embedding = next(t for t in file.tensors if t.name == "token_embd.weight")
    assert geo.weight_bytes_per_token == geo.weight_bytes - embedding.n_bytes
    assert file.n_bytes == tiny.stat().st_size


def test_every_truncation_is_refused(tiny: Path, tmp_path: Path) -> None:
    whole, cut = tiny.read_bytes(), tmp_path / "cut.gguf"
    rng = np.random.default_rng(0)
    for n in [0, 3, 4, 8, 20, 24, len(whole) - 1, *rng.integers(0, len(whole), 60)]:
        cut.write_bytes(whole[:n])
        with pytest.raises(SparqError, match="cut.gguf"):
            read_gguf(cut)


@pytest.mark.parametrize("content", [b"not a model", b"GGUF\x01\0\0\0" + bytes(40), None])
def test_other_files(tmp_path: Path, content: bytes | None) -> None:
    """Text, an old version, no file."""
    path = tmp_path / "m.gguf"
    if content:
        path.write_bytes(content)
    for file in (path, tmp_path):
        with pytest.raises(SparqError, match=file.name):
            read_gguf(file)


def test_a_file_that_is_no_language_model(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "m.gguf")
    path.write_bytes(path.read_bytes().replace(b"llama.block_count", b"llama.blork_count"))
    with pytest.raises(SparqError, match="llama.block_count"):
        geometry(read_gguf(path))


@pytest.mark.parametrize(
    ("policy", "mems", "wanted"),
    [
        ("default", "0-2", None),
        ("interleave:0-1", "0-2", None),
        ("bind:1", "0-2", 1),
        ("bind=static:0-1", "0-2", 2),
        ("default", "2", 1),
        ("bind:1-2", "0-1", 1),
    ],
)
def test_memory_of_the_nodes_a_process_is_bound_to(
    tmp_path: Path, policy: str, mems: str, wanted: int | None
) -> None:
    (tmp_path / "has_memory").write_text("0-2\n")
    (tmp_path / "status").write_text(f"Name:\tx\nMems_allowed:\t7\nMems_allowed_list:\t{mems}\n")
    (tmp_path / "numa_maps").write_text(f"5584 {policy} file=/x mapped=2\n5585 default\n")
    for n in range(3):
        (tmp_path / f"node{n}").mkdir()
        text = f"Node {n} MemTotal: 900 kB\nNode {n} MemFree: 100 kB\nNode {n} Active(file): 1 kB\n"
        (tmp_path / f"node{n}/meminfo").write_text(text + f"Node {n} Active(anon): 50 kB\n")

    def of(*kinds: str) -> int | None:
        return memory.of_nodes(*kinds, proc=tmp_path, nodes=tmp_path)

    assert of("MemFree", "Active(file)") == (wanted and wanted * 101 * 1024)
    assert of("MemTotal") == (wanted and wanted * 900 * 1024)
    (tmp_path / "numa_maps").unlink()  # a system without nodes
    assert of("MemFree") is None


def test_available_memory_is_believable(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 1 << 26 < memory.available_memory() < 1 << 46
    for n in (12345, 1 << 50):  # in place of what is free
        monkeypatch.setenv("SPARQ_MEMORY_LIMIT", str(n))
        assert memory.available_memory() == n
    monkeypatch.setenv("SPARQ_MEMORY_LIMIT", "12 GB")
    with pytest.raises(SparqError, match="12 GB"):
        memory.available_memory()
