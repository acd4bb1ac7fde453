"""A build with Vulkan, which `make test-vulkan` makes: one of Mesa's devices on the CPU will do.
Nothing is read in batches here: their shaders take a minute to compile."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import pytest
import tiny as tiny_models

from pyorch import children
from pyorch.native import build, devices

FOLDER = build.find(build.Options(vulkan=True))
os.environ.setdefault("GGML_VK_VISIBLE_DEVICES", "0")  # one on the CPU is not looked at without
pytestmark = [
    pytest.mark.skipif(not FOLDER, reason="no build with Vulkan: make test-vulkan"),
    pytest.mark.skipif(not (FOLDER and devices.of_library(FOLDER)), reason="no device for Vulkan"),
]
SPARSE = "sparq,rank=8,topk=16,min_ctx=0"
REPLY = """
import json, sys
from pyorch import engine

options = json.loads(sys.argv[2])
with engine.load(sys.argv[1], n_threads=1, n_batch=1, n_ctx=512, **options) as s:
    pieces = engine.generate(s, list(range(3, 103)), max_tokens=20, ignore_eog=True)
    tokens, info = [p.token for p in pieces], engine.info(s)
    print(json.dumps([tokens, info.counters.get("calls_sparse", 0), s.kv_in_memory]))
"""


@pytest.fixture(scope="module")
def reply(tmp_path_factory: pytest.TempPathFactory):
    """reply(options): tokens, sparse calls, and the layers whose K and V lie in memory."""
    model = tiny_models.write(tmp_path_factory.mktemp("m") / "m.gguf", "llama", n_layer=3)

    def go(**options: Any) -> tuple[list[int], int, list[int]]:
        env = {k: v for k, v in os.environ.items() if k != "SPARQ_VULKAN"} | {"SPARQ_CUDA": "0"}
        argv = [sys.executable, "-c", REPLY, str(model), json.dumps(options)]
        done = children.run(argv, env=env)
        assert done.returncode == 0, done.stderr
        tokens, n_sparse, in_memory = json.loads(done.stdout)
        return tokens, n_sparse, in_memory

    return go


@pytest.mark.parametrize("kind", ["f16", "q8_0"])
@pytest.mark.parametrize("spec", [SPARSE, "topk,k=16,min_ctx=0", "dense"])
def test_kv_in_memory(spec: str, kind: str, reply) -> None:
    """Weights on the device, attention here: the text and the counters are those of the CPU."""
    options = {"attention": spec, "type_k": kind, "type_v": kind}
    here = reply(n_gpu_layers=0, **options)
    assert reply(kv_offload=False, **options) == here and (here[1] > 0) == (spec != "dense")


def test_kv_on_the_device_is_dense(reply) -> None:
    there = reply(attention=SPARSE, kv_offload=True)
    assert there[1:] == (0, []) and there[0] == reply(attention="off")[0]
    _, n_sparse, in_memory = reply(attention=SPARSE)
    assert (n_sparse > 0) == bool(in_memory)
