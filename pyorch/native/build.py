"""Build the patched library, at most once for the same inputs.

Below the cache root:

    sdist/                   the pinned source as downloaded
    python/<source>/         its Python bindings, unpacked
    build/<tree>/            work tree of one (source, patches, options, compiler): only what
                             changed is compiled again. In it:
        src, ops, out        the patched source, a copy of ggml_ops/, what ninja makes
    lib/<stamp>/             a finished build: libraries, tools, stamp.json
    lock                     held while any of this is written

A build that was interrupted leaves no `lib/<stamp>`, so nothing half-built is ever used, and ninja
goes on from where it was.
"""

from __future__ import annotations

import errno
import hashlib
import importlib
import itertools
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pyorch import paths
from pyorch.errors import SparqError
from pyorch.native import cuda, patches, probe, source
from pyorch.progress import Progress, Say, progress_bar, say

TOOLS = (
    "llama-bench",
    "llama-cli",
    "llama-completion",
    "llama-perplexity",
    "llama-quantize",
    "llama-server",
)

# Parts of the source that no target of ours needs: 110 of 170 MB.
_SKIP = ("models", "docs", "media", "benches", "gguf-py")
_KEEP_BUILDS = 8
_KEEP_TREES = 4


@dataclass(frozen=True)
class Options:
    """What to build. Two different options never share a file of the result."""

    stock: bool = False  # the same pin, without patches and without ggml_ops
    portable: bool = False  # for any CPU of this kind (x86: AVX2, FMA, F16C), not for this one
    cuda: str = ""  # architectures, as in 80;90; none: for the CPU only

    @property
    def name(self) -> str:
        kind = "stock" if self.stock else "sparq"
        return kind + ("-portable" if self.portable else "") + ("-cuda" if self.cuda else "")


def usual(stock: bool = False) -> Options:
    """What is built when nothing else is said: with CUDA where a compiler and a device are."""
    return Options(stock, cuda=cuda.archs("native") if cuda.present() else "")


def working(options: Options) -> Options:
    """The same, without CUDA where it does not work, which is said. Compiles a program for that."""
    if options.cuda:
        _, why = cuda.toolkit(probe.need_compiler())
        if why:
            say(f"for the CPU only, though a CUDA device is here: {why}")
            return replace(options, cuda="")
    return options


def inputs(options: Options) -> dict[str, Any]:
    """Everything that decides the result, except the compiler. Takes milliseconds."""
    pin = source.read_pin()
    return {
        "pin": source.locate(pin).key,
        "patches": "" if options.stock else patches.digest(),
        "ops": ""
        if options.stock
        else source.digest_of(_ops_files(paths.data("ggml_ops"), options)),
        "options": options.name,
        "cpu": platform.machine() if options.portable else probe.cpu()[1],
        "env": {k: os.environ[k] for k in ("CFLAGS", "CXXFLAGS", "LDFLAGS") if k in os.environ},
    } | ({"cuda": f"{cuda.nvcc()}; {options.cuda}"} if options.cuda else {})


def find(options: Options, tools: tuple[str, ...] = ()) -> Path | None:
    """The finished build for the present inputs, if there is one.

    Where the machine has no compiler, a build by any compiler will do.
    """
    want = inputs(options)
    compiler = probe.find_compiler()
    if compiler is not None:
        want["compiler"] = compiler.version
    for folder, stamp in finished():
        if all(stamp["inputs"].get(key) == value for key, value in want.items()) and all(
            (folder / tool).is_file() for tool in tools
        ):
            return folder
    return None


def finished() -> list[tuple[Path, dict[str, Any]]]:
    """All finished builds with their stamps, newest first."""
    folders = (paths.cache() / "lib").glob("*")
    found = [(f, stamp) for f in folders if f.suffix != ".partial" and (stamp := read_stamp(f))]
    return sorted(found, key=lambda item: item[1]["time"], reverse=True)


def read_stamp(folder: Path) -> dict[str, Any] | None:
    """What a finished build was made from; None if there is no finished build in the folder."""
    try:
        stamp: dict[str, Any] = json.loads((folder / "stamp.json").read_text("utf-8"))
        return stamp
    except (OSError, ValueError):
        return None


def bindings() -> Path:
    """Folder that holds the `llama_cpp` package of the pinned source; put there by `build`."""
    return paths.cache() / "python" / source.locate(source.read_pin()).key[:12]


def build(
    options: Options,
    tools: tuple[str, ...] = (),
    jobs: int | None = None,
    force: bool = False,
    note: Say | None = None,
) -> Path:
    """Make sure that the library is built. Returns the folder that holds it.

    Args:
        tools: programs of llama.cpp to build too, from `TOOLS`.
        jobs: compilers to run at once; as many as cores, if there is memory for them.
        force: build again even if the result is there.

    Raises:
        SparqError: it could not be built; the message names the log.
    """
    note = note or say
    probe.check_system()
    try:
        return _build(options, tools, jobs or _default_jobs(), force, note)
    except OSError as error:
        root = paths.cache()
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise SparqError(f"no space left for the build in {root}", _SPACE) from None
        raise SparqError(f"cannot build in the cache {root}: {error}", _WRITE) from None


_SPACE = "about 300 MB are needed: free some, or set SPARQ_CACHE to a folder on another disk"
_WRITE = "set SPARQ_CACHE to a folder that you may write to"


def _build(options: Options, tools: tuple[str, ...], jobs: int, force: bool, note: Say) -> Path:
    compiler = probe.need_compiler()
    found = probe.probe(compiler, native=not options.portable)
    toolkit, why = cuda.toolkit(compiler) if options.cuda else (None, "")
    if why:
        raise SparqError(f"CUDA cannot be used: {why}", "for the CPU alone: sparq-cpp build --cpu")
    pin = source.read_pin()
    where = source.locate(pin)
    want = inputs(options) | {"compiler": compiler.version, "flags": list(found.flags)}
    want["openmp"] = found.openmp
    stamp = _hash(want)
    target = paths.cache() / "lib" / f"{options.name}-{stamp}"
    if not force and _complete(target, tools) and bindings().is_dir():
        return target

    def waiting(who: str) -> None:
        note(f"waiting for another build in {paths.cache()} (process {who})")

    with paths.locked(paths.cache(), waiting) as lock:
        if not force and _complete(target, tools) and bindings().is_dir():
            return target  # another process built it while this one waited
        for thing, why in found.off.items():
            note(f"{thing} is off: {why}")
        tree = paths.cache() / "build" / _hash({k: v for k, v in want.items() if k != "ops"})
        if force:
            shutil.rmtree(tree, ignore_errors=True)
        _prepare(tree, options, pin, where, note)
        if not options.stock:
            if patches.digest() != want["patches"]:
                shutil.rmtree(tree / "src")
                raise SparqError("patches/ changed while it was applied", "build again")
            want["ops"] = source.digest_of(
                _ops_files(tree / "ops", options)
            )  # true, if edited meanwhile
        stamp = _hash(want)
        target = target.with_name(f"{options.name}-{stamp}")
        tools = tuple(sorted({*tools, *(tool for tool in TOOLS if (target / tool).is_file())}))
        log = tree / "build.log"
        log.write_text("", "utf-8")
        note(f"building {options.name}: {jobs} job{'s' if jobs > 1 else ''}, log in {log}")
        started = time.monotonic()
        env = _environment(compiler, found, toolkit)
        with progress_bar("compiling", off_terminal=say) as step:
            for argv in _commands(tree, options, tools, found.openmp, jobs, toolkit):
                _run_logged(argv, env, tree, step, lock)
        stamped = {
            "stamp": stamp,
            "time": time.time(),
            "inputs": want,
            "pin": f"{pin.package} {pin.version}" if where.pinned else str(where.path),
            "off": found.off,
            "isa": list(found.isa),
        }
        _publish(tree / "out" / "bin", target, tools, stamped)
        _prune()
    note(f"built {target} in {time.monotonic() - started:.0f} s")
    return target


def _complete(target: Path, tools: tuple[str, ...]) -> bool:
    return read_stamp(target) is not None and all((target / tool).is_file() for tool in tools)


def _default_jobs() -> int:
    return max(1, min(probe.cores(), probe.memory() >> 30))  # a compiler takes up to 1 GiB


# ---- steps ---------------------------------------------------------------------------------------


def _prepare(
    tree: Path, options: Options, pin: source.Pin, where: source.Source, note: Say
) -> None:
    """Fetch, unpack and patch the source; copy ggml_ops. Each part appears complete or not."""
    tree.mkdir(parents=True, exist_ok=True)
    os.utime(tree)  # for _prune
    todo = [(bindings() / "llama_cpp", "llama_cpp"), (tree / "src", pin.folder)]
    missing = [(into, folder) for into, folder in todo if not into.is_dir()]
    if missing:
        source.fetch(pin, where, note)
    for into, folder in missing:
        partial = into.with_name(into.name + ".partial")
        shutil.rmtree(partial, ignore_errors=True)
        source.unpack(where, folder, partial, _SKIP)
        if folder == pin.folder and not options.stock:
            patches.apply_series(partial)
        partial.rename(into)
    if not options.stock:
        if (cache := tree / "out" / "CMakeCache.txt").is_file() and (
            f"CMAKE_HOME_DIRECTORY:INTERNAL={tree / 'src'}\n" not in cache.read_text("utf-8")
        ):
            shutil.rmtree(tree / "out")  # the folder was moved, which cmake cannot follow
        _sync_ops(tree / "ops", options)


def _ops_files(root: Path, options: Options) -> dict[str, Path]:
    """The files that are compiled, by their path below `root`."""
    return {
        str(file.relative_to(root)): file
        for file in sorted(root.rglob("*"))
        if file.is_file() and file.suffix != ".md" and not file.name.startswith(".")
        if options.cuda or file.relative_to(root).parts[0] != "cuda"
    }


def _sync_ops(into: Path, options: Options) -> None:
    """Make `into` a copy of ggml_ops/, writing only files that differ: ninja rebuilds just those.

    A copy, because modification times of an installed package or a checkout say nothing of content.
    """
    files = _ops_files(paths.data("ggml_ops"), options)
    for old in sorted(into.rglob("*"), reverse=True):
        if old.is_file() and str(old.relative_to(into)) not in files:
            old.unlink()
    for name, file in files.items():
        content = file.read_bytes()
        copy = into / name
        if not copy.is_file() or copy.read_bytes() != content:
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(content)


def cmake_options(
    options: Options,
    tools: tuple[str, ...],
    openmp: bool,
    tree: Path,
    toolkit: cuda.Toolkit | None = None,
) -> list[str]:
    """The `-D` arguments of the configure step."""
    origin = "@loader_path" if platform.system() == "Darwin" else "$ORIGIN"
    pin = source.read_pin()
    on_off = {
        "BUILD_SHARED_LIBS": True,
        "CMAKE_BUILD_WITH_INSTALL_RPATH": True,
        "GGML_NATIVE": not options.portable,
        "GGML_OPENMP": openmp,
        "GGML_METAL": False,
        "LLAMA_BUILD_COMMON": bool(tools),
        "LLAMA_BUILD_TOOLS": bool(tools),
        "LLAMA_BUILD_TESTS": False,
        "LLAMA_BUILD_EXAMPLES": False,
        "LLAMA_BUILD_SERVER": bool(tools),
        "LLAMA_BUILD_APP": False,
        "LLAMA_BUILD_UI": False,
        "LLAMA_USE_PREBUILT_UI": False,  # it would download the web page of llama-server
        "LLAMA_OPENSSL": False,
    }
    values = {key: "ON" if value else "OFF" for key, value in on_off.items()}
    values["CMAKE_BUILD_TYPE"] = "Release"
    values["CMAKE_INSTALL_RPATH"] = ";".join([origin, *(toolkit.lib if toolkit else ())])
    if toolkit:
        values |= cuda.cmake_options(toolkit, options.cuda)
    values["LLAMA_BUILD_COMMIT"] = pin.commit[:9]
    values["LLAMA_BUILD_NUMBER"] = "0"
    if not options.stock:
        values["CMAKE_PROJECT_llama.cpp_INCLUDE"] = str(tree / "ops" / "attach.cmake")
    return [f"-D{key}={value}" for key, value in values.items()]


def _environment(
    compiler: probe.Compiler, found: probe.Probe, toolkit: cuda.Toolkit | None = None
) -> dict[str, str]:
    """The variables that cmake and ninja run with."""
    env = {**os.environ, "CC": compiler.cc, "CXX": compiler.cxx, "LC_ALL": "C"}
    env["NINJA_STATUS"] = "[%f/%t] "
    for key in ("CFLAGS", "CXXFLAGS"):
        env[key] = " ".join([*os.environ.get(key, "").split(), *found.flags])
    if toolkit:
        env["CUDAFLAGS"] = " ".join([os.environ.get("CUDAFLAGS", ""), *toolkit.flags]).strip()
    return env


def _commands(
    tree: Path,
    options: Options,
    tools: tuple[str, ...],
    openmp: bool,
    jobs: int,
    toolkit: cuda.Toolkit | None = None,
) -> list[list[str]]:
    """Configure, compile."""
    ninja = _tool("ninja")
    configure = [_tool("cmake"), "-S", str(tree / "src"), "-B", str(tree / "out"), "-G", "Ninja"]
    configure += [f"-DCMAKE_MAKE_PROGRAM={ninja}"]
    configure += cmake_options(options, tools, openmp, tree, toolkit)
    return [configure, [ninja, "-C", str(tree / "out"), "-j", str(jobs), "llama", *tools]]


def _run_logged(
    argv: list[str], env: dict[str, str], tree: Path, step: Progress, lock: int
) -> None:
    """Run one build command; its output goes to the log, `[n/m]` lines to `step(n, m)`.

    The command holds the lock too: should this process be killed, nobody enters the work tree
    before the compilers have gone.
    """
    log = tree / "build.log"
    copy = str(tree / "ops")
    original = "" if not Path(copy).is_dir() else str(paths.data("ggml_ops"))
    lines: list[str] = []
    with log.open("a", encoding="utf-8") as file:
        file.write("$ " + " ".join(argv) + "\n")
        with subprocess.Popen(
            argv, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, errors="replace", pass_fds=(lock,),
        ) as process:  # fmt: skip
            assert process.stdout is not None
            try:
                for line in process.stdout:
                    if original:
                        line = line.replace(copy, original)  # the file that a person can edit
                    file.write(line)
                    lines.append(line)
                    if match := re.match(r"\[(\d+)/(\d+)\] ", line):
                        step(int(match.group(1)), int(match.group(2)))
            except BaseException:
                process.terminate()  # ninja deletes what it was in the middle of
                raise
        code = process.returncode
    if code != 0:
        raise _failure(argv, code, lines, log)


def _failure(argv: list[str], code: int, lines: list[str], log: Path) -> SparqError:
    """Say in one line why a build command failed."""
    text = "".join(lines)
    what = Path(argv[0]).name
    if "No space left on device" in text:
        return SparqError(f"no space left for the build in {paths.cache()}", _SPACE)
    if code < 0 or re.search(r"Killed signal|\bKilled\b", text):
        how = f"signal {-code}" if code < 0 else "out of memory?"
        return SparqError(f"{what} was killed ({how})", f"try again with --jobs 1; log: {log}")
    at = next((i for i, line in enumerate(lines) if re.search(r"(?i)\berror\b[: ]", line)), None)
    if at is None:
        reason = lines[-1].strip() if lines else f"exit code {code}"
    elif lines[at].startswith("CMake Error"):  # it goes on, indented, until an unindented line
        rest = itertools.takewhile(lambda s: s[0] in " \n", lines[at + 1 :])
        reason = " ".join("".join([lines[at], *rest]).split())
    else:
        reason = lines[at].strip()
    return SparqError(f"{what} failed: {reason}", f"full log: {log}")


def _tool(name: str) -> str:
    """cmake or ninja: from the Python package of that name, else from PATH."""
    folder = {"cmake": "CMAKE_BIN_DIR", "ninja": "BIN_DIR"}[name]  # where the package says it is
    try:
        packaged = shutil.which(name, path=getattr(importlib.import_module(name), folder, ""))
    except ImportError:
        packaged = None
    program = packaged or shutil.which(name)
    if program is None:
        raise SparqError(f"{name} is missing", f"{sys.executable} -m pip install {name}")
    return program


def _publish(bin_dir: Path, target: Path, tools: tuple[str, ...], stamp: dict[str, Any]) -> None:
    """Copy the result out of the work tree, to a name that appears only when all of it is there."""
    libraries = "lib" if tools else ("libllama.", "libggml")  # others may be from an older build
    names = {file.name for file in bin_dir.iterdir() if file.name.startswith(libraries)}
    partial = target.with_name(target.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    for name in sorted(names | set(tools)):
        shutil.copy2(bin_dir / name, partial / name, follow_symlinks=False)
    (partial / "stamp.json").write_text(json.dumps(stamp, indent=1), "utf-8")
    if target.exists():  # more tools, or --force; running programs keep the files they opened
        old = target.with_name(target.name + ".old.partial")
        shutil.rmtree(old, ignore_errors=True)
        target.rename(old)
        partial.rename(target)
        shutil.rmtree(old)
    else:
        partial.rename(target)


def _prune() -> None:
    """Delete the oldest builds and work trees, so that the cache does not grow with every edit.

    Builds of each kind are counted by themselves: edits of ours do not cost a stock build.
    """
    kept: dict[str, int] = {}
    for folder, stamp in finished():
        kind = stamp["inputs"]["options"]
        kept[kind] = kept.get(kind, 0) + 1
        if kept[kind] > _KEEP_BUILDS:
            shutil.rmtree(folder, ignore_errors=True)
    trees = [tree for tree in (paths.cache() / "build").iterdir() if tree.is_dir()]
    trees.sort(key=lambda tree: tree.stat().st_mtime, reverse=True)
    for tree in trees[_KEEP_TREES:]:
        shutil.rmtree(tree, ignore_errors=True)


def _hash(value: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:12]
