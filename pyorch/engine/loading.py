"""Load a model into memory, or a model with its first session in one line."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, TypedDict

from pyorch.attention.placement import layers_on_gpu
from pyorch.engine import machines
from pyorch.engine.library import Call, library
from pyorch.engine.model import Model, Session, Watch
from pyorch.engine.settings import SessionOptions, Settings, layers_away, settings_for
from pyorch.errors import SparqError
from pyorch.models.geometry import geometry
from pyorch.models.gguf_file import GGUFFile, read_gguf
from pyorch.models.memory import available_memory, weight_bytes
from pyorch.progress import Progress

if TYPE_CHECKING:
    from typing_extensions import Unpack


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
    watch: Watch | None = None,
    n_gpu_layers: int | None = None,
    kv_offload: bool | None = None,
    placed: Callable[[Session], None] | None = None,
    workers: Sequence[str] = (),
    tensor_split: Sequence[float] = (),
    numa: str = "",
    repack: bool = True,
    stock: bool = False,
    progress: Progress | None = None,
    settings: Settings | None = None,
    **options: Unpack[SessionOptions],
) -> Session:
    """Load a model and make one session, which closes the model when it is closed.

    Args:
        path: a GGUF model, or its header where that has been read.
        watch: as for `Model.session`.
        n_gpu_layers, kv_offload, placed, workers, tensor_split, numa, repack, stock, progress: as
            for `load_model`.
        settings: what `settings_for` has made of the options, which are then left out.
        options: those of `SessionOptions`; errors in them are raised before the model is
            read.

    Raises:
        SparqError: something is wrong with the file, the sizes or the library.
    """
    options.setdefault("n_away", layers_away(workers, n_gpu_layers))
    file = path if isinstance(path, GGUFFile) else read_gguf(path)
    settings = settings or settings_for(file, **options)
    model = load_model(
        file,
        n_gpu_layers=n_gpu_layers,
        kv_offload=kv_offload,
        placed=placed,
        workers=workers,
        tensor_split=tensor_split,
        numa=numa,
        repack=repack and not settings.lacking,
        stock=stock,
        progress=progress,
    )
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
        placed: called with each session of which it does.
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
    found = library(stock)
    if not workers:
        found.check_gpu(n_gpu_layers, tensor_split)
    found.place(numa)
    lib = found.lib
    params = lib.llama_model_default_params()
    params.load_mode = lib.LLAMA_LOAD_MODE_MMAP
    params.use_extra_bufts = repack and weight_bytes(file) <= available_memory()
    if n_gpu_layers is not None:
        params.n_gpu_layers = n_gpu_layers
    if workers:
        devices = machines.devices(found, workers)
        ended = (ctypes.c_void_p * (len(devices) + 1))(*devices, None)
        params.devices = ctypes.cast(ended, ctypes.c_void_p)
        _check_shares(tensor_split, len(devices))
    if tensor_split:
        params.tensor_split = (ctypes.c_float * lib.llama_max_devices())(*tensor_split)
    with found.call() as call:
        on_progress = _on_progress(lib, call, progress)  # the name keeps it alive
        params.progress_callback = on_progress
        handle = lib.llama_model_load_from_file(os.fsencode(file.path), params)
    if call.came and handle:
        lib.llama_model_free(handle)
    call.raise_if_it_came()
    if not handle:
        raise _cannot_load(file, call.reason)
    if lib.llama_model_has_encoder(handle) or not lib.llama_model_has_decoder(handle):
        lib.llama_model_free(handle)
        raise SparqError(f"{file.path}: not a decoder-only language model")
    on_cpu = n_gpu_layers == 0 or not (workers or found.has_gpu)
    on_gpu = layers_on_gpu(geometry(file).n_layer, 0 if on_cpu or workers else n_gpu_layers)
    return Model(found, file, handle, on_cpu, kv_offload, on_gpu, placed)


def _check_shares(tensor_split: Sequence[float], n_devices: int) -> None:
    """Raises:
    SparqError: it has not one part for each device.
    """
    if tensor_split and len(tensor_split) != n_devices:
        raise SparqError(
            f"--tensor-split has {len(tensor_split)} parts for {n_devices} devices of workers",
            "give one part for each",
            exit_code=2,
        )


def _on_progress(lib: ModuleType, call: Call, progress: Progress | None) -> object:
    """The function that llama.cpp calls while it loads; if it returns False, loading ends."""

    def on_progress(share: float, _: object) -> bool:
        try:
            if progress is not None:
                progress(int(share * 1000), 1000)
        except KeyboardInterrupt:
            call.note()
        return not call.came

    return lib.llama_progress_callback(on_progress)


def _cannot_load(file: GGUFFile, reason: str) -> SparqError:
    hint = "run with -v to see llama.cpp's own messages"
    if "unknown model architecture" in reason:
        hint = "the pinned llama.cpp does not know this architecture"
    return SparqError(f"{file.path}: llama.cpp cannot load this model: {reason}", hint)
