"""Makes the wheels of the packages `sparq-cpp-cuda` and `sparq-cpp-vulkan`: `make wheel-cuda` and
`make wheel-vulkan`.

Each adds to the wheel for Linux (Vulkan's: or Windows) on x86-64 the backend and a libggml that is
linked with it (used by carried_gpu.py). cuBLAS and the CUDA runtime come from NVIDIA's own
packages, libvulkan and the drivers from the system.

Zig compiles Vulkan's backend as it does the other wheel. nvcc takes no C++ library but GCC's, so
GCC compiles what runs on the host. Zig links it, for the glibc of the other wheel, with GCC's
library inside, which nobody sees: only C crosses the border.
"""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

from pyorch import children, paths
from pyorch.errors import SparqError
from pyorch.native import build, carried_gpu, cmake, cuda, probe, source, wheel
from pyorch.progress import say

# A100; RTX 3000 and A10; RTX 4000 and L4; H100; RTX 5000
ARCHS = ("80", "86", "89", "90", "120")
# Asked for by what GCC compiles, and only in glibc 2.32: 0, there may be several threads.
_OLDER_GLIBC = "char __libc_single_threaded;\n"
_CCCL = "nvidia-cuda-cccl"  # templates, which are compiled in
# The functions of a library that is linked in libvulkan's place, which would ask for its own glibc:
# those that the backend does not ask it for at run time.
_VK = "CmdCopyBuffer", "GetDeviceProcAddr", "GetInstanceProcAddr", "GetPhysicalDeviceFeatures2"
_PYPROJECT = """\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "{name}"
version = "{version}"
description = "llama.cpp's backend for sparq-cpp: {about}"
license = {{ text = "MIT" }}
requires-python = ">=3.10"
dependencies = {dependencies}

[tool.hatch.build.targets.wheel]
packages = ["{module}"]

[tool.hatch.build.targets.wheel.hooks.custom]
path = "{hook}"
"""

# the options, what the stamp says of how it was made, and the compilers for a work tree
Recipe = tuple[build.Options, dict[str, Any], Callable[[wheel.Zig, Path], cmake.Toolchain]]


def make(backend: str, into: Path, of: tuple[str, ...] = ()) -> Path:
    """Make the wheel in the folder `into`. Returns its file.

    Args:
        of: the architectures of CUDA, if not all; or for Vulkan a name of `wheel.TARGETS`.

    Raises:
        SparqError: what it needs cannot be used, or something did not compile.
    """
    target = wheel.TARGETS[of[0] if of and backend == "vulkan" else "linux-x86_64"]
    options, how, chain = _cuda(of or ARCHS) if backend == "cuda" else _vulkan()
    how["compiler"] = f"ziglang {metadata.version('ziglang')}, {how['compiler']}"
    made_of = build.sources(options)
    # not how it is made: ninja sees which of its commands are others, and this takes an hour
    key = [made_of["pin"], made_of["patches"], target.zig, how]
    with wheel.workshop("_".join([backend, *of]), target, key) as (zig, lock):
        tree = zig.root / backend
        say(f"ggml with {backend}, log in {tree / 'build.log'}")
        build.prepare(tree, options)
        tools = chain(zig, tree)
        cmake.compile_tree(tree, options, ("ggml",), build.default_jobs(), tools, lock)
        bin_dir, names = tree / "out" / "bin", ("ggml", f"ggml-{backend}")
        libraries = [bin_dir / target.system.library(name) for name in names]
        stamp = source.digest_of({file.name: file for file in libraries})[:12]
        licenses = {"llama.cpp": tree / "src", "zig": zig.folder}
        if backend == "cuda":
            templates = licenses[_CCCL] = zig.root / _CCCL
            templates.mkdir(exist_ok=True)
            for path in metadata.files(_CCCL) or ():
                if path.name.lower().startswith("license"):
                    shutil.copy(path.locate(), templates / "LICENSE")
        facts = {"stamp": stamp, "inputs": made_of, **how}
        return pack(backend, zig.root / "package", libraries, licenses, facts, target.tag, into)


def pack(
    backend: str,
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
    module = carried_gpu.MODULE.format(backend)
    package = folder / module
    package.mkdir(parents=True)
    for file in libraries:
        shutil.copy(file, package)
    (package / "stamp.json").write_text(json.dumps(stamp, indent=1), "utf-8")
    wheel.copy_licenses(package / "licenses", licenses)
    about, needed = "Vulkan", [f"sparq-cpp=={metadata.version('sparq-cpp')}"]
    if backend == "cuda":
        about, major = f"CUDA for sm_{', sm_'.join(stamp['archs'])}", int(carried_gpu.MAJOR)
        needed += [f"nvidia-{x}>={major}.0,<{major + 1}" for x in ("cublas", "cuda-runtime")]
    text = _PYPROJECT.format(
        name=carried_gpu.PACKAGE.format(backend),
        module=module,
        version=metadata.version("sparq-cpp"),
        about=about,
        dependencies=json.dumps(needed),
        hook=paths.REPOSITORY / "hatch_build.py",
    )
    (folder / "pyproject.toml").write_text(text, "utf-8")
    return wheel.pack(folder, module, {"SPARQ_WHEEL_TAG": tag}, into)


def _vulkan() -> Recipe:
    parts, why = cmake.vulkan_parts()
    if why:
        raise SparqError(f"Vulkan cannot be used: {why}", "docs/gpu.md says what a build needs")
    version = probe.run([parts["Vulkan_GLSLC_EXECUTABLE"], "--version"]).stdout.split("\n")[0]

    def chain(zig: wheel.Zig, tree: Path) -> cmake.Toolchain:
        headers = tree / "headers"  # beside them may lie those of another C library
        for name in ("vulkan", "vk_video", "spirv"):
            original = Path(parts["Vulkan_INCLUDE_DIR"]) / name
            shutil.copytree(original, headers / name, dirs_exist_ok=True)
        system = zig.target.system
        code, library = tree / "libvulkan.c", tree / carried_gpu.LOADERS[system.name]
        export = "__attribute__((dllexport))"  # and nothing of the C library, on Windows
        code.write_text("\n".join(f"{export} void vk{name}(void) {{}}" for name in _VK), "utf-8")
        named = system.named.format(name=library.name, path=library)
        zig.run(["cc", "-shared", named, str(code), "-o", str(library)])
        linked = f"{library}{system.linked}"
        more = parts | {"Vulkan_INCLUDE_DIR": str(headers), "Vulkan_LIBRARY": linked}
        return zig.toolchain(tree, more)

    return build.Options(portable=True, vulkan=True), {"compiler": version}, chain


def _cuda(archs: tuple[str, ...]) -> Recipe:
    host = probe.need_compiler()
    toolkit, why = cuda.toolkit(host)
    release = toolkit.release if toolkit else ""
    if toolkit is None or release.split(".")[0] != carried_gpu.MAJOR:
        raise SparqError(
            f"CUDA {carried_gpu.MAJOR} cannot be used: {why or f'nvcc is of {release}'}",
            f"put nvcc {carried_gpu.MAJOR} on PATH, or set CUDA_HOME",
        )

    def chain(zig: wheel.Zig, tree: Path) -> cmake.Toolchain:
        more = {
            "CMAKE_CUDA_HOST_COMPILER": str(_host(zig, host, tree)),
            "CMAKE_INSTALL_RPATH": f"$ORIGIN;$ORIGIN/{carried_gpu.NVIDIA}",
            "GGML_CUDA_NO_VMM": "ON",  # it would be linked with the driver, and not load without
        }
        return replace(zig.toolchain(tree, more), toolkit=toolkit)

    how = {"archs": archs, "cuda": f"nvcc {release}; {';'.join(archs)}", "compiler": host.version}
    return build.Options(portable=True, cuda=";".join(f"{x}-real" for x in archs)), how, chain


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
