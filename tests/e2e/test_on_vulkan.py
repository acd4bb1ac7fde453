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
if FOLDER:  # a device on the CPU is not looked at without
    os.environ.setdefault("GGML_VK_VISIBLE_DEVICES", "0")
pytestmark = [
    pytest.mark.skipif(not FOLDER, reason="no build with Vulkan: make test-vulkan"),
    pytest.mark.skipif(not (FOLDER and devices.of_library(FOLDER)), reason="no device for Vulkan"),
]
SPARSE, TOPK = "sparq,rank=8,topk=16,min_ctx=0", "topk,k=16,min_ctx=0"
REPLY = """
import json, logging, sys
from pyorch import engine

logging.basicConfig(level="INFO")
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
        assert ("Vulkan0" in done.stderr) == (options.get("n_gpu_layers") != 0)
        tokens, n_sparse, in_memory = json.loads(done.stdout)
        return tokens, n_sparse, in_memory

    return go


@pytest.mark.parametrize(
    ("spec", "kind", "n_same"),
    [(SPARSE, "f32", 20), (TOPK, "f32", 20), ("dense", "f32", 20), (SPARSE, "q8_0", 4)],
)
def test_kv_in_memory(spec: str, kind: str, n_same: int, reply) -> None:
    """Weights on the device, attention here: text and counters are those of the CPU. Rounding K
    makes more of the last bits in which the device's differs."""
    options = {"attention": spec, "type_k": kind, "type_v": kind}
    here, there = reply(n_gpu_layers=0, **options), reply(kv_offload=False, **options)
    assert there[0][:n_same] == here[0][:n_same] and there[1:] == here[1:]
    assert (here[1] > 0) == (spec != "dense")


def test_kv_on_the_device_is_dense(reply) -> None:
    there = reply(attention=SPARSE, kv_offload=True)
    assert there[1:] == (0, []) and there[0] == reply(attention="off")[0]
    _, n_sparse, in_memory = reply(attention=SPARSE)
    assert (n_sparse > 0) == bool(in_memory)
