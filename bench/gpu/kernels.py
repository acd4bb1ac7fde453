"""Times attention by itself on a CUDA device: SparQ against the best dense attention.

    python -m bench gpu_attention           # Table 4, Figs. 8 (batch 64) and F1 (batch 1)
    python -m bench gpu_attention --quick   # small sizes, to see that it runs
    python -m bench gpu_attention --real MODEL TEXT   # also K and V of that model

A graph has several layers with their own K and V, more bytes than any cache holds, so that every
layer reads fresh data, and it is computed again and again (llama.cpp then replays it as one CUDA
graph). So is a graph of half of the layers. The time of a layer is the difference by the layers
that it has more: what a graph costs once, its launch and the wait for it, is not in it. Dense
attention is ggml's flash attention, and torch's scaled_dot_product_attention if torch is installed
(each of its backends, in a CUDA graph, timed in the same way). The time excludes SEAL. The shadow
lies as in a model, with the ranges of a component beside each other. `tail` groups at the end are
not sealed: their rows of K are read.

SELECT guesses between which logits the cut lies, and where it does not, reads the keys once more:
`passes` counts that, per KV head. K and V are random, which suits the guess; a model that reads a
text shows what it does with others. Its layers take turns in the graph.

Figure `gpu_attention` compares with the faster of the two, measured with the same library; the last
record of each case counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import c_void_p
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from bench import plot
from bench.gpu import real
from bench.gpu.device import Device, layer_times, torch_with_cuda
from pyorch import native
from pyorch.attention.cost import GROUP, GROUPS_PER_SUM, SHADOW_BYTES
from pyorch.cli.bench.measurement import Done, Measurement, text_hash
from pyorch.cli.groups import option
from pyorch.cli.terminal import note
from pyorch.errors import SparqError
from pyorch.evals.texts import read_texts
from pyorch.measure import records
from pyorch.measure.records import Record, Result, optional
from pyorch.native import slots
from pyorch.native.slots import STATS, sources
from pyorch.table import markdown

FILE = "gpu_attention.jsonl"
NEEDS = "python -m bench gpu_attention"
D, RANK, TOPK, LOCAL, SINKS = 128, 32, 128, 32, 4
SHADOWS = {name: int(8 * size) for name, size in SHADOW_BYTES.items()}  # bits
FRESH = 2 << 30  # the least bytes of K and V in a graph
SECONDS = 0.3  # of timed repetitions of a case
TAILS = (1, 7)  # groups
LINE = 64  # bytes that the row of a component has more
POOL = 8_388_593  # random elements of K and V: a prime, so that no two rows are alike
DENSE = ("ggml flash", "torch sdpa")
METHODS = (*DENSE, *(f"sparq {s}" for s in SHADOWS))
KV_HEADS = {32: "llama2-7b", 8: "llama3-8b"}
_COLOURS = {"ggml flash": plot.STOCK, "torch sdpa": plot.STOCK_2}
_COLOURS |= plot.colours([f"SparQ {s}" for s in ("f16", "q8", "q4")])


@dataclass(frozen=True, kw_only=True)
class KernelOptions:
    device: str = option(
        "--device", default="cuda", help="Device: cuda, or a library with ggml_backend_init."
    )
    quick: bool = option("--quick", is_flag=True, help="Small sizes only, as a quick check.")
    real: tuple[str, str] | None = option(
        "--real", nargs=2, metavar="MODEL TEXT", help="Also measure K and V of a model, of a text."
    )


@dataclass(frozen=True)
class KernelCase:
    batch: int
    n_head: int
    n_head_kv: int
    positions: int
    method: str  # `ggml flash`, `torch sdpa`, `sparq f16|q8|q4`
    rank: int = RANK
    topk: int = TOPK
    head_dim: int = D
    tail: int = optional(0)  # groups at the end that are not sealed
    type_kv: str = "f16"  # always; it stays because the key of every record is made from it
    library: str = optional("sparq")
    real: str = optional("")  # whose K and V: a model, and the hash of its text

    def __str__(self) -> str:
        heads = f"batch {self.batch:2} heads {self.n_head}/{self.n_head_kv}"
        tail = f" tail {self.tail}" if self.tail else ""
        return f"{heads} S {self.positions:6} {self.method}{tail} {self.real}".rstrip()

    @property
    def layer_bytes(self) -> int:
        """The bytes of K and V in a layer."""
        return 4 * self.batch * self.n_head_kv * self.positions * self.head_dim

    @property
    def n_group(self) -> int:
        return -(-self.positions // GROUP)


@cache
def opened(name: str) -> Device:
    """The device.

    Raises:
        SparqError: it is not here, or the library cannot use it.
    """
    built = native.built()
    if name == "cuda" and not (built / "libggml-cuda.so").exists():
        raise SparqError("this build is for the CPU only", "sparq-cpp build --cuda native")
    return Device(built, name)


def groups(o: KernelOptions) -> list[list[KernelCase]]:
    """Each case by itself; without torch those of ggml alone. Tails are of the smallest shadow."""
    opened(o.device)
    methods = METHODS
    if not torch_with_cuda():
        note("torch is not installed, or sees no CUDA device: dense is ggml's flash attention only")
        methods = tuple(m for m in METHODS if m != "torch sdpa")
    shapes = [(64, 32, 32, 4096)]
    shapes += [(1, 32, kv, 4096 << i) for kv in (32, 8) for i in range(6)]
    with_tail = [s for s in shapes if s[3] in (8192, 32768, 131072)]
    if o.quick:
        shapes = with_tail = [(2, 4, 4, 768), (1, 8, 2, 1024)]
    cases = [KernelCase(*shape, method) for shape in shapes for method in methods]
    cases += [KernelCase(*shape, "sparq q4", tail=n) for shape in with_tail for n in TAILS]
    if o.real:
        name, layers = real_rows(o)
        (_, n_head, d), (n, n_head_kv, _) = (x.shape for x in layers[0][:2])
        about: dict[str, Any] = {"rank": d // 4, "head_dim": d, "real": name}
        cases += [KernelCase(1, n_head, n_head_kv, n, method, **about) for method in methods]
    return [[case] for case in cases]


@cache
def real_rows(o: KernelOptions) -> tuple[str, list[real.Rows]]:
    """What a record says of them, and those of each layer."""
    assert o.real
    model, (text,) = Path(o.real[0]), read_texts([Path(o.real[1])])
    rows = real.read(model, text, 99 if o.device == "cuda" else 0)
    return f"{model.name} {text_hash(text)}", rows


def measure(o: KernelOptions, group: Sequence[KernelCase], _: Done) -> list[Result]:
    """The result of a case."""
    (case,) = group
    device = opened(o.device)
    fresh, seconds = (1 << 24, 0.1) if o.quick else (FRESH, SECONDS)
    n = layers_of(device, case, fresh)
    rows = real_rows(o)[1] if case.real else []
    time_it = torch_layers if case.method == "torch sdpa" else partial(ggml_layers, device, rows)
    return [time_it(case, n, seconds) | {"device": device.name}]


def layers_of(device: Device, case: KernelCase, fresh: int) -> int:
    """An even number, of which half are enough to be fresh."""
    need = 2 * -(-fresh // case.layer_bytes)
    most = int(device.free_bytes() * 0.5 / (case.layer_bytes * 1.6)) // 2 * 2
    if most < 2:
        raise SparqError("K and V of two layers do not fit on the device", "a larger device")
    return min(need, most, 64)


def ggml_layers(
    device: Device, rows: Sequence[real.Rows], c: KernelCase, n: int, seconds: float
) -> Result:
    """Returns samples_ns per layer, the number of layers, the bytes read per layer, and the passes
    over the keys of a KV head beyond the first. rows: none for random ones."""
    base, rng = device.base, np.random.default_rng(1)
    block = rng.standard_normal(POOL, np.float32).astype(np.float16)
    scale, d = float(1 / np.sqrt(c.head_dim)), c.head_dim
    with device.context() as ctx:
        mask = device.new(ctx, "f16", c.positions, 1, 1, c.batch)
        q = [device.new(ctx, "f32", d, c.n_head, 1, c.batch) for _ in range(n)]
        size = (d, c.n_head_kv, c.positions, c.batch)
        kv = [[device.new(ctx, "f16", *size) for _ in range(2)] for _ in range(n)]
        stats: Any = None
        seals: list[Any] = []
        inputs: dict[str, Any] = {}
        if c.method == "ggml flash":
            nodes = [
                base.ggml_flash_attn_ext(
                    ctx, *(base.ggml_permute(ctx, x, 0, 2, 1, 3) for x in (qi, *kvi)),
                    mask, scale, 0.0, 0.0,
                )
                for qi, kvi in zip(q, kv, strict=True)
            ]  # fmt: skip
        else:
            stats, seals, nodes, inputs = sparq(device, ctx, c, q, kv, mask, scale)
        device.allocate(ctx)
        for i, tensors in enumerate(zip(q, *zip(*kv, strict=True), strict=True)):
            of: real.Rows = [rng.standard_normal(d * c.n_head * c.batch, np.float32), block, block]
            for x, values in zip(tensors, rows[i % len(rows)] if rows else of, strict=True):
                device.fill(x, values)
        device.fill(mask, np.zeros(1 << 16, np.float16))
        for name, x in inputs.items():
            device.fill(x, np.ascontiguousarray(rows_of_inputs(c)[name], np.int32))
        counted: Result = {"bytes_read": c.layer_bytes}
        graph = device.graph(ctx, nodes)
        if stats is not None:
            values = np.zeros(len(STATS), np.int64)
            device.fill(stats, values)
            device.run(device.graph(ctx, seals))
            device.run(graph)
            base.ggml_backend_tensor_get(stats, values.ctypes.data, 0, values.nbytes)
            counts = dict(zip(STATS, values.tolist(), strict=True))
            if counts["attend_sparse"] != n * c.batch:
                raise SparqError(f"{c.method}: not every layer ran sparse: {counts}", "a bug")
            counted["bytes_read"] = (counts["bytes_score"] + counts["bytes_attend"]) // n
            counted["passes"] = counts["cut_passes"] / (n * c.batch * c.n_head_kv)
        half = device.graph(ctx, nodes[: n // 2])
        both = (lambda: device.run(half), lambda: device.run(graph))
        return {"samples_ns": layer_times(*both, n, seconds), "n_layer": n, **counted}


def sparq(
    device: Device,
    ctx: c_void_p,
    c: KernelCase,
    q: list[Any],
    kv: list[list[Any]],
    mask: Any,
    scale: float,
) -> tuple[Any, list[Any], list[Any], dict[str, Any]]:
    """(stats, SEAL nodes, ATTEND nodes, small inputs by name)."""
    new, base = partial(device.new, ctx), device.base
    n_range = 16 * (-(-c.n_group // 16) | 1)  # of a component: as llama/sparse-shadow.cpp has them
    bits = SHADOWS[c.method.split()[1]]
    inputs = {name: new("i32", c.n_group, c.batch) for name in ("list", "sealed")}
    inputs["wanted"] = new("i32", 2 + LOCAL + SINKS, 1, 1, c.batch)
    stats = new("i64", len(STATS))
    visible = base.ggml_sparse_attn_visible(ctx, mask)
    chan = c.head_dim * c.n_head_kv
    n_sums = -(-c.n_group // GROUPS_PER_SUM) * (GROUPS_PER_SUM + 1)
    width = c.n_group * GROUP * bits // 8 + LINE
    params = slots.ScoreSelectParams(
        slots.ScoreParams(c.rank, scale, 0.0, 0.0, bits),
        slots.SelectParams(c.topk, c.n_head_kv, LOCAL, 1),
    )
    seals, nodes = [], []
    for qi, (k, v) in zip(q, kv, strict=True):
        r = None if bits == 16 else new("f16", 2, n_range, chan, c.batch)
        shadow = {
            "k_t": new("i8", width, chan, c.batch) if r else new("f16", width // 2, chan, c.batch),
            "k_range": r and base.ggml_permute(ctx, r, 0, 2, 1, 3),
            "v_sum": new("f32", chan, n_sums, c.batch),
        }
        all_of = dict(k=k, v=v, stats=stats, **shadow, **inputs)
        src = sources(q=qi, mask=mask, visible=visible, **all_of)
        seals.append(base.ggml_sparse_attn_seal(ctx, src, slots.SealParams(bits, 0)))
        nodes.append(base.ggml_sparq_attn(ctx, src, params))
    return stats, seals, nodes, inputs


def rows_of_inputs(c: KernelCase) -> dict[str, np.ndarray]:
    """The rows of the small inputs: every whole group before the tail is sealed."""
    groups = np.arange(c.n_group, dtype=np.int32)
    full = (groups + 1) * GROUP <= c.positions
    newest = c.positions - 1 - np.arange(LOCAL)
    return {
        "list": np.where(full, groups, -1),
        "sealed": full & (groups < c.n_group - c.tail),
        "wanted": np.r_[c.topk, LOCAL, newest, np.arange(SINKS)],
    }


def torch_layers(c: KernelCase, n_layer: int, seconds: float) -> Result:
    """The same of the fastest backend of torch's scaled_dot_product_attention.

    Raises:
        SparqError: none of them runs.
    """
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    like = {"dtype": torch.float16, "device": "cuda"}
    q = [torch.randn(c.batch, c.n_head, 1, c.head_dim, **like) for _ in range(n_layer)]
    size = (c.batch, c.n_head_kv, c.positions, c.head_dim)
    kv = [[torch.randn(size, **like) for _ in range(2)] for _ in range(n_layer)]
    gqa = {"enable_gqa": True} if c.n_head != c.n_head_kv else {}

    def captured(backend: Any, n: int) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()

        def once() -> None:
            with sdpa_kernel(backend):
                for qi, (k, v) in zip(q[:n], kv[:n], strict=True):
                    torch.nn.functional.scaled_dot_product_attention(qi, k, v, **gqa)

        def replay() -> None:
            graph.replay()
            torch.cuda.synchronize()

        once()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            once()
        return replay

    ran: list[Result] = []
    for name in ("FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION"):
        try:
            half, whole = (captured(getattr(SDPBackend, name), n) for n in (n_layer // 2, n_layer))
            samples = layer_times(half, whole, n_layer, seconds / 3)
        except RuntimeError as error:
            note(f"torch {name}: {str(error).splitlines()[0]}")
            continue
        ran.append({"samples_ns": samples, "backend": name})
    if not ran:
        raise SparqError("no backend of torch's attention runs this", "see the lines above")
    about = {"n_layer": n_layer, "bytes_read": c.layer_bytes, "torch": torch.__version__}
    return min(ran, key=lambda x: np.median(x["samples_ns"])) | about


def table(recs: Sequence[Record]) -> str:
    """A row for each case."""
    rows = []
    for rec in recs:
        us = float(np.median(rec["samples_ns"])) / 1e3
        rate = rec["bytes_read"] / us / 1e3
        passes = f"{rec['passes']:.2f}" if "passes" in rec else ""
        rows.append([records.read_case(KernelCase, rec), f"{us:.1f}", f"{rate:.0f}", passes])
    return markdown(["case", "us per layer", "GB/s", "passes"], rows, left=("case",))


# ---- figure ----


def rows(recs: Sequence[Record]) -> list[plot.Row]:
    """A row for each batch, number of KV heads, length and method that has dense ones beside it."""
    # times of two libraries are not compared; the last of each method counts
    beside: dict[str, dict[str, Record]] = {}
    for rec in recs:
        if rec["case"]["method"] in DENSE:
            beside.setdefault(_compared(rec), {})[rec["case"]["method"]] = rec
    last: dict[str, plot.Row] = {}  # the last row of each case on each device
    for rec in recs:
        if dense := beside.get(_compared(rec)):
            c, device = rec["case"], _device(rec)
            ns, low, high = records.spread(rec["samples_ns"])
            times = {name: records.spread(r["samples_ns"])[0] for name, r in dense.items()}
            dense_is = min(times, key=lambda method: times[method])
            last[f"{device} {c}"] = {
                "device": device,
                "model": KV_HEADS.get(c["n_head_kv"], ""),
                **{k: c[k] for k in ("batch", "n_head", "n_head_kv", "positions", "method")},
                "attention": c["method"].replace("sparq", "SparQ"),
                "layer_ms": ns / 1e6,
                "layer_ms_p10": low / 1e6,
                "layer_ms_p90": high / 1e6,
                "speedup": times[dense_is] / ns,
                "limit": dense[dense_is]["bytes_read"] / rec["bytes_read"],
                "dense_is": dense_is,
                "gb_s": rec["bytes_read"] / ns,
            }
    names = ("batch", "n_head_kv", "method", "positions")
    return sorted(last.values(), key=lambda r: tuple(r[n] for n in names))


def data(folder: Path) -> list[plot.Row]:
    measured = rows([r for r in records.load_all(folder / FILE) if not r["case"].get("real")])
    plot.need(measured, "attention by itself on a GPU, ours beside dense", NEEDS)
    return measured


def _compared(rec: Record) -> str:
    """What records of one shape, library and machine have in common."""
    case = {k: v for k, v in rec["case"].items() if k != "method"}
    return str((_device(rec), rec["env"].get("stamps"), case))


def _device(rec: Record) -> str:
    return str(rec.get("device") or rec["env"]["device"])  # where it was until November 2026


def draw(rows: Sequence[plot.Row]) -> Any:
    """A row of panels for each model: times, and speed-ups."""
    models = list(dict.fromkeys(r["model"] for r in rows))
    figure, axes = plot.panels(2, len(models), height=3.2)
    ours = {name: colour for name, colour in _COLOURS.items() if "SparQ" in name}
    lines, x = plot.Names(), "positions"
    for i, model in enumerate(models):
        times, gains = axes[2 * i : 2 * i + 2]
        of_model = [r for r in rows if r["model"] == model]
        one = [r for r in of_model if r["batch"] == 1]
        many = [r for r in of_model if r["batch"] > 1]
        lines.each(times, one, x, "layer_ms", _COLOURS, "layer_ms_p10", "layer_ms_p90")
        lines.each(gains, one, x, "speedup", ours)
        lines.each(gains, many, x, "speedup", ours, named=False, fmt="D")
        lines.each(gains, one, x, "limit", ours, named=False, fmt=":", linewidth=1.2)
        for batch, style in ((1, "s--"), (64, "D")) if model == "llama2-7b" else ():
            points = plot.points("gpu_attention", f"A100: speed-up at batch {batch}")
            gains.plot(*zip(*points, strict=True), style, color=plot.PAPER)
        for ax in (times, gains):
            plot.positions_axis(ax, [r[x] for r in of_model])
        plot.decades(times, [r["layer_ms"] for r in of_model])
        times.set(ylabel="ms per token and layer", title=f"heads of {model}")
        title = "speed-up (dotted: by bytes)"
        gains.set(ylabel="times faster than best dense", ylim=(0, None), title=title)
    lines.write(figure)
    return figure


FIGURE = plot.Figure(
    name="gpu_attention",
    title="Attention by itself on a GPU (Fig. 8, Table 4, F1)",
    caption="32 query heads of 128, r = 32, k = 128, f16 cache, fresh data for every layer; "
    "medians, bars are the 10th to 90th percentile. Lines are of batch 1, diamonds of batch 64. "
    "Speed-up over the faster of ggml's flash attention and torch's own attention. Dotted: dense "
    "bytes by bytes read. Grey: the paper, on other GPUs.",
    needs=NEEDS,
    file=FILE,
    data=data,
    draw=draw,
)


MEASUREMENT = Measurement("gpu_attention", KernelOptions, KernelCase, groups, measure, table)
