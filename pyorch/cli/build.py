"""`sparq-cpp build`: the patched library."""

from __future__ import annotations

import shlex

import click

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
@click.option("--vulkan", is_flag=True, help="Build with Vulkan, for other GPUs.")
@click.option("--metal", is_flag=True, help="Build with Metal, for macOS; never tried.")
@click.option("--ui", is_flag=True, help="Make the web page of serve, too; needs Node.js.")
@click.option(
    "--jobs", type=click.IntRange(1), help="Compilers that run at once.  [default: one per core]"
)
@click.option("--force", is_flag=True, help="Build again from scratch.")
@click.option("--env", is_flag=True, help="Print the variables that make other programs use it.")
def command(
    stock: bool,
    tools: bool,
    portable: bool,
    cuda: str | None,
    vulkan: bool,
    metal: bool,
    ui: bool,
    jobs: int | None,
    force: bool,
    env: bool,
) -> None:
    """Build the patched llama.cpp library, unless it is built already.

    The source is downloaded once. Source and builds are kept in the cache (SPARQ_CACHE). With
    SPARQ_CUDA=0 neither this nor any other command uses CUDA. After a build with Vulkan or Metal
    all commands use that, and build it again when the source changes, unless SPARQ_VULKAN or
    SPARQ_METAL is 0.
    """
    from pyorch.native import build, page
    from pyorch.native import cuda as toolkit

    archs = "" if cuda is None else toolkit.archs(cuda)
    options = build.Options(stock, portable, archs, vulkan, metal)
    if len(options.backends) > 1:
        what = f"one build has one backend, not {' and '.join(options.backends)}"
        raise SparqError(what, "--cuda, --vulkan or --metal", exit_code=2)
    is_usual = not (portable or options.backends)
    if is_usual:
        options = build.usual(stock)
    names = build.TOOLS if tools else ()
    folder = None if force else build.find(options, names)
    if folder is None:
        if is_usual:
            options = build.working(options)
        if options.cuda:
            say(f"with CUDA, for sm_{options.cuda.replace(';', ', sm_')}")
        folder = build.build(options, names, jobs, force)
    if ui:
        page.build()
    if env:
        lib, python = shlex.quote(str(folder)), shlex.quote(str(build.bindings()))
        print(f'export PYTHONPATH={python}"${{PYTHONPATH:+:$PYTHONPATH}}"')
        print(f"export LLAMA_CPP_LIB_PATH={lib} MTMD_CPP_LIB={lib}")
    else:
        print(folder)
