"""`sparq-cpp doctor`: the first thing to paste into a bug report."""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path

import click

from pyorch.cli.options import json_option
from pyorch.cli.terminal import print_json
from pyorch.errors import SparqError
from pyorch.text import human_bytes

Facts = dict[str, object]


@click.command()
@json_option
def command(as_json: bool) -> None:
    """Say what is built, what this machine can do, and what is switched off, and why."""
    facts = examine()
    if as_json:
        print_json(facts)
        return
    for section, items in facts.items():
        click.secho(section, bold=True)
        for key, value in items.items():
            if isinstance(value, dict):
                value = value["lib_dir"]
            elif isinstance(value, list):
                value = ", ".join(value)
            elif isinstance(value, bool):
                value = "yes" if value else "no"
            elif isinstance(value, int) and (section == "cache" or key == "memory"):
                value = human_bytes(value)
            click.echo(f"  {key}: {value or 'none'}")


def examine() -> dict[str, Facts]:
    """Collect the facts; nothing is built or downloaded. Sizes are in bytes."""
    from pyorch import __version__, paths
    from pyorch.native import cuda, patches, probe, source

    pin, root = source.read_pin(), paths.cache()
    toolchain, off = _toolchain()
    built, failed = _built()
    folders = sorted(folder for folder in root.glob("*") if folder.is_dir())
    return {
        "sparq-cpp": {
            "version": __version__,
            "pin": f"{pin.package} {pin.version}, {pin.repo} {pin.commit[:9]}",
            "patches": len(patches.series()),
            "SPARQ_ATTN": os.environ.get("SPARQ_ATTN", ""),
            "SPARQ_LIBRARY": os.environ.get("SPARQ_LIBRARY", ""),
            "SPARQ_LLAMA_SOURCE": os.environ.get("SPARQ_LLAMA_SOURCE", ""),
        },
        "built": built,
        "machine": {
            "system": f"{platform.system()} {platform.release()} {platform.machine()}",
            "cpu": probe.cpu()[0],
            "cores": probe.cores(),
            "memory": probe.memory(),
            "python": platform.python_version(),
            "nvcc": cuda.nvcc(),
            "gpu": [f"{device.name} (sm_{device.arch})" for device in cuda.devices()[0]],
        },
        "toolchain": toolchain,
        "off": {name: why for name, why in (off | failed).items() if why},
        "cache": {"path": str(root), **{folder.name: paths.size(folder) for folder in folders}},
    }


def _toolchain() -> tuple[Facts, Facts]:
    """The tools that build the library, and the features that are off, with the reasons."""
    from pyorch.native import cmake, cuda, probe

    present = probe.find_compiler()
    facts: Facts = {"compiler": present.version if present else ""}
    off: Facts = {}
    try:
        compiler = cmake.need_tools()
        probed = probe.probe(compiler, native=True)
        facts |= {"isa": list(probed.isa), "flags": list(probed.flags), "openmp": probed.openmp}
        off |= probed.off
        toolkit, why = cuda.toolkit(compiler)
        if toolkit:
            runs = " and run" if cuda.devices()[0] else ""
            facts["cuda"] = f"{toolkit.release}, programs with cuBLAS link{runs}"
        off["cuda"] = why or cuda.devices()[1]
        off["vulkan"] = cmake.why_not_vulkan()
        off["metal"] = "sparq-cpp build --metal was never tried" if sys.platform == "darwin" else ""
    except SparqError as error:
        off["build"] = error.message
    return facts, off


def _built() -> tuple[Facts, Facts]:
    """What is built and whether it works, and the features that failed when it was tried."""
    from pyorch import native
    from pyorch.native import build, carried, carried_cuda, cuda, smoke

    facts: Facts = {}
    failed: Facts = {}

    def add(name: str, folder: Path | None) -> None:
        facts[name] = "not built for the present sources"
        if folder and (stamp := build.read_stamp(folder)):
            facts[name] = {"lib_dir": str(folder), "stamp": stamp["stamp"]}
            failed.update(stamp["off"])
            if "ranked" in stamp:
                facts["variant"] = f"{stamp['isa'][0]}, of {', '.join(stamp['ranked'])}"

    kinds = [build.Options(), build.Options(stock=True), build.Options(portable=True)]
    kinds += [build.usual()] * (build.usual().cuda == "" and build.usual() not in kinds)
    if cuda.find_nvcc() or cuda.is_preferred():
        kinds.append(build.Options(cuda=cuda.archs(None)))
    for options in kinds:
        add(options.name, build.find(options))
    try:
        if cpu := carried.find_cpu():
            add(carried.NAME, cpu)
            with_cuda, why = carried_cuda.find(cpu)
            if with_cuda:
                add(carried_cuda.NAME, with_cuda)
            if with_cuda or why:
                failed["cuda"] = why and f"{carried_cuda.PACKAGE} is not used: {why}"
        if used := native.find():
            facts["used"] = used.name
            facts["works"] = f"no: {fault}" if (fault := smoke.fault(used)) else "yes"
            facts["gpus"] = [f"{gpu.name} ({gpu.backend})" for gpu in native.gpus()]
    except SparqError as error:
        facts["works"] = f"no: {error.message}"
    return facts, failed
