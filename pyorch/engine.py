"""Load a model, prefill, decode, generate: plain functions over one small session.

The command line, the server, the evaluations and the benchmarks share these; none of them adds to
the mathematics. A session is one sequence: `session.tokens` are those whose K and V are cached.

    with load("model.gguf", n_ctx=8192, attention="sparq,ratio=1/8") as s:
        for piece in generate(s, "Once upon a time", max_tokens=64):
            print(piece, end="", flush=True)
"""

from __future__ import annotations

import codecs
import ctypes
import json
import math
import os
import re
import secrets
import signal
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Protocol

from pyorch import native
from pyorch.attention.bytes import cache_bytes, shadow_bytes
from pyorch.attention.calibrate import resolve
from pyorch.attention.spec import AttentionSpec, check_against_model, parse_spec
from pyorch.errors import SparqError
from pyorch.models.gguf_file import (
    CACHE_TYPES,
    TENSOR_TYPES,
    Geometry,
    geometry,
    human_bytes,
    read_gguf,
)
from pyorch.models.memory import check_memory
from pyorch.native import probe

MAX_THREADS = 512  # of ggml, which does not check
DEFAULT_CTX = 8192  # when none is asked for; less if the model was trained on less
NUMA = {"distribute": 1, "isolate": 2, "numactl": 3}  # ggml_numa_strategy
ROPE_SCALING = {"none": 0, "linear": 1, "yarn": 2}  # llama_rope_scaling_type
Progress = Callable[[int, int], None]  # (done, total)


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen. `temp` 0 is greedy; `seed` None takes a new one each time."""

    temp: float = 0.0
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    seed: int | None = None


@dataclass(frozen=True)
class Piece:
    """One step of `generate`. Text may be empty: half a character, or held back for a stop string.

    `finish` is set on the last piece only: `eog` (the model ended), `stop` (a stop string),
    `length` (max_tokens), `context` (no room left) or `interrupted` (token -1 if there is none).
    """

    token: int
    text: str
    finish: str = ""

    def __str__(self) -> str:
        return self.text


@dataclass
class Timings:
    """Since the session began or `reset_counters`."""

    prefill_tokens: int = 0
    prefill_s: float = 0.0
    decode_s: list[float] = field(default_factory=list)  # one per decoded token

    @property
    def decode_rate(self) -> float:
        """Decoded tokens per second, 0 before the first."""
        return len(self.decode_s) / sum(self.decode_s) if self.decode_s else 0.0

    @property
    def decode_rate_median(self) -> float:
        """The same from the median token, which other programs on the machine disturb less."""
        return 1 / statistics.median(self.decode_s) if self.decode_s else 0.0


@dataclass(frozen=True)
class AttentionInfo:
    """What the library did, by its own account. `counters` are those of the C header."""

    spec: str
    active: bool
    reason: str  # why attention is dense though something sparse was asked for
    method: str
    n_layer: int
    layers_sparse: int
    shadow_bytes: int
    shadow_type: str
    layers: Sequence[Mapping[str, Any]]
    counters: Mapping[str, Any]
    raw: Mapping[str, Any] = field(repr=False)  # the whole JSON

    def counter(self, name: str) -> int:
        return int(self.counters.get(name, 0))

    @property
    def sparse_share(self) -> float:
        """Share of the attention calls of decoded tokens that ran sparse, 0 when there was none."""
        total = self.counter("steps") * len(self.layers)
        return self.counter("calls_sparse") / total if total > 0 else 0.0

    @property
    def dense_reasons(self) -> list[str]:
        """Why attention, or some of its layers, is left to llama.cpp; each reason once."""
        found = [self.reason] if not self.active else []
        found += [str(layer["reason"]) for layer in self.layers if layer["state"] != "sparse"]
        return list(dict.fromkeys(r for r in found if r))


class Watch(Protocol):
    """Sees the tensors of every llama_decode; `pyorch.policies` decides with it what is read."""

    def node(self, address: int, ask: bool) -> bool:
        """llama.cpp's evaluation callback; may not raise."""

    def done(self, n_past: int) -> None:
        """After a llama_decode that began with `n_past` positions; may raise."""

    def reset(self) -> None:
        """With `reset_counters`."""


class Session:
    """A loaded model with one context. Made by `load`; to be closed, or used with `with`."""

    watch: Watch | None = None
    on_node: Any = None

    def __init__(self, lib: Any, path: Path, geo: Geometry, model: Any, ctx: Any) -> None:
        self.lib, self.path, self.geometry, self.model, self.ctx = lib, path, geo, model, ctx
        self.vocab = lib.llama_model_get_vocab(model)
        self.memory = lib.llama_get_memory(ctx)
        self.n_vocab: int = lib.llama_vocab_n_tokens(self.vocab)
        self.n_ctx: int = lib.llama_n_ctx(ctx)
        self.n_batch: int = lib.llama_n_batch(ctx)
        self.tokens: list[int] = []
        self.timings = Timings()

    def close(self) -> None:
        if self.ctx:
            self.lib.llama_free(self.ctx)
        if self.model:
            self.lib.llama_model_free(self.model)
        self.ctx = self.model = None

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# ---- the library's log ----

_log_lines: deque[str] = deque(maxlen=20)  # the newest warnings and errors
_log_callback: Any = None  # kept alive as long as the library may call it
_LOG_PREFIX = re.compile(r"^(?:[\w:~]+: |error loading model[\w ]*: )+")
_interrupted = False  # Ctrl-C came while C code was calling us, where no exception can pass
_ABORTED = 2  # what llama_decode returns when its callback ends it
_LOG_DEBUG, _LOG_WARN, _LOG_ERROR, _LOG_CONT = 1, 3, 4, 5  # enum ggml_log_level


def _set_log(lib: Any, verbose: bool) -> None:
    """Keep warnings and errors for our messages; show everything on stderr if `verbose`."""
    global _log_callback
    level_now = 0

    def on_log(level: int, text: bytes, _: object) -> None:
        nonlocal level_now
        global _interrupted
        try:
            level_now = level if level != _LOG_CONT else level_now
            line = text.decode("utf-8", errors="replace")
            if level_now in (_LOG_WARN, _LOG_ERROR) and line.strip(" .\n"):
                _log_lines.append(line.strip())
            if verbose and level_now != _LOG_DEBUG:
                sys.stderr.write(line)
        except KeyboardInterrupt:
            _interrupted = True

    callback = lib.llama_log_callback(on_log)
    lib.llama_log_set(callback, None)
    _log_callback = callback


def _raise_interrupt() -> None:
    global _interrupted
    if _interrupted:
        _interrupted = False
        raise KeyboardInterrupt


@contextmanager
def _interrupt_later() -> Iterator[None]:
    """Ctrl-C waits, for `_raise_interrupt`, while C code runs that calls us at any moment.

    A function that C calls would lose it: Python may raise before the first line of its body.
    """

    def later(*_: object) -> None:
        global _interrupted
        _interrupted = True

    plain = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not (plain and threading.current_thread() is threading.main_thread()):
        yield
        return
    signal.signal(signal.SIGINT, later)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _last_log() -> str:
    """The first message since the list was cleared, without the names of functions."""
    useful = [s for s in _log_lines if "error" in s.lower() or "fail" in s.lower() or ":" in s]
    # "llama_model_load: error loading model: X" -> "X"
    return _LOG_PREFIX.sub("", useful[0]) if useful else "no reason given"


# ---- load ----


def usable_cores() -> int:
    """Threads where none are asked for: one per core, as far as the library goes."""
    return min(probe.cores(), MAX_THREADS)


@dataclass(frozen=True)
class Rope:
    """How positions are turned into rotations: llama.cpp's settings, None = the model's own.

    A model reads longer texts than it was trained on where they are set, more or less well:
    `Rope("linear", freq_scale=1/4)`, `Rope("yarn", freq_scale=1/4, yarn_orig_ctx=4096)`.

    scaling        a key of `ROPE_SCALING`
    freq_base      base of the frequencies
    freq_scale     factor of the frequencies: 1/4 stretches a context to four times its length
    yarn_orig_ctx  positions that the model was trained on
    yarn_*         YaRN's mix of extrapolation, its attention magnitude, its two corrections
    """

    scaling: str | None = None
    freq_base: float | None = None
    freq_scale: float | None = None
    yarn_orig_ctx: int | None = None
    yarn_ext_factor: float | None = None
    yarn_attn_factor: float | None = None
    yarn_beta_fast: float | None = None
    yarn_beta_slow: float | None = None

    def __post_init__(self) -> None:
        """Raises:
        SparqError: an unknown scaling, or a number that llama.cpp would take for "not given".
        """
        if self.scaling is not None and self.scaling not in ROPE_SCALING:
            raise SparqError(
                f"unknown RoPE scaling {self.scaling!r}", ", ".join(ROPE_SCALING), exit_code=2
            )
        for f in fields(self)[1:]:
            value, may_be_0 = getattr(self, f.name), f.name.startswith(("yarn_ext", "yarn_attn"))
            if value is not None and not (0 < value < math.inf or (value == 0 and may_be_0)):
                least = "0 or more" if may_be_0 else "above 0"
                raise SparqError(f"RoPE {f.name} {value} is out of range", f"it is {least}", 2)

    @classmethod
    def parse(cls, text: str) -> Rope:
        """What `str` made: `scaling=yarn,freq_scale=0.25`; "" is the model's own."""
        values = dict(part.split("=") for part in text.split(",") if part)
        kind = {"scaling": str, "yarn_orig_ctx": int}
        return cls(**{k: kind.get(k, float)(v) for k, v in values.items()})

    def __str__(self) -> str:
        return ",".join(f"{k}={v}" for k, v in self.given.items())

    @property
    def given(self) -> dict[str, Any]:
        """The settings that are not the model's own."""
        return {k: v for k, v in asdict(self).items() if v is not None}

    @property
    def params(self) -> dict[str, Any]:
        """The same as fields of `llama_context_params`."""
        names = {"scaling": "rope_scaling_type", "freq_base": "rope_freq_base"}
        names["freq_scale"] = "rope_freq_scale"
        out = {names.get(k, k): v for k, v in self.given.items()}
        if self.scaling is not None:
            out["rope_scaling_type"] = ROPE_SCALING[self.scaling]
        return out


@dataclass(frozen=True)
class CacheType:
    """A ggml type of the KV cache: its number, and its bytes per element."""

    name: str
    number: int
    bytes_per_element: float


def load(
    path: str | os.PathLike[str],
    *,
    n_ctx: int | None = None,
    n_threads: int | None = None,
    n_batch: int = 512,
    type_k: str = "f16",
    type_v: str = "f16",
    flash_attn: bool = True,
    attention: AttentionSpec | str | None = None,
    rope: Rope | None = None,
    n_gpu_layers: int | None = None,
    numa: str = "",
    stock: bool = False,
    verbose: bool = False,
    progress: Progress | None = None,
    watch: Watch | None = None,
) -> Session:
    """Map a GGUF model into memory and make a context for it.

    Args:
        n_ctx: positions; None = the model's training context, at most 8192. More than the model
            was trained on only with `rope`.
        n_threads: None = the number of cores this process may use.
        n_batch: tokens evaluated at once in prefill.
        type_k, type_v: types of the cache, from `CACHE_TYPES`.
        flash_attn: sparse attention needs True; False is the other stock path, to compare with.
        attention: as for `set_attention`; None = what SPARQ_ATTN says, or off.
        rope: other rotations than the model's own, for longer contexts.
        n_gpu_layers: layers on the GPU, None = llama.cpp's default: all.
        numa: a key of `NUMA`, llama.cpp's own strategies; the first one in a process counts.
        stock: on the unpatched library, to compare with; a process has one library or the other.
        progress: called with (per mille done, 1000) while loading.
        watch: sees every tensor that is computed.

    Raises:
        SparqError: anything wrong with the file, the sizes, or the library.
    """
    file = read_gguf(path)
    geo = geometry(file)
    n_ctx = checked_ctx(geo, n_ctx, rope)
    if numa and numa not in NUMA:
        raise SparqError(f"unknown NUMA strategy {numa!r}", ", ".join(NUMA), exit_code=2)
    types = [cache_type(t) for t in (type_k, type_v)]
    if attention is None and not stock:
        attention = os.environ.get("SPARQ_ATTN") or None
    spec = parse_spec(attention) if isinstance(attention, str) else attention
    if spec is not None:
        spec = resolve(spec, file.path)
        check_against_model(spec, geo.head_dim_k)
    shadow = shadow_bytes(geo, n_ctx, spec) if spec is not None else 0
    check_memory(file, cache_bytes(geo, n_ctx, *types), shadow)

    lib = _library(stock, verbose)
    check_gpu(lib, n_gpu_layers)
    if numa:
        lib.llama_numa_init(NUMA[numa])
    model = _load_model(lib, file.path, n_gpu_layers, progress)
    params = lib.llama_context_default_params()
    params.n_ctx = n_ctx
    params.n_batch = params.n_ubatch = min(n_batch, n_ctx)
    params.n_threads = params.n_threads_batch = min(n_threads or usable_cores(), MAX_THREADS)
    params.flash_attn_type = 1 if flash_attn else 0
    params.type_k, params.type_v = (t.number for t in types)
    params.no_perf = True
    for name, value in (rope.params if rope else {}).items():
        setattr(params, name, value)
    if watch is not None:
        on_node = lib.ggml_backend_sched_eval_callback(lambda t, ask, _: watch.node(t, ask))
        params.cb_eval = on_node
    session = _make_session(lib, file.path, geo, model, params)
    if watch is not None:
        session.watch, session.on_node = watch, on_node  # kept alive with the context
    try:
        if spec is not None:
            set_attention(session, spec)
    except BaseException:  # Ctrl-C while what is cached is sealed, too
        session.close()
        raise
    return session


def _make_session(lib: Any, path: Path, geo: Geometry, model: Any, params: Any) -> Session:
    _log_lines.clear()
    with _interrupt_later():
        ctx = lib.llama_init_from_model(model, params)
    if not ctx or _interrupted:
        if ctx:
            lib.llama_free(ctx)
        lib.llama_model_free(model)
        _raise_interrupt()
        raise SparqError(
            f"{path}: cannot make a context of {params.n_ctx} positions: {_last_log()}",
            "lower --ctx, or run with -v to see llama.cpp's own messages",
        )
    return Session(lib, path, geo, model, ctx)


def cache_type(name: str) -> CacheType:
    """The type of this name.

    Raises:
        SparqError: there is none, or the cache cannot have it.
    """
    for number, (type_name, per_block, block_bytes) in TENSOR_TYPES.items():
        if type_name == name and name in CACHE_TYPES:
            return CacheType(name, number, block_bytes / per_block)
    raise SparqError(f"unknown cache type {name!r}", ", ".join(CACHE_TYPES), exit_code=2)


def checked_ctx(geo: Geometry, n_ctx: int | None, rope: Rope | None = None) -> int:
    """Positions of a context where `n_ctx` are asked for.

    Raises:
        SparqError: none, or more than the model was trained on and no `rope` to stretch them.
    """
    limit = geo.n_ctx_train
    if n_ctx is None:
        return min(DEFAULT_CTX, limit) if limit else DEFAULT_CTX
    if n_ctx < 1:
        raise SparqError(f"context {n_ctx} is below 1", "--ctx 4096", exit_code=2)
    if beyond_training(geo, n_ctx) and not (rope and rope.given):
        raise SparqError(
            f"context {n_ctx} is beyond the {limit} positions this model was trained on",
            f"--ctx {limit} or less; or stretch it: --rope-scaling yarn "
            f"--rope-scale {-(-n_ctx // limit)}",
            exit_code=2,
        )
    return n_ctx


def beyond_training(geo: Geometry, n_ctx: int) -> bool:
    """Whether a context has more positions than the model has seen."""
    return bool(geo.n_ctx_train and n_ctx > geo.n_ctx_train)


def _library(stock: bool, verbose: bool) -> Any:
    """The low-level llama_cpp bindings, on our library."""
    lib = native.load(stock)
    lib = getattr(lib, "llama_cpp", lib)  # the package, or its module of C functions
    _set_log(lib, verbose)
    lib.llama_backend_init()
    return lib


def check_gpu(lib: Any, n_gpu_layers: int | None) -> None:
    """Refuse layers on a GPU where there is none for this library.

    Raises:
        SparqError: it is a build without CUDA, or sees no device.
    """
    if n_gpu_layers and not lib.llama_supports_gpu_offload():
        raise SparqError(
            f"{n_gpu_layers} layers cannot go to a GPU: this library has none",
            "sparq-cpp doctor says why; with a device, sparq-cpp build --cuda",
            exit_code=2,
        )


def _load_model(lib: Any, path: Path, n_gpu_layers: int | None, progress: Progress | None) -> Any:
    params = lib.llama_model_default_params()
    params.load_mode = lib.LLAMA_LOAD_MODE_MMAP
    if n_gpu_layers is not None:
        params.n_gpu_layers = n_gpu_layers

    def on_progress(share: float, _: object) -> bool:
        global _interrupted
        try:
            if progress is not None:
                progress(int(share * 1000), 1000)
        except KeyboardInterrupt:
            _interrupted = True
        return not _interrupted  # False ends the loading

    callback = lib.llama_progress_callback(on_progress)
    params.progress_callback = callback
    _log_lines.clear()
    with _interrupt_later():
        model = lib.llama_model_load_from_file(os.fsencode(path), params)
    if _interrupted and model:
        lib.llama_model_free(model)
    _raise_interrupt()
    if not model:
        reason = _last_log()
        hint = "run with -v to see llama.cpp's own messages"
        if "unknown model architecture" in reason:
            hint = "the pinned llama.cpp does not know this architecture"
        raise SparqError(f"{path}: llama.cpp cannot load this model: {reason}", hint)
    if lib.llama_model_has_encoder(model) or not lib.llama_model_has_decoder(model):
        lib.llama_model_free(model)
        raise SparqError(f"{path}: not a decoder-only language model")
    return model


# ---- attention ----


def _sparse_call(session: Session, name: str, restype: Any, *argtypes: Any) -> Any:
    """One function of our C API, or an error that says it is a stock library."""
    try:
        function = getattr(session.lib._lib, name)
    except AttributeError:
        raise SparqError(
            "this libllama has no sparse attention: it is a stock build", "run `sparq-cpp build`"
        ) from None
    function.restype, function.argtypes = restype, list(argtypes)
    return function


def set_attention(session: Session, spec: AttentionSpec | str) -> None:
    """Switch attention, from the next decoded token on. What is in the cache stays.

    Raises:
        SparqError: the library refuses the settings.
    """
    spec = resolve(parse_spec(spec) if isinstance(spec, str) else spec, session.path)
    check_against_model(spec, session.geometry.head_dim_k)
    if spec.method == "off" and not hasattr(session.lib._lib, "llama_set_sparse_attn"):
        return  # a stock library is off already
    err = ctypes.create_string_buffer(1024)
    call = _sparse_call(
        session,
        "llama_set_sparse_attn",
        ctypes.c_int32,
        ctypes.c_void_p,
        ctypes.c_char_p,
        ctypes.c_char_p,
        ctypes.c_size_t,
    )
    if call(session.ctx, str(spec).encode(), err, len(err)) < 0:
        message, _, hint = err.value.decode("utf-8", errors="replace").partition("\n")
        raise SparqError(f"attention {str(spec)!r}: {message or 'refused'}", hint.strip())


def info(session: Session) -> AttentionInfo:
    """What the library did since the counters were last reset.

    Raises:
        SparqError: a stock library, which keeps no account.
    """
    call = _sparse_call(
        session,
        "llama_get_sparse_attn_info",
        ctypes.c_int32,
        ctypes.c_void_p,
        ctypes.c_char_p,
        ctypes.c_size_t,
    )
    size = call(session.ctx, None, 0) + 1
    buf = ctypes.create_string_buffer(size + 4096)  # counters may grow a digit in between
    call(session.ctx, buf, len(buf))
    raw = json.loads(buf.value)
    return AttentionInfo(
        spec=raw["spec"],
        active=raw["active"],
        reason=raw["reason"],
        method=raw["method"],
        n_layer=raw.get("n_layer", session.geometry.n_layer),  # while off, the rest is not there
        layers_sparse=raw.get("layers_sparse", 0),
        shadow_bytes=raw.get("shadow_bytes", 0),
        shadow_type=raw.get("shadow_type", ""),
        layers=raw.get("layers", []),
        counters=raw.get("counters", {}),
        raw=raw,
    )


def reset_counters(session: Session) -> None:
    """Set the library's counters and `session.timings` to zero."""
    session.timings = Timings()
    if session.watch is not None:
        session.watch.reset()
    if hasattr(session.lib._lib, "llama_sparse_attn_reset_counters"):
        _sparse_call(session, "llama_sparse_attn_reset_counters", None, ctypes.c_void_p)(
            session.ctx
        )


def seal(session: Session) -> int:
    """Bring the transposed K up to date now, not with the next token.

    Returns how many groups of positions were sealed, counted per layer; 0 without a transposed K.

    Raises:
        SparqError: the library could not.
    """
    call = _sparse_call(session, "llama_sparse_attn_seal", ctypes.c_int64, ctypes.c_void_p)
    n = int(call(session.ctx))
    if n < 0:
        raise SparqError("the transposed K could not be brought up to date")
    return n


# ---- text ----


def tokenize(
    session: Session, text: str, *, add_special: bool = True, parse_special: bool = False
) -> list[int]:
    """Text to tokens. `add_special`: the model's begin token; `parse_special`: reads `<|...|>`."""
    raw = text.encode("utf-8", errors="replace")
    size = len(raw) + 8
    while True:
        buf = (ctypes.c_int32 * size)()
        n = session.lib.llama_tokenize(
            session.vocab, raw, len(raw), buf, size, add_special, parse_special
        )
        if n >= 0:
            return list(buf[:n])
        if n == -(2**31):
            raise SparqError(f"a text of {human_bytes(len(raw))} is too long to tokenise")
        size = -n


def token_bytes(session: Session, token: int, *, special: bool = False) -> bytes:
    """The bytes of one token: maybe part of a character. Control tokens: none unless `special`."""
    size = 64
    while True:
        buf = ctypes.create_string_buffer(size)
        n = session.lib.llama_token_to_piece(session.vocab, token, buf, size, 0, special)
        if n >= 0:
            return buf.raw[:n]
        size = -n


def detokenize(session: Session, tokens: Sequence[int], *, special: bool = False) -> str:
    """Tokens to text; bytes that are no UTF-8 become U+FFFD."""
    raw = b"".join(token_bytes(session, t, special=special) for t in tokens)
    return raw.decode("utf-8", errors="replace")


def is_eog(session: Session, token: int) -> bool:
    """Whether the model ends its text with this token."""
    return bool(session.lib.llama_vocab_is_eog(session.vocab, token))


class _TextStream:
    """Tokens in, text out once it is certain: whole characters, no beginning of a stop string."""

    def __init__(self, session: Session, stop: Sequence[str]) -> None:
        self.session, self.stop = session, [s for s in stop if s]
        self.decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self.held = ""

    def add(self, token: int) -> tuple[str, bool]:
        """Text that is now certain, and whether a stop string was met (it is cut off)."""
        self.held += self.decoder.decode(token_bytes(self.session, token))
        cuts = [i for i in (self.held.find(s) for s in self.stop) if i >= 0]
        if cuts:
            return self._take(min(cuts)), True
        keep = max((_overlap(self.held, s) for s in self.stop), default=0)
        return self._take(len(self.held) - keep), False

    def rest(self) -> str:
        """What was held back, at the end."""
        self.held += self.decoder.decode(b"", final=True)
        return self._take(len(self.held))

    def _take(self, n: int) -> str:
        out, self.held = self.held[:n], self.held[n:]
        return out


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    for n in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:n]):
            return n
    return 0


# ---- prefill and decode ----


def _decode_tokens(
    session: Session, tokens: Sequence[int], should_stop: Callable[[], bool] | None = None
) -> bool:
    """Append `tokens` to the cache; False where `should_stop` ended it, with nothing appended."""
    if len(session.tokens) + len(tokens) > session.n_ctx:
        raise SparqError(
            f"context full: {len(session.tokens)} + {len(tokens)} tokens, "
            f"but the context has {session.n_ctx} positions",
            "raise --ctx (up to the model's training context) or shorten the text",
        )
    buf = (ctypes.c_int32 * len(tokens))(*tokens)
    _log_lines.clear()
    is_prompt = len(tokens) > 1
    with _interrupt_later(), _abortable(session, should_stop) if is_prompt else nullcontext():
        code = session.lib.llama_decode(
            session.ctx, session.lib.llama_batch_get_one(buf, len(tokens))
        )
        if code == 0:
            session.tokens.extend(tokens)
        elif session.lib.llama_memory_seq_pos_max(session.memory, 0) != len(session.tokens) - 1:
            _forget(session)  # recurrent models cannot take a batch back
    if session.watch is not None:
        session.watch.done(len(session.tokens) - (len(tokens) if code == 0 else 0))
    _raise_interrupt()
    if code == _ABORTED:
        return False
    if code != 0:
        raise SparqError(f"llama.cpp could not evaluate {len(tokens)} tokens: {_last_log()}")
    return True


@contextmanager
def _abortable(session: Session, should_stop: Callable[[], bool] | None) -> Iterator[None]:
    """Ctrl-C and `should_stop` end llama_decode after the node at hand (CPU only).

    Python sees a signal between two steps of its own, so it needs some while C code runs.
    """

    def on_node(_: object) -> bool:
        global _interrupted
        try:
            return _interrupted or (should_stop is not None and should_stop())
        except KeyboardInterrupt:
            _interrupted = True
            return True

    callback = session.lib.ggml_abort_callback(on_node)
    session.lib.llama_set_abort_callback(session.ctx, callback, None)
    try:
        yield
    finally:
        none = session.lib.ggml_abort_callback(0)
        session.lib.llama_set_abort_callback(session.ctx, none, None)


def prefill(
    session: Session,
    tokens: Sequence[int],
    *,
    progress: Progress | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> None:
    """Append `tokens` to the cache, `n_batch` at a time. The logits of the last are then ready.

    Args:
        progress: called with (tokens done, tokens in all) after each batch.
        should_stop: asked before and during each batch; True ends early, whole batches stay.

    Raises:
        SparqError: the context is too small, or the library failed.
    """
    if len(session.tokens) + len(tokens) > session.n_ctx:
        raise SparqError(
            f"the text has {len(session.tokens) + len(tokens)} tokens, "
            f"but the context has {session.n_ctx} positions",
            "raise --ctx (up to the model's training context) or shorten the text",
        )
    started = time.perf_counter()
    for i in range(0, len(tokens), session.n_batch):
        if should_stop is not None and should_stop():
            break
        batch = tokens[i : i + session.n_batch]
        if not _decode_tokens(session, batch, should_stop):
            break
        session.timings.prefill_tokens += len(batch)
        if progress is not None:
            progress(i + len(batch), len(tokens))
    session.lib.llama_synchronize(session.ctx)
    session.timings.prefill_s += time.perf_counter() - started


def decode(session: Session, token: int) -> None:
    """Append one token, attending as `set_attention` says. Its logits are then ready.

    Raises:
        SparqError: the context is full, or the library failed.
    """
    started = time.perf_counter()
    _decode_tokens(session, [token])
    session.lib.llama_synchronize(session.ctx)
    session.timings.decode_s.append(time.perf_counter() - started)


def logits(session: Session) -> Any:
    """Logits of the last token: a copy, numpy float32 [n_vocab].

    Raises:
        SparqError: nothing has been evaluated yet.
    """
    import numpy as np

    pointer = session.lib.llama_get_logits_ith(session.ctx, -1) if session.tokens else None
    if not pointer:
        raise SparqError("no logits: no token has been evaluated")
    return np.ctypeslib.as_array(pointer, shape=(session.n_vocab,)).copy()


def rewind(session: Session, n: int) -> None:
    """Keep the first `n` tokens of the cache and forget the rest.

    A model whose memory cannot be cut (recurrent ones) forgets everything.
    """
    if n >= len(session.tokens):
        return
    if n > 0 and session.lib.llama_memory_seq_rm(session.memory, 0, n, -1):
        del session.tokens[n:]
        return
    _forget(session)


def _forget(session: Session) -> None:
    session.lib.llama_memory_clear(session.memory, True)
    session.tokens.clear()


def align(session: Session, tokens: Sequence[int]) -> list[int]:
    """Rewind to what the cache has in common with `tokens`; return the tokens still to prefill.

    At least the last one is left over: its logits are needed.
    """
    n = 0
    for a, b in zip(session.tokens, tokens[:-1], strict=False):
        if a != b:
            break
        n += 1
    rewind(session, n)
    return list(tokens[len(session.tokens) :])


# ---- generate ----


class Sampler:
    """llama.cpp's own chain of samplers. Its seed is in `seed`; free it with `close`."""

    def __init__(self, session: Session, sampling: Sampling) -> None:
        lib = session.lib
        self.session = session
        self.seed = secrets.randbits(32) if sampling.seed is None else sampling.seed & 0xFFFFFFFF
        self.chain = lib.llama_sampler_chain_init(lib.llama_sampler_chain_default_params())
        for sampler in self._samplers(lib, sampling):
            lib.llama_sampler_chain_add(self.chain, sampler)

    def _samplers(self, lib: Any, s: Sampling) -> Iterator[Any]:
        if s.temp <= 0:
            yield lib.llama_sampler_init_greedy()
            return
        yield lib.llama_sampler_init_top_k(s.top_k)
        yield lib.llama_sampler_init_top_p(s.top_p, 1)
        yield lib.llama_sampler_init_min_p(s.min_p, 1)
        yield lib.llama_sampler_init_temp(s.temp)
        yield lib.llama_sampler_init_dist(self.seed)

    def sample(self) -> int:
        """The next token, from the logits of the last evaluated one."""
        return int(self.session.lib.llama_sampler_sample(self.chain, self.session.ctx, -1))

    def close(self) -> None:
        if self.chain:
            self.session.lib.llama_sampler_free(self.chain)
        self.chain = None


def generate(
    session: Session,
    prompt: Sequence[int] | str,
    *,
    max_tokens: int = 256,
    sampling: Sampling | None = None,
    stop: Sequence[str] = (),
    ignore_eog: bool = False,
    progress: Progress | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> Iterator[Piece]:
    """Prefill what the cache lacks of `prompt`, then yield one piece per token.

    Args:
        prompt: tokens, or a text to tokenise.
        stop: texts that end the generation; they are not part of it.
        ignore_eog: go on when the model wants to end.
        progress, should_stop: as for `prefill`; `should_stop` is asked before each token too.

    Raises:
        SparqError: the prompt is empty or does not fit, or the library failed.
    """
    prompt = tokenize(session, prompt) if isinstance(prompt, str) else prompt
    if not prompt:
        raise SparqError("the prompt is empty", "give at least one token")
    if len(prompt) > session.n_ctx:
        raise SparqError(
            f"the prompt has {len(prompt)} tokens, but the context has {session.n_ctx} positions",
            "raise --ctx (up to the model's training context) or shorten the prompt",
        )
    stopped = should_stop or (lambda: False)
    prefill(session, align(session, prompt), progress=progress, should_stop=should_stop)
    if len(session.tokens) < len(prompt):
        yield Piece(-1, "", "interrupted")
        return
    stream = _TextStream(session, stop)
    sampler = Sampler(session, sampling or Sampling())
    try:
        yield from _generate(session, sampler, stream, max_tokens, ignore_eog, stopped)
    finally:
        sampler.close()


def _generate(
    session: Session,
    sampler: Sampler,
    stream: _TextStream,
    max_tokens: int,
    ignore_eog: bool,
    stopped: Callable[[], bool],
) -> Iterator[Piece]:
    for i in range(max_tokens):
        token = sampler.sample()
        if is_eog(session, token) and not ignore_eog:
            yield Piece(token, stream.rest(), "eog")
            return
        text, met_stop = stream.add(token)
        if met_stop:
            yield Piece(token, text, "stop")
            return
        finish = ""
        if i + 1 == max_tokens:
            finish = "length"
        elif len(session.tokens) >= session.n_ctx:
            finish = "context"
        elif stopped():
            finish = "interrupted"
        yield Piece(token, text + (stream.rest() if finish else ""), finish)
        if finish:
            return
        decode(session, token)


# ---- saved sessions ----


def save_state(session: Session, path: str | os.PathLike[str]) -> None:
    """Write the cache and its tokens to a file that `load_state` and stock llama.cpp read.

    Raises:
        SparqError: the file cannot be written.
    """
    buf = (ctypes.c_int32 * len(session.tokens))(*session.tokens)
    _log_lines.clear()
    if not Path(path).absolute().parent.is_dir() or not session.lib.llama_state_save_file(
        session.ctx, os.fsencode(path), buf, len(session.tokens)
    ):
        raise SparqError(f"{path}: cannot write the session", "is the folder there and writable?")


def load_state(session: Session, path: str | os.PathLike[str]) -> None:
    """Put the cache back as `save_state` found it. On failure the cache is empty.

    Raises:
        SparqError: no such file, or not a session of this model and context.
    """
    if not Path(path).is_file():
        raise SparqError(f"{path}: no such file")
    buf, n = (ctypes.c_int32 * session.n_ctx)(), ctypes.c_size_t()
    _log_lines.clear()
    ok = session.lib.llama_state_load_file(
        session.ctx, os.fsencode(path), buf, session.n_ctx, ctypes.byref(n)
    )
    if not ok:
        session.lib.llama_memory_clear(session.memory, True)
        session.tokens.clear()
        raise SparqError(
            f"{path}: not a saved session of this model: {_last_log()}",
            "a session needs the same model, cache types and at least the same --ctx",
        )
    session.tokens = list(buf[: n.value])
