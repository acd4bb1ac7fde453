"""Build the patched library, at most once for the same inputs.

Below the cache root:

    sdist/                   the pinned source as downloaded
    python/<source>/         its Python bindings, unpacked
    build/<tree>/            work tree of one (source, patches, options, compiler): only what
                             changed is compiled again. In it:
        src, ops, out        the patched source, a copy of ggml_ops/, what ninja makes
        off.json             the features that `out` is without because they failed, and how
    lib/<stamp>/             a finished build: libraries, tools, stamp.json
    lock                     held while any of this is written

A build that was interrupted leaves no `lib/<stamp>`, so nothing half-built is ever used, and ninja
goes on from where it was.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from pyorch import paths
from pyorch.errors import SparqError
from pyorch.native import cmake, cuda, patches, probe, smoke, source
from pyorch.native.cmake import BACKENDS as BACKENDS
from pyorch.native.cmake import TOOLS as TOOLS
from pyorch.native.cmake import Options as Options
from pyorch.progress import say

# Parts of the source that none of our targets needs; they are 110 of its 170 MB.
_SKIP = ("models", "docs", "media", "benches", "gguf-py")
_OFF = "off.json"
_KEEP_BUILDS = 8
_KEEP_TREES = 4
# Names in the folders of builds. SPARQ_CACHE may be a folder that is not ours alone.
_OURS = re.compile(r"(sparq|stock)-.+|[0-9a-f]{12}(\.partial)?")


def usual(stock: bool = False) -> Options:
    """The default options: with CUDA if there is a device, else with Vulkan or Metal if a build of
    this cache was made with it. The variable SPARQ_<BACKEND>=0 switches one off."""
    compiled = (folder for folder, _ in finished() if "-carried-" not in folder.name)
    before = {name for folder in compiled for name in backends(folder)}
    vulkan = "vulkan" in before and os.environ.get("SPARQ_VULKAN") != "0"
    metal = "metal" in before and os.environ.get("SPARQ_METAL") != "0"
    if cuda.is_preferred() and (cuda.find_nvcc() or not (vulkan or metal)):
        return Options(stock, cuda=cuda.archs("native"))
    return Options(stock, vulkan=vulkan, metal=metal)


def working(options: Options) -> Options:
    """The same options, but without a backend that does not work, with a note on stderr. A program
    is compiled to find out."""
    why = cuda.toolkit(probe.need_compiler())[1] if options.cuda else ""
    if options.vulkan:
        why = cmake.vulkan_parts()[1]
    if why:
        say(f"building for the CPU only, without {options.backends[0]}: {why}")
        return replace(options, cuda="", vulkan=False)
    return options


def backends(folder: Path) -> list[str]:
    """Those of a finished build."""
    stamp = read_stamp(folder)
    words = stamp["inputs"]["options"].split("-") if stamp else []
    return [name for name in BACKENDS if name in words]


def sources(options: Options) -> dict[str, str]:
    """What is compiled: hashes of the pin, of the patches and of ggml_ops/. Takes milliseconds."""
    return {
        "pin": source.locate(source.read_pin()).key,
        "patches": "" if options.stock else patches.digest(),
        "ops": source.digest_of(_ops_files(paths.data("ggml_ops"), options)),
    }


def inputs(options: Options) -> dict[str, Any]:
    """Everything that decides the result, except the compiler. Takes milliseconds."""
    return {
        **sources(options),
        "options": options.name,
        "cpu": platform.machine() if options.portable else probe.cpu()[1],
        "env": {k: v for k, v in os.environ.items() if re.fullmatch("(C|CXX|CUDA|LD)FLAGS", k)},
    } | ({"cuda": options.cuda, "nvcc": cuda.nvcc()} if options.cuda else {})


def find(options: Options, tools: tuple[str, ...] = ()) -> Path | None:
    """The finished build for the present inputs, if there is one.

    Where the machine has no compiler or no nvcc, a build by any will do; and one for more kinds of
    GPUs than are asked for.
    """
    want = inputs(options)
    archs = set(want.pop("cuda", "").split(";"))
    if compiler := probe.find_compiler():
        want["compiler"] = compiler.version
    if not want.get("nvcc"):
        want.pop("nvcc", None)
    for folder, stamp in finished():
        has = stamp["inputs"]
        made_of = all(has.get(key) == value for key, value in want.items())
        made_of = made_of and archs <= set(has.get("cuda", "").split(";"))
        if made_of and _has(folder, tools):
            return folder
    return None


def finished() -> list[tuple[Path, dict[str, Any]]]:
    """All finished builds with their stamps, newest first."""
    folders = (paths.cache() / "lib").glob("*")
    stamped = [(f, stamp) for f in folders if f.suffix != ".partial" and (stamp := read_stamp(f))]
    return sorted(stamped, key=lambda item: item[1]["time"], reverse=True)


def read_stamp(folder: Path) -> dict[str, Any] | None:
    """The inputs of a finished build; None if the folder holds no finished build."""
    try:
        stamp: dict[str, Any] = json.loads((folder / "stamp.json").read_text("utf-8"))
        return stamp
    except (OSError, ValueError):
        return None


def from_environment() -> Path | None:
    """The folder that SPARQ_LIBRARY names: `lib/<stamp>` of the cache of another machine, with that
    machine's `python/<source>` in it as `python`.

    Raises:
        SparqError: it holds no finished build.
    """
    named = os.environ.get("SPARQ_LIBRARY")
    if not named:
        return None
    folder = paths.expanded(named).absolute()
    if read_stamp(folder) is None or not (folder / "python" / "llama_cpp").is_dir():
        hint = "see SPARQ_LIBRARY in docs/environment.md, or unset it"
        raise SparqError(f"SPARQ_LIBRARY={named} holds no finished build with its bindings", hint)
    return folder


def bindings() -> Path:
    """The folder of the pinned source's `llama_cpp` package, which `build` unpacks."""
    if folder := from_environment():
        return folder / "python"
    return paths.cache() / "python" / source.locate(source.read_pin()).key[:12]


def has_bindings() -> bool:
    """Whether they are unpacked, all of them."""
    return (bindings() / "llama_cpp").is_dir()


def unpack_bindings(where: source.Source, folder: str) -> None:
    """Unpack them unless they are there. Their lock is their own: builds, wheels and what came with
    a wheel hold different ones."""
    to = bindings()
    paths.once(to, has_bindings, lambda _: source.unpack(where, folder, to / "llama_cpp"))


def build(
    options: Options, tools: tuple[str, ...] = (), jobs: int | None = None, force: bool = False
) -> Path:
    """Make sure that the library is built. Returns the folder that holds it.

    Args:
        tools: programs of llama.cpp to build too, from `TOOLS`.
        jobs: how many compilers run at once; by default one per core if there is enough memory.
        force: build again even if the result is there.

    Raises:
        SparqError: it could not be built; the message names the log.
        OSError: the cache cannot be written.
    """
    paths.check_exec(paths.cache())
    chain = cmake.toolchain(options)
    jobs = jobs or default_jobs()
    want = inputs(options) | {"compiler": chain.compiler.version, "openmp": chain.cpu.openmp}
    want["flags"] = list(chain.cpu.flags)

    def done() -> bool:
        target = _target(options, want)
        has_library = read_stamp(target) is not None and _has(target, tools)
        return not force and has_library and has_bindings()

    if done():
        return _target(options, want)
    with paths.locked(paths.cache()) as lock:
        if done():  # another process built it while this one waited
            return _target(options, want)
        for left in (paths.cache() / "lib").glob("*.partial"):  # by a killed process
            shutil.rmtree(left, ignore_errors=True)
        tree = _tree(want)
        if force:
            shutil.rmtree(tree, ignore_errors=True)
        prepare(tree, options)
        # what was compiled counts, if somebody edits meanwhile
        want["ops"] = source.digest_of(_ops_files(tree / "ops", options))
        if not options.stock and patches.digest() != want["patches"]:
            shutil.rmtree(tree / "src")
            raise SparqError("patches/ changed while it was applied", "build again")
        target = _target(options, want)
        for thing, why in (chain.cpu.off | _read_off(tree)).items():
            say(f"{thing} is off: {why}")
        tools = tuple(sorted({t for t in TOOLS if t in tools or (target / t).is_file()}))
        say(f"building {options.name}: {jobs} jobs, log in {tree / 'build.log'}")
        started = time.monotonic()
        chain = _that_works(tree, options, ("llama", *tools), jobs, chain, lock)
        where = source.locate(pin := source.read_pin())
        stamp = {
            "stamp": _hash(want),
            "time": time.time(),
            "inputs": want,
            "pin": f"{pin.package} {pin.version}" if where.pinned else str(where.path),
            "off": chain.cpu.off,
            "isa": list(chain.cpu.isa),
        }
        _publish(tree / "out" / "bin", target, tools, stamp)
        _prune()
    say(f"built {target} in {time.monotonic() - started:.0f} s")
    return target


def _that_works(
    tree: Path,
    options: Options,
    targets: tuple[str, ...],
    jobs: int,
    chain: cmake.Toolchain,
    lock: int,
) -> cmake.Toolchain:
    """Compile, and run what was made. While that fails, the features that may be at fault are
    switched off, the likeliest first. What is off stays off in this work tree, so that the next
    edit is not compiled twice. Returns the tools that made what is in the tree now."""
    off = _read_off(tree)
    while True:
        cpu = chain.cpu
        for feature, why in off.items():
            cpu = probe.without(cpu, feature, why)
        now = replace(chain, cpu=cpu)
        cmake.compile_tree(tree, options, targets, jobs, now, lock)
        fault = smoke.fault(tree / "out" / "bin")
        if fault is None:
            return now
        shutil.rmtree(tree / "out")  # cmake takes the flags of its first run
        suspects = [s for s in smoke.suspects(fault, now.cpu.isa) if s not in off]
        if not suspects:
            (tree / _OFF).unlink(missing_ok=True)
            hint = "try another compiler (CC, CXX) or sparq-cpp build --portable, and report it"
            raise SparqError(f"what was built does not work on this machine: {fault}", hint)
        off[suspects[0]] = f"what was built with it does not work: {fault}"
        (tree / _OFF).write_text(json.dumps(off), "utf-8")
        say(f"{fault}; building again without {suspects[0]}")


def _read_off(tree: Path) -> dict[str, str]:
    try:
        off: dict[str, str] = json.loads((tree / _OFF).read_text("utf-8"))
        return off
    except (OSError, ValueError):
        return {}


def made(*kinds: str) -> list[Path]:
    """What builds have left below the cache: libraries (lib), work trees (build) and bindings
    (python)."""
    names = (path for kind in kinds for path in (paths.cache() / kind).glob("*"))
    return [path for path in names if _OURS.fullmatch(path.name)]


def used() -> set[Path]:
    """The finished builds of the present sources and settings, by whatever compiler, with their
    work trees and bindings."""
    folders: set[Path] = set()
    for folder, stamp in finished():
        has = stamp["inputs"]
        name = has["options"]
        flags = {word: word in name for word in ("stock", "portable", "vulkan", "metal")}
        options = Options(**flags, cuda=has.get("cuda", ""))
        # what came with a wheel has a name of its own, and no more inputs than these
        want = inputs(options) if name == options.name else sources(options)
        want.pop("nvcc", None)
        if all(has.get(key) == value for key, value in want.items()):
            folders |= {folder, _tree(has), paths.cache() / "python" / has["pin"][:12]}
    return folders


def _tree(want: dict[str, Any]) -> Path:
    """The work tree of a build."""
    return paths.cache() / "build" / _hash({k: v for k, v in want.items() if k != "ops"})


def _target(options: Options, want: dict[str, Any]) -> Path:
    return paths.cache() / "lib" / f"{options.name}-{_hash(want)}"


def _has(folder: Path, tools: tuple[str, ...]) -> bool:
    return all((folder / tool).is_file() for tool in tools)


def default_jobs() -> int:
    return max(1, min(probe.cores(), probe.memory() >> 30))  # a compiler takes up to 1 GiB


def prepare(tree: Path, options: Options) -> None:
    """Fetch, unpack and patch the source; copy ggml_ops. No part ever appears incomplete."""
    pin = source.read_pin()
    where = source.locate(pin)
    tree.mkdir(parents=True, exist_ok=True)
    os.utime(tree)  # `_prune` goes by the time of use
    if not (has_bindings() and (tree / "src").is_dir()):
        source.fetch(pin, where)
    unpack_bindings(where, "llama_cpp")
    if not (tree / "src").is_dir():
        source.unpack(where, pin.folder, untouched := tree / "untouched", _SKIP)
        if not options.stock:
            patches.apply_series(untouched)
        untouched.rename(tree / "src")
    if (cache := tree / "out" / "CMakeCache.txt").is_file() and (
        f"CMAKE_HOME_DIRECTORY:INTERNAL={tree / 'src'}\n" not in cache.read_text("utf-8")
    ):
        shutil.rmtree(tree / "out")  # the folder was moved, which cmake cannot follow
    _sync_ops(tree / "ops", options)


def _ops_files(root: Path, options: Options) -> dict[str, Path]:
    """The files of ggml_ops/ that this build has, keyed by their path below `root`."""
    part = "compilers" if options.stock else "."
    return {
        file.relative_to(root).as_posix(): file
        for file in sorted((root / part).rglob("*"))
        if file.is_file() and file.suffix != ".md" and not file.name.startswith(".")
        if options.cuda or file.relative_to(root).parts[0] != "cuda"
    }


def _sync_ops(into: Path, options: Options) -> None:
    """Make `into` a copy of ggml_ops/, writing only files that differ: ninja rebuilds just those.

    It is a copy, because the modification times of an installed package or of a checkout say
    nothing about the content.
    """
    files = _ops_files(paths.data("ggml_ops"), options)
    for old in sorted(into.rglob("*"), reverse=True):
        if old.is_file() and old.relative_to(into).as_posix() not in files:
            old.unlink()
    for name, file in files.items():
        content = file.read_bytes()
        copy = into / name
        if not copy.is_file() or copy.read_bytes() != content:
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(content)


def _publish(bin_dir: Path, target: Path, tools: tuple[str, ...], stamp: dict[str, Any]) -> None:
    """Copy the result out of the work tree, to a name that appears only when all of it is there."""
    libraries = "lib" if tools else ("libllama.", "libggml")  # others may be left over
    names = {file.name for file in bin_dir.iterdir() if file.name.startswith(libraries)}
    partial = target.with_name(target.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    for name in sorted(names | set(tools)):
        shutil.copy2(bin_dir / name, partial / name, follow_symlinks=False)
    publish(partial, target, stamp)


def publish(partial: Path, target: Path, stamp: dict[str, Any]) -> None:
    """Give a folder its stamp and its name. What is there makes room; programs keep the files that
    they have opened."""
    (partial / "stamp.json").write_text(json.dumps(stamp, indent=1), "utf-8")
    if target.exists():
        old = target.with_name(target.name + ".old.partial")
        shutil.rmtree(old, ignore_errors=True)
        target.rename(old)
        partial.rename(target)
        shutil.rmtree(old)
    else:
        partial.rename(target)


def _prune() -> None:
    """Delete the oldest builds and work trees, so that the cache does not grow with every edit.

    Each kind of build is counted separately, so that our own edits do not evict a stock build.
    """
    kept: dict[str, int] = {}
    for folder, stamp in finished():
        kind = stamp["inputs"]["options"]
        kept[kind] = kept.get(kind, 0) + 1
        if kept[kind] > _KEEP_BUILDS:
            shutil.rmtree(folder, ignore_errors=True)
    trees = [tree for tree in made("build") if tree.is_dir()]
    trees.sort(key=lambda tree: tree.stat().st_mtime, reverse=True)
    for tree in trees[_KEEP_TREES:]:
        shutil.rmtree(tree, ignore_errors=True)


def _hash(value: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:12]
