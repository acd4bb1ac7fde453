"""`sparq-cpp doctor`: the first thing to paste into a bug report."""

from __future__ import annotations

import json
import os
import platform
import re
import sys
from pathlib import Path

import click

from pyorch import children
from pyorch.cli.options import json_option
from pyorch.cli.terminal import print_json
from pyorch.cli.types import File
from pyorch.errors import SparqError
from pyorch.progress import say
from pyorch.text import human_bytes

Facts = dict[str, object]
_VARIABLES = ("ATTN", "LIBRARY", "LLAMA_SOURCE")


@click.command()
@json_option
@click.option(
    "--report",
    type=File(),
    is_flag=False,
    flag_value="sparq-report.json",
    help="Try and time all devices, and write a file for a bug report, which names nobody and no"
    " folder.  [default: sparq-report.json]",
)
def command(as_json: bool, report: str | None) -> None:
    """Say what is built, what this machine can do, and what is switched off, and why."""
    if report:
        _write(Path(report))
        print(report)
        return
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
            **{f"SPARQ_{x}": os.environ.get(f"SPARQ_{x}", "") for x in _VARIABLES},
        },
        "built": built,
        "machine": {
            "system": f"{platform.system()} {platform.release()} {platform.machine()}",
            "cpu": probe.cpu()[0],
            "cores": probe.cores(),
            "memory": probe.memory(),
            "python": platform.python_version(),
            "nvcc": cuda.nvcc(),
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
        off["cuda"] = cuda.toolkit(compiler)[1] or cuda.devices()[1]
        off["vulkan"] = cmake.vulkan_parts()[1]
        facts["vulkan"] = "" if off["vulkan"] else "half an hour to build with one compiler"
        off["metal"] = "sparq-cpp build --metal was never tried" if sys.platform == "darwin" else ""
    except SparqError as error:
        off["build"] = error.message
    return facts, off


def _built() -> tuple[Facts, Facts]:
    """What is built of the present sources and whether it works, and the features that failed when
    it was tried."""
    from pyorch import native
    from pyorch.native import build, carried, carried_gpu

    facts: Facts = {"used": ""}
    failed: Facts = {}
    try:
        used = native.find()
        if cpu := carried.find_cpu():
            for backend in filter(carried_gpu.installed, carried_gpu.BACKENDS):
                failed[backend] = carried_gpu.find(backend, cpu)[1]
        if used:
            facts["used"] = used.name
            facts["works"] = _works(used)
            facts["gpus"] = [f"{x.name} ({x.backend})" for x in native.gpus()]
    except SparqError as error:
        facts["works"] = f"no: {error.message}"
    current = build.used()
    for folder, stamp in reversed(build.finished()):
        if folder in current:
            facts[stamp["inputs"]["options"]] = {"lib_dir": str(folder), "stamp": stamp["stamp"]}
            failed |= stamp["off"]
            if "ranked" in stamp:
                facts["variant"] = f"{stamp['isa'][0]}, of {', '.join(stamp['ranked'])}"
    return facts, failed


def _works(folder: Path, gpu: bool = False) -> str:
    from pyorch.native import smoke

    try:
        fault = smoke.fault(folder, gpu)
    except SparqError as error:
        return f"no: {error.message}"
    return f"no: {fault}" if fault else "yes"


# ---- a report ----

# a small model continues a text of 2,100 tokens, here and on the GPU
N_CHARACTERS, N_TOKENS = 6000, 32
SPARSE = "-a sparq,ratio=1/8,gpu_min_mb=0"
RUNS = {
    "CPU, dense": "-ngl 0 -a off",
    "CPU, sparse": f"-ngl 0 {SPARSE}",
    "GPU, dense": "-kvo -a off",
    "GPU, sparse, K and V in memory": f"-nkvo {SPARSE}",
}


def _write(file: Path) -> None:
    """Try all devices, which takes half a minute to five, and write the report."""
    from pyorch import native, paths

    if file.exists():
        raise SparqError(f"{file}: exists already", "give --report another name", 2)
    folder, gpus, facts = native.lib_dir(), native.gpus(), examine()
    del facts["cache"]
    if gpus:
        say("multiplying on the GPUs, for half a minute")
        memory = [(x.name, human_bytes(x.memory), x.integrated) for x in gpus]
        facts["gpus"] = {"works": _works(folder, gpu=True), "memory, integrated": memory}
    lines = {name: line for name, line in RUNS.items() if gpus or name.startswith("CPU")}
    facts["runs"] = {name: _run(name, line) for name, line in lines.items()}
    text = json.dumps(facts, indent=1)
    words = r'"(?:[^"\\]|\\.)*"'
    paths.put(file, re.sub(words, lambda x: json.dumps(anonymous(json.loads(x[0]))), text))


def _run(name: str, line: str) -> Facts:
    """What a run says of itself, or how it failed. A backend may die with its process."""
    from pyorch import paths
    from pyorch.native import probe

    say(f"continuing a text, for a minute at most: {name}")
    demo = paths.data("models") / "demo"
    text = (demo / "document.txt").read_text("utf-8")[:N_CHARACTERS]
    argv = ["generate", str(demo / "demo.gguf"), "-p", text, "-n", str(N_TOKENS), "--temp", "0"]
    done = probe.run(children.python("pyorch", *argv, "--json", *line.split()))
    failed = {"failed": children.ended(done.returncode)}
    numbers = failed if done.returncode else json.loads(done.stdout)
    return {**numbers, "notes": done.stderr.splitlines()[-20:]}


def anonymous(text: str) -> str:
    """A text in which a path is its last name, and the user and the machine have none."""
    home = os.path.expanduser("~")
    names = [os.environ.get(x, "") for x in ("USER", "LOGNAME", "USERNAME")]
    for name in filter(None, (home, os.path.basename(home), *names, platform.node())):
        text = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", "", text)
    return re.sub(r"(?<![\w.])(?:[A-Za-z]:)?[\\/]+(?:[^\\/\s'\":;,()]+[\\/]+)*", "", text)
