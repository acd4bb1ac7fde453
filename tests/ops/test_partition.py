"""The split of the work over 1 to 128 threads, by counting what the kernels read (partition.py)."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import partition
import pytest

pytestmark = pytest.mark.slow  # a minute to compile

# positions: threads
THREADS = {16384: partition.THREADS, 131072: (1, 16, 64, 128)}
# name: bits of the transposed K (0: exact dense), rank, topk
METHODS = {
    "dense": (0, 0, 0),
    "sparq f16, r 32, k 128": (16, 32, 128),
    "sparq q4, r 32, k S/16": (4, 32, 0),
}


@pytest.fixture(scope="module")
def counting(tmp_path_factory, native_lib_dir: Path, ggml_headers: Path) -> partition.Counting:
    if not shutil.which("gcc"):
        pytest.skip("no gcc")
    return partition.Counting(native_lib_dir, ggml_headers, tmp_path_factory.mktemp("counting"))


def test_eight_kv_heads_feed_many_threads(counting: partition.Counting, capsys) -> None:
    """With 32 query heads. Where a node reads little, its units are few: k = 128 is 32 of them."""
    found: partition.Found = {}
    for n_pos, threads in THREADS.items():
        for method, (n_bit, rank, topk) in METHODS.items():
            whole: dict[str, int] = {}
            for n in threads:
                counting.bytes.clear()
                partition.count(counting, n_pos, n_bit, rank, topk or n_pos // 16, n)
                for name, total in partition.add(found, (n_pos, method), n, counting.bytes).items():
                    assert whole.setdefault(name, total) == total, "more threads read more"
    with capsys.disabled():
        print("\n" + partition.table(found))
    for (n_pos, _, name), by_threads in found.items():
        assert by_threads[1] == 1
        if name == "all":
            assert min(b for n, b in by_threads.items() if n <= 64) > 0.55
            assert by_threads[128] > (0.3 if n_pos < 131072 else 0.6)


def test_few_tokens_feed_many_threads(counting: partition.Counting) -> None:
    """A question after a document: threads share the positions of a head, none is read twice."""
    whole = partition.count_question(counting, 32768, 1).sum()
    for n_threads in (8, 16, 64):
        read = partition.count_question(counting, 32768, n_threads)
        assert read.sum() == whole
        assert read.mean() / read.max() > 0.95, n_threads


@pytest.mark.parametrize("n_threads", [2, 4, 8, 16, 32, 64, 128])
def test_shadow_lies_on_the_node_that_reads_it(
    n_threads: int, counting: partition.Counting
) -> None:
    """Threads lie on nodes in turns (`--numa distribute`); who seals a head touches it first."""
    for n_pos in (8192, 14336):
        found = partition.shadow_threads(counting, n_pos, n_threads)
        assert found["seal"].any(0).all(), "every thread seals"
        for seal, fused in zip(found["seal"], found["score_select"], strict=True):
            assert seal.any() and fused.any()
            for n_node in (2, 4, 8):
                if n_threads % n_node == 0:
                    nodes = {int(t) % n_node for t in np.flatnonzero(seal)}
                    assert {int(t) % n_node for t in np.flatnonzero(fused)} == nodes
                    assert len(nodes) == 1


@pytest.mark.parametrize("n_bit", [4, 16])
def test_sealing_walks_its_list_once(n_bit: int, counting: partition.Counting) -> None:
    """Four times as many groups take four times as many looks at the list, not sixteen."""
    few, many = (partition.list_bytes(counting, n_group, n_bit) for n_group in (64, 256))
    assert few > 0 and many / few < 4.5
