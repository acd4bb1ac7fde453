"""Runs what was built: small products of every type of weights and our attention, against plain
numbers, since a compiler may make wrong code of llama.cpp's kernels.

A child process multiplies, on two threads, with one token and with many, weights as they are and
repacked. It says what it is about to do, so that its last words name what killed it.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import POINTER, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pyorch import children, system
from pyorch.errors import SparqError
from pyorch.ggml import BY_NAME
from pyorch.native import devices
from pyorch.native.prototypes import declare
from pyorch.native.slots import PrefillParams, sources
from pyorch.native.tensor import InitParams

# What a backend of the CPU may leave out: the feature by the name of the buffer that has it.
BUFFERS = {"AMX": "amx", "CPU_REPACK": "repack"}
PLAIN = "llamafile"  # a feature too, which serves weights that are not repacked

WEIGHTS: tuple[str, ...] = ("f32", "f16", "bf16", "q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "mxfp4")
WEIGHTS += ("q2_K", "q3_K", "q4_K", "q5_K", "q6_K", "tq1_0", "tq2_0", "iq4_nl", "iq4_xs")
WEIGHTS += ("iq3_xxs", "iq3_s", "iq2_xxs", "iq2_xs", "iq2_s", "iq1_s", "iq1_m")
# any bits are weights of these, which llama.cpp's quantiser would prepare for seconds
AT_RANDOM = ("iq2_xxs", "iq2_xs", "iq2_s", "iq1_s", "iq1_m")
N_IN, N_OUT = 512, 64  # of a matrix; whole blocks of every type, and of every repacking
TOKENS = (1, 37)  # a few more than whole tiles
THREADS = 2
# The error that is wrong, as a share of the result. q8 of the tokens makes 0.01 at most.
WRONG = 0.03
TIMEOUT_S = 300  # it takes one or two seconds
VULKAN_S = 30  # what is right by then is enough: a device in software compiles for minutes

_OURS = "ggml_sparse_attn_prefill"  # of our ops, the one that every prompt takes


@dataclass(frozen=True)
class Fault:
    """What does not work."""

    case: str  # such as "multiplying 37 tokens by q4_0 (AMX)"
    buffer: str  # the name of the buffer that the weights were in; empty before there was one
    how: str  # "was ended by SIGILL (illegal instruction)"

    def __str__(self) -> str:
        return f"{self.case} {self.how}"


def fault(folder: Path, gpu: bool = False) -> Fault | None:
    """The first thing that the library in `folder` does wrong, found by a child process; None if
    there is none.

    Args:
        gpu: try its GPUs, which multiply, and not the CPU. There must be one.

    Raises:
        SparqError: it could not be found out, or the library does not load.
    """
    argv = children.python("pyorch.native.smoke", str(folder), *["gpu"] * gpu)
    is_vulkan, is_late = gpu and (folder / system.library("ggml-vulkan")).exists(), False
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as out:
        try:
            done = children.run(argv, stdout=out, timeout=VULKAN_S if is_vulkan else TIMEOUT_S)
            why = children.reason(done)
        except subprocess.TimeoutExpired as late:
            done, why = children.Done(argv, 1, "", ""), f"it took more than {late.timeout} s"
            is_late = True
        out.seek(0)
        cases = [json.loads(line) for line in out if line.startswith("{")]
    last = cases[-1] if cases else {"case": "loading the library", "buffer": ""}
    if done.returncode == 0 or (is_vulkan and is_late and len(cases) > 1):
        return Fault(**last) if "how" in last else None
    ended = children.ended(done.returncode)
    if system.crashed(done.returncode):
        return Fault(last["case"], last["buffer"], ended)
    why = ended if system.died(done.returncode) else why
    raise SparqError(
        f"the library in {folder} could not be tried: {why}, at {last['case']}", "build again"
    )


def suspects(fault: Fault, isa: tuple[str, ...]) -> list[str]:
    """The features that may be at fault, the likeliest first.

    Args:
        isa: the instruction sets in use, the oldest first.
    """
    likely = [BUFFERS[fault.buffer]] if fault.buffer in BUFFERS else [*reversed(isa), PLAIN]
    return [*likely, *(name for name in reversed(isa) if name not in likely)]


# ---- the child ----


def check(folder: Path, gpu: bool = False) -> Iterator[dict[str, str]]:
    """Multiply, and on the CPU attend. Yields each case before it is tried, and the first wrong one
    with `how`."""
    base = declare(ctypes.CDLL(str(folder / system.library("ggml-base")), mode=ctypes.RTLD_GLOBAL))
    cpu = declare(ctypes.CDLL(str(folder / system.library("ggml-cpu"))))
    for backend, buffer_type, attends in _gpus(base, folder) if gpu else _cpu(base, cpu):
        buffer = base.ggml_backend_buft_name(buffer_type).decode()
        tries = [
            (f"by {kind}", functools.partial(_product, base, backend, buffer_type, kind))
            for kind in WEIGHTS
        ]
        if attends:
            tries += [
                (f"by K and V{how}", functools.partial(_attention, base, backend, fast))
                for fast, how in ((0, ""), (1, ", fast"))
            ]
        for n_token, (what, error) in itertools.product(TOKENS, tries):
            tokens = f"{n_token} token" + "s" * (n_token > 1)
            case = {"case": f"multiplying {tokens} {what} ({buffer})", "buffer": buffer}
            yield case
            if not (wrong := error(n_token)) <= WRONG:  # also NaN
                yield case | {"how": f"is wrong by {wrong:.0%}"}
                return


def _cpu(base: Any, cpu: Any) -> Iterator[tuple[int, int, bool]]:
    """The backend of the CPU with each type of buffer for weights, and whether to attend there."""
    backend = cpu.ggml_backend_cpu_init()
    cpu.ggml_backend_cpu_set_n_threads(backend, THREADS)
    yield backend, base.ggml_backend_get_default_buffer_type(backend), hasattr(base, _OURS)
    name = b"ggml_backend_dev_get_extra_bufts"  # in which it keeps weights repacked
    address = base.ggml_backend_reg_get_proc_address(cpu.ggml_backend_cpu_reg(), name)
    get = ctypes.CFUNCTYPE(POINTER(c_void_p), c_void_p)(address)
    extra = get(base.ggml_backend_get_device(backend))
    for buffer_type in itertools.takewhile(bool, map(extra.__getitem__, itertools.count())):
        yield backend, buffer_type, False


def _gpus(base: Any, folder: Path) -> Iterator[tuple[int, int, bool]]:
    """Likewise each GPU. Ends the process if there is none: ggml has said why."""
    library = ctypes.CDLL(str(folder / system.library("ggml")))
    system.with_ggml(library)
    ggml = declare(library)
    if not (found := devices.listed(ggml)):
        sys.exit(1)
    for device in found:
        backend = base.ggml_backend_dev_init(device.pointer, None)
        yield backend, base.ggml_backend_get_default_buffer_type(backend), False


def _product(base: Any, backend: int, buffer_type: int, kind: str, n_token: int) -> float:
    """The error of a product, as a share of it. 0 if such weights cannot be in such a buffer."""
    data, weights = _weights(base, kind)
    x = np.random.default_rng(1).standard_normal((n_token, N_IN), np.float32)
    with _context(base) as of_weights, _context(base) as of_tokens:
        w = base.ggml_new_tensor_4d(of_weights, BY_NAME[kind].number, N_IN, N_OUT, 1, 1)
        buffer = base.ggml_backend_alloc_ctx_tensors_from_buft(of_weights, buffer_type)
        x_in = base.ggml_new_tensor_4d(of_tokens, BY_NAME["f32"].number, N_IN, n_token, 1, 1)
        y = base.ggml_mul_mat(of_tokens, w, x_in)
        if not base.ggml_backend_dev_supports_op(base.ggml_backend_get_device(backend), y):
            wrong = 0.0
        else:
            result = _computed(base, backend, of_tokens, y, [(w, data), (x_in, x)])
            wrong = _error(result, x.astype(np.float64) @ weights.T)
        base.ggml_backend_buffer_free(buffer)
    return wrong


def _attention(base: Any, backend: int, fast: int, n_token: int) -> float:
    """The error of exact attention by our own op, as a share of the result; K and V in f16."""
    rng = np.random.default_rng(1)
    n_head, width, n_kv = 4, 64, 96
    q = rng.standard_normal((n_token, n_head, width), np.float32)
    k, v = rng.standard_normal((2, n_kv, 1, width), np.float32).astype(np.float16)
    mask = np.zeros((n_token, n_kv), np.float16)
    with _context(base) as context:
        tensors = []
        for array in (q, k, v, mask):
            kind = BY_NAME["f32" if array.dtype == np.float32 else "f16"].number
            ne = [*reversed(array.shape), 1, 1][:4]
            tensors.append(base.ggml_new_tensor_4d(context, kind, *ne))
        params = PrefillParams(width**-0.5, 0.0, 0.0, fast)
        named = dict(zip(("q", "k", "v", "mask"), tensors, strict=True))
        y = base.ggml_sparse_attn_prefill(context, sources(**named), params)
        values = list(zip(tensors, (q, k, v, mask), strict=True))
        result = _computed(base, backend, context, y, values).reshape(n_token, n_head, width)
    k, v = (array[:, 0].astype(np.float64) for array in (k, v))
    mass = np.exp(q @ k.T * width**-0.5)
    return _error(result, mass @ v / mass.sum(-1, keepdims=True))


def _error(result: Any, expected: Any) -> float:
    """The largest error of a token, as a share of what is expected."""
    axes = tuple(range(1, expected.ndim))
    size = np.sqrt((expected**2).sum(axes))
    return float((np.sqrt(((result - expected) ** 2).sum(axes)) / size).max())


def _computed(base: Any, backend: int, context: int, y: Any, values: list[tuple[Any, Any]]) -> Any:
    """The values of `y`, computed from those of its sources."""
    graph = base.ggml_new_graph(context)
    base.ggml_build_forward_expand(graph, y)
    buffer = base.ggml_backend_alloc_ctx_tensors(context, backend)
    for tensor, array in values:
        base.ggml_backend_tensor_set(tensor, array.ctypes.data, 0, array.nbytes)
    if base.ggml_backend_graph_compute(backend, graph) != 0:
        raise RuntimeError("ggml_backend_graph_compute failed")
    result = np.full(list(reversed(y.contents.ne[:2])), np.nan, np.float32)
    base.ggml_backend_tensor_get(y, result.ctypes.data, 0, result.nbytes)
    base.ggml_backend_buffer_free(buffer)
    return result


@contextmanager
def _context(base: Any) -> Iterator[int]:
    context = base.ggml_init(InitParams(1 << 20, None, True))
    yield context
    base.ggml_free(context)


@functools.cache
def _weights(base: Any, kind: str) -> tuple[Any, Any]:
    """Random weights of a type: their bytes, and what they are in double precision."""
    import gguf

    rng = np.random.default_rng(2)
    x = rng.standard_normal((N_OUT, N_IN), np.float32)
    data = np.zeros((N_OUT, BY_NAME[kind].n_bytes(N_IN)), np.uint8)
    blocks = data.reshape(-1, BY_NAME[kind].block_bytes)
    if kind == "f32":
        data[:] = x.view(np.uint8)
    elif kind in AT_RANDOM:
        blocks[:] = rng.integers(0, 256, blocks.shape)
        if kind == "iq1_m":  # its f16 scale is spread over the upper halves of the last four words
            blocks[:, 49::2] &= 0x0F
            blocks[:, 55] |= 0x20
        else:
            blocks[:, :2] = np.array([0.01], np.float16).view(np.uint8)
    else:
        arrays = x, data, np.ones(N_IN, np.float32)
        x_at, data_at, importance_at = (array.ctypes.data for array in arrays)
        number = BY_NAME[kind].number
        base.ggml_quantize_chunk(number, x_at, data_at, 0, N_OUT, N_IN, importance_at)
    gguf_type = gguf.GGMLQuantizationType(BY_NAME[kind].number)
    return data, gguf.quants.dequantize(data, gguf_type).astype(np.float64)


def main() -> None:
    """Print what `check` yields, a line of JSON each."""
    system.quiet_crashes()  # one is an answer here
    for line in check(Path(sys.argv[1]), gpu="gpu" in sys.argv[2:]):
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
