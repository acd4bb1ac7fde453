"""Reading memory in the orders of sparse attention: what is read, and that it is."""

from __future__ import annotations

import ctypes
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

sys.path.append(str(Path(__file__).parents[2] / "bench"))

import row_reads

from pyorch.bench import bandwidth


@pytest.fixture
def layers(monkeypatch: pytest.MonkeyPatch) -> row_reads.Layers:
    """Two small ones: 4,096 positions of 2 heads."""
    monkeypatch.setattr(row_reads, "N_KV", 4096)
    monkeypatch.setattr(row_reads, "N_HEAD", 2)
    monkeypatch.setattr(row_reads, "LAYER", 2 * 4096 * 2 * row_reads.ROW)
    monkeypatch.setattr(row_reads, "TILE", 2048)
    made = row_reads.Layers(2)
    made.bytes[:] = np.random.default_rng(1).integers(0, 256, made.bytes.size, np.uint8)
    return made


@pytest.mark.parametrize("read", row_reads.READS)
def test_every_byte_of_the_pieces_is_read(layers: row_reads.Layers, read: str) -> None:
    at = layers.pieces(read, np.random.default_rng(2))
    size = row_reads.size(read)
    words = layers.bytes.view(np.uint64)
    want = np.bitwise_xor.reduce(words[(at[:, None] + np.arange(0, size, 8)) // 8], axis=None)
    name, more = "sparq_bench_rows", [row_reads.ROWS_AHEAD]
    if components := row_reads.COMPONENTS.get(read):
        name, more = f"sparq_bench_runs{components.side}", [size, components.ahead]
    function = layers.lib[name]
    function.restype = ctypes.c_uint64
    where = ctypes.c_void_p(layers.bytes.ctypes.data), ctypes.c_void_p(at.ctypes.data)
    assert function(*where, *map(ctypes.c_size_t, [at.size, *more])) == int(want)


def test_rows_are_of_one_head_after_another(layers: row_reads.Layers) -> None:
    at = layers.pieces("rows", np.random.default_rng(2)).reshape(2, 2, 512, 2)
    k, v = at[..., 0], at[..., 1]
    assert (v - k == row_reads.LAYER // 2).all()
    assert (np.diff(k, axis=-1) > 0).all()
    layer, rest = np.divmod(k, row_reads.LAYER)
    position, rest = np.divmod(rest, 2 * row_reads.ROW)
    assert (layer == np.arange(2)[:, None, None]).all()
    assert (rest == np.arange(2)[:, None] * row_reads.ROW).all()
    assert position.min() >= 0 and position.max() < 4096


@pytest.mark.parametrize(
    ("read", "run", "stride"), [("channels", 4096, 8064), ("codes", 1024, 2112)]
)
def test_components_are_read_tile_by_tile(
    layers: row_reads.Layers, read: str, run: int, stride: int
) -> None:
    at = layers.pieces(read, np.random.default_rng(2)).reshape(2, 2, 2, row_reads.RANK)
    assert (np.diff(at, axis=2) == run).all()
    chan, rest = np.divmod(at - np.arange(2)[:, None, None, None] * row_reads.LAYER, stride)
    assert (rest == np.array([0, run])[:, None]).all()
    assert (chan // row_reads.D == np.arange(2)[:, None, None]).all()
    assert (np.diff(chan, axis=-1) > 0).all()


def test_command_writes_records_and_a_table(
    layers: row_reads.Layers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bandwidth, "BUFFER_BYTES", 1 << 20)
    monkeypatch.setattr(bandwidth, "LEAST_BYTES", 1 << 20)
    asked = ["-t", "1,2", "--samples", "2", "--out", str(tmp_path)]
    done = CliRunner().invoke(row_reads.command, asked)
    assert done.exit_code == 0, done.output
    made = [json.loads(line) for line in (tmp_path / "row_reads.jsonl").read_text().splitlines()]
    assert [(r["case"]["read"], r["case"]["n_threads"]) for r in made] == [
        (read, n) for n in (1, 2) for read in layers.reads
    ]
    for r in made:
        assert len(r["samples_ns"]) == len(r["bandwidth_bytes_per_s"]) == 2
        assert min(r["samples_ns"]) > 0
    table = (tmp_path / "row_reads.md").read_text().splitlines()
    assert len(table) == 2 + len(made)
    rec = made[0] | {"bytes": 2560, "samples_ns": [1280, 1280], "bandwidth_bytes_per_s": [4e9] * 2}
    row = row_reads.table([rec]).splitlines()[-1].split(" | ")
    assert row[1:] == ["1", "128.0", "2.0 (2.0-2.0)", "50% |"]
