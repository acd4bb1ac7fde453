"""The port that a server of ours is about to take."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from pyorch.errors import SparqError


def address(host: str, port: int) -> tuple[socket.AddressFamily, str]:
    """The kind of address, and the number that a name stands for."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        found = socket.getaddrinfo(host, port, family, socket.SOCK_STREAM)
    except (OSError, UnicodeError) as e:
        raise _cannot_listen(host, port, e) from None
    return family, str(found[0][4][0])


@contextmanager
def reserved(family: socket.AddressFamily, number: str, port: int) -> Iterator[int]:
    """Keep the port, or any free one for 0, while the model is made ready. Nobody is answered yet:
    it does not listen.

    Raises:
        SparqError: it cannot be had.
    """
    with socket.socket(family, socket.SOCK_STREAM) as place:
        place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as llama-server does
        try:
            place.bind((number, port))
        except OSError as e:
            raise _cannot_listen(number, port, e) from None
        yield place.getsockname()[1]


def _cannot_listen(host: str, port: int, error: Exception) -> SparqError:
    hint = "--host takes an address of this machine, 127.0.0.1 or 0.0.0.0"
    if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
        hint = "another program listens there: --port 0 takes a free one"
    reason = getattr(error, "strerror", None) or error
    return SparqError(f"cannot listen on {host}:{port}: {reason}", hint)
