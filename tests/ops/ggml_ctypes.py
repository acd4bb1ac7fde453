"""ggml of our build through ctypes: numpy in, numpy out, every buffer ours and guarded.

    with ggml.graph() as g:
        # numpy axes, slowest first: ggml's ne is the reverse
        x = g.tensor(array, "f16", pad=(0, 0, 8))
        y = g.op("ggml_sparse_attn_visible", x)
        g.compute(y, n_threads=2)
        print(g.read(y))

Tensors are made without memory (no_alloc); each gets its own buffer with guard bytes on both sides,
and so does the work buffer of the CPU backend. Padding between rows is NaN. `compute` checks that
nothing outside the results was written.
"""

from __future__ import annotations

import ctypes
from ctypes import c_int64, c_void_p
from pathlib import Path

import numpy as np
from cases import BLOCKS, bf16_bits, row_bytes, to_blocks
from cpu import has_fast

from pyorch.ggml import BY_NAME
from pyorch.native.prototypes import TensorPtr, declare  # noqa: F401
from pyorch.native.slots import (  # noqa: F401  the tests have them from here
    STATS,
    AttendParams,
    PrefillParams,
    ScoreParams,
    ScoreSelectParams,
    SealParams,
    SelectParams,
    sources,
)
from pyorch.native.tensor import InitParams, Tensor

CONTEXT = 1 << 20  # bytes for the structs of the tensors and the graph
GUARD = 256  # bytes on each side
GUARD_BYTE = 0xCD
SPARE = 1 << 20  # bytes behind a work buffer that is expected to be too small
UNWRITTEN = 0xAB  # results are filled with it: what no op writes by itself
DTYPES = {
    "f32": np.float32,
    "f16": np.float16,
    "bf16": np.uint16,
    "q8_0": np.uint8,
    "q4_0": np.uint8,
    "i8": np.int8,
    "i32": np.int32,
    "i64": np.int64,
}
BLOCK_BYTES = {kind: row_bytes(32, kind) for kind in BLOCKS}
NUMPY_TYPE = {BY_NAME[name].number: (name, dtype) for name, dtype in DTYPES.items()}
KINDS = {"q": "f32", "v_sum": "f32", "logits": "f32", "sinks": "f32", "stats": "i64"}
KINDS |= dict.fromkeys(("k", "v", "mask", "k_t", "k_range"), "f16")  # others are i32


class Ggml:
    """The loaded libraries, with prototypes.

    n_planned: threads that work buffers are made for, where fewer run; 0: as many as run.
    same_bits: the bits of a token do not depend on what other tokens of the batch read.
    fast_exp: exp is a GPU's own, good to 2^-22.
    """

    n_planned = 0
    same_bits = True
    fast_exp = False

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        base = ctypes.CDLL(str(_library(folder, "ggml-base")), mode=ctypes.RTLD_GLOBAL)
        self.base = base = declare(base)
        self.cpu = declare(ctypes.CDLL(str(_library(folder, "ggml-cpu"))))
        self.has_fast = has_fast(self.cpu)
        self.ops = base  # where the constructors of our ops are
        object_size = 32  # struct ggml_object, in front of every tensor of a context
        if self.base.ggml_tensor_overhead() != ctypes.sizeof(Tensor) + object_size:
            raise RuntimeError(
                "struct ggml_tensor of this pin is not what pyorch/native/tensor.py says"
            )
        self.cpu.ggml_cpu_init()

    def graph(self) -> Graph:
        return Graph(self)

    def memory(self, size: int) -> np.ndarray:
        """Bytes for tensors and buffers."""
        return np.empty(size, np.uint8)

    def buffer(self, size: int, fill: int) -> Buffer:
        return Buffer(self.memory(Buffer.bytes_for(size)), size, fill)

    def threads(self, *numbers: int) -> tuple[int, ...]:
        """The numbers of threads to compare, of these."""
        return numbers

    def compute(self, graph: c_void_p, nodes: list, n_threads: int) -> None:
        plan = self.cpu.ggml_graph_plan(graph, self.n_planned or n_threads, None)
        spare = SPARE if self.n_planned else 0
        work = self.buffer(plan.work_size + spare, 0xFF)  # NaN
        plan.work_data, plan.n_threads = work.address, n_threads
        status = self.cpu.ggml_graph_compute(graph, ctypes.byref(plan))
        assert status == 0, f"ggml_graph_compute: status {status}"
        intact = work.guards_intact() and (work.bytes[plan.work_size :] == 0xFF).all()
        assert intact, "an op wrote outside its work buffer"


def _library(folder: Path, name: str) -> Path:
    for pattern in (f"lib{name}.so", f"lib{name}.dylib", f"{name}.dll"):
        if (folder / pattern).exists():
            return folder / pattern
    raise FileNotFoundError(f"no {name} library in {folder}")


class Buffer:
    """`size` bytes at a 64-byte boundary between two guards; raw: `bytes_for(size)` bytes."""

    def __init__(self, raw: np.ndarray, size: int, fill: int) -> None:
        self.raw = raw
        self.raw[:] = GUARD_BYTE
        self.start = GUARD + (-(self.raw.ctypes.data + GUARD)) % 64
        self.bytes = self.raw[self.start : self.start + size]
        self.bytes[:] = fill
        self.address = self.raw.ctypes.data + self.start

    @staticmethod
    def bytes_for(size: int) -> int:
        return size + 2 * GUARD + 64

    def guards_intact(self) -> bool:
        end = self.start + len(self.bytes)
        return bool(
            (self.raw[: self.start] == GUARD_BYTE).all() and (self.raw[end:] == GUARD_BYTE).all()
        )


class Graph:
    """One context, its tensors, one computation."""

    def __init__(self, ggml: Ggml) -> None:
        self.ggml = ggml
        self.buffers: dict[int, Buffer] = {}  # by the address of the tensor
        self.lazies: list[np.ndarray] = []
        # tensors that nothing may write to, and their bytes
        self.inputs: list[tuple[object, Buffer, np.ndarray]] = []

    def __enter__(self) -> Graph:
        self.memory = self.ggml.memory(CONTEXT)
        self.ctx = self.ggml.base.ggml_init(InitParams(CONTEXT, self.memory.ctypes.data, True))
        return self

    def __exit__(self, *exc: object) -> None:
        self.ggml.base.ggml_free(self.ctx)

    def tensor(
        self,
        array: np.ndarray | None,
        kind: str,
        pad: tuple[int, ...] = (),
        inplace: bool = False,
        order: tuple[int, ...] = (),
    ):
        """A tensor with the values of `array` (None gives None: an optional source).

        pad: extra elements per numpy axis, between the rows; filled with NaN (-1 for integers).
        inplace: an op may write it.
        order: of the numpy axes in memory, where it is another.
        """
        if array is None:
            return None
        number, dtype = BY_NAME[kind].number, DTYPES[kind]
        ne = (c_int64 * array.ndim)(*reversed(array.shape))
        if kind in BLOCKS:
            array = to_blocks(array, kind)  # bytes from here on
        shape = array.shape
        full = [n + p for n, p in zip(shape, pad or [0] * len(shape), strict=True)]
        t = self.ggml.base.ggml_new_tensor(self.ctx, number, len(shape), ne)
        buffer = self.ggml.buffer(int(np.prod(full)) * np.dtype(dtype).itemsize, 0xFF)
        order = order or tuple(range(len(full)))
        whole = buffer.bytes.view(dtype).reshape([full[i] for i in order])
        whole = whole.transpose(np.argsort(order))
        with np.errstate(over="ignore"):
            whole[tuple(map(slice, shape))] = (
                bf16_bits(array) if kind == "bf16" else array.astype(dtype)
            )
        strides = [*whole.strides[::-1]]
        if kind in BLOCKS:
            strides[0] = BLOCK_BYTES[kind]
        strides += [buffer.bytes.nbytes] * (4 - len(strides))
        t.contents.nb[:] = strides
        self._own(t, buffer)
        if not inplace:
            self.inputs.append((t, buffer, buffer.bytes.copy()))
        return t

    def lazy(self, shape: tuple[int, ...], kind: str) -> tuple[object, np.ndarray]:
        """A tensor of zeros larger than memory would like, and its values: pages come when touched.

        Without guards, and not compared after the computation.
        """
        number, dtype = BY_NAME[kind].number, DTYPES[kind]
        ne = (c_int64 * len(shape))(*reversed(shape))
        t = self.ggml.base.ggml_new_tensor(self.ctx, number, len(shape), ne)
        array = np.zeros(shape, dtype)
        self.lazies.append(array)
        t.contents.data = array.ctypes.data
        return t, array

    def op(self, name: str, *args):
        return getattr(self.ggml.ops, name)(self.ctx, *args)

    def node(self, step: str, params, **given):
        """The op `sparse_attn_STEP` of sources by name: tensors, values of the type that such a
        source has as a rule, or a tuple of arguments of `tensor`."""
        tensors = {}
        for name, source in given.items():
            if isinstance(source, np.ndarray):
                source = source, KINDS.get(name, "i32")
            tensors[name] = self.tensor(*source) if isinstance(source, tuple) else source
        name = step if step.endswith("attn") else f"sparse_attn_{step}"
        return self.op(f"ggml_{name}", sources(**tensors), params)

    def compute(self, *outputs, n_threads: int = 2) -> None:
        base = self.ggml.base
        graph = base.ggml_new_graph(self.ctx)
        for t in outputs:
            base.ggml_build_forward_expand(graph, t)
        self.nodes = [base.ggml_graph_node(graph, i) for i in range(base.ggml_graph_n_nodes(graph))]
        for node in self.nodes:
            if node.contents.data is None:
                self._own(node, self.ggml.buffer(base.ggml_nbytes(node), UNWRITTEN))
        self.ggml.compute(graph, self.nodes, n_threads)
        for buffer in self.buffers.values():
            assert buffer.guards_intact(), "an op wrote outside a tensor"
        for _, buffer, before in self.inputs:
            assert np.array_equal(buffer.bytes, before), "an op wrote to its input"

    def read(self, t) -> np.ndarray:
        """A copy of the values, numpy axes. bf16 comes as its bits."""
        c = t.contents
        buffer = self.buffers[ctypes.addressof(c.view_src.contents if c.view_src else c)]
        _, dtype = NUMPY_TYPE[c.type]
        return np.lib.stride_tricks.as_strided(
            buffer.bytes.view(dtype), tuple(c.ne[::-1]), tuple(c.nb[::-1])
        ).copy()

    def _own(self, t, buffer: Buffer) -> None:
        t.contents.data = buffer.address
        self.buffers[ctypes.addressof(t.contents)] = buffer
