"""Makes wheels that need no compiler where they are installed: `make wheels`.

A wheel is the package of Python and, in `pyorch/_built`, what a native build puts into the cache:
the libraries, the tools and the bindings. Only the backend of the CPU is there many times, once for
each set of instructions (llama.cpp's GGML_CPU_ALL_VARIANTS); `pyorch/native/carried.py` takes the
best that works when the wheel is first used.

The compiler is the Clang of the package `ziglang`, which links for any version of glibc. If each of
our libraries had its C++ library inside, one would not catch what another throws. So we compile a
shared one from its sources. Its symbols have a version, on macOS a namespace, so that a process may
have the system's C++ library too.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from pyorch import children, paths
from pyorch.errors import SparqError
from pyorch.native import build, cmake, page, probe, source
from pyorch.progress import say


@dataclass(frozen=True)
class System:
    """What differs between the systems for which Zig links."""

    name: str  # as cmake has it
    suffix: str  # of a library
    origin: str  # what its loader calls the folder of a library
    named: str  # the linker's option with a library's own name, or what others are linked with
    has_unwinder: bool  # so that the C++ library needs none
    linked: str = ""  # what stands behind the name of a library in that of what others link with
    program: str = ""  # what stands behind the name of a program
    prefix: str = "lib"  # of ggml's libraries
    module: str = "so"  # the suffix of what only dlopen() loads
    flags: tuple[str, ...] = ()  # of all compilers
    definitions: tuple[tuple[str, str], ...] = ()  # for cmake

    def library(self, name: str) -> str:
        """The file name of a shared library of ggml."""
        return f"{self.prefix}{name}.{self.suffix}"


@dataclass(frozen=True)
class Target:
    """A kind of machine, and what its wheel is for."""

    zig: str  # with the oldest glibc, or macOS, on which it runs
    tag: str
    processor: str
    variants: tuple[str, ...]  # of llama.cpp's, from its ggml/src/CMakeLists.txt
    system: System

    @property
    def cxx_library(self) -> str:
        """The name of the file that has the C++ library."""
        return f"libc++.{self.system.suffix}"


LINUX = System("Linux", "so", "$ORIGIN", "-Wl,-soname,{name}", has_unwinder=False)
MACOS = System(
    "Darwin",
    "dylib",
    "@loader_path",
    "-Wl,-install_name,@rpath/{name}",
    has_unwinder=True,
    # names of its own, since inline functions of the same name in the system's would replace these
    flags=("-U_LIBCPP_ABI_NAMESPACE", "-D_LIBCPP_ABI_NAMESPACE=__sparq"),
    # Zig has none of the frameworks, and no such tool, which only other ways to link need
    definitions=(
        ("GGML_ACCELERATE", "OFF"),
        ("GGML_BLAS", "OFF"),
        ("CMAKE_INSTALL_NAME_TOOL", "true"),
    ),
)
WINDOWS = System(
    "Windows",
    "dll",
    "",  # always where the program is
    "-Wl,--out-implib,{path}.a",
    has_unwinder=False,
    linked=".a",
    program=".exe",
    prefix="",
    module="dll",
    definitions=(("CMAKE_RC_COMPILER", "true"),),  # llama.cpp has no resources
)


TARGETS = {
    "linux-x86_64": Target(
        "x86_64-linux-gnu.2.17",
        "py3-none-manylinux_2_17_x86_64",
        "x86_64",
        # llama.cpp has five more, for few machines; each takes minutes, and 1 MB of the wheel
        ("x64", "sandybridge", "haswell", "alderlake")
        + ("skylakex", "cascadelake", "icelake", "zen4", "sapphirerapids"),
        LINUX,
    ),
    "linux-aarch64": Target(
        "aarch64-linux-gnu.2.17",
        "py3-none-manylinux_2_17_aarch64",
        "aarch64",
        # a Raspberry Pi 4; Graviton2, Ampere and Apple; Graviton3; Graviton4 and Grace
        ("armv8.0_1", "armv8.2_2", "armv8.6_1", "armv8.6_2"),
        LINUX,
    ),
    "macos-arm64": Target(
        "aarch64-macos.11.0",
        "py3-none-macosx_11_0_arm64",
        "arm64",
        ("apple_m1", "apple_m2_m3"),
        MACOS,
    ),
    "windows-x86_64": Target(
        "x86_64-windows-gnu",
        "py3-none-win_amd64",
        "x86_64",
        ("x64", "haswell", "skylakex", "zen4"),
        WINDOWS,
    ),
}
# Zig knows the instruction sets of Arm by other names than the compilers for which cmake is made.
_ARM = r"s/^-march=armv([0-9])\.?([0-9]*)-a/-mcpu=generic+v\1_\2a/; s/_a/a/; s/[+]fp16/+fullfp16/"


def make(name: str, into: Path) -> Path:
    """Make one wheel in the folder `into`. Returns its file.

    Raises:
        SparqError: something did not compile.
    """
    target = TARGETS[name]
    options = build.Options(portable=True)
    made_of = build.sources(options)
    version = metadata.version("ziglang")
    how = source.digest_of({"wheel": Path(__file__), "cmake": Path(cmake.__file__)})
    key = [made_of["pin"], made_of["patches"], how, target.zig, version]
    with workshop(name, target, key) as (zig, lock):
        root = zig.root
        variants = tuple(f"ggml-cpu-{variant}" for variant in target.variants)
        for part, targets, more in (
            ("all", ("llama", *build.TOOLS), {}),
            ("cpu", variants, {"GGML_BACKEND_DL": "ON", "GGML_CPU_ALL_VARIANTS": "ON"}),
        ):
            say(f"{name}: {', '.join(targets)}")
            tree = root / part
            build.prepare(tree, options)
            chain = zig.toolchain(tree, more)
            cmake.compile_tree(tree, options, targets, build.default_jobs(), chain, lock)
        built, system = root / "built", target.system
        shutil.rmtree(built, ignore_errors=True)
        (built / "lib").mkdir(parents=True)
        bin_all, bin_cpu = root / "all" / "out" / "bin", root / "cpu" / "out" / "bin"
        for file in (
            *bin_all.glob(f"*.{system.suffix}"),
            *(bin_all / (tool + system.program) for tool in build.TOOLS),
            *(bin_cpu / f"{system.prefix}{variant}.{system.module}" for variant in variants),
            root / target.cxx_library,
        ):
            if file.name != system.library("ggml-cpu"):  # the variants replace it
                shutil.copy(file, built / "lib")
        pin = source.read_pin()
        where, licenses = source.locate(pin), built / "licenses"
        shutil.copytree(page.build(), built / "page")
        source.unpack(where, "llama_cpp", built / "python" / "llama_cpp")
        source.unpack(where, "", licenses / "llama_cpp", only=("LICENSE.md",))
        copy_licenses(licenses, {"llama.cpp": root / "all" / "src", "zig": zig.folder})
        files = sorted(file for file in built.rglob("*") if file.is_file())
        stamp = {
            "stamp": source.digest_of({str(f.relative_to(built)): f for f in files})[:12],
            "inputs": made_of,
            "pin": f"{pin.package} {pin.version}",
            "compiler": zig.version,
        }
        (built / "stamp.json").write_text(json.dumps(stamp, indent=1), "utf-8")
        env = {"SPARQ_WHEEL_LIBRARY": str(built), "SPARQ_WHEEL_TAG": target.tag}
        return pack(paths.REPOSITORY, "sparq_cpp", env, into)


@contextmanager
def workshop(name: str, target: Target, key: list[Any]) -> Iterator[tuple[Zig, int]]:
    """The compiler with its C++ library, in a folder of the cache that is for this `key` and takes
    the place of older ones; and the descriptor of its lock, which is not the one of the cache, for
    that would keep every other build waiting."""
    digest = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:12]
    root = paths.cache() / "wheels" / f"{name}-{digest}"
    for old in set(root.parent.glob(f"{name}-*")) - {root}:
        with paths.locked(old):  # another clone may make its wheel
            shutil.rmtree(old)
    with paths.locked(root) as lock:
        zig = Zig(target, root)
        if not (root / target.cxx_library).exists():
            say(f"{name}: the C++ library of {zig.version}")
            zig.make_cxx_library()
        yield zig, lock


def copy_licenses(into: Path, trees: dict[str, Path]) -> None:
    """Copy the licences of all that is in each tree to a folder of its name."""
    for name, tree in trees.items():
        for file in (f for f in tree.rglob("LICENSE*") if f.is_file()):
            copy = into / name / file.relative_to(tree)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, copy)


def pack(project: Path, name: str, env: dict[str, str], into: Path) -> Path:
    """The wheel of a project of Python, of that name, made with the variables of hatch_build.py.

    Raises:
        SparqError: hatchling failed.
    """
    argv = [*children.python("hatchling"), "build", "-t", "wheel", "-d", str(into)]
    done = children.run(argv, env={**os.environ, **env}, cwd=project)
    if done.returncode:
        raise SparqError(f"hatchling failed: {children.reason(done)}", "look at hatch_build.py")
    made = into.glob(f"{name}-*-{env['SPARQ_WHEEL_TAG']}.whl")  # beside those of older versions
    return max(made, key=lambda file: file.stat().st_mtime)


class Zig:
    """The compiler for one target, and the C++ library that all of ours share."""

    def __init__(self, target: Target, root: Path) -> None:
        import ziglang

        self.version = f"ziglang {metadata.version('ziglang')}"
        self.target, self.root = target, root
        self.folder = Path(ziglang.__file__).parent
        os.environ["ZIG_GLOBAL_CACHE_DIR"] = os.environ["ZIG_LOCAL_CACHE_DIR"] = str(root / "zig")

    def make_cxx_library(self) -> None:
        """Compile `libc++.so` from libc++, libc++abi and libunwind, as LLVM's own build does."""
        objects = self.root / "libc++"
        objects.mkdir(parents=True, exist_ok=True)
        lib = self.folder / "lib"
        cxx, abi, unwind = (lib / name / "src" for name in ("libcxx", "libcxxabi", "libunwind"))
        system = self.target.system
        ours = ["-std=c++23", "-D_LIBCPP_BUILDING_LIBRARY", f"-I{cxx}", *system.flags]
        plain = ["-D_LIBUNWIND_IS_NATIVE_ONLY", f"-I{unwind.parent / 'include'}"]
        libc = f"-I{cxx.parent / 'libc'}"
        left_out = {abi / "cxa_noexception.cpp"}
        if system is WINDOWS:
            left_out.add(abi / "stdlib_new_delete.cpp")  # which libc++ has too, and none is weak
            # what is to be exported says so, as in LLVM's own build
            ours += [f"-U_LIB{name}_DISABLE_VISIBILITY_ANNOTATIONS" for name in ("CPP", "CXXABI")]
        jobs = [
            ("c++", [*cxx.glob("*.cpp"), *cxx.glob("filesystem/*.cpp"), *cxx.glob("ryu/*.cpp")],
             [*ours, "-DLIBCXX_BUILDING_LIBCXXABI", "-DLIBC_NAMESPACE=__llvm_libc", libc]),
            ("c++", set(abi.glob("*.cpp")) - left_out,
             [*ours, "-D_LIBCXXABI_BUILDING_LIBRARY", f"-I{abi}"]),
        ]  # fmt: skip
        if not system.has_unwinder:
            jobs += [
                ("c++", [unwind / "libunwind.cpp"], [*plain, "-fno-exceptions", "-fno-rtti"]),
                ("cc", [*unwind.glob("UnwindLevel1*.c"), *unwind.glob("UnwindRegisters*.S")],
                 [*plain, "-fexceptions"]),
            ]  # fmt: skip
        if system is WINDOWS:
            jobs += [
                ("c++", [*cxx.glob("support/win32/*.cpp")], ours),
                # as C++ it would find the compiler's unwind.h before its own
                ("cc", [unwind / "Unwind-seh.cpp"], [*plain, "-fno-exceptions", "-fno-rtti"]),
            ]
        flags = ["-O2", "-fPIC", "-DNDEBUG", "-funwind-tables", "-w", *self._same_names(lib)]
        todo = [
            ([driver, *flags, *more, "-c", str(file)], objects / f"{file.parts[-3]}-{file.stem}.o")
            for driver, files, more in jobs
            for file in sorted(files)
        ]
        with ThreadPoolExecutor(build.default_jobs()) as pool:
            list(pool.map(lambda job: self.run([*job[0], "-o", str(job[1])]), todo))
        name = self.target.cxx_library
        named = system.named.format(name=name, path=self.root / name)
        argv = ["cc", "-shared", "-s", "-nostdlib++", named]
        if system is LINUX:
            versions = objects / "versions.map"
            versions.write_text("SPARQ_1 { *; };\n", "utf-8")
            argv.append(f"-Wl,--version-script={versions}")
        elif system is WINDOWS:
            argv.append("-O2")  # or Zig writes the time into it
        self.run([*argv, *(str(file) for _, file in todo), "-o", str(self.root / name)])

    def toolchain(self, tree: Path, more: dict[str, str]) -> cmake.Toolchain:
        """The tools as cmake wants them: a program each, without arguments."""
        programs = {}
        zig = shlex.quote(str(self.folder / "zig"))
        linked = [f"{self.root / self.target.cxx_library}{self.target.system.linked}"]
        if self.target.system is WINDOWS:
            linked.append(str(self._hidden()))
        library = shlex.join(linked)
        # here, where a path may have spaces, which it may not in CFLAGS
        target = shlex.join(["-target", self.target.zig, *self._same_names(tree)])
        translated = [
            "for arg do shift; case $arg in",
            f"-march=armv*) arg=$(echo \"$arg\" | sed -E '{_ARM}');;",
            "-bundle) arg=-dynamiclib;;",  # macOS does not link with what is a module
            'esac; set -- "$@" "$arg"; done',
        ]
        for name, lines in {
            "cc": [*translated, f'exec {zig} cc {target} "$@"'],
            # what is linked as C++ by Zig has a C++ library of its own
            "c++": [
                *translated,
                f'case " $* " in *" -c "*) exec {zig} c++ {target} "$@" ;; esac',
                f'exec {zig} cc {target} "$@" {library}',
            ],
            "ar": [f'exec {zig} ar "$@"'],
            "ranlib": [f'exec {zig} ranlib "$@"'],
        }.items():
            program = programs[name] = self.root / name
            program.write_text("\n".join(["#!/bin/sh", *lines, ""]), "utf-8")
            program.chmod(0o755)
        definitions = {
            "CMAKE_SYSTEM_NAME": self.target.system.name,
            "CMAKE_SYSTEM_PROCESSOR": self.target.processor,
            "CMAKE_AR": str(programs["ar"]),
            "CMAKE_RANLIB": str(programs["ranlib"]),
            "CMAKE_PLATFORM_NO_VERSIONED_SONAME": "ON",  # a wheel cannot hold links
            "CMAKE_INSTALL_RPATH": self.target.system.origin,
            **{f"CMAKE_{kind}_LINKER_FLAGS": "-s" for kind in ("EXE", "SHARED", "MODULE")},
            **dict(self.target.system.definitions),
            **more,
        }
        compiler = probe.Compiler(str(programs["cc"]), str(programs["c++"]), self.version)
        # Zig compiles with -O2 and for a debugger, whatever cmake says
        flags = ("-Xclang", "-O3", "-g0", "-fomit-frame-pointer", *self.target.system.flags)
        return cmake.Toolchain(
            compiler, probe.Probe((), flags, {}, openmp=False), more=tuple(definitions.items())
        )

    def _hidden(self) -> Path:
        """An object that keeps what Zig links into every library out of what a library exports,
        which is all else; another that is linked with it would have that twice."""
        text, made = self.root / "hidden.s", self.root / "hidden.o"
        names = ",".join(("atexit", "_CRT_INIT", "__mingw_module_is_dll"))
        text.write_text(f'.section .drectve,"yn"\n.ascii " -exclude-symbols:{names}"\n', "utf-8")
        self.run(["cc", "-c", str(text), "-o", str(made)])
        return made

    def _same_names(self, tree: Path) -> list[str]:
        """Options with which no path of this machine gets into what is compiled."""
        return [f"-ffile-prefix-map={tree}=.", f"-ffile-prefix-map={self.folder}=zig"]

    def run(self, argv: list[str]) -> None:
        """Compile or link: `cc` or `c++`, and its arguments."""
        driver, *rest = argv
        full = [str(self.folder / "zig"), driver, "-target", self.target.zig, *rest]
        done = children.run(full)
        if done.returncode:
            raise SparqError(f"{argv[-1]}: {children.reason(done)}", "another version of ziglang?")
