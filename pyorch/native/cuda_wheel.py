"""Makes the wheel of the package `sparq-cpp-cuda`: `make wheel-cuda`.

It adds to the wheel for Linux on x86-64 the backend and a libggml that is linked with it (used by
carried_cuda.py). cuBLAS and the CUDA runtime come from NVIDIA's own packages.

nvcc takes no C++ library but GCC's, so GCC compiles what runs on the host. Zig links it, for the
glibc of the other wheel, with GCC's library inside, which nobody sees: only C crosses the border.
"""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

from pyorch import children, paths, system
from pyorch.errors import SparqError
from pyorch.native import build, carried_cuda, cmake, cuda, probe, source, wheel
from pyorch.progress import say

# A100; RTX 3000 and A10; RTX 4000 and L4; H100; RTX 5000
ARCHS = ("80", "86", "89", "90", "120")
# Asked for by what GCC compiles, and only in glibc 2.32: 0, there may be several threads.
_OLDER_GLIBC = "char __libc_single_threaded;\n"
_PYPROJECT = """\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "{name}"
version = "{version}"
description = "CUDA for sparq-cpp: llama.cpp's backend with sparse attention, for {archs}"
license = {{ text = "MIT" }}
requires-python = ">=3.10"
dependencies = {dependencies}

[tool.hatch.build.targets.wheel]
packages = ["{module}"]

[tool.hatch.build.targets.wheel.hooks.custom]
path = "{hook}"
"""


def make(into: Path, archs: tuple[str, ...] = ARCHS) -> Path:
    """Make the wheel in the folder `into`. Returns its file.

    Raises:
        SparqError: CUDA or GCC cannot be used, or something did not compile.
    """
    target = wheel.TARGETS["linux-x86_64"]
    options = build.Options(portable=True, cuda=";".join(f"{arch}-real" for arch in archs))
    host = probe.need_compiler()
    toolkit, why = cuda.toolkit(host)
    release = toolkit.release if toolkit else ""
    if toolkit is None or release.split(".")[0] != carried_cuda.MAJOR:
        raise SparqError(
            f"CUDA {carried_cuda.MAJOR} cannot be used: {why or f'nvcc is of {release}'}",
            f"put nvcc {carried_cuda.MAJOR} on PATH, or set CUDA_HOME",
        )
    made_of = build.sources(options)
    made_by = [metadata.version("ziglang"), release, host.version]
    # not how it is made: ninja sees which of its commands are others, and this takes an hour
    key = [made_of["pin"], made_of["patches"], target.zig, *made_by, archs]
    name = "cuda" if archs == ARCHS else f"cuda_{'_'.join(archs)}"
    with wheel.workshop(name, target, key) as (zig, lock):
        root = zig.root
        tree = root / "cuda"
        say(f"ggml with CUDA for sm_{', sm_'.join(archs)}, log in {tree / 'build.log'}")
        build.prepare(tree, options)
        more = {
            "CMAKE_CUDA_HOST_COMPILER": str(_host(zig, host, tree)),
            "CMAKE_INSTALL_RPATH": f"$ORIGIN;$ORIGIN/{carried_cuda.NVIDIA}",
            "GGML_CUDA_NO_VMM": "ON",  # it would be linked with the driver, and not load without
        }
        chain = replace(zig.toolchain(tree, more), toolkit=toolkit)
        cmake.compile_tree(tree, options, ("ggml",), build.default_jobs(), chain, lock)
        libraries = [tree / "out" / "bin" / system.library(x) for x in ("ggml", "ggml-cuda")]
        stamp = {
            "stamp": source.digest_of({file.name: file for file in libraries})[:12],
            "inputs": made_of,
            "archs": archs,
            "cuda": f"nvcc {release}; {';'.join(archs)}",
            "compiler": f"{zig.version}, {host.version}",
        }
        templates = root / "nvidia-cuda-cccl"  # which are compiled in
        templates.mkdir(exist_ok=True)
        for path in metadata.files(templates.name) or ():
            if path.name.lower().startswith("license"):
                shutil.copy(path.locate(), templates / "LICENSE")
        licenses = {"llama.cpp": tree / "src", "zig": zig.folder, templates.name: templates}
        return pack(root / "package", libraries, licenses, stamp, target.tag, into)


def pack(
    folder: Path,
    libraries: Sequence[Path],
    licenses: dict[str, Path],
    stamp: dict[str, Any],
    tag: str,
    into: Path,
) -> Path:
    """The wheel of the package with these libraries. Returns its file.

    Args:
        folder: is filled with what the wheel is made of.
        licenses: where they are, by the name of what they are for.
    """
    shutil.rmtree(folder, ignore_errors=True)
    package = folder / carried_cuda.MODULE
    package.mkdir(parents=True)
    for file in libraries:
        shutil.copy(file, package)
    (package / "stamp.json").write_text(json.dumps(stamp, indent=1), "utf-8")
    wheel.copy_licenses(package / "licenses", licenses)
    major, version = int(carried_cuda.MAJOR), metadata.version("sparq-cpp")
    needed = [f"nvidia-{name}>={major}.0,<{major + 1}" for name in ("cublas", "cuda-runtime")]
    text = _PYPROJECT.format(
        name=carried_cuda.PACKAGE,
        module=carried_cuda.MODULE,
        version=version,
        archs=f"sm_{', sm_'.join(stamp['archs'])}",
        dependencies=json.dumps([f"sparq-cpp=={version}", *needed]),
        hook=paths.REPOSITORY / "hatch_build.py",
    )
    (folder / "pyproject.toml").write_text(text, "utf-8")
    return wheel.pack(folder, carried_cuda.MODULE, {"SPARQ_WHEEL_TAG": tag}, into)


def _host(zig: wheel.Zig, host: probe.Compiler, tree: Path) -> Path:
    """A program that compiles as GCC does, for nvcc, and links as Zig does, for cmake."""
    gcc, folder = shlex.split(host.cxx), zig.root
    library = children.run([*gcc, "-print-file-name=libstdc++.a"]).stdout.strip()
    older, exports = folder / "older-glibc.c", folder / "exports.map"
    older.write_text(_OLDER_GLIBC, "utf-8")
    exports.write_text("{ global: ggml_*; local: *; };\n", "utf-8")
    compile = shlex.join([*gcc, f"-ffile-prefix-map={tree}=."])
    link = shlex.join([str(zig.folder / "zig"), "cc", "-target", zig.target.zig])
    # GCC's headers may ask for functions of a newer glibc: then it should not link at all
    hidden = shlex.quote(f"-Wl,-z,defs,--gc-sections,--version-script={exports}")
    more = shlex.join([library, str(older), "-lunwind"])
    lines = [
        "#!/bin/sh",
        f'case " $* " in *" -c "*|*" -E "*) exec {compile} "$@" ;; esac',
        f'case " $* " in *" -shared "*) set -- "$@" {hidden} ;; esac',
        f'exec {link} "$@" {more}',
    ]
    program = folder / "host"
    program.write_text("\n".join([*lines, ""]), "utf-8")
    program.chmod(0o755)
    return program
