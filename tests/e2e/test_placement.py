"""Where attention runs when K and V lie in a device's memory, on devices that are not there.

fake_device.cpp: "GPUs" computed by the CPU backend, whose memory the CPU backend cannot touch. So
every run must give the very bits of the run on the CPU, or crash. A GPU by Vulkan rounds otherwise.
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
from cases import GROUP
from llama import Context, Model, environment, from_child
from on_vulkan import needs_stock_vulkan, needs_vulkan
from quick import pairwise

HERE = Path(__file__).parent
SPARQ = "sparq,rank=8,topk=64,min_ctx=0,gpu_min_mb=0"
TOPK = "topk,k=64,min_ctx=0,gpu_min_mb=0"
ALL = 99  # layers on devices
ON_CPU = "SPARQ_PROMPT_ON_CPU=1"
N_LAYER, N_PROMPT, N_DECODE = 3, 600, 40  # of placed.py


@pytest.fixture(scope="module")
def fake(tmp_path_factory: pytest.TempPathFactory, native_lib_dir: Path) -> Path:
    return fake_device.build(tmp_path_factory.mktemp("fake"), native_lib_dir)


@pytest.fixture(scope="module")
def run(fake: Path, tmp_path_factory: pytest.TempPathFactory):
    """run(spec, n_gpu_layers, variables of the fake devices, architecture, whether on Vulkan's in
    their place, whether stock; other options of placed.py, or with `order` of beside.py)."""

    @functools.cache
    def fake_of_stock() -> Path:
        folder = Path(environment(stock=True)["LLAMA_CPP_LIB_PATH"])
        return fake_device.build(tmp_path_factory.mktemp("stock"), folder)

    @functools.cache
    def made(arch: str) -> Path:
        n_layer = N_LAYER if arch == "llama" else 2 * N_LAYER
        return tiny_models.write(tmp_path_factory.mktemp("m") / "m.gguf", arch, n_layer=n_layer)

    @functools.cache
    def go(
        spec: str,
        n_gpu_layers: int,
        variables: str = "",
        arch: str = "llama",
        vulkan: bool = False,
        stock: bool = False,
        **options: Any,
    ) -> dict[str, Any]:
        model = made(arch)
        options |= {"n_ubatch": 16} if vulkan else {}  # shaders of more compile for a minute
        text = json.dumps({"spec": spec, "n_gpu_layers": n_gpu_layers, **options})
        more = {"FAKE_DEVICES": "2", "FAKE_POISON": "1"}
        more |= dict(item.split("=") for item in variables.split())
        script = HERE / ("beside.py" if "order" in options else "placed.py")
        library = "" if vulkan else fake_of_stock() if stock else fake
        return from_child(script, model, library, text, stock=stock, **more)

    return go


def ran(result: dict[str, Any], name: str) -> list[int]:
    """Nodes of a sub-operation, by device."""
    return [nodes[name] for nodes in result["nodes"]]


def reasons(result: dict[str, Any]) -> set[str]:
    return {layer["reason"] for layer in result["info"]["layers"]}


def assert_same(got: dict[str, Any], want: dict[str, Any]) -> None:
    """The same logits, and the same account of all devices together."""
    for key in ("bits", "differ", "sealed"):
        assert got[key] == want[key], key
    one, other = ({**x["info"], "devices": ()} for x in (got, want))
    assert one == other


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
    n = N_DECODE - (name == "document")  # what comes after a document is a prompt
    assert ran(got, "ATTEND") == [2 * n, n] and ran(want, "ATTEND") == [0, 0]
    assert ran(got, "VISIBLE") == [n, n]  # once per token and device
    here, *there = got["info"]["devices"]
    (alone,) = want["info"]["devices"]
    assert here["bytes_read"] == 0
    for key in ("shadow_bytes", "calls_sparse", "bytes_read"):
        assert sum(device[key] for device in there) == alone[key], key
    assert_same(got, want)  # counters and shadow, read back from the devices
    if name == "restored":
        assert got["sealed"] == N_LAYER * (N_PROMPT // GROUP)
    if spec.startswith("sparq"):
        assert got["differ"] == 0 and got["info"]["shadow_bytes"] > 0
        assert got["info"]["counters"]["calls_sparse"] > 0


def test_a_part_of_the_layers_on_a_device(run) -> None:
    got = run(SPARQ, 2)  # the last layer, and the output
    assert got["bits"] == run(SPARQ, 0)["bits"] and sum(ran(got, "ATTEND")) == N_DECODE


IN_MEMORY = VARIANTS | {"q4_0": (SPARQ, {"type_k": "q4_0", "type_v": "q4_0"})}
IN_MEMORY |= {arch: (SPARQ, {"arch": arch}) for arch in ("lfm2", "gemma3")}  # hybrid; windows


@pytest.mark.parametrize("name", IN_MEMORY)
def test_kv_in_memory(name: str, run) -> None:
    """-nkvo: the CPU attends, whatever the device could do; K does not travel. Asked for, PREFILL
    reads a prompt there, as on a machine without devices."""
    spec, options = IN_MEMORY[name]
    got, want = run(spec, ALL, offload_kqv=False, **options), run(spec, 0, **options)
    assert all(count == 0 for nodes in got["nodes"] for count in nodes.values())
    assert_same(got, want)
    counters = got["info"]["counters"]
    assert got["info"]["layers_sparse"] and counters["calls_sparse"] + counters["calls_dense_op"]
    assert counters["calls_prefill"] == 0 and counters["stock_reasons"]["prefill"] > 0
    got = run(spec, ALL, ON_CPU, offload_kqv=False, **options)
    assert_same(got, run(spec, 0, "FAKE_DEVICES=0", **options))
    counters = got["info"]["counters"]
    assert counters["calls_prefill"] > 0 and "prefill" not in counters["stock_reasons"]


@needs_vulkan
@pytest.mark.parametrize("name", IN_MEMORY)
def test_kv_in_memory_beside_vulkan(name: str, run) -> None:
    """The same account, and logits that differ by what the device rounds otherwise."""
    spec, options = IN_MEMORY[name]
    if "shadow" not in spec:  # codes share a scale with other sequences
        spec = spec.replace("rank", "shadow=f16,rank")
    options = {"vulkan": True, "offload_kqv": False, **options}
    got, want = run(spec, ALL, **options), run(spec, 0, **options)
    off = run("off", 0, **options | {"reseal": False})
    assert_same(got | {"bits": ""}, want | {"bits": ""})
    near, far = (np.median(np.abs(np.subtract(want["logits"], x["logits"]))) for x in (got, off))
    limit, factor = (0.2, 4) if name == "q4_0" else (0.1, 5)  # llama.cpp's own differs by 0.1 there
    assert 0 < near < limit and (far > factor * near or spec == "dense")


@pytest.mark.parametrize("name", [name for name in IN_MEMORY if name not in ("lfm2", "gemma3")])
def test_kv_of_some_layers_in_memory(name: str, run) -> None:
    """The first and the last layer attend on the CPU, and the other one on its device."""
    spec, options = IN_MEMORY[name]
    got, want = run(spec, ALL, "SPARQ_KV_IN_MEMORY=0,2", **options), run(spec, 0, **options)
    assert sum(ran(got, "ATTEND")) == N_DECODE - (name == "document")
    assert 0 in ran(got, "ATTEND")
    here, there = got["info"]["devices"]
    (alone,) = want["info"]["devices"]
    for key in ("shadow_bytes", "calls_sparse", "bytes_read"):
        assert here[key] + there[key] == alone[key], key
    assert here["bytes_read"] > there["bytes_read"] > 0
    assert_same(got, want)


def test_prompts_on_the_cpu_in_some_layers(run) -> None:
    """Those with K on a device are llama.cpp's there."""
    got = run(SPARQ, ALL, f"{ON_CPU} SPARQ_KV_IN_MEMORY=0,2")["info"]["counters"]
    assert got["calls_prefill"] == 2 * N_PROMPT and got["stock_reasons"] == {"prefill": N_PROMPT}
    assert run(SPARQ, ALL, ON_CPU)["info"]["counters"]["calls_prefill"] == 0


@pytest.mark.parametrize("order", ["rp", "rpr"])
def test_prompts_on_the_cpu_beside_replies(order: str, run) -> None:
    options = {"order": order, "unified": True}
    got = run(SPARQ, ALL, ON_CPU, offload_kqv=False, **options)
    want = run(SPARQ, 0, "FAKE_DEVICES=0", **options)
    assert got["info"]["counters"]["calls_prefill"] == 2 * 90 * N_LAYER
    assert got["logits"] == want["logits"] and got["info"] == want["info"]


@pytest.mark.parametrize(
    ("arch", "listed", "n_there", "n_here"),
    [
        ("lfm2", "1,4", [1, 1], 1),  # 1, 3 and 5 attend, the others are recurrent
        ("lfm2", "2,3,5", [1, 0], 2),
        ("gemma3", "0,2", [0, 1], 2),  # 5 sees all positions, the others have a window
        ("gemma3", "1,5", [0, 0], 2),
    ],
)
def test_some_layers_of_unlike_kinds(
    arch: str, listed: str, n_there: list[int], n_here: int, run
) -> None:
    """Replies attend where K lies, and PREFILL reads a prompt in those that lie in memory."""
    listed = f"SPARQ_KV_IN_MEMORY={listed}"
    got, want = run(SPARQ, ALL, listed, arch=arch), run(SPARQ, 0, arch=arch)
    assert ran(got, "ATTEND") == [n * N_DECODE for n in n_there]
    assert_same(got, want)
    counters = run(SPARQ, ALL, f"{ON_CPU} {listed}", arch=arch)["info"]["counters"]
    assert counters["calls_prefill"] == n_here * N_PROMPT


def test_recurrent_states_stay_on_the_device(run) -> None:
    """With -nkvo they leave it; K and V alone do where every layer of them is listed."""
    arch = {"arch": "lfm2"}
    want = run(SPARQ, 0, **arch)
    got = run(SPARQ, ALL, "SPARQ_KV_IN_MEMORY=0,1,2,3,4,5", **arch)
    assert got["bits"] == want["bits"] and sum(ran(got, "ATTEND")) == 0
    none, all_of_it = (
        run(SPARQ, ALL, f"{COUNTED} SPARQ_KV_IN_MEMORY={x}", **more, **arch)["crossed"]
        for x, more in (("0,1,2,3,4,5", {}), ("", {"offload_kqv": False}))
    )
    assert len(none) < len(all_of_it)


STOCK_VULKAN = [pytest.param(True, x, marks=needs_stock_vulkan, id=f"Vulkan-{x}") for x in (0, 1)]


@pytest.mark.parametrize(("vulkan", "offload_kqv"), [(False, False), *STOCK_VULKAN])
@pytest.mark.parametrize("types", [{}, {"type_k": "q8_0", "type_v": "q8_0"}], ids=["f16", "q8_0"])
def test_off_is_stock(types: dict[str, str], vulkan: bool, offload_kqv: bool, run) -> None:
    """The promise of `off`, with the same -nkvo or -kvo, each library with devices of its own."""
    options = {"vulkan": vulkan, "offload_kqv": bool(offload_kqv), **types}
    stock = run("", ALL, stock=True, **options)
    assert stock["info"] == {} and run("off", ALL, **options)["bits"] == stock["bits"]


COUNTED = "GGML_SCHED_DEBUG=1 LLAMA_GRAPH_REUSE_DISABLE=1"


def test_what_crosses_for_a_token(run) -> None:
    """With K and V in memory q, k and v come back from the device, and the result of attention goes
    there: four copies in a layer, each with a wait. What our ops read beside lies here already."""
    splits = run(SPARQ, ALL, COUNTED, offload_kqv=False)["crossed"]
    back = [names for backend, names in splits if backend == "CPU" and names]
    assert back == [[f"{x}cur-{il} (view)" for x in "KVQ"] for il in range(N_LAYER)]
    there = [name for backend, names in splits if backend != "CPU" for name in names]
    attended = [name for name in there if name.startswith("kqv_out")]
    assert attended == [f"kqv_out-{il}" for il in range(N_LAYER)]
    assert not [name for name in there if "sparse" in name or "mask" in name or "cache" in name]


@pytest.mark.parametrize("offload_kqv", [True, False])
def test_a_mask_beside_replies_goes_to_a_device_once(offload_kqv: bool, run) -> None:
    """That of a prompt is as long as the context for each of its tokens, and once went there with
    every layer."""
    got = run(SPARQ, ALL, COUNTED, order="rp", unified=True, offload_kqv=offload_kqv)
    for device in ("FAKE0", "FAKE1"):
        names = [name for backend, all_ in got["crossed"] if backend == device for name in all_]
        masks = [name for name in names if "mask" in name]
        assert masks and len(masks) <= 1 + offload_kqv, masks


@pytest.mark.parametrize(
    ("spec", "variables", "why"),
    [
        (SPARQ, "FAKE_REFUSE=0", "no kernel for SEAL"),
        (SPARQ, "FAKE_REFUSE=4", "no kernel for SCORE_SELECT"),
        (TOPK, "FAKE_REFUSE=3", "no kernel for SELECT"),
        ("dense", "FAKE_REFUSE=1", "no kernel for VISIBLE"),
        (SPARQ, "FAKE_NAME=RPC FAKE_REFUSE=0", "on a worker without our sparse attention"),
        ("sparq,rank=8,topk=64,min_ctx=0", "FAKE_REFUSE=7", "not known to be faster"),
    ],
)
def test_what_a_device_cannot_run_stays_dense(spec: str, variables: str, why: str, run) -> None:
    """llama.cpp's attention, the reason, and no memory for a shadow that nothing would read."""
    got = run(spec, ALL, variables)
    assert got["bits"] == run("off", 0)["bits"]
    assert reasons(got) and all(why in reason for reason in reasons(got))
    assert set(got["runs"]) == {variables != "FAKE_REFUSE=7"}, "what explain asks"
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
    offload_kqv={"on the device": True, "in memory": False},
)
def test_a_reply_beside_prompts_is_what_it_is_alone(
    spec: str, order: str, unified: bool, offload_kqv: bool, run
) -> None:
    """On a device llama.cpp reads the prompts of a batch, wherever K lies, and our ops its
    replies."""
    if "shadow" not in spec:  # codes share a scale with other sequences
        spec = spec.replace("rank", "shadow=f16,rank")
    got = run(spec, ALL, order=order, unified=unified, offload_kqv=offload_kqv)
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
    """256 replies by 1,024 heads take less than 1 GiB while the cache has 768 cells, and more in
    the next step, whose attention is the device's own."""
    path = tiny_models.write(
        tmp_path / "m.gguf", n_layer=1, n_head=1024, n_head_kv=32, head_dim=32, n_embd=64
    )
    options = {"spec": SPARQ, "n_gpu_layers": ALL, "order": "r" * 256, "n_before": 2}
    text = json.dumps(options | {"unified": True, "only_info": True})
    got = from_child(HERE / "beside.py", path, fake, text)
    assert reasons(got) == {"too many logits for a GPU"}
    counters = got["info"]["counters"]
    assert counters["calls_sparse"] == 256
    assert counters["stock_reasons"] == {"too many logits for a GPU": 256}


@pytest.mark.parametrize(
    ("key", "why"),
    [("gpu_min_mb=1", "short for a GPU"), ("min_ctx=1024", "every position is read")],
)
def test_short_on_a_device(key: str, why: str, run) -> None:
    """The device's own attention, sealed meanwhile. gpu_min_mb is nothing to the CPU."""
    spec = SPARQ.replace(f"{key.split('=')[0]}=0", key)
    got = run(spec, ALL)
    assert got["bits"] == run("off", 0)["bits"] and reasons(got) == {why}
    assert got["differ"] == 0
    sealed = (N_PROMPT + N_DECODE - 1) // GROUP  # what the last token completes the next one seals
    assert got["info"]["counters"]["groups_sealed"] == N_LAYER * sealed
    assert (run(spec, 0)["bits"] == run(SPARQ, 0)["bits"]) == ("gpu" in key)


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


# ---- as many as fit ----

GIB = 1 << 30
FITTED = {"n_ctx": 8192, "attention": SPARQ}
N_REPLY = 19  # of 20 tokens, of which the first follows the prompt
LAYER = 8192 * 2 * 32 * (2 + 2 + 0.5)  # of the tiny model: K, V and codes of K; scales beside


@pytest.fixture(scope="module")
def fitted(fake: Path, tmp_path_factory: pytest.TempPathFactory):
    """fitted(bytes of each of two devices beside the margin, options of fitted.py)."""
    path = tmp_path_factory.mktemp("m") / "m.gguf"
    model = tiny_models.write(path, "llama", n_layer=6, n_ctx=8192)

    def go(n_bytes: float, vulkan: bool = False, **options: Any) -> dict[str, Any]:
        text, size = json.dumps({**FITTED, **options}), str(int(GIB + n_bytes))
        more = {"FAKE_DEVICES": "2", "FAKE_MEMORY": size}
        if "rates" in options:
            more |= {"FAKE_NAME": "Vulkan", "FAKE_REFUSE": "1"}
        return from_child(HERE / "fitted.py", model, "" if vulkan else fake, text, **more)

    return go


def test_as_many_as_fit(fitted) -> None:
    """Where K and V do not fit, those of some layers stay in memory, and the text is the same."""
    whole = fitted(GIB)
    assert whole["in_memory"] == [] and whole["said"] == ""
    some = fitted(5 * LAYER)  # weights, mask and the room for a prompt take their part
    n = len(some["in_memory"])
    assert 0 < n < 6 and some["tokens"] == whole["tokens"]
    assert sum(whole["attend"]) == 6 * N_REPLY and sum(some["attend"]) == (6 - n) * N_REPLY
    assert all(some["attend"]), "both devices have layers"
    line = f"note: K and V of {n} of 6 layers do not fit on the GPU and stay in memory"
    assert some["said"].startswith(line) and some["said"].count("\n") == 1
    none = fitted(0)
    assert none["in_memory"] == [*range(6)] and none["tokens"] == whole["tokens"]
    assert sum(none["attend"]) == 0 and "K and V of 6 of 6 layers" in none["said"]


def test_what_insists(fitted) -> None:
    for kv_offload in (True, False):
        got = fitted(0, kv_offload=kv_offload)
        assert got["in_memory"] == [] and got["said"] == ""
        assert sum(got["attend"]) == 6 * N_REPLY * kv_offload
    assert fitted(0, n_gpu_layers=0)["in_memory"] == []


@pytest.mark.parametrize("vulkan", [False, pytest.param(True, marks=needs_vulkan, id="Vulkan")])
def test_devices_without_our_kernels(vulkan: bool, fitted) -> None:
    """K and V lie in memory where a token gains by it; otherwise attention is dense. With -ngl 0
    nothing is there, and no prompt goes there."""
    options = {"vulkan": vulkan, "type_k": "f32", "type_v": "f32"}
    here, asked = fitted(GIB, n_gpu_layers=0, **options), fitted(GIB, kv_offload=False, **options)
    gained, left = (fitted(GIB, rates=[x, 1e10, 0], **options) for x in (1e9, 1e13))
    assert gained["in_memory"] == [*range(6)] and gained["tokens"] == asked["tokens"]
    assert gained["sparse"] == asked["sparse"] == here["sparse"] == 6 * N_REPLY
    assert "6 of 6" in gained["said"] and not asked["said"]
    assert left["in_memory"] == [] and left["said"].count("\n") == 1 and left["sparse"] == 0
    used = [f"{'Vulkan' if vulkan else 'FAKE'}0 compute buffer" in x["log"] for x in (here, asked)]
    assert used == [False, True]


def test_a_document_is_mapped_into_what_stays_in_memory(fitted, tmp_path: Path) -> None:
    """Its pages take the place of K and V there; a device gets a copy of the rest."""
    wide = {"n_ctx": 1536, "n_sequences": 96, "document": str(tmp_path / "d.kv")}  # large buffers
    here = fitted(GIB, kv_offload=False, **wide)
    there = fitted(GIB, **wide)
    assert there["in_memory"] == [] and there["mapped"] == 0 < here["mapped"]
    some = fitted(90 << 20, **wide)
    assert 0 < len(some["in_memory"]) < 6 and 0 < some["mapped"] < here["mapped"]
    assert here["tokens"] == there["tokens"] == some["tokens"]
