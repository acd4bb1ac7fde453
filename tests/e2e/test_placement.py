"""Where attention runs when K and V lie in a device's memory, on devices that are not there.

fake_device.cpp: "GPUs" computed by the CPU backend, whose memory the CPU backend cannot touch. So
every run must give the very bits of the run on the CPU, or crash.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import fake_device
import numpy as np
import pytest
import tiny as tiny_models
from llama import Context, Model, from_child
from quick import pairwise

HERE = Path(__file__).parent
SPARQ = "sparq,rank=8,topk=64,min_ctx=0,gpu_min_mb=0"
TOPK = "topk,k=64,min_ctx=0,gpu_min_mb=0"
ALL = 99  # layers on devices
N_LAYER, N_PROMPT, N_DECODE = 3, 600, 40  # of placed.py


@pytest.fixture(scope="module")
def fake(tmp_path_factory: pytest.TempPathFactory, native_lib_dir: Path) -> Path:
    return fake_device.build(tmp_path_factory.mktemp("fake"), native_lib_dir)


@pytest.fixture(scope="module")
def run(fake: Path, tmp_path_factory: pytest.TempPathFactory):
    """run(spec, n_gpu_layers, variables of the fake devices, other options of placed.py, or with
    `order` of beside.py)."""
    model = tiny_models.write(tmp_path_factory.mktemp("m") / "m.gguf", "llama", n_layer=N_LAYER)

    @functools.cache
    def go(spec: str, n_gpu_layers: int, variables: str = "", **options: Any) -> dict[str, Any]:
        text = json.dumps({"spec": spec, "n_gpu_layers": n_gpu_layers, **options})
        more = dict(item.split("=") for item in variables.split())
        script = HERE / ("beside.py" if "order" in options else "placed.py")
        more |= {"FAKE_DEVICES": "2", "FAKE_POISON": "1"}
        return from_child(script, model, fake, text, **more)

    return go


def ran(result: dict[str, Any], name: str) -> list[int]:
    """Nodes of a sub-operation, by device."""
    return [nodes[name] for nodes in result["nodes"]]


def reasons(result: dict[str, Any]) -> set[str]:
    return {layer["reason"] for layer in result["info"]["layers"]}


VARIANTS = {
    "sparq": (SPARQ, {}),
    "sequences": (SPARQ, {"n_seq": 3}),
    "q8_0": (SPARQ, {"type_k": "q8_0", "type_v": "q8_0"}),
    "restored": (SPARQ, {"reseal": True}),
    "document": (SPARQ, {"reopen": True}),
    "mean_v": (SPARQ + ",mean_v=on,shadow=f16", {}),
    "topk": (TOPK, {}),
    "dense": ("dense", {}),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_layers_on_two_devices(name: str, run) -> None:
    """Layer split: each layer's nodes run where its K lies, with the bits of the CPU."""
    spec, options = VARIANTS[name]
    got, want = run(spec, ALL, **options), run(spec, 0, **options)
    assert got["bits"] == want["bits"]
    n = N_DECODE - (name == "document")  # what comes after a document is a prompt
    assert ran(got, "ATTEND") == [2 * n, n] and ran(want, "ATTEND") == [0, 0]
    assert ran(got, "VISIBLE") == [n, n]  # once per token and device
    here, *there = got["info"].pop("devices")
    (alone,) = want["info"].pop("devices")
    assert here["bytes_read"] == 0
    for key in ("shadow_bytes", "calls_sparse", "bytes_read"):
        assert sum(device[key] for device in there) == alone[key], key
    for key in ("info", "differ", "sealed"):  # counters and shadow, read back from the devices
        assert got[key] == want[key], key
    if name == "restored":
        assert got["sealed"] == N_LAYER * (N_PROMPT // 64)
    if spec.startswith("sparq"):
        assert got["differ"] == 0 and got["info"]["shadow_bytes"] > 0
        assert got["info"]["counters"]["calls_sparse"] > 0


def test_a_part_of_the_layers_on_a_device(run) -> None:
    got = run(SPARQ, 2)  # the last layer, and the output
    assert got["bits"] == run(SPARQ, 0)["bits"] and sum(ran(got, "ATTEND")) == N_DECODE


def test_kv_on_the_host(run) -> None:
    """-nkvo: the CPU attends, whatever the device could do; K does not travel."""
    got = run(SPARQ, ALL, offload_kqv=False)
    assert got["bits"] == run(SPARQ, 0)["bits"]
    assert all(count == 0 for nodes in got["nodes"] for count in nodes.values())
    assert got["info"]["layers_sparse"] == N_LAYER


@pytest.mark.parametrize(
    ("spec", "variables", "why"),
    [
        (SPARQ, "FAKE_REFUSE=0", "no kernel for SEAL"),
        (SPARQ, "FAKE_REFUSE=4", "no kernel for SCORE_SELECT"),
        (TOPK, "FAKE_REFUSE=3", "no kernel for SELECT"),
        ("dense", "FAKE_REFUSE=1", "no kernel for VISIBLE"),
        (SPARQ, "FAKE_NAME=RPC FAKE_REFUSE=0", "on a worker without our sparse attention"),
    ],
)
def test_what_a_device_cannot_run_stays_dense(spec: str, variables: str, why: str, run) -> None:
    """llama.cpp's attention, the reason, and no memory for a shadow that nothing would read."""
    got = run(spec, ALL, variables)
    assert got["bits"] == run("off", 0)["bits"]
    assert reasons(got) and all(why in reason for reason in reasons(got))
    assert got["info"]["shadow_bytes"] == 0 and got["info"]["layers_sparse"] == 0
    assert all(count == 0 for nodes in got["nodes"] for count in nodes.values())


def test_a_device_without_memory_for_the_counters(run) -> None:
    """The spec is refused; the context goes on, and ends, as it was."""
    got = run(SPARQ, ALL, "FAKE_FULL=1", refused="no memory for the counters")
    assert got["bits"] == run("off", 0)["bits"] and not got["info"]["active"]


@pairwise(
    spec={"sparq": SPARQ, "topk": TOPK},
    order=["rp", "pr", "prp", "rpr", "rppr"],
    unified={"unified": True, "split": False},
)
def test_a_reply_beside_prompts_is_what_it_is_alone(
    spec: str, order: str, unified: bool, run
) -> None:
    """On a device llama.cpp reads the prompts of a batch, and our ops its replies."""
    spec = spec.replace("rank", "shadow=f16,rank")  # codes share a scale with other sequences
    got = run(spec, ALL, order=order, unified=unified)
    counters, n_reply, n_prompt = got["info"]["counters"], order.count("r"), order.count("p")
    assert counters["calls_sparse"] == 2 * n_reply * N_LAYER and counters["calls_prefill"] == 0
    assert counters["stock_reasons"] == {"prefill": 2 * 90 * n_prompt * N_LAYER}
    assert got["differ"] <= 0 and reasons(got) == {""}
    for seq, kind in enumerate(order):
        near, far = (
            np.abs(np.subtract(got["logits"][seq], got[other][seq])).max()
            for other in ("alone", "off")
        )
        assert near < 1e-3, seq
        assert far > 20 * near or kind == "p", "a reply is told from exact attention"


def test_a_long_prompt_between_replies(run) -> None:
    """The kernels of a device would keep the logits of its tokens too: it says so, and is dense."""
    got = run(SPARQ, ALL, order="rpr", unified=True, n_read=300)
    assert reasons(got) == {"a long prompt between replies"}
    assert got["info"]["counters"]["calls_sparse"] == 0
    got = run(SPARQ, ALL, order="rrp", unified=True, n_read=300)  # as llama-server orders them
    assert reasons(got) == {""} and got["info"]["counters"]["calls_sparse"] == 2 * 2 * N_LAYER


def test_too_many_logits_on_a_device(fake: Path, tmp_path: Path) -> None:
    """256 replies by 1,024 heads are just 1 GiB of logits while the cache has 1,024 cells, and more
    in the next step, whose attention is the device's own."""
    path = tiny_models.write(
        tmp_path / "m.gguf", n_layer=1, n_head=1024, n_head_kv=32, head_dim=32, n_embd=64
    )
    options = {"spec": SPARQ, "n_gpu_layers": ALL, "order": "r" * 256, "n_before": 3}
    text = json.dumps(options | {"unified": True, "only_info": True})
    got = from_child(HERE / "beside.py", path, fake, text)
    assert reasons(got) == {"too many logits for a GPU"}
    counters = got["info"]["counters"]
    assert counters["calls_sparse"] == 256
    assert counters["stock_reasons"] == {"too many logits for a GPU": 256}


def test_short_on_a_device(run) -> None:
    """Below gpu_min_mb: the device's own attention, sealed meanwhile. The CPU does not care."""
    spec = SPARQ.replace("gpu_min_mb=0", "gpu_min_mb=1")
    got = run(spec, ALL)
    assert got["bits"] == run("off", 0)["bits"] and reasons(got) == {"short for a GPU"}
    assert got["info"]["counters"]["groups_sealed"] == N_LAYER * (N_PROMPT // 64)
    assert run(spec, 0)["bits"] == run(SPARQ, 0)["bits"]


def test_whole_context_on_a_device(run) -> None:
    """Up to min_ctx nothing is chosen: the device's own attention, and the shadow is filled."""
    got = run(SPARQ.replace("min_ctx=0", "min_ctx=1024"), ALL)
    assert got["bits"] == run("off", 0)["bits"] and reasons(got) == {"every position is read"}
    assert got["differ"] == 0 and got["info"]["counters"]["groups_sealed"] > 0


def test_a_context_that_only_measures_gets_no_shadow(tmp_path: Path) -> None:
    """As llama.cpp makes them to see what fits: nothing may be allocated for K, V or the shadow."""
    path = tiny_models.write(tmp_path / "m.gguf", "llama", n_layer=N_LAYER)
    for no_alloc in (False, True):
        with Model(path, no_alloc=no_alloc) as model, Context(model, n_ctx=8192) as ctx:
            ctx.set_sparse(SPARQ)
            assert (ctx.info()["shadow_bytes"] == 0) == no_alloc


def test_the_comparison_can_fail(run) -> None:
    """The comparison sees what it is to see: sparse logits are not the dense ones."""
    assert len({run(spec, 0)["bits"] for spec in (SPARQ, TOPK, "dense", "off")}) == 4
