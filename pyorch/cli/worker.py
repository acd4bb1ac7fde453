"""`sparq-cpp worker`: lend this machine's memory and cores to a model on another one."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass

import click

from pyorch import native, system
from pyorch.cli import options as opt
from pyorch.cli.groups import option, takes
from pyorch.cli.supervise import Child, reserved
from pyorch.cli.terminal import note, shows_log
from pyorch.cli.types import THREADS
from pyorch.engine import machines, usable_cores
from pyorch.errors import SparqError
from pyorch.text import human_bytes

PROGRAM = "ggml-rpc-server"


@dataclass(frozen=True)
class ListenOptions:
    """Where the worker listens, and what it lends."""

    host: str = option("--host", default="127.0.0.1", help="Address to listen on.")
    port: int = option(
        "--port", type=click.IntRange(1, 65535), default=machines.PORT, help="Port to listen on."
    )
    threads: int | None = option(
        "-t", "--threads", type=THREADS, help="Number of threads.  [default: one per core]"
    )
    cache: bool = option(
        "--cache",
        is_flag=True,
        help="Keep the weights on the disk, so that they are sent only once.",
    )
    insecure: bool = option(
        "--insecure", is_flag=True, help="Listen on an address that is not private."
    )


@click.command()
@takes(server=ListenOptions)
@opt.verbose_option
def command(server: ListenOptions) -> None:
    """Hold layers of a model for another machine, which names this one by --rpc HOST:PORT.

    It holds the weights, K, V and the transposed K of its layers, and computes them. It serves one
    program at a time. Traffic is not encrypted and no key is required: anyone who can reach the
    port can use it.
    """
    _check(server)
    with reserved(server.host, server.port) as (address, _):
        folder = native.built(tools=(PROGRAM,))
    argv = [str(folder / system.program(PROGRAM)), "--host", address, "--port", str(server.port)]
    argv += ["--threads", str(server.threads or usable_cores())]
    argv += ["--cache"] * server.cache
    with Child(argv, os.environ | native.waiting(), lambda line: None, shows_log()) as child:
        everywhere = address == "0.0.0.0"  # which Windows connects nobody to
        endpoint = f"{'127.0.0.1' if everywhere else server.host}:{server.port}"
        if child.wait_ready(lambda: machines.answers(endpoint), "starting"):
            note(f"{human_bytes(machines.ask(endpoint).free)} of memory are free for layers")
            name = socket.gethostname() if everywhere else server.host
            note(f"--rpc {name}:{server.port} on the other machine; Ctrl-C ends it")
            child.wait_end()


def _check(server: ListenOptions) -> None:
    """Refuse an address that others reach, or that is not of IPv4."""
    if ":" in server.host:
        what = f"--host {server.host}: llama.cpp's workers listen on IPv4 addresses only"
        hint = "127.0.0.1, or another IPv4 address of this machine"
        raise SparqError(what, hint, exit_code=2)
    reach = machines.reach(server.host)
    if reach == "public" and not server.insecure:
        raise SparqError(
            f"--host {server.host} would be open to everybody: workers ask for no key",
            "listen on 127.0.0.1, and let the other machine come through "
            f"ssh -N -L {server.port}:127.0.0.1:{server.port} THIS_MACHINE; or --insecure",
            exit_code=2,
        )
    if reach != "loopback":
        note(
            "note: nothing is encrypted: whoever reaches this address can use and read it", "yellow"
        )
