"""The split of the work over 1 to 128 threads, by counting what the kernels read (partition.py)."""

from __future__ import annotations

import shutil
from pathlib import Path

import partition
import pytest

# positions: threads
THREADS = {16384: partition.THREADS, 131072: (1, 16, 64, 128)}
# name: bits of the transposed K (0: exact dense), rank, topk
METHODS = {
    "dense": (0, 0, 0),
    "sparq f16, r 32, k 128": (16, 32, 128),
    "sparq q4, r 32, k S/16": (4, 32, 0),
}


@pytest.mark.slow
def test_eight_kv_heads_feed_many_threads(
    tmp_path: Path, native_lib_dir: Path, ggml_headers: Path, capsys
) -> None:
    """With 32 query heads. Where a node reads little, its units are few: k = 128 is 32 of them."""
    if not shutil.which("gcc"):
        pytest.skip("no gcc")
    ggml = partition.Counting(native_lib_dir, ggml_headers, tmp_path)
    found: partition.Found = {}
    for n_pos, threads in THREADS.items():
        for method, (n_bit, rank, topk) in METHODS.items():
            whole: dict[str, int] = {}
            for n in threads:
                ggml.bytes.clear()
                partition.count(ggml, n_pos, n_bit, rank, topk or n_pos // 16, n)
                for name, total in partition.add(found, (n_pos, method), n, ggml.bytes).items():
                    assert whole.setdefault(name, total) == total, "more threads read more"
    with capsys.disabled():
        print("\n" + partition.table(found))
    for (n_pos, _, name), by_threads in found.items():
        assert by_threads[1] == 1
        if name == "all":
            assert min(b for n, b in by_threads.items() if n <= 64) > 0.55
            assert by_threads[128] > (0.3 if n_pos < 131072 else 0.6)
