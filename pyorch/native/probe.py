"""What this machine can compile and run, found by trying.

Some cloud machines report AMX and kill the process at its first tile instruction. So each
instruction set that `-march=native` would use is executed once, in a child process.
"""

from __future__ import annotations

import hashlib
import math
import os
import platform
import re
import shlex
import shutil
import subprocess
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pyorch import children, system
from pyorch.errors import SparqError
from pyorch.native import cgroup

_INSTALL = (
    "install one (apt install g++, dnf install gcc-c++, xcode-select --install) or set CC and CXX"
)


@dataclass(frozen=True)
class Compiler:
    cc: str  # as in the variable CC; it may include arguments
    cxx: str
    version: str  # the first lines of both compilers' `--version`


@dataclass(frozen=True)
class Probe:
    """`flags` are for the C and C++ compilers; `off` has the reason for each feature it names."""

    isa: tuple[str, ...]
    flags: tuple[str, ...]
    off: dict[str, str]
    openmp: bool


def find_compiler() -> Compiler | None:
    """CC and CXX if set, else the first usual pair on PATH; None if there is none."""
    if "CC" in os.environ or "CXX" in os.environ:
        pairs = [(os.environ.get("CC", "cc"), os.environ.get("CXX", "c++"))]
    else:
        pairs = [("cc", "c++"), ("gcc", "g++"), ("clang", "clang++")]
    for cc, cxx in pairs:
        if all(command.split() and shutil.which(shlex.split(command)[0]) for command in (cc, cxx)):
            outputs = [run([*shlex.split(command), "--version"]).stdout for command in (cc, cxx)]
            lines = [(text.splitlines() or ["unknown version"])[0] for text in outputs]
            return Compiler(cc, cxx, "; ".join(lines))
    return None


def need_compiler() -> Compiler:
    """The compiler that `find_compiler` finds.

    Raises:
        SparqError: none is there.
    """
    compiler = find_compiler()
    if compiler is None:
        chosen = " ".join(f"{k}={os.environ[k]}" for k in ("CC", "CXX") if k in os.environ)
        raise SparqError(f"no C and C++ compiler found{f' ({chosen})' if chosen else ''}", _INSTALL)
    return compiler


def cpu() -> tuple[str, str]:
    """The CPU's name, and a hash of all that the system says about its instruction sets."""
    if platform.system() == "Darwin":
        text = run(["sysctl", "machdep.cpu", "hw.optional"]).stdout
        name = re.search(r"machdep.cpu.brand_string: (.*)", text)
    else:
        try:
            info = Path("/proc/cpuinfo").read_text("utf-8", "replace").split("\n\n")[0]
        except OSError:
            info = f"model name: {platform.processor()}"
        name = re.search(r"^model name\s*: (.*)", info, re.M)
        lines = re.findall(r"^(?:flags|Features|model name|CPU part|isa)\s*:.*", info, re.M)
        text = "\n".join(lines)
    text += platform.machine()
    return (
        name.group(1) if name else platform.machine(),
        hashlib.sha256(text.encode()).hexdigest()[:12],
    )


def cores() -> int:
    """The number of CPU cores that this process may use, as a container or a unit limits them.

    A quota of 1.5 CPUs counts as two: measured on two cores, two threads then decode as fast as one
    and read prompts faster. With a quota of half a CPU two threads are a third slower than one.
    """
    n = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        n = len(os.sched_getaffinity(0))
    quota = cgroup.cpus()
    return n if quota is None else max(1, min(n, math.ceil(quota)))


def compute_cores(devices: Path = Path("/sys/devices")) -> int:
    """The number of threads that llama.cpp computes with by default: one per physical core, of two
    kinds of cores the fast ones; but no more than `cores`."""
    n = os.cpu_count() or 1
    if platform.system() == "Darwin":
        listed = run(["sysctl", "-n", "hw.perflevel0.physicalcpu", "hw.physicalcpu"]).stdout
        n = next((int(word) for word in listed.split() if word.isdecimal()), n)
    elif hasattr(os, "sched_getaffinity"):
        allowed = os.sched_getaffinity(0)
        with suppress(OSError):  # only machines with two kinds of cores by Intel have this file
            allowed = allowed & numbers((devices / "cpu_core/cpus").read_text()) or allowed
        places = (devices / f"system/cpu/cpu{cpu}/topology/thread_siblings_list" for cpu in allowed)
        n = len({place.read_text() for place in places if place.is_file()}) or len(allowed)
    elif n > 4:
        n //= 2
    return min(n, cores())


def numbers(text: str) -> set[int]:
    """`0-2,5` -> 0, 1, 2, 5."""
    ends = (part.partition("-") for part in text.strip().split(","))
    return {n for first, _, last in ends for n in range(int(first), int(last or first) + 1)}


def memory() -> int:
    """The bytes of main memory that this process may use."""
    installed, _ = system.memory()
    return min(installed, cgroup.memory() or installed)


# (name, macro that the compiler sets for it, switches that turn it off, statement that uses it).
# The statements work on volatile data, so that nothing is computed at compile time.
_X86 = (
    ("avx2", "__AVX2__", ["-mno-avx2"],
     "__m256i a = _mm256_set1_epi32(v); v = _mm256_extract_epi32(_mm256_abs_epi32(a), 0);"),
    ("fma", "__FMA__", ["-mno-fma"],
     "__m256 a = _mm256_set1_ps(v); v = (int) _mm256_cvtss_f32(_mm256_fmadd_ps(a, a, a));"),
    ("f16c", "__F16C__", ["-mno-f16c"],
     "v = (int) _mm_cvtss_f32(_mm_cvtph_ps(_mm_set1_epi16((short) v)));"),
    ("avx512", "__AVX512F__", ["-mno-avx512f"],
     "__m512i a = _mm512_set1_epi32(v); v = _mm512_reduce_add_epi32(_mm512_add_epi32(a, a));"),
    ("avx512-vnni", "__AVX512VNNI__", ["-mno-avx512vnni"],
     "__m512i a = _mm512_set1_epi32(v);"
     "v = _mm512_reduce_add_epi32(_mm512_dpbusd_epi32(a, a, a));"),
    ("avx512-bf16", "__AVX512BF16__", ["-mno-avx512bf16"],
     "__m512 a = _mm512_set1_ps(v); __m512bh b = _mm512_cvtne2ps_pbh(a, a);"
     "v = (int) _mm512_reduce_add_ps(_mm512_dpbf16_ps(a, b, b));"),
    ("avx-vnni", "__AVXVNNI__", ["-mno-avxvnni"],
     "__m256i a = _mm256_set1_epi32(v);"
     "v = _mm256_extract_epi32(_mm256_dpbusd_avx_epi32(a, a, a), 0);"),
    # The kernel must be asked for tiles first (ARCH_REQ_XCOMP_PERM, XTILEDATA), as ggml does.
    ("amx", "__AMX_TILE__", ["-mno-amx-tile", "-mno-amx-int8", "-mno-amx-bf16"],
     "if (syscall(SYS_arch_prctl, 0x1023, 18)) return 1;"
     "static unsigned char config[64] __attribute__((aligned(64)));"
     "config[0] = 1; for (int i = 0; i < 3; i++) { config[16 + 2*i] = 64; config[48 + i] = 16; }"
     "_tile_loadconfig(config); _tile_zero(0); _tile_zero(1); _tile_zero(2);"
     "_tile_dpbssd(0, 1, 2); _tile_release();"),
)  # fmt: skip


def probe(compiler: Compiler, native: bool) -> Probe:
    """Compile and run tiny programs. Takes one or two seconds.

    Args:
        native: whether the build will use `-march=native`, so that instruction sets matter.

    Raises:
        SparqError: the compiler cannot make a C++17 program that runs.
    """
    off: dict[str, str] = {}
    flags: list[str] = []
    isa: list[str] = []
    with tempfile.TemporaryDirectory(prefix="sparq-probe-") as temp:
        folder = Path(temp)
        code = "#include <string_view>\n#include <thread>\nint main() {\n"
        code += 'std::thread t([] {}); t.join(); return std::string_view("x").size() - 1; }\n'
        error = _compile(compiler.cxx, folder / "cxx.cpp", code, ["-std=c++17", "-pthread"])
        if error:
            raise SparqError(f"{compiler.cxx} cannot build a C++17 program: {error}", _INSTALL)
        if run([str(folder / "cxx")]).returncode != 0:
            raise SparqError(
                f"the program that {compiler.cxx} made in {folder.parent} does not run",
                "set TMPDIR to a folder in which programs may run, or use another compiler",
            )
        code = "#include <omp.h>\nint main(void) { return omp_get_max_threads() < 1; }\n"
        openmp = not _compile(compiler.cc, folder / "omp.c", code, ["-fopenmp"])
        openmp = openmp and run([str(folder / "omp")]).returncode == 0
        if not openmp:
            off["openmp"] = "the compiler lacks it; ggml uses its own threads"
        if native and platform.machine() in ("x86_64", "AMD64"):
            isa, flags, dead = _probe_x86(compiler, folder)
            off |= dead
    return Probe(tuple(isa), tuple(flags), off, openmp)


def without(cpu: Probe, feature: str, why: str) -> Probe:
    """The same machine with a feature switched off: an instruction set, or a part of ggml."""
    switches = next((s for name, _, s, _ in _X86 if name == feature), [])
    isa = tuple(name for name in cpu.isa if name != feature)
    return Probe(isa, (*cpu.flags, *switches), {**cpu.off, feature: why}, cpu.openmp)


def _probe_x86(compiler: Compiler, folder: Path) -> tuple[list[str], list[str], dict[str, str]]:
    code = "#include <immintrin.h>\n#include <stdlib.h>\n#include <sys/syscall.h>\n"
    code += "#include <unistd.h>\nint main(int n, char ** arg) {\n  volatile int w = n;\n"
    code += "  int v = w;\n  switch (atoi(arg[1])) {\n"
    for i, (_, macro, _, statement) in enumerate(_X86):
        code += f"#ifdef {macro}\n  case {i}: {{ {statement} break; }}\n#endif\n"
    code += "  default: return 3;\n  }\n  w = v;\n  return 0;\n}\n"
    if error := _compile(compiler.cc, folder / "isa.c", code, ["-march=native", "-D_GNU_SOURCE"]):
        return [], [], {"isa probe": f"did not compile: {error}"}
    isa, flags, off = [], [], {}
    for i, (name, _, switches, _) in enumerate(_X86):
        status = run([str(folder / "isa"), str(i)]).returncode
        if status == 0:
            isa.append(name)
        elif status != 3:  # 3: the compiler does not use it in any case
            flags += switches
            how = children.ended(status) if status < 0 else "the kernel refuses it"
            off[name] = f"the CPU reports it, but executing it fails: {how}"
    return isa, flags, off


def _compile(compiler: str, file: Path, code: str, options: list[str]) -> str:
    """Compile to `file` without its suffix. Returns the first error line; empty on success."""
    file.write_text(code, "utf-8")
    done = run([*shlex.split(compiler), *options, str(file), "-o", str(file.with_suffix(""))])
    return "" if done.returncode == 0 else first_error(done.stderr)


def first_error(text: str) -> str:
    """The first line of a compiler's output that tells of an error."""
    lines = [s.strip() for s in text.splitlines() if re.search("error|fatal|cannot", s)]
    return (lines or ["no message"])[0]


def run(argv: list[str]) -> children.Done:
    """Run a program for its output, for a minute at most; one that cannot run returns 127."""
    env = {**os.environ, "LC_ALL": "C"}
    try:
        return children.run(argv, env=env, timeout=60)
    except OSError as error:
        return children.Done(argv, 127, "", f"error: {error}")
    except subprocess.TimeoutExpired:
        return children.Done(argv, 127, "", "error: it took more than a minute")
