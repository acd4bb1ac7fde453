"""The op tests again, on sanitized builds of our sources: each in a process with the runtime.

Reads and writes outside of tensors and work buffers, undefined behaviour, races between threads.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from isa import SANITIZED

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
RUNTIMES = {"address": "libasan.so", "thread": "libtsan.so"}
SUITES = [
    "test_steps.py",
    "test_attn.py",
    "test_quant.py",
    "test_prefill.py",
    "test_threads.py",
    "test_mixed_kinds.py",
]

# The op on a mask that ends too early, or twice at the same time on the same result.
WRONG = """
import sys, threading
from pathlib import Path
sys.path[:0] = [{here!r}, {tests!r}]
import cases
from graphs import Sources
from ggml_ctypes import AttendParams
from isa import IsaGgml

target, lib_dir, headers, folder = sys.argv[1:]
ggml = IsaGgml(Path(lib_dir), target, Path(headers), Path(folder))
with ggml.graph() as g:
    s = Sources(cases.make(cases.Case(n_kv=1000, heads=(4, 4))), g)
    y = s.node("attend", AttendParams(1, 0, 0, 0))
    if target != "thread":
        s.mask.contents.data += 16
    else:
        compute = ggml.compute
        def twice(*args):
            other = threading.Thread(target=compute, args=args)
            other.start()
            compute(*args)
            other.join()
        ggml.compute = twice
    g.compute(y, n_threads=3)
"""


def runtime(target: str) -> str:
    """Path of the sanitizer's library; skips the test where the compiler has none."""
    name = RUNTIMES[target.split("-")[0]]
    if not shutil.which("gcc"):
        pytest.skip("no gcc")
    argv = ["gcc", f"-print-file-name={name}"]
    path = subprocess.run(argv, capture_output=True, text=True, check=True).stdout.strip()
    if path == name:
        pytest.skip(f"no {name}")
    return path


def run(target: str, lib_dir: Path, log: Path, *argv: str) -> tuple[int, str]:
    """(exit status, what the sanitizer said, and the last lines) of a Python process."""
    options = f"log_path={log}:detect_leaks=0:exitcode=66:print_stacktrace=1"
    env = {**os.environ, "LD_PRELOAD": runtime(target), "SPARQ_TEST_SANITIZE": target}
    env["SPARQ_TEST_LIB_DIR"] = str(lib_dir)  # nothing is to be compiled with that runtime loaded
    env |= {name: options for name in ("ASAN_OPTIONS", "UBSAN_OPTIONS")}
    env["TSAN_OPTIONS"] = f"log_path={log}:exitcode=66"
    done = subprocess.run([sys.executable, *argv], env=env, capture_output=True, text=True)
    said = "".join(f.read_text("utf-8", "replace") for f in log.parent.glob(f"{log.name}.*"))
    return done.returncode, said + (done.stdout + done.stderr)[-3000:] * (done.returncode != 0)


@pytest.mark.parametrize("target", SANITIZED)
def test_op_tests_run_clean(target: str, tmp_path: Path, native_lib_dir: Path) -> None:
    """A part of the cases of each test, see conftest.py: everything takes several times as long."""
    suites = [str(HERE / name) for name in SUITES]
    argv = ["-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", "not slow", *suites]
    code, said = run(target, native_lib_dir, tmp_path / "log", *argv)
    assert code == 0 and not said, said


@pytest.mark.parametrize(
    ("target", "report"),
    [("address", "use-after-poison"), ("address-scalar", "use-after-poison"), ("thread", "race")],
)
def test_what_is_wrong_is_seen(
    target: str, report: str, tmp_path: Path, native_lib_dir: Path, ggml_headers: Path
) -> None:
    program = WRONG.format(here=str(HERE), tests=str(HERE.parent))
    paths = [str(native_lib_dir), str(ggml_headers), str(tmp_path)]
    code, said = run(target, native_lib_dir, tmp_path / "log", "-c", program, target, *paths)
    assert code != 0 and report in said, said
