"""`sparq-cpp build`: the patched library."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

import click

from pyorch.cli.types import Number
from pyorch.errors import SparqError
from pyorch.progress import say


@click.command()
@click.option("--stock", is_flag=True, help="Build the same llama.cpp without our patches.")
@click.option(
    "--tools", is_flag=True, help="Build llama-bench, llama-cli, llama-server and more, too."
)
@click.option(
    "--portable", is_flag=True, help="Build for any CPU of this kind (x86-64: with AVX2)."
)
@click.option(
    "--cuda",
    metavar="ARCHS",
    help="Build with CUDA for native, all or 80,90.  [default: native where nvcc and a device are"
    " here, none with --portable]",
)
@click.option(
    "--jobs", type=Number(int, 1), help="Compilers that run at once.  [default: one per core]"
)
@click.option("--force", is_flag=True, help="Build again from scratch.")
@click.option("--env", is_flag=True, help="Print the variables that make other programs use it.")
def command(
    stock: bool,
    tools: bool,
    portable: bool,
    cuda: str | None,
    jobs: int | None,
    force: bool,
    env: bool,
) -> None:
    """Build the patched llama.cpp library, unless it is built already.

    The source is downloaded once. Source and builds are kept in the cache (SPARQ_CACHE). With
    SPARQ_CUDA=0 neither this nor any other command uses CUDA.
    """
    from pyorch.native import build, carried
    from pyorch.native import cuda as toolkit

    options = build.Options(stock=stock, portable=portable)
    if cuda is not None:
        options = replace(options, cuda=toolkit.archs(cuda))
        if not toolkit.find_nvcc():
            raise SparqError(
                "CUDA builds need nvcc, which is not here", "install a CUDA toolkit, 12 or 13", 2
            )
    names = build.TOOLS if tools else ()
    if cuda is None and not portable:
        options = build.usual(stock)
        if build.find(options, names) is None:
            options = build.working(options)
    if options.cuda:
        say(f"with CUDA, for sm_{options.cuda.replace(';', ', sm_')}")
    before = build.find(options, names)
    folder = build.build(options, names, jobs, force)
    if options == build.Options() and folder != before and carried.fits():
        _tell_gain(folder)
    if env:
        lib, python = shlex.quote(str(folder)), shlex.quote(str(build.bindings()))
        print(f'export PYTHONPATH={python}"${{PYTHONPATH:+:$PYTHONPATH}}"')
        print(f"export LLAMA_CPP_LIB_PATH={lib} MTMD_CPP_LIB={lib}")
    else:
        print(folder)


def _tell_gain(folder: Path) -> None:
    """Say how much faster a build made here is than the library of the wheel."""
    from pyorch.bench import gain
    from pyorch.native import carried

    say("measuring it beside the library of the wheel")
    try:
        with_wheel = carried.find_cpu()
        assert with_wheel is not None, "the caller has looked"
        found = gain.gain(folder, with_wheel).values()
        prompt, dense, sparse = (f"{low:.2f} to {high:.2f}" for low, high in found)
    except SparqError as error:  # of what a build does without
        say(f"it could not be measured: {error.message}")
        return
    say(
        f"with {gain.N_LAYER} layers of {gain.LIKE}, after {gain.N_BEFORE:,} positions, it reads a "
        f"prompt {prompt} times as fast as the wheel's, and decodes {dense} times as fast; "
        f"{sparse} times at 1/8"
    )
