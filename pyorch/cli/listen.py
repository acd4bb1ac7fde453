"""The port that a server of ours is about to take."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from pyorch.errors import SparqError


@contextmanager
def reserved(host: str, port: int) -> Iterator[tuple[str, int]]:
    """Keep the port, or any free one for 0, while the model is made ready. Nobody is answered yet:
    it does not listen. Yields the address that a name stands for, and the port.

    Raises:
        SparqError: it cannot be had.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as place:
        place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as llama-server does
        try:
            addresses = socket.getaddrinfo(host, port, family, socket.SOCK_STREAM)
            place.bind((address := str(addresses[0][4][0]), port))
        except (OSError, UnicodeError) as e:
            hint = "--host takes an address of this machine, 127.0.0.1 or 0.0.0.0"
            if isinstance(e, OSError) and e.errno == errno.EADDRINUSE:
                hint = "another program listens there: --port 0 takes a free one"
            reason = getattr(e, "strerror", None) or e
            raise SparqError(f"cannot listen on {host}:{port}: {reason}", hint) from None
        yield address, place.getsockname()[1]
