"""Configure and compile a work tree with cmake and ninja.

A work tree has the patched source in `src`, a copy of ggml_ops/ in `ops`, and in `out` what ninja
makes.
"""

from __future__ import annotations

import importlib
import os
import platform
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from pyorch import children, paths, system
from pyorch.errors import SparqError
from pyorch.native import cuda, probe, source, vulkan
from pyorch.progress import Progress, progress_bar, say

TOOLS = (
    "ggml-rpc-server",
    "llama-bench",
    "llama-cli",
    "llama-completion",
    "llama-perplexity",
    "llama-quantize",
    "llama-server",
)

# the parts of ggml that may be switched off because they do not work
_PARTS = {"repack": "GGML_CPU_REPACK", "llamafile": "GGML_LLAMAFILE"}

_OLDEST = {"cmake": (3, 21), "ninja": (1, 10)}

BACKENDS = ("cuda", "vulkan", "metal")  # of GPUs, as fields of `Options`


@dataclass(frozen=True)
class Options:
    """The options of a build. Builds with different options never share an output file."""

    stock: bool = False  # the same pin, without patches and without ggml_ops
    portable: bool = False  # for any CPU of this kind (x86: AVX2, FMA, F16C), not only for this one
    cuda: str = ""  # architectures such as 80;90; empty without CUDA
    vulkan: bool = False
    metal: bool = False

    @property
    def backends(self) -> list[str]:
        return [name for name in BACKENDS if getattr(self, name)]

    @property
    def name(self) -> str:
        kind = "stock" if self.stock else "sparq"
        return "-".join([kind, *["portable"] * self.portable, *self.backends])


@dataclass(frozen=True)
class Toolchain:
    """The compilers of this machine that work."""

    compiler: probe.Compiler
    cpu: probe.Probe
    toolkit: cuda.Toolkit | None = None
    more: tuple[tuple[str, str], ...] = ()  # further definitions for cmake, which win

    @property
    def env(self) -> dict[str, str]:
        """The variables that cmake and ninja run with."""
        env = {**os.environ, "CC": self.compiler.cc, "CXX": self.compiler.cxx, "LC_ALL": "C"}
        env["NINJA_STATUS"] = "[%f/%t] "
        for key in ("CFLAGS", "CXXFLAGS"):
            env[key] = " ".join([*os.environ.get(key, "").split(), *self.cpu.flags])
        if self.toolkit:
            flags = [os.environ.get("CUDAFLAGS", ""), *self.toolkit.flags]
            env["CUDAFLAGS"] = " ".join(flags).strip()
        return env


def need_tools() -> probe.Compiler:
    """The compiler of a build, for which cmake and ninja are here too. Takes milliseconds.

    Raises:
        SparqError: one of them is missing, or nothing can be built on this system.
    """
    if platform.system() not in ("Linux", "Darwin"):  # where a build was never tried
        raise SparqError(
            f"building on {platform.system() or 'this system'} is not supported",
            "use Linux or macOS; on Windows the wheel, or the Windows Subsystem for Linux",
        )
    compiler = probe.need_compiler()
    for name in _OLDEST:
        tool(name)
    return compiler


def toolchain(options: Options) -> Toolchain:
    """Find it by compiling tiny programs, which takes seconds.

    Raises:
        SparqError: a tool is missing, no compiler works, or a backend that is asked for cannot be
            used.
    """
    compiler = need_tools()
    cpu = probe.probe(compiler, native=not options.portable)
    toolkit, why = cuda.toolkit(compiler) if options.cuda else (None, "")
    if why:
        raise SparqError(f"CUDA cannot be used: {why}", "for the CPU alone: SPARQ_CUDA=0")
    if options.vulkan and (why := vulkan_parts()[1]):
        raise SparqError(f"Vulkan cannot be used: {why}", "for the CPU alone: SPARQ_VULKAN=0")
    if options.metal and platform.system() != "Darwin":
        raise SparqError("Metal is of macOS only", "without --metal", exit_code=2)
    return Toolchain(compiler, cpu, toolkit)


def vulkan_parts() -> tuple[dict[str, str], str]:
    """As `vulkan.parts`, with the tools that are here."""
    return vulkan.parts(tool("cmake"), tool("ninja"))


def compile_tree(
    tree: Path, options: Options, targets: tuple[str, ...], jobs: int, chain: Toolchain, lock: int
) -> None:
    """Configure and compile; all output goes to `build.log` in the work tree.

    Args:
        targets: what to make: `llama`, and programs from `TOOLS`.
        jobs: how many compilers run at once.
        lock: a descriptor that the compilers hold too. If this process is killed, no other enters
            the work tree before they have ended.

    Raises:
        SparqError: with the first thing that failed.
    """
    (tree / "build.log").write_text("", "utf-8")
    ninja, out = tool("ninja"), str(tree / "out")
    configure = [tool("cmake"), "-S", str(tree / "src"), "-B", out, "-G", "Ninja"]
    configure += [f"-DCMAKE_MAKE_PROGRAM={ninja}"]
    configure += _definitions(tree, options, not set(TOOLS).isdisjoint(targets), chain)
    with progress_bar("compiling", off_terminal=say) as progress:
        for argv in (configure, [ninja, "-C", out, "-j", str(jobs), *targets]):
            _run(argv, chain.env, tree, progress, lock)


def _definitions(tree: Path, options: Options, tools: bool, chain: Toolchain) -> list[str]:
    """The `-D` arguments of the configure step."""
    origin = "@loader_path" if platform.system() == "Darwin" else "$ORIGIN"
    ours = "compilers/compilers.cmake" if options.stock else "attach.cmake"
    pin, toolkit = source.read_pin(), chain.toolkit
    values: dict[str, bool | str] = {
        "BUILD_SHARED_LIBS": True,
        "CMAKE_BUILD_TYPE": "Release",
        "CMAKE_BUILD_WITH_INSTALL_RPATH": True,
        "CMAKE_INSTALL_RPATH": ";".join([origin, *(toolkit.lib if toolkit else ())]),
        "GGML_NATIVE": not options.portable,
        "GGML_OPENMP": chain.cpu.openmp,
        "GGML_METAL": options.metal,
        "GGML_VULKAN": options.vulkan,
        "GGML_RPC": True,
        "GGML_RPC_RDMA": False,  # it would need a library that other machines lack
        "LLAMA_BUILD_COMMIT": pin.commit[:9],
        "LLAMA_BUILD_NUMBER": "0",
        "LLAMA_BUILD_COMMON": tools,
        "LLAMA_BUILD_TOOLS": tools,
        "LLAMA_BUILD_TESTS": False,
        "LLAMA_BUILD_EXAMPLES": False,
        "LLAMA_BUILD_SERVER": tools,
        "LLAMA_BUILD_APP": False,
        "LLAMA_BUILD_UI": False,
        "LLAMA_USE_PREBUILT_UI": False,  # it would download the web page of llama-server
        "LLAMA_OPENSSL": False,
        "CMAKE_PROJECT_llama.cpp_INCLUDE": str(tree / "ops" / ours),
    }
    values |= {key: False for feature, key in _PARTS.items() if feature in chain.cpu.off}
    if toolkit:
        values |= cuda.cmake_options(toolkit, options.cuda)
    texts: dict[bool | str, str] = {True: "ON", False: "OFF"}
    return [f"-D{k}={texts.get(v, v)}" for k, v in (values | dict(chain.more)).items()]


def _run(argv: list[str], env: dict[str, str], tree: Path, progress: Progress, lock: int) -> None:
    """Run one command of a build. Its output goes to the log of the work tree."""
    log = tree / "build.log"
    copy = str(tree / "ops")
    original = "" if not Path(copy).is_dir() else str(paths.data("ggml_ops"))
    lines: list[str] = []
    most = 0  # steps; Vulkan's shaders have a ninja of their own, with fewer
    with log.open("a", encoding="utf-8") as file:
        file.write("$ " + " ".join(argv) + "\n")
        output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        # asked to end, ninja deletes the outputs that it has not finished
        with children.running(argv, env=env, **system.inherit(lock), **output) as process:
            for line in children.lines(process.stdout):
                if original:
                    line = line.replace(copy, original)  # the file that the user can edit
                file.write(line + "\n")
                lines.append(line)
                match = re.match(r"\[(\d+)/(\d+)\] ", line)  # of ninja
                if match and (most := max(most, int(match[2]))) == int(match[2]):
                    progress(int(match[1]), most)
            code = process.wait()
    if code != 0:
        raise _failure(argv, code, lines, log)


def _failure(argv: list[str], code: int, lines: list[str], log: Path) -> SparqError:
    """The error of a failed build command, in one line."""
    text, hint = "\n".join(lines), f"full log: {log}"
    # a message of cmake goes on in indented lines
    error = re.search(r"(?m)^CMake Error.*(?:\n(?: .*)?)*|^.*\b(?i:error)\b[: ].*", text)
    reason = " ".join(error[0].split()) if error else "".join(lines[-1:]).strip()
    if "No space left on device" in text:
        hint = f"about 300 MB are needed in {paths.cache()}, or set SPARQ_CACHE; log: {log}"
    elif code == system.KILLED or re.search(r"Killed signal|\bKilled\b", text):
        hint = f"is the memory full? try again with --jobs 1; log: {log}"
    if code < 0 or not reason:
        reason = f"it {children.ended(code)}"
    return SparqError(f"{Path(argv[0]).name} failed: {reason}", hint)


def tool(name: str) -> str:
    """The path of cmake or ninja: from the Python package of that name, else from PATH.

    Raises:
        SparqError: it is missing or too old.
    """
    folder = {"cmake": "CMAKE_BIN_DIR", "ninja": "BIN_DIR"}[name]  # where the package says it is
    try:
        packaged = shutil.which(name, path=getattr(importlib.import_module(name), folder, ""))
    except ImportError:
        packaged = None
    program = packaged or shutil.which(name)
    answer = probe.run([program, "--version"]).stdout if program else ""
    version = re.search(r"(\d+)\.(\d+)", answer)
    if program is None or version is None or tuple(map(int, version.groups())) < _OLDEST[name]:
        oldest = ".".join(map(str, _OLDEST[name]))
        raise SparqError(f"a build needs {name} {oldest} or newer", paths.install_command("build"))
    return program
