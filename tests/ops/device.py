"""The same op tests on a device: everything a graph touches goes there, and comes back.

SPARQ_TEST_DEVICE names what `ggml` in the op tests computes with: `cuda` (a build with CUDA), or a
library with `ggml_backend_init`, as tests/fake_device.cpp makes. Guards and paddings go
too, so a write outside a tensor is seen. A test whose nodes the device refuses is skipped and says
so.
"""

from __future__ import annotations

import ctypes
import weakref
from ctypes import c_void_p
from pathlib import Path

import pytest
from ggml_ctypes import Buffer, Ggml, Tensor

from bench.gpu.device import Device


class DeviceGgml(Ggml):
    def __init__(self, folder: Path, device: str) -> None:
        super().__init__(folder)
        self.made: weakref.WeakSet[Buffer] = weakref.WeakSet()
        opened = Device(folder, device)
        self.device, self.backend = opened.dev, opened.backend
        self.same_bits, self.fast_exp = device != "cuda", device == "cuda"
        self.n_computed = 0  # of our nodes, on the device

    def buffer(self, size: int, fill: int) -> Buffer:
        buffer = super().buffer(size, fill)
        self.made.add(buffer)
        return buffer

    def compute(self, graph: c_void_p, nodes: list, n_threads: int) -> None:
        base = self.base
        for node in nodes:
            if not base.ggml_backend_dev_supports_op(self.device, node):
                name = base.ggml_backend_dev_name(self.device).decode()
                pytest.skip(f"{name} has no kernel for sub-operation {node.contents.op_params[0]}")
        tensors = {ctypes.addressof(t.contents): t.contents for n in nodes for t in _reach(n)}
        buffers = [b for b in self.made if any(_inside(b, t.data) for t in tensors.values())]
        if any(t.data and not any(_inside(b, t.data) for b in buffers) for t in tensors.values()):
            pytest.skip("a tensor larger than what these tests copy to a device")

        offsets, total = {}, 0
        for b in buffers:  # its tensor at a multiple of 64 bytes, there as here
            offsets[id(b)] = total + (-(total + b.start)) % 64
            total = offsets[id(b)] + len(b.raw)
        buffer_type = base.ggml_backend_dev_buffer_type(self.device)
        memory = base.ggml_backend_buft_alloc_buffer(buffer_type, total)
        start = base.ggml_backend_buffer_get_base(memory)
        whole = Tensor(type=24, buffer=memory, data=start)  # i8: all of the memory, to copy with
        whole.ne[:], whole.nb[:] = (total, 1, 1, 1), (1, total, total, total)
        before = [(t, t.data, t.buffer) for t in tensors.values()]
        try:
            for b in buffers:
                base.ggml_backend_tensor_set(
                    ctypes.byref(whole), b.raw.ctypes.data, offsets[id(b)], len(b.raw)
                )
            for t in tensors.values():
                if t.data:
                    b = next(b for b in buffers if _inside(b, t.data))
                    t.data += start + offsets[id(b)] - b.raw.ctypes.data
                t.buffer = memory
            status = base.ggml_backend_graph_compute(self.backend, graph)
            assert status == 0, f"ggml_backend_graph_compute: status {status}"
            self.n_computed += len(nodes)
            for b in buffers:
                base.ggml_backend_tensor_get(
                    ctypes.byref(whole), b.raw.ctypes.data, offsets[id(b)], len(b.raw)
                )
        finally:
            for t, data, buffer in before:
                t.data, t.buffer = data, buffer
            base.ggml_backend_buffer_free(memory)


def _reach(t) -> list:
    """A tensor, and all that it reads."""
    c = t.contents
    found = [t, *(s for s in c.src if s)]
    found += [s.contents.view_src for s in found if s.contents.view_src]
    return found


def _inside(buffer: Buffer, address: int | None) -> bool:
    first = buffer.raw.ctypes.data
    return address is not None and first <= address < first + len(buffer.raw)
