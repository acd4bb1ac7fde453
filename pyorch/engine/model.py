"""A model in memory, and its sessions: one sequence of tokens each, in a context of its own."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from pyorch.attention.placement import Rates, layers_on_gpu
from pyorch.engine import c_functions
from pyorch.engine.library import Library, free_on, gpus
from pyorch.engine.settings import Placement, SessionOptions, Settings, settings_for, share_here
from pyorch.errors import SparqError
from pyorch.models.geometry import geometry
from pyorch.models.gguf_file import GGUFFile
from pyorch.models.memory import check_more

if TYPE_CHECKING:
    import ctypes


class Model:
    """A loaded GGUF model. `load_model` makes one; it has to be closed, or used with `with`.

    Its sessions share the weights; each has a context and a cache of its own. `handle` is
    llama.cpp's pointer, `on_cpu` means that no layer is on a GPU or another machine, `on_gpu` are
    the layers on this machine's GPUs, and `n_away` is that of `SessionOptions`.
    """

    def __init__(self, library: Library, file: GGUFFile, handle: int, place: Placement) -> None:
        self.library, self.lib, self.file = library, library.lib, file
        self.handle: int | None = handle  # None once it is closed
        self.path, self.geometry, self.place = file.path, geometry(file), place
        self.on_cpu = place.n_gpu_layers == 0 or not (place.workers or library.gpu_devices())
        n_there = 0 if self.on_cpu or place.workers else place.n_gpu_layers
        self.on_gpu = layers_on_gpu(self.geometry.n_layer, n_there)
        self.n_away = place.n_away(not all(gpu.integrated for gpu in library.gpu_devices()))
        self.vocab = self.lib.llama_model_get_vocab(handle)
        self.n_vocab: int = self.lib.llama_vocab_n_tokens(self.vocab)
        self._sessions: weakref.WeakSet[Session] = weakref.WeakSet()

    def session(self, *, watch: Watcher | None = None, **options: Any) -> Session:
        """Make a context of this model, with an empty cache.

        Args:
            watch: receives the tensors as they are computed.
            options: those of `SessionOptions`.

        Raises:
            SparqError: the settings do not fit the model, or need too much memory.
        """
        options = {"n_away": self.n_away, **options}
        return Session(self, settings_for(self.file, SessionOptions(**options)), watch)

    def close(self) -> None:
        """Free the sessions that are still open, then the model."""
        for session in list(self._sessions):
            session.close()
        if self.handle:
            self.lib.llama_model_free(self.handle)
        self.handle = None

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass
class Timings:
    """Times in seconds, since the session began or its counters were reset."""

    prefill_tokens: int = 0
    prefill_s: float = 0.0
    decode_s: list[float] = field(default_factory=list)  # one per decoded token

    @property
    def decode_rate(self) -> float:
        """Decoded tokens per second; 0 before the first."""
        return len(self.decode_s) / sum(self.decode_s) if self.decode_s else 0.0


class Watcher(Protocol):
    """A receiver of the tensors of every llama_decode. `pyorch.policies` has one that decides what
    is read."""

    def attach(self, session: Session) -> None:
        """Called once, when the context exists. May raise."""

    def node(self, address: int, ask: bool) -> bool:
        """llama.cpp's evaluation callback, with the address of a ggml_tensor: with `ask`
        it returns whether it wants the tensor, and is called again when that is computed. May not
        raise."""

    def done(self, n_past: int) -> None:
        """Called after a llama_decode that began with `n_past` positions. May raise."""

    def reset(self) -> None:
        """Called by `reset_counters`."""


class Session:
    """A context of a model, with the `tokens` whose K and V are in its cache.

    `Model.session` and `load` make one; it has to be closed, or used with `with`. Everything else
    that can be done with it is a function of this package.
    """

    def __init__(self, model: Model, settings: Settings, watch: Watcher | None = None) -> None:
        """Raises:
        SparqError: llama.cpp cannot make the context, or refuses the attention.
        """
        self.model, self.lib, self.library = model, model.lib, model.library
        self.path, self.geometry = model.path, model.geometry
        self.vocab, self.n_vocab = model.vocab, model.n_vocab
        self.types, self.rope, self.watch = settings.types, settings.rope, watch
        self.tokens: list[int] = []
        # what layers that forget knew after so many tokens, see decoding.py
        self.checkpoint: tuple[int, ctypes.Array[ctypes.c_uint8]] | None = None
        self.timings = Timings()
        self.owns_model = False  # whether the model is closed with the session
        self.settings = settings
        self.rates: Rates | None = None  # of GPUs without our kernels
        self.kv_in_memory = self._kv_in_memory()  # layers, of those with weights on a GPU
        self.ctx: int | None = self._context(settings)  # None once it is closed
        model._sessions.add(self)
        self.memory = self.lib.llama_get_memory(self.ctx)
        self.n_sequences, self.swa_full = settings.n_sequences, settings.swa_full
        self.n_ctx: int = self.lib.llama_n_ctx_seq(self.ctx)  # of each sequence
        self.n_batch: int = self.lib.llama_n_batch(self.ctx)
        try:
            if watch is not None:
                watch.attach(self)
            if settings.spec is not None:
                c_functions.set_spec(self.lib, self.ctx, settings.spec)
            if (self.kv_in_memory or self.rates) and model.place.placed:
                model.place.placed(self)
        except BaseException:  # includes Ctrl-C while the cache is sealed
            self.close()
            raise

    def _kv_in_memory(self) -> tuple[int, ...]:
        insists, settings = self.model.place.kv_offload is not None, self.settings
        if insists or not (c_functions.is_ours(self.lib) and self.model.on_gpu):
            return ()
        devices, self.rates = gpus(self.library, settings.spec, settings.n_threads)
        layers = settings.in_memory(free_on(devices), self.model.on_gpu, self.rates)
        if self.model.n_away != 0:  # not counted yet
            sizes = settings.layer_bytes()
            check_more(self.path, "cache beside the GPU's", sum(sizes[il] for il in layers))
        return layers

    @property
    def share_here(self) -> float:
        """The share of the layers whose K and V are in this machine's main memory."""
        share = share_here(self.geometry, self.model.n_away)
        return min(1.0, share + len(self.kv_in_memory) / self.geometry.n_layer)

    def _context(self, settings: Settings) -> int:
        params = settings.params(self.lib)
        params.offload_kqv = self.model.place.kv_offload is not False
        if (watch := self.watch) is not None:
            self._on_node = self.lib.ggml_backend_sched_eval_callback(
                lambda t, ask, _: watch.node(t, ask)
            )  # kept alive with the context
            params.cb_eval = self._on_node
        with self.library.call() as call, c_functions.environment(self.kv_in_memory):
            ctx = self.lib.llama_init_from_model(self.model.handle, params)
        if ctx and call.came:
            self.lib.llama_free(ctx)
        call.raise_if_it_came()
        if not ctx:
            raise SparqError(
                f"{self.path}: cannot make a context of {settings.n_ctx} positions: {call.reason}",
                "lower --ctx, or run with -v to see llama.cpp's own messages",
            )
        return int(ctx)

    def close(self) -> None:
        """Free the context, and also the model if `load` made both."""
        if self.ctx:
            self.lib.llama_free(self.ctx)
        self.ctx = None
        if self.owns_model:
            self.owns_model = False
            self.model.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
