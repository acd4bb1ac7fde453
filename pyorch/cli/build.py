"""`sparq-cpp build`: the patched library."""

from __future__ import annotations

import json
import shlex

import click


@click.command()
@click.option("--stock", is_flag=True, help="The same llama.cpp without our patches, beside it.")
@click.option(
    "--tools", is_flag=True, help="Also llama-bench, -cli, -server and more: --sparse-attn."
)
@click.option(
    "--portable", is_flag=True, help="For any CPU of this kind (x86-64: AVX2), not just this one."
)
@click.option("--native", is_flag=True, help="For this CPU and no other; the default.")
@click.option("--cuda", is_flag=True, help="With CUDA: not there yet.")
@click.option("--jobs", type=click.IntRange(1), help="Compilers at once [default: one per core].")
@click.option("--force", is_flag=True, help="Build again from the start.")
@click.option("--env", is_flag=True, help="Print shell lines that point other programs at it.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def command(
    stock: bool,
    tools: bool,
    portable: bool,
    native: bool,
    cuda: bool,
    jobs: int | None,
    force: bool,
    env: bool,
    as_json: bool,
) -> None:
    """Build the patched llama.cpp library, unless it is built already.

    The source is downloaded once, through pip, and everything is kept in the cache (SPARQ_CACHE).
    """
    from pyorch.errors import SparqError
    from pyorch.native import build

    if cuda:
        raise SparqError("CUDA builds are not there yet", "build for the CPU: sparq-cpp build", 2)
    if native and portable:
        raise SparqError("--native and --portable exclude each other", "give one of them", 2)
    options = build.Options(stock=stock, portable=portable)
    names = build.TOOLS if tools else ()
    folder = build.build(options, names, jobs, force)
    if as_json:
        click.echo(json.dumps({"lib_dir": str(folder), **(build.read_stamp(folder) or {})}))
    elif env:
        lib, python = shlex.quote(str(folder)), shlex.quote(str(build.bindings()))
        click.echo(f'export PYTHONPATH={python}"${{PYTHONPATH:+:$PYTHONPATH}}"')
        click.echo(f"export LLAMA_CPP_LIB_PATH={lib} MTMD_CPP_LIB={lib}")
    else:
        click.echo(folder)
