"""`sparq-cpp build`: the patched library."""

from __future__ import annotations

import shlex
from dataclasses import replace

import click

from pyorch.cli import options as opt
from pyorch.errors import SparqError


@click.command()
@click.option("--stock", is_flag=True, help="The same llama.cpp without our patches, beside it.")
@click.option(
    "--tools", is_flag=True, help="Also llama-bench, -cli, -server and more: --sparse-attn."
)
@click.option(
    "--portable", is_flag=True, help="For any CPU of this kind (x86-64: AVX2), not just this one."
)
@click.option("--native", is_flag=True, help="For this CPU and no other; the default.")
@click.option("--cuda", is_flag=True, help="With CUDA; the default where nvcc and a device are.")
@click.option("--cpu", is_flag=True, help="For the CPU alone, even where a device is.")
@click.option(
    "--cuda-arch", help="native, all, or as in 80,90  [default: native, or all without a device]"
)
@click.option("--jobs", type=opt.Number(int, 1), help="Compilers.  [default: one per core]")
@click.option("--force", is_flag=True, help="Build again from the start.")
@click.option("--env", is_flag=True, help="Print shell lines that point other programs at it.")
@opt.json_option
def command(
    stock: bool,
    tools: bool,
    portable: bool,
    native: bool,
    cuda: bool,
    cpu: bool,
    cuda_arch: str | None,
    jobs: int | None,
    force: bool,
    env: bool,
    as_json: bool,
) -> None:
    """Build the patched llama.cpp library, unless it is built already.

    The source is downloaded once, through pip, and everything is kept in the cache (SPARQ_CACHE).
    """
    from pyorch.native import build
    from pyorch.native import cuda as toolkit

    cuda = cuda or cuda_arch is not None
    for one, other, both in (
        ("native", "portable", native and portable),
        ("cuda", "cpu", cuda and cpu),
    ):
        if both:
            raise SparqError(f"--{one} and --{other} exclude each other", "give one of them", 2)
    options = build.Options(stock=stock, portable=portable)
    if cuda:
        options = replace(options, cuda=toolkit.archs(cuda_arch))
        if not toolkit.find_nvcc():
            raise SparqError(
                "CUDA builds need nvcc, which is not here", "install a CUDA toolkit, 12 or 13", 2
            )
    elif not (cpu or portable):
        options = build.usual(stock)
        if build.find(options, build.TOOLS if tools else ()) is None:
            options = build.working(options)
    if options.cuda:
        build.say(f"with CUDA, for sm_{options.cuda.replace(';', ', sm_')}")
    names = build.TOOLS if tools else ()
    folder = build.build(options, names, jobs, force)
    if as_json:
        opt.print_json({"lib_dir": str(folder), **(build.read_stamp(folder) or {})})
    elif env:
        lib, python = shlex.quote(str(folder)), shlex.quote(str(build.bindings()))
        print(f'export PYTHONPATH={python}"${{PYTHONPATH:+:$PYTHONPATH}}"')
        print(f"export LLAMA_CPP_LIB_PATH={lib} MTMD_CPP_LIB={lib}")
    else:
        print(folder)
