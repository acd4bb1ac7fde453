"""K and V of a model that reads a text, for attention by itself."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from pyorch import engine
from pyorch.errors import SparqError
from pyorch.measure.turns import OFF
from pyorch.native.prototypes import declare
from pyorch.native.slots import FLASH_ATTN
from pyorch.native.tensor import Tensor
from pyorch.policies.watch import PolicyWatch

STEP = 256  # what llama.cpp rounds the positions in view up to
Rows = list[np.ndarray]  # q (1, heads, size) f32; K and V (positions, KV heads, size) f16


class Copies(PolicyWatch):
    """Copies what llama.cpp's attention reads, layer by layer, while `layers` is a list."""

    layers: list[Rows] | None = None

    def node(self, address: int, ask: bool) -> bool:
        node = Tensor.from_address(address)
        if self.layers is None or self.session is None or node.op != self.flash_attn:
            return not ask
        if not ask:
            self.layers.append([])
            for name, kind in {"q": np.float32, "k": np.float16, "v": np.float16}.items():
                t = node.src[FLASH_ATTN[name]]
                size, n, heads, _ = t.contents.ne
                out = np.empty((n, heads, size), kind)  # as it lies in memory
                get = declare(self.session.lib._lib).ggml_backend_tensor_get
                get(t, out.ctypes.data, 0, out.nbytes)
                self.layers[-1].append(out)
        return True


def read(model: Path, text: str, n_gpu_layers: int) -> list[Rows]:
    """q of the last token of a text, and K and V of all, by layer, but for those with a window.

    Raises:
        SparqError: the text is too short.
    """
    copies = Copies()
    with engine.load_model(model, n_gpu_layers=n_gpu_layers) as loaded:
        tokens = engine.tokenize(loaded, text)
        n = len(tokens) // STEP * STEP
        if n == 0:
            raise SparqError(f"the text has {len(tokens)} tokens", f"{STEP} are needed")
        more = {"n_ctx": n, "flash_attn": True, "attention": str(OFF)}
        with loaded.session(watch=copies, **more) as s:
            engine.prefill(s, tokens[: n - 1])
            copies.layers = []
            engine.decode(s, tokens[n - 1])
    return [rows for rows in copies.layers if len(rows[1]) == n]
