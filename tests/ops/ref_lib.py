"""ggml_ops/ref through ctypes, compiled alone: the reference needs no build of llama.cpp."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np

SOURCE = Path(__file__).parents[2] / "ggml_ops" / "ref" / "sparq-ref.c"
FLAGS = [
    "-std=c11",
    "-O2",
    "-fPIC",
    "-shared",
    "-fno-tree-vectorize",
    "-Wall",
    "-Wextra",
    "-Wshadow",
    "-Wconversion",
    "-Wdouble-promotion",
    "-Werror",
]
I64, F64 = ctypes.c_int64, ctypes.c_double


def find_compiler() -> str | None:
    return next(filter(None, map(shutil.which, [os.environ.get("CC", "cc"), "gcc", "clang"])), None)


def _argument(x: np.ndarray | float | None) -> object:
    """An array is a pointer, a whole number an int64_t, any other a double."""
    if x is None or isinstance(x, np.ndarray):
        return ctypes.c_void_p(None if x is None else x.ctypes.data)
    return F64(x) if isinstance(x, float) else I64(x)


def _f32(array: np.ndarray | None) -> np.ndarray | None:
    return None if array is None else np.ascontiguousarray(array, np.float32)


def build(folder: Path) -> None:
    out = folder / "sparq-ref.so"
    subprocess.run([find_compiler(), *FLAGS, str(SOURCE), "-o", str(out), "-lm"], check=True)


class Ref:
    """The steps for one token and one KV head; arrays as in tests/oracle.py."""

    def __init__(self, folder: Path) -> None:
        """folder: what `build` made."""
        self.lib = ctypes.CDLL(str(folder / "sparq-ref.so"))
        self.lib.sparq_ref_select.restype = I64

    def call(self, step: str, *args: np.ndarray | float | None) -> int:
        return getattr(self.lib, f"sparq_ref_{step}")(*map(_argument, args))

    def seal(self, k, v, t_stride: int) -> tuple[np.ndarray, np.ndarray]:
        k, v = _f32(k), _f32(v)
        k_t = np.full((k.shape[1], t_stride), np.nan, np.float32)
        v_sum = np.full(v.shape[1], np.nan, np.float32)
        d_k, d_v = k.shape[1], v.shape[1]
        self.call("seal", k_t, v_sum, k, v, len(k), d_k, d_v, t_stride, d_k, d_v)
        return k_t, v_sum

    def components(self, q, rank: int, spread=None) -> np.ndarray:
        q, spread = _f32(q), None if spread is None else _f32(spread)
        out = np.full(rank, -1, np.int32)
        self.call("components", out, q, spread, *q.shape, rank)
        return out

    def score(self, q, k, bias, components, scale, softcap=0.0, transposed=False, spread=None):
        """k (n, d_k), or (d_k, n) with transposed."""
        q, k, bias = _f32(q), _f32(k), _f32(bias)
        spread = None if spread is None else _f32(spread)
        (g, n), d = bias.shape, q.shape[1]
        strides = (1, k.shape[1]) if transposed else (k.shape[1], 1)
        out = np.full((g, n), np.nan, np.float32)
        components = np.ascontiguousarray(components, np.int32)
        sizes = (g, n, d, len(components), *strides, float(scale), float(softcap))
        self.call("score", out, q, k, bias, components, spread, *sizes)
        return out

    def select(
        self, logits, k: int, forced, k_max: int, top_p=1.0
    ) -> tuple[np.ndarray, np.ndarray]:
        """selected (n_sel,), rest (g,)"""
        sel, rest = np.full(k_max, -1, np.int32), np.empty(len(logits))
        n_sel = self.select_raw(sel, rest, logits, k, forced, k_max, top_p)
        return sel[:n_sel], rest

    def select_raw(self, sel, rest, logits, k: int, forced, k_max, top_p=1.0) -> int:
        """n_sel; fills sel (k_max,) and rest (g,)."""
        logits = _f32(logits)
        g, n = logits.shape
        forced, score = np.ascontiguousarray(forced, np.int32), np.empty(n)
        sizes = (g, n, len(forced), k, k_max, float(top_p))
        return self.call("select", sel, rest, logits, forced, score, *sizes)

    def attend(
        self, q, k, v, bias, scale, softcap=0.0, selected=None, rest=None, sinks=None, n_sel=None
    ) -> np.ndarray:
        q, k, v, bias, sinks = _f32(q), _f32(k), _f32(v), _f32(bias), _f32(sinks)
        (g, n), d_k, d_v = bias.shape, q.shape[1], v.shape[1]
        out, weight = np.full((g, d_v), np.nan, np.float32), np.empty(n)
        if selected is not None:
            selected = np.ascontiguousarray(selected, np.int32)
        rest = None if rest is None else np.ascontiguousarray(rest, np.float64)
        if n_sel is None:
            n_sel = 0 if selected is None else len(selected)
        sizes = (g, n, n_sel, d_k, d_v, d_k, d_v, float(scale), float(softcap))
        self.call("attend", out, q, k, v, bias, selected, rest, sinks, weight, *sizes)
        return out
