"""Other machines that hold layers of a model: the workers of llama.cpp's RPC (ggml-rpc).

A worker is asked before llama.cpp connects to it, because llama.cpp ends the whole program when
there is none. What is sent then is the protocol's own: a byte with the number of the command, the
number of bytes as uint64, the bytes; an answer has no command. All numbers are little-endian.
"""

from __future__ import annotations

import ctypes
import ipaddress
import socket
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from io import BufferedRWPair
from typing import NoReturn

from pyorch.engine.library import Library
from pyorch.errors import SparqError
from pyorch.native.prototypes import declare

PORT = 50052  # llama.cpp's own
_PROTOCOL = 7  # the major version, which must agree
_HELLO, _DEVICE_COUNT, _DEVICE_MEMORY = 14, 15, 11
_CAPABILITIES = 24  # bytes of the greeting about transports other than TCP
_ANSWER_S = 10.0


@dataclass(frozen=True)
class Worker:
    """What a worker says of itself. sparse_version: the byte that tells which sparse attention it
    runs, 0: none; free: the bytes of memory on all of its devices."""

    endpoint: str
    sparse_version: int
    free: int


def parse_endpoint(text: str) -> str:
    """HOST:PORT, from that or HOST alone.

    Raises:
        SparqError: it is neither.
    """
    host, _, port = text.strip().partition(":")
    if not host or not (port or str(PORT)).isdecimal() or not 0 < int(port or PORT) < 2**16:
        hint = f"for example 192.168.1.20:{PORT}; llama.cpp connects to workers by IPv4 only"
        raise SparqError(f"{text!r} is not HOST:PORT", hint, 2)
    return f"{host}:{int(port or PORT)}"


def reach(host: str) -> str:
    """Who may be between us and this address: `loopback`, nobody; `private`, our own network;
    `public`, anybody. A name that is not known is `public`."""
    try:
        names = socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)
        address = ipaddress.ip_address(str(names[0][4][0]))
    except (OSError, UnicodeError, ValueError):
        return "public"
    if address.is_loopback:
        return "loopback"
    return "private" if address.is_private and not address.is_unspecified else "public"


def answers(endpoint: str) -> bool:
    """Whether a worker of our version is there."""
    with suppress(SparqError):
        return bool(ask(endpoint))
    return False


def ask(endpoint: str) -> Worker:
    """What the worker at HOST:PORT says of itself.

    Raises:
        SparqError: there is none, it does not answer, or it speaks another version.
    """
    host, _, port = parse_endpoint(endpoint).partition(":")
    try:
        with (
            socket.create_connection((host, int(port)), timeout=_ANSWER_S) as wire,
            wire.makefile("rwb") as stream,
        ):
            hello = _answer(stream, _HELLO, bytes(_CAPABILITIES), 4 + _CAPABILITIES)
            if hello[0] != _PROTOCOL:
                raise SparqError(
                    f"the worker at {endpoint} speaks version {hello[0]}, and we {_PROTOCOL}",
                    "take the same version of sparq-cpp on all machines",
                )
            (n_devices,) = struct.unpack("<I", _answer(stream, _DEVICE_COUNT, b"", 4))
            numbers = (struct.pack("<I", i) for i in range(n_devices))
            memory = (_answer(stream, _DEVICE_MEMORY, number, 16) for number in numbers)
            free = sum(struct.unpack("<QQ", answer)[0] for answer in memory)
    except TimeoutError:
        raise SparqError(
            f"the worker at {endpoint} does not answer within {_ANSWER_S:.0f} s",
            "it serves one program at a time: end the other, or start one more worker",
        ) from None
    except (OSError, UnicodeError) as e:
        raise SparqError(
            f"no worker answers at {endpoint}: {getattr(e, 'strerror', None) or e}",
            f"start one there: sparq-cpp worker --host {host} --port {port}",
        ) from None
    return Worker(endpoint, hello[3], free)


def _answer(stream: BufferedRWPair, command: int, request: bytes, n_answer: int) -> bytes:
    """Raises:
    OSError: the connection ended, or the answer has another size.
    """
    stream.write(struct.pack("<BQ", command, len(request)) + request)
    stream.flush()
    answer = stream.read(8 + n_answer)
    if len(answer) < 8 + n_answer or struct.unpack("<Q", answer[:8])[0] != n_answer:
        raise OSError("what listens there is not a worker of llama.cpp")
    return answer[8:]


# ---- in the library of this process ----


def sparse_version(library: Library) -> int:
    """The byte with which a worker of this library greets; 0 for a stock library."""
    call = getattr(library.lib._lib, "ggml_sparse_rpc_own_version", None)
    return int(call()) & 0xFF if call else 0


def runs_sparse(library: Library, worker: Worker) -> bool:
    """Whether a worker runs sparse attention as this library builds it."""
    return worker.sparse_version != 0 and worker.sparse_version == sparse_version(library)


def on_loss(library: Library, endpoints: Sequence[str], end: Callable[[str], NoReturn]) -> None:
    """Have `end` called with the reason, in one line, when llama.cpp is about to abort the program,
    as it does when a worker is lost.

    Args:
        end: ends the program; it runs on a thread of llama.cpp's. If llama.cpp aborts for another
            reason it is not called.
    """

    def ending(text: bytes) -> None:
        if gone := [e for e in endpoints if not _listens(e)]:
            end(f"the worker at {' and '.join(gone)} is gone")
        if b"RPC" in text:
            end("the connection to a worker was lost")

    library.on_abort = ctypes.CFUNCTYPE(None, ctypes.c_char_p)(ending)  # kept alive
    declare(library.lib._lib).ggml_set_abort_callback(library.on_abort)


def _listens(endpoint: str) -> bool:
    host, _, port = endpoint.partition(":")
    with suppress(OSError), socket.create_connection((host, int(port)), timeout=2):
        return True
    return False


def check_split(tensor_split: Sequence[float], n: int) -> None:
    """Raises:
    SparqError: it has not one part for each device of the workers.
    """
    if tensor_split and len(tensor_split) != n:
        what = f"--tensor-split has {len(tensor_split)} parts for {n} devices of workers"
        hint = "give one part for each"
        raise SparqError(what, hint, exit_code=2)


def devices(library: Library, endpoints: Sequence[str]) -> list[int]:
    """Pointers to the devices of these workers, which are connected to on first use. The library is
    not told of them: it would put layers of any other model there, too.

    Raises:
        SparqError: a worker cannot be reached, or the library has no RPC.
    """
    ggml = declare(library.lib._lib)
    if not hasattr(ggml, "ggml_backend_rpc_add_server"):
        raise SparqError("this library has no RPC", "sparq-cpp build --force")
    res: list[int] = []
    for endpoint in endpoints:
        if endpoint not in library.workers:  # it would not answer beside a connection
            ask(endpoint)
        worker = ggml.ggml_backend_rpc_add_server(endpoint.encode())
        if not worker:
            raise SparqError(f"the worker at {endpoint} has no devices", "restart it")
        library.workers.add(endpoint)
        n = ggml.ggml_backend_reg_dev_count(worker)
        res += [ggml.ggml_backend_reg_dev_get(worker, i) for i in range(n)]
    return res
