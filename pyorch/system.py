"""What Windows does in another way than Linux and macOS, so that no other module needs to know.

Nothing is compiled on Windows: the library comes with the wheel.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

IS_WINDOWS = sys.platform == "win32"
KILLED = -9  # `returncode` of a process that SIGKILL ended, or the system when memory ran out
# what asks a program to end
ENDING = [getattr(signal, n) for n in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, n)]


@contextmanager
def handled(handler: Callable[[int, Any], object], numbers: Iterable[int]) -> Iterator[None]:
    """A handler of signals that are not ignored, as nohup does."""
    asked = [n for n in numbers if signal.getsignal(n) != signal.SIG_IGN]
    before = {n: signal.signal(n, handler) for n in asked}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


if sys.platform == "win32":
    import ctypes
    import msvcrt
    from ctypes import wintypes

    _FATAL = {  # the codes of processes that died
        0xC0000005: "an access violation",
        0xC000001D: "an illegal instruction",
        0xC0000094: "a division by zero",
        0xC00000FD: "a stack overflow",
        0xC0000409: "abort()",
    }
    _KERNEL = ctypes.WinDLL("kernel32", use_last_error=True)

    def program(name: str) -> str:
        return f"{name}.exe"

    def is_busy() -> bool:
        """Whether other programs make times long and uneven: nobody counts them here."""
        return False

    def library(name: str) -> str:
        return f"{name}.dll"

    class _Whole(ctypes.CDLL):
        others: list[ctypes.CDLL]

        def __getitem__(self, name: str | int) -> Any:
            for lib in (super(), *self.others):
                with suppress(AttributeError):
                    return lib.__getitem__(name)
            raise AttributeError(name)

    def with_ggml(lib: Any) -> None:
        """Let a library have the functions of ggml, which it is linked with. Here it has its own
        alone."""
        names = ("ggml", "ggml-base", "ggml-rpc")
        folder = os.path.dirname(lib._name)
        lib.others = [ctypes.CDLL(os.path.join(folder, library(name))) for name in names]
        lib.__class__ = _Whole

    def died(code: int) -> str:
        return _FATAL.get(code & 0xFFFFFFFF, "")

    def crashed(code: int) -> bool:
        return bool(died(code))

    def quiet_crashes() -> None:
        _KERNEL.SetErrorMode(0x0003)

    def inherit(*fds: int) -> dict[str, Any]:
        """The arguments of `Popen` with which a child holds these files too. Here none does."""
        return {}

    def open_shared(path: os.PathLike[str], mode: int = 0o666) -> int:
        """A descriptor to read and write a file, made if it is not there, which others may rename
        or remove meanwhile."""
        create = _KERNEL.CreateFileW
        create.restype = wintypes.HANDLE
        create.argtypes = [wintypes.LPCWSTR, *[wintypes.DWORD] * 2, ctypes.c_void_p]
        create.argtypes += [*[wintypes.DWORD] * 2, wintypes.HANDLE]
        read_write, share_all, open_always = 0xC0000000, 7, 4
        handle = create(os.fspath(path), read_write, share_all, None, open_always, 0x80, None)
        if handle == wintypes.HANDLE(-1).value:
            raise ctypes.WinError(ctypes.get_last_error())
        return msvcrt.open_osfhandle(handle, os.O_BINARY)

    def lock(fd: int, wait: bool = False) -> bool:
        exclusive, at_once, is_locked = 2, 1, 33
        where = (ctypes.c_uint32 * 8)()  # OVERLAPPED: a byte far behind the end of any file,
        where[5] = 1 << 30  # because nobody else may read or write one that is locked
        handle = wintypes.HANDLE(msvcrt.get_osfhandle(fd))
        if _KERNEL.LockFileEx(handle, exclusive | (not wait) * at_once, 0, 1, 0, where):
            return True
        if ctypes.get_last_error() == is_locked and not wait:
            return False
        raise ctypes.WinError(ctypes.get_last_error())

    def memory() -> tuple[int, int]:
        status = (ctypes.c_uint64 * 8)(64)  # MEMORYSTATUSEX, whose first two fields are shorter
        _KERNEL.GlobalMemoryStatusEx(status)
        return status[1], status[2]

    def address_space() -> int | None:
        """The bytes that this process may still map; None without a limit, as here."""
        return None

else:
    import fcntl
    import resource

    def program(name: str) -> str:
        """The file name of a program."""
        return name

    def is_busy() -> bool:
        """Whether other programs make times long and uneven, now or in the last minute."""
        return os.getloadavg()[0] > (os.cpu_count() or 1) / 4

    def library(name: str) -> str:
        """The file name of a shared library of ggml, such as `libggml-cpu.so`."""
        return f"lib{name}.{'dylib' if sys.platform == 'darwin' else 'so'}"

    def with_ggml(lib: Any) -> None:
        """Let a library have the functions of ggml, which it is linked with."""

    def died(code: int) -> str:
        """What ended a process with this `returncode`; "" if it ended by itself."""
        if code >= 0:
            return ""
        try:
            name, text = signal.Signals(-code).name, (signal.strsignal(-code) or "").lower()
        except ValueError:
            return f"signal {-code}"
        return f"{name} ({'out of memory?' if code == KILLED else text})"

    def crashed(code: int) -> bool:
        """Whether that was the fault of what it ran."""
        faults = {signal.SIGILL, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGSEGV}
        return -code in faults

    def quiet_crashes() -> None:
        """This process leaves no memory dump when it dies."""
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    def inherit(*fds: int) -> dict[str, Any]:
        """The arguments of `Popen` with which a child holds these files too, and their locks."""
        return {"pass_fds": fds}

    def open_shared(path: os.PathLike[str], mode: int = 0o666) -> int:
        """A descriptor to read and write a file, made if it is not there, which others may rename
        or remove meanwhile. A link is refused."""
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, mode)

    def lock(fd: int, wait: bool = False) -> bool:
        """Lock a file until it is closed. False: another process has it."""
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            return False
        return True

    def memory() -> tuple[int, int]:
        """Bytes of main memory: all of it, and what can be used without swapping, where the system
        says that so easily."""
        installed = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return installed, installed

    def address_space() -> int | None:
        """The bytes that this process may still map, files included; None without a limit
        (`ulimit -v`), and on macOS, which keeps none."""
        limit, _ = resource.getrlimit(resource.RLIMIT_AS)
        if limit == resource.RLIM_INFINITY or sys.platform == "darwin":
            return None
        with open("/proc/self/statm") as f:
            return max(limit - int(f.read().split()[0]) * os.sysconf("SC_PAGE_SIZE"), 0)
