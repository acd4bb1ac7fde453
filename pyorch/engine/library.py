"""The llama.cpp library of this process: its C functions, its log, and calls into it.

llama.cpp's messages go to the logger `pyorch.llama`, from debug to error at its own levels. Nothing
shows them unless the program sets up logging, as the command line does for -v.
"""

from __future__ import annotations

import atexit
import ctypes
import logging
import re
import signal
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from types import ModuleType

from pyorch import native, system
from pyorch.attention.placement import MAIN_MEMORY, MARGIN, Rates
from pyorch.attention.spec import AttentionSpec
from pyorch.engine import bandwidth
from pyorch.errors import SparqError
from pyorch.ggml import NUMA
from pyorch.native import devices
from pyorch.native.devices import Device
from pyorch.native.prototypes import declare

LOG = logging.getLogger("pyorch.llama")
LOG.addHandler(logging.NullHandler())

_LEVELS = {1: logging.DEBUG, 2: logging.INFO, 3: logging.WARNING, 4: logging.ERROR}
_CONT = 5  # the ggml_log_level of a message that continues
# "llama_model_load: error loading model: X" -> "X"
_LOG_PREFIX = re.compile(r"^(?:[\w:~]+: |error loading model[\w ]*: )+")


class Call:
    """A call into the library, with the warnings and errors that it logged meanwhile. No exception
    can pass through C code, so a Ctrl-C is remembered until Python code may raise it."""

    def __init__(self) -> None:
        self.came = False  # Ctrl-C
        self.warnings: deque[str] = deque(maxlen=20)

    def note(self, *_: object) -> None:
        """Remember that Ctrl-C came; functions that C calls do this instead of raising."""
        self.came = True

    def raise_if_it_came(self) -> None:
        """Raises:
        KeyboardInterrupt: Ctrl-C came.
        """
        if self.came:
            raise KeyboardInterrupt

    @property
    def reason(self) -> str:
        """The reason why the call failed, as far as the library said: its first useful warning,
        without the name of the function."""
        telling = [s for s in self.warnings if re.search("error|fail|:", s.lower())]
        return _LOG_PREFIX.sub("", telling[0]) if telling else "no reason given"


class Library:
    """The bindings of a built libllama; `lib` is their module of C functions.

    A process has one library, which `library` returns.
    """

    def __init__(self, lib: ModuleType) -> None:
        self.lib = lib
        self._calls: list[Call] = []
        self._line, self._level = "", logging.INFO  # the line of the log that is not yet complete
        self._numa = ""
        self.workers: set[str] = set()  # HOST:PORT of those that we are connected to
        self.on_abort: object = None  # what llama.cpp calls before it aborts
        self._on_log = lib.llama_log_callback(self._log)  # kept alive: the library calls it
        silent = lib.llama_log_callback(lambda *_: None)
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(silent))  # for what is freed after our modules
        atexit.register(lib.llama_log_set, silent, None)
        lib.llama_backend_init()

    @contextmanager
    def call(self) -> Iterator[Call]:
        """Wrap C code, which may call us at any moment. A Ctrl-C is noted meanwhile; the caller
        cleans up, then raises it.

        A function that C calls would lose it, because Python may raise before the first line of its
        body. Nothing changes if a program has a handler of its own, or in threads other than the
        main one, which get no signals.
        """
        call = Call()
        self._calls.append(call)
        is_plain = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        is_ours = is_plain and threading.current_thread() is threading.main_thread()
        try:
            with system.handled(call.note, [signal.SIGINT] * is_ours):
                yield call
        finally:
            self._calls.remove(call)

    def place(self, numa: str) -> None:
        """Place memory and threads on the NUMA nodes of the machine. llama.cpp does it once per
        process, so later calls change nothing.

        Raises:
            SparqError: it is not a key of `NUMA`.
        """
        if numa and numa not in NUMA:
            raise SparqError(f"unknown NUMA strategy {numa!r}", ", ".join(NUMA), exit_code=2)
        if numa and not self._numa:
            self._numa = numa
            self.lib.llama_numa_init(NUMA[numa])

    def gpu_devices(self) -> list[Device]:
        """The GPUs of this machine, without their memory."""
        return devices.listed(declare(self.lib._lib), self.workers)

    def check_gpu(self, n_gpu_layers: int | None, tensor_split: Sequence[float] = ()) -> None:
        """Refuse layers on a GPU, or shares of several, if this library has none.

        Raises:
            SparqError: it is a build for the CPU, or there is no device.
        """
        has_gpu = bool(self.gpu_devices())
        if n_gpu_layers and not has_gpu:
            what = f"{n_gpu_layers} layers cannot go to a GPU: this library has none"
            hint = "sparq-cpp doctor says why; with a device, sparq-cpp build --cuda or --vulkan"
            raise SparqError(what, hint, exit_code=2)
        if tensor_split and not has_gpu:
            what = "--tensor-split shares layers among machines, and there is only this one"
            hint = "--rpc HOST:PORT names the others"
            raise SparqError(what, hint, exit_code=2)

    def _log(self, level: int, text: bytes, _: object) -> None:
        """llama.cpp calls this with pieces of messages; a message ends with its line."""
        try:
            if level != _CONT:
                self._end_line()
                self._level = _LEVELS.get(level, logging.INFO)
            *lines, rest = text.decode("utf-8", errors="replace").split("\n")
            for line in lines:
                self._line += line
                self._end_line()
            self._line += rest
        except KeyboardInterrupt:
            for call in self._calls:
                call.note()

    def _end_line(self) -> None:
        line, self._line = self._line.rstrip(), ""
        if not line.strip(" ."):
            return
        LOG.log(self._level, "%s", line)
        if self._level >= logging.WARNING:
            for call in self._calls:
                call.warnings.append(line.strip())


def gpus(
    library: Library, spec: AttentionSpec | None, n_threads: int
) -> tuple[list[Device], Rates | None]:
    """Those that llama.cpp puts layers on: the ones with memory of their own, if there are any. The
    rates decide where K and V lie, those of the first GPU for all; None if attention is sparse
    there, or reads everything anywhere.

    Raises:
        SparqError: so many threads cannot be measured.
    """
    found, ggml = library.gpu_devices(), declare(library.lib._lib)
    found = [gpu for gpu in found if not gpu.integrated] or found
    found = [devices.with_memory(ggml, gpu) for gpu in found]
    if not (spec and spec.sparse):
        return found, None
    asked = spec.gpu_min_mb is not None
    found = [replace(x, kernels=devices.runs_sparse(library.lib, x, asked)) for x in found]
    if all(gpu.kernels for gpu in found):
        return found, None
    return found, bandwidth.beside_gpu(ggml, found[0], n_threads)


def free_on(gpus: Sequence[Device]) -> int:
    """The bytes for weights, K and V, beside what computing takes."""
    own = [gpu.free - MARGIN for gpu in gpus if not gpu.integrated]
    return sum(own) if own else MAIN_MEMORY


@cache
def _library(stock: bool) -> Library:
    return Library(native.load(stock).llama_cpp)


def library(stock: bool = False) -> Library:
    """The library of this process, loaded on first use.

    Raises:
        SparqError: it is not built, or this process has another one.
    """
    ours = _library(stock)
    ours.lib.llama_log_set(ours._on_log, None)  # it can send its messages to one place only
    return ours
