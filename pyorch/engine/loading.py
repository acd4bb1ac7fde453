"""Load a model into memory, or a model with its first session in one line."""

from __future__ import annotations

import ctypes
import os
from dataclasses import fields, replace
from typing import Any

from pyorch import native
from pyorch.engine import machines
from pyorch.engine.library import library
from pyorch.engine.model import Model, Session, Watcher
from pyorch.engine.settings import Placement, SessionOptions, Settings, settings_for
from pyorch.errors import SparqError
from pyorch.models.gguf_file import GGUFFile, read_gguf
from pyorch.models.memory import available_memory, weight_bytes
from pyorch.progress import Progress


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
        options: those of `Placement` and of `SessionOptions`; errors in the latter are raised
            before the model is read.

    Raises:
        SparqError: something is wrong with the file, the sizes or the library.
    """
    names = {f.name for f in fields(Placement)} & options.keys()
    place = Placement(**{name: options.pop(name) for name in names})
    file = path if isinstance(path, GGUFFile) else read_gguf(path)
    options = {"n_away": place.n_away(native.has_gpu_memory()), **options}
    settings = settings or settings_for(file, SessionOptions(**options))
    place = replace(place, repack=place.repack and not settings.lacking)
    model = load_model(file, stock=stock, progress=progress, **vars(place))
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
    stock: bool = False,
    progress: Progress | None = None,
    **where: Any,
) -> Model:
    """Map a GGUF model into memory.

    Args:
        path: the model, or its header where that has been read.
        stock: use the unpatched library for comparison; a process has one library or the other.
        progress: called with (per mille done, 1000) while the model is loaded.
        where: the fields of `Placement`.

    Raises:
        SparqError: something is wrong with the file, the library is not built, or a worker does
            not answer.
    """
    place = Placement(**where)
    file = path if isinstance(path, GGUFFile) else read_gguf(path)
    ours = library(stock)
    if not place.workers:
        ours.check_gpu(place.n_gpu_layers, place.tensor_split)
    ours.place(place.numa)
    lib = ours.lib
    params = lib.llama_model_default_params()
    params.load_mode = lib.LLAMA_LOAD_MODE_MMAP
    params.use_extra_bufts = place.repack and weight_bytes(file) <= available_memory()
    if place.n_gpu_layers is not None:
        params.n_gpu_layers = place.n_gpu_layers
    if place.n_gpu_layers == 0:  # no device at all, or prompts would go there
        nothing = (ctypes.c_void_p * 1)(None)
        params.devices = ctypes.cast(nothing, ctypes.c_void_p)
    if place.workers:
        devices = machines.devices(ours, place.workers)
        ended = (ctypes.c_void_p * (len(devices) + 1))(*devices, None)
        params.devices = ctypes.cast(ended, ctypes.c_void_p)
        machines.check_split(place.tensor_split, len(devices))
    if place.tensor_split:
        params.tensor_split = (ctypes.c_float * lib.llama_max_devices())(*place.tensor_split)
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
    return Model(ours, file, handle, place)


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
