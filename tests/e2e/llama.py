"""llama.cpp of our build through its low-level bindings: models, contexts, batches, and our C API.

    with Model(path) as model, Context(model, n_ctx=1024, watch=Watch()) as ctx:
        ctx.set_sparse("sparq,rank=8,topk=32,min_ctx=0")
        ctx.decode([(token, position, 0) for position, token in enumerate(prompt)])
        logits = ctx.logits()

SPARQ_TEST_LIB_DIR and SPARQ_TEST_STOCK_DIR name folders of libraries to test, in place of those
that `sparq-cpp build` makes.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from ctypes import c_char_p, c_int32, c_int64, c_size_t, c_void_p
from pathlib import Path
from tempfile import TemporaryFile
from types import ModuleType
from typing import Any

import numpy as np

from pyorch import native
from pyorch.ggml import BY_NAME
from pyorch.native import build

ROOT = Path(__file__).parents[2]
Token = tuple[int, int, int]  # (token, position, sequence)


def tokens(seq: int, n: int, first: int = 0) -> list[Token]:
    """`n` random tokens of a sequence from position `first` on, always the same ones."""
    rng = np.random.default_rng(seq)
    return [(int(t), i, seq) for i, t in enumerate(rng.integers(3, 259, first + n))][first:]


def environment(stock: bool = False) -> dict[str, str]:
    """Variables for another process that is to use the library (the stock one, if `stock`)."""
    folder = os.environ.get("SPARQ_TEST_STOCK_DIR" if stock else "SPARQ_TEST_LIB_DIR")
    if not folder:
        native.built(stock)
        return native.environment(stock)
    return {"LLAMA_CPP_LIB_PATH": folder, "PYTHONPATH": str(build.bindings())}


def python_environment(stock: bool = False, **more: str) -> dict[str, str]:
    """The whole environment of a Python process that imports these modules on that library."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("SPARQ_ATTN", "LLAMA_"))}
    env |= environment(stock) | more
    here = [
        str(ROOT),
        str(ROOT / "tests"),
        str(ROOT / "tests" / "e2e"),
        str(ROOT / "tests" / "ops"),
    ]
    before = [path for path in [os.environ.get("PYTHONPATH")] if path]
    env["PYTHONPATH"] = os.pathsep.join([*here, env["PYTHONPATH"], *before])
    return env


def from_child(*args: object, timeout: float | None = 300, stock: bool = False, **more: str) -> Any:
    """What a program that imports these modules prints, as JSON, in a process of its own."""
    argv, env = [sys.executable, *map(str, args)], python_environment(stock, **more)
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


_module: ModuleType | None = None
_log: deque[str] = deque(maxlen=200)
_log_callback: Any = None


def bindings() -> ModuleType:
    """The module `llama_cpp.llama_cpp` on our library, with our functions declared; silent."""
    global _module, _log_callback
    if _module is not None:
        _module.llama_log_set(_log_callback, None)  # pyorch.engine may have put its own there
        return _module
    folder = os.environ.get("SPARQ_TEST_LIB_DIR")
    if "LLAMA_CPP_LIB_PATH" in os.environ:  # a child of `python_environment`
        import llama_cpp
    elif folder:
        os.environ["LLAMA_CPP_LIB_PATH"] = folder
        sys.path.insert(0, str(build.bindings()))
        import llama_cpp
    else:
        native.built()
        llama_cpp = native.load()
    m = llama_cpp.llama_cpp
    for name, result, *args in (
        ("llama_set_sparse_attn", c_int32, c_void_p, c_char_p, c_char_p, c_size_t),
        ("llama_set_sparse_attn_seq", c_int32, c_void_p, c_int32, c_char_p, c_char_p, c_size_t),
        ("llama_sparse_attn_seq_prompt", None, c_void_p, c_int32),
        ("llama_sparse_attn_seq_draft", None, c_void_p, c_int32, c_int32, c_int32),
        ("llama_get_sparse_attn_seq_info", c_int32, c_void_p, c_int32, c_char_p, c_size_t),
        ("llama_sparse_attn_parse", c_int32, c_char_p, c_char_p, c_size_t),
        ("llama_get_sparse_attn_info", c_int32, c_void_p, c_char_p, c_size_t),
        ("llama_sparse_attn_reset_counters", None, c_void_p),
        ("llama_sparse_attn_seal", c_int64, c_void_p),
        ("llama_sparse_attn_check", c_int64, c_void_p),
    ):
        if hasattr(m._lib, name):  # not in the stock library
            getattr(m._lib, name).argtypes = args
            getattr(m._lib, name).restype = result

    @m.llama_log_callback
    def keep(_level: int, text: bytes, _data: Any) -> None:
        _log.append(text.decode("utf-8", "replace"))

    _log_callback = keep
    m.llama_log_set(keep, None)
    m.llama_backend_init()
    _module = m
    return m


def load_devices(path: str, lib: Any = None) -> Callable[[int, int], int]:
    """Let the library, or another one, know devices that are not there (fake_device.cpp).

    Returns how often a device has run an operation: (device, its number) to int.
    """
    load, count = (lib or bindings()._lib).ggml_backend_load, ctypes.CDLL(path).fake_count
    load.restype, load.argtypes, count.restype = c_void_p, [c_char_p], ctypes.c_long
    assert load(path.encode())
    return count


def keep_log() -> deque[str]:
    """All lines of the library's log from now on, in place of the newest 200."""
    global _log
    bindings()
    _log = deque()
    return _log


def crossed(log: Iterable[str]) -> list[tuple[str, list[str]]]:
    """What a graph copied, from a log with GGML_SCHED_DEBUG=1: for each run of nodes the name of
    its backend, and the tensors that were copied there before."""
    lines = [line for line in "".join(log).split("\n") if line.startswith("## SPLIT")]
    named = re.compile(r"\[(.*?) +\( *\d+[KM]\)\]")
    return [(line.split(": ")[1].split(" #")[0], named.findall(line)) for line in lines]


def log_text() -> str:
    """The newest lines of the library's log."""
    return "".join(_log)


class SpecError(Exception):
    """The library refused a spec; the text is its message and hint."""


class Model:
    def __init__(self, path: Path, n_gpu_layers: int = 0, no_alloc: bool = False) -> None:
        m = bindings()
        params = m.llama_model_default_params()
        params.n_gpu_layers, params.no_alloc = n_gpu_layers, no_alloc
        params.load_mode = m.LLAMA_LOAD_MODE_NONE if no_alloc else params.load_mode
        self.handle = m.llama_model_load_from_file(str(path).encode(), params)
        if not self.handle:
            raise RuntimeError(f"cannot load {path}\n{log_text()}")
        self.n_vocab: int = m.llama_vocab_n_tokens(m.llama_model_get_vocab(self.handle))
        self.n_layer: int = m.llama_model_n_layer(self.handle)

    def tokenize(self, text: str) -> list[int]:
        m, data = bindings(), text.encode()
        tokens = (c_int32 * (len(data) + 8))()
        vocab = m.llama_model_get_vocab(self.handle)
        return tokens[: m.llama_tokenize(vocab, data, len(data), tokens, len(tokens), True, False)]

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *_: object) -> None:
        bindings().llama_model_free(self.handle)


class Context:
    """One context. `watch.node` sees every tensor that `watch.wants`, once it is computed."""

    def __init__(
        self,
        model: Model,
        *,
        n_ctx: int = 1024,
        n_seq: int = 1,
        unified: bool = True,
        n_batch: int = 2048,
        n_ubatch: int = 512,
        n_threads: int = 1,
        flash: bool = True,
        type_k: str = "f16",
        type_v: str = "f16",
        offload_kqv: bool = True,
        swa_full: bool = True,
        watch: Any = None,
    ) -> None:
        m = bindings()
        self.model, self.n_seq, self.watch = model, n_seq, watch
        self._error: BaseException | None = None
        p = m.llama_context_default_params()
        p.n_ctx, p.n_batch, p.n_ubatch, p.n_seq_max = n_ctx, n_batch, min(n_ubatch, n_batch), n_seq
        p.n_threads = p.n_threads_batch = n_threads
        p.kv_unified, p.flash_attn_type, p.no_perf = unified, int(flash), True
        p.type_k, p.type_v = BY_NAME[type_k].number, BY_NAME[type_v].number
        p.offload_kqv, p.swa_full = offload_kqv, swa_full
        if watch is not None:
            self._callback = m.ggml_backend_sched_eval_callback(self._eval)  # kept alive with us
            p.cb_eval = self._callback
        self.handle = m.llama_init_from_model(model.handle, p)
        if not self.handle:
            raise RuntimeError(log_text())
        self.memory = m.llama_get_memory(self.handle)
        self.n_ctx_seq: int = m.llama_n_ctx_seq(self.handle)
        self._batch = m.llama_batch_init(n_batch, 0, 1)

    def close(self) -> None:
        if self.handle:
            bindings().llama_batch_free(self._batch)
            bindings().llama_free(self.handle)
            self.handle = None

    def __enter__(self) -> Context:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _eval(self, address: int, ask: bool, _data: Any) -> bool:
        # an exception cannot pass through C: keep the first, raise it in decode()
        try:
            if ask:
                return self.watch.wants(address)
            if self._error is None:
                self.watch.node(address)
        except BaseException as error:  # noqa: BLE001
            self._error = self._error or error
        return True

    # ---- batches ----

    def decode(self, tokens: Sequence[Token], logits: str | Sequence[bool] = "last") -> int:
        """llama_decode; returns its result.

        logits: for the "last" token of each sequence, for "all", for "none", or one flag per token.
        """
        if isinstance(logits, str):
            last = {seq: i for i, (*_, seq) in enumerate(tokens)}
            logits = [
                logits == "all" or (logits == "last" and last[seq] == i)
                for i, (*_, seq) in enumerate(tokens)
            ]
        result = bindings().llama_decode(self.handle, self._filled(tokens, logits))
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        return result

    def encode(self, tokens: Sequence[Token]) -> int:
        """llama_encode, of the text that a decoder's cross-attention sees; returns its result."""
        return bindings().llama_encode(self.handle, self._filled(tokens, [False] * len(tokens)))

    def _filled(self, tokens: Sequence[Token], logits: Sequence[bool]) -> Any:
        b = self._batch
        b.n_tokens = len(tokens)
        for i, (token, position, seq) in enumerate(tokens):
            b.token[i], b.pos[i], b.n_seq_id[i] = token, position, 1
            b.seq_id[i][0] = seq
            b.logits[i] = logits[i]
        return b

    def logits(self, i: int = -1) -> np.ndarray:
        """(n_vocab,) of token `i` of the last batch."""
        p = bindings().llama_get_logits_ith(self.handle, i)
        return np.ctypeslib.as_array(p, (self.model.n_vocab,)).copy()

    def abort_after(self, n_calls: int | None) -> None:
        """Abort the computation at the n-th time it asks; None: never."""
        m = bindings()
        left = [n_calls or 0]

        @m.ggml_abort_callback
        def abort(_data: Any) -> bool:
            left[0] -= 1
            return left[0] == 0

        self._abort = abort if n_calls else m.ggml_abort_callback(0)
        m.llama_set_abort_callback(self.handle, self._abort, None)

    def set_threads(self, n: int) -> None:
        bindings().llama_set_n_threads(self.handle, n, n)

    # ---- sequences ----

    def seq_rm(self, seq: int, p0: int = -1, p1: int = -1) -> bool:
        return bindings().llama_memory_seq_rm(self.memory, seq, p0, p1)

    def seq_cp(self, src: int, dst: int, p0: int = -1, p1: int = -1) -> None:
        bindings().llama_memory_seq_cp(self.memory, src, dst, p0, p1)

    def seq_keep(self, seq: int) -> None:
        bindings().llama_memory_seq_keep(self.memory, seq)

    def seq_add(self, seq: int, p0: int, p1: int, delta: int) -> None:
        bindings().llama_memory_seq_add(self.memory, seq, p0, p1, delta)

    def clear(self, data: bool) -> None:
        bindings().llama_memory_clear(self.memory, data)

    def seq_range(self, seq: int) -> tuple[int, int]:
        """(first, last) position; (-1, -1) for none."""
        m = bindings()
        return (
            m.llama_memory_seq_pos_min(self.memory, seq),
            m.llama_memory_seq_pos_max(self.memory, seq),
        )

    # ---- states ----

    def get_state(self, seq: int | None = None) -> bytes:
        """The state of a sequence, or of the whole context."""
        m = bindings()
        if seq is None:
            size = m.llama_state_get_size(self.handle)
            call: Callable = lambda p: m.llama_state_get_data(self.handle, p, size)  # noqa: E731
        else:
            size = m.llama_state_seq_get_size(self.handle, seq)
            call = lambda p: m.llama_state_seq_get_data(self.handle, p, size, seq)  # noqa: E731
        data = (ctypes.c_uint8 * size)()
        written = call(data)
        return bytes(data)[:written]

    def set_state(self, data: bytes, seq: int | None = None) -> int:
        """Bytes read; 0 when the library refuses it."""
        m = bindings()
        array = (ctypes.c_uint8 * len(data)).from_buffer_copy(data)
        if seq is None:
            return m.llama_state_set_data(self.handle, array, len(data))
        return m.llama_state_seq_set_data(self.handle, array, len(data), seq)

    # ---- ours ----

    def set_sparse(self, spec: str) -> None:
        error = ctypes.create_string_buffer(512)
        if bindings()._lib.llama_set_sparse_attn(self.handle, spec.encode(), error, 512) != 0:
            raise SpecError(error.value.decode())

    def set_sequence(self, seq: int, spec: str | None) -> None:
        """The settings of one sequence; None: the context's."""
        error = ctypes.create_string_buffer(512)
        text = None if spec is None else spec.encode()
        if bindings()._lib.llama_set_sparse_attn_seq(self.handle, seq, text, error, 512) != 0:
            raise SpecError(error.value.decode())

    def say_prompt(self, seq: int) -> None:
        bindings()._lib.llama_sparse_attn_seq_prompt(self.handle, seq)

    def say_draft(self, seq: int, first: int, n: int) -> None:
        """`n` tokens from position `first` on verify a draft; 0: none do any more."""
        bindings()._lib.llama_sparse_attn_seq_draft(self.handle, seq, first, n)

    def info(self, seq: int | None = None) -> dict[str, Any]:
        """Of the context, or of a sequence."""
        lib, args = bindings()._lib, (self.handle,) if seq is None else (self.handle, seq)
        call = lib.llama_get_sparse_attn_info if seq is None else lib.llama_get_sparse_attn_seq_info
        size = call(*args, None, 0) + 1
        text = ctypes.create_string_buffer(size)
        call(*args, text, size)
        return json.loads(text.value)

    def document(self, name: str, *args: object) -> tuple[int, bytes]:
        """What `llama_sparse_document_NAME` returns, and its text.

        Raises:
            SpecError: the library refuses it.
        """
        function = getattr(bindings()._lib, f"llama_sparse_document_{name}")
        function.restype, text = c_int64, ctypes.create_string_buffer(1024)
        result = function(c_void_p(self.handle), *args, text, c_size_t(1024))
        if result < 0:
            raise SpecError(text.value.decode())
        return result, text.value

    def reopen(self, n: int) -> None:
        """Write the first `n` positions of sequence 0 as a document, forget all, and open it."""
        kind, size = self.document("kind")[1], ctypes.c_uint32(n)
        with TemporaryFile() as file:
            where = c_int32(0), c_int32(file.fileno()), ctypes.c_uint64(0), size
            self.document("write", *where, ctypes.c_uint32(0), size)
            self.document("write_shadow", *where)
            file.truncate(self.document("bytes", size)[0])
            self.clear(True)
            mapped, _ = self.document("open", *where, size, c_char_p(kind))
            assert mapped == 0, "copied, not mapped"

    def reset_counters(self) -> None:
        bindings()._lib.llama_sparse_attn_reset_counters(self.handle)

    def seal(self) -> int:
        return bindings()._lib.llama_sparse_attn_seal(self.handle)

    def check_shadow(self) -> int:
        return bindings()._lib.llama_sparse_attn_check(self.handle)
