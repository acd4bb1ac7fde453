"""Memory: nothing is allocated per token, and pages of the shadow come when they are written."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from c_library import compiled
from llama import from_child
from tiny import write

# Allocations of each decoded token, by spec; the growth of the cache's view makes a new graph.
COUNT = """
import ctypes, json, statistics, sys
from llama import Context, Model, bindings

def count():
    calls, largest = ctypes.c_long(), ctypes.c_long()
    ctypes.CDLL(None).allocations(ctypes.byref(calls), ctypes.byref(largest))
    return calls.value, largest.value

found = {}
with Model(sys.argv[1]) as model:
    for spec in sys.argv[2:]:
        with Context(model, n_ctx=4096, n_threads=2) as ctx:
            ctx.set_sparse(spec)
            ctx.decode([(5, i, 0) for i in range(1000)])
            samples = []
            for i in range(1000, 1200):
                count()
                assert ctx.decode([(7, i, 0)]) == 0
                bindings().llama_synchronize(ctx.handle)
                samples.append(count())
            found[spec] = [statistics.median(s) for s in zip(*samples[40:])]
print(json.dumps(found))
"""
SPECS = (
    "off",
    "dense",
    "topk,k=64,min_ctx=0",
    "sparq,rank=8,topk=64,min_ctx=0,shadow=f16",
    "sparq,rank=8,topk=64,min_ctx=0,shadow=q4,mean_v=on",
)


GROWN = """
import sys
from llama import Context, Model
from server import resident
with Model(sys.argv[1]) as model, Context(model, n_ctx=1 << 17, n_threads=2) as ctx:
    before = resident()
    ctx.set_sparse("sparq,rank=8,topk=64,shadow=f16,mean_v=on")
    assert ctx.info()["shadow_bytes"] > 32 << 20
    print(resident() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_threads_that_seal_touch_the_shadow_first(tmp_path: Path) -> None:
    """Then its pages lie in their part of a NUMA machine: making it must not write to it."""
    model_file = write(tmp_path / "m.gguf", "llama", n_ctx=1 << 17)
    assert from_child("-c", GROWN, model_file) < 1 << 20


@pytest.mark.skipif(sys.platform != "linux", reason="counts with glibc's functions")
def test_sparse_attention_allocates_nothing_per_token(tiny: Path, tmp_path: Path) -> None:
    """llama.cpp allocates for each token; with sparse attention it is not one call more."""
    library = compiled(Path(__file__).with_name("count_malloc.c"), tmp_path / "count_malloc.so")
    found = from_child("-c", COUNT, tiny, *SPECS, LD_PRELOAD=str(library))
    assert found["off"][0] > 10
    assert all(found[spec] == found["off"] for spec in SPECS), found
