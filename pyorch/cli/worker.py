"""`sparq-cpp worker`: lend this machine's memory and cores to a model on another one."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass

import click

from pyorch import native, system
from pyorch.cli import listen
from pyorch.cli import options as opt
from pyorch.cli.groups import option, takes
from pyorch.cli.log import shows_log
from pyorch.cli.supervise import Child
from pyorch.cli.terminal import note
from pyorch.cli.types import THREADS, Number
from pyorch.engine import machines, usable_cores
from pyorch.errors import SparqError
from pyorch.text import human_bytes

PROGRAM = "ggml-rpc-server"


@dataclass(frozen=True)
class WorkerOptions:
    """Where the worker listens, and what it lends."""

    host: str = option(
        "--host", default="127.0.0.1", show_default=True, help="Address to listen on."
    )
    port: int = option(
        "--port",
        type=Number(int, 1, 65535),
        default=machines.PORT,
        show_default=True,
        help="Port to listen on.",
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
@takes(wanted=WorkerOptions)
@opt.verbose_option
def command(wanted: WorkerOptions) -> None:
    """Hold layers of a model for another machine, which names this one by --rpc HOST:PORT.

    It holds the weights, K, V and the transposed K of its layers, and computes them. It serves one
    program at a time. Traffic is not encrypted and no key is required: anyone who can reach the
    port can use it.
    """
    _check(wanted)
    family, address = listen.address(wanted.host, wanted.port)
    with listen.reserved(family, address, wanted.port):
        folder = native.built(tools=(PROGRAM,))
    argv = [str(folder / system.program(PROGRAM)), "--host", address, "--port", str(wanted.port)]
    argv += ["--threads", str(wanted.threads or usable_cores())]
    argv += ["--cache"] * wanted.cache
    env = {k: v for k, v in os.environ.items() if k != "GGML_RPC_DEBUG"}
    env |= native.waiting()
    with Child(argv, env, lambda line: None, shows_log()) as child:
        everywhere = address == "0.0.0.0"  # which Windows connects nobody to
        endpoint = f"{'127.0.0.1' if everywhere else wanted.host}:{wanted.port}"
        if child.wait_ready(lambda: machines.answers(endpoint), "starting"):
            note(f"{human_bytes(machines.ask(endpoint).free)} of memory are free for layers")
            name = socket.gethostname() if everywhere else wanted.host
            note(f"--rpc {name}:{wanted.port} on the other machine; Ctrl-C ends it")
            child.wait_end()


def _check(wanted: WorkerOptions) -> None:
    """Raises:
    SparqError: others reach the address, or it is not of IPv4.
    """
    if ":" in wanted.host:
        raise SparqError(
            f"--host {wanted.host}: llama.cpp's workers listen on IPv4 addresses only",
            "127.0.0.1, or another IPv4 address of this machine",
            exit_code=2,
        )
    reach = machines.reach(wanted.host)
    if reach == "public" and not wanted.insecure:
        raise SparqError(
            f"--host {wanted.host} would be open to everybody: workers ask for no key",
            "listen on 127.0.0.1, and let the other machine come through "
            f"ssh -N -L {wanted.port}:127.0.0.1:{wanted.port} THIS_MACHINE; or --insecure",
            exit_code=2,
        )
    if reach != "loopback":
        note(
            "note: nothing is encrypted: whoever reaches this address can use and read it", "yellow"
        )
