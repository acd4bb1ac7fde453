"""Load a model into memory, or a model with its first session in one line."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from typing import Any, TypedDict

from pyorch import native
from pyorch.attention.placement import layers_on_gpu
from pyorch.engine import machines
from pyorch.engine.library import library
from pyorch.engine.model import Model, Session, Watcher
from pyorch.engine.settings import SessionOptions, Settings, layers_away, settings_for
from pyorch.errors import SparqError
from pyorch.models.geometry import geometry
from pyorch.models.gguf_file import GGUFFile, read_gguf
from pyorch.models.memory import available_memory, weight_bytes
from pyorch.progress import Progress


class Placement(TypedDict, total=False):
    """Where a model goes, as keywords of `load` and `load_model`, which explains them."""

    n_gpu_layers: int | None
    kv_offload: bool | None
    placed: Callable[[Session], None] | None
    workers: Sequence[str]
    tensor_split: Sequence[float]
    numa: str
    repack: bool


def load(
    path: str | os.PathLike[str] | GGUFFile,
    *,
    watch: Watcher | None = None,
    stock: bool = False,
    progress: Progress | None = None,
    settings: Settings | None = None,
    **options: Any,
) -> Session:
    """Load a model and make one session, which closes the model when it is closed.

    Args:
        path: a GGUF model, or its header where that has been read.
        watch: as for `Model.session`.
        stock, progress: as for `load_model`.
        settings: what `settings_for` has made of the session's options, which are left out then.
        options: those of `load_model` and of `SessionOptions`; errors in the latter are raised
            before the model is read.

    Raises:
        SparqError: something is wrong with the file, the sizes or the library.
    """
    place: Any = {k: v for k, v in options.items() if k in Placement.__optional_keys__}
    of_session = {k: v for k, v in options.items() if k not in place}
    where = place.get("workers", ()), place.get("n_gpu_layers"), place.get("kv_offload")
    away = layers_away(*where, native.has_gpu_memory())
    session_options = SessionOptions(**{"n_away": away, **of_session})
    file = path if isinstance(path, GGUFFile) else read_gguf(path)
    settings = settings or settings_for(file, session_options)
    place["repack"] = place.get("repack", True) and not settings.lacking
    model = load_model(file, stock=stock, progress=progress, **place)
    try:
        session = Session(model, settings, watch)
    except BaseException:
        model.close()
        raise
    session.owns_model = True
    return session


def load_model(
    path: str | os.PathLike[str] | GGUFFile,
    *,
    n_gpu_layers: int | None = None,
    kv_offload: bool | None = None,
    placed: Callable[[Session], None] | None = None,
    workers: Sequence[str] = (),
    tensor_split: Sequence[float] = (),
    numa: str = "",
    repack: bool = True,
    stock: bool = False,
    progress: Progress | None = None,
) -> Model:
    """Map a GGUF model into memory.

    Args:
        path: the model, or its header where that has been read.
        n_gpu_layers: how many layers go to the GPU, or to the workers; None is llama.cpp's
            default, all. The first layers stay.
        kv_offload: whether K and V of the layers on a GPU lie there, too. False keeps them in
            memory, where our attention reads them on the CPU. None does so with those of as many
            layers as do not fit on GPUs of this machine when a session is made, whose
            `kv_in_memory` names them.
        placed: called with each session that keeps K and V in memory.
        workers: HOST:PORT of the other machines that hold these layers, in their order.
        tensor_split: in what proportion the GPUs, or the devices of the workers, share them; by
            default as their free memory.
        numa: one of llama.cpp's strategies, a key of `NUMA`; only a process's first one counts.
        repack: whether llama.cpp may rearrange the weights for its CPU kernels, as it does by
            default; it may decode faster with that, and read prompts faster without. It may not
            where the weights exceed the memory: the copy that it makes cannot be dropped.
        stock: use the unpatched library for comparison; a process has one library or the other.
        progress: called with (per mille done, 1000) while the model is loaded.

    Raises:
        SparqError: something is wrong with the file, the library is not built, or a worker does
            not answer.
    """
    file = path if isinstance(path, GGUFFile) else read_gguf(path)
    ours = library(stock)
    if not workers:
        ours.check_gpu(n_gpu_layers, tensor_split)
    ours.place(numa)
    lib = ours.lib
    params = lib.llama_model_default_params()
    params.load_mode = lib.LLAMA_LOAD_MODE_MMAP
    params.use_extra_bufts = repack and weight_bytes(file) <= available_memory()
    if n_gpu_layers is not None:
        params.n_gpu_layers = n_gpu_layers
    if workers:
        devices = machines.devices(ours, workers)
        ended = (ctypes.c_void_p * (len(devices) + 1))(*devices, None)
        params.devices = ctypes.cast(ended, ctypes.c_void_p)
        machines.check_split(tensor_split, len(devices))
    if tensor_split:
        params.tensor_split = (ctypes.c_float * lib.llama_max_devices())(*tensor_split)
    with ours.call() as call:

        def on_progress(share: float, _: object) -> bool:
            try:
                if progress is not None:
                    progress(int(share * 1000), 1000)
            except KeyboardInterrupt:
                call.note()
            return not call.came  # False ends it

        callback = lib.llama_progress_callback(on_progress)  # the name keeps it alive
        params.progress_callback = callback
        handle = lib.llama_model_load_from_file(os.fsencode(file.path), params)
    if call.came and handle:
        lib.llama_model_free(handle)
    call.raise_if_it_came()
    if not handle:
        raise _cannot_load(file, call.reason)
    if lib.llama_model_has_encoder(handle) or lib.llama_model_is_diffusion(handle):
        lib.llama_model_free(handle)
        raise SparqError(f"{file.path}: not a decoder-only language model")
    on_cpu = n_gpu_layers == 0 or not (workers or ours.has_gpu)
    on_gpu = layers_on_gpu(geometry(file).n_layer, 0 if on_cpu or workers else n_gpu_layers)
    has_memory = bool(ours.gpu_devices(shared=False))
    away = layers_away(workers, n_gpu_layers, kv_offload, has_memory)
    return Model(ours, file, handle, on_cpu, kv_offload, on_gpu, placed, away)


def check_loads(file: GGUFFile) -> None:
    """Refuse a file that llama.cpp cannot load as a model. No weights are read.

    Raises:
        SparqError: it says why.
    """
    ours = library()
    params = ours.lib.llama_model_default_params()
    params.load_mode, params.no_alloc = ours.lib.LLAMA_LOAD_MODE_NONE, True
    params.n_gpu_layers, params.use_extra_bufts = 0, False
    with ours.call() as call:
        handle = ours.lib.llama_model_load_from_file(os.fsencode(file.path), params)
    if not handle:
        raise _cannot_load(file, call.reason)
    ours.lib.llama_model_free(handle)
    call.raise_if_it_came()


def _cannot_load(file: GGUFFile, reason: str) -> SparqError:
    hint = "run with -v to see llama.cpp's own messages"
    if "unknown model architecture" in reason:
        hint = "the pinned llama.cpp does not know this architecture"
    return SparqError(f"{file.path}: llama.cpp cannot load this model: {reason}", hint)
