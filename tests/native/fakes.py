"""A build that takes milliseconds: a tiny source, and cmake and ninja replaced by scripts.

`world(folder)` makes it. `python fakes.py FOLDER` builds in it, as another process would; the
variable FAKE_NINJA is shell code that its ninja runs first.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from pyorch import paths
from pyorch.native import build, cmake, probe, smoke

UPSTREAM = """\
package  llama-cpp-python
folder   vendor/llama.cpp
repo     -

version  0.0.1
sha256   {sha256}
commit   0123456789abcdef
"""

PATCH = """\
Subject: [PATCH] llama : hook

Upstream-Status: Pending
Calls: none
Gate: none

diff --git a/src/a.cpp b/src/a.cpp
--- a/src/a.cpp
+++ b/src/a.cpp
@@ -1,2 +1,3 @@
 one
+hook
 two
"""


NINJA = """\
#!/bin/sh
eval "$FAKE_NINJA"
echo "run $@" >> {folder}/ninja.log
mkdir -p $2/bin && echo library > $2/bin/libllama.so
tools="$2/bin/llama-bench $2/bin/llama-server $2/bin/libllama-common.so"
case "$*" in *llama-[bs]*) for f in $tools; do echo tool > $f; done; esac
echo "[1/1] done"
"""


def world(folder: Path) -> None:
    """Write the tiny source, its patch, our sources and the two scripts below `folder`."""
    files = {
        "sdist/llama_cpp/__init__.py": "",
        "sdist/vendor/llama.cpp/CMakeLists.txt": "",
        "sdist/vendor/llama.cpp/src/a.cpp": "one\ntwo\n",
        "patches/UPSTREAM": UPSTREAM.format(sha256="0" * 64),
        "patches/0001-hook.patch": PATCH,
        "ggml_ops/op.c": "int a;\n",
        "ggml_ops/cpu/op.c": "int b;\n",
        "bin/cmake": '#!/bin/sh\neval "$FAKE_CMAKE"\n',
        "bin/ninja": NINJA.format(folder=folder),
    }
    write(folder, files)


def write(folder: Path, files: dict[str, str]) -> Path:
    """Files below a folder by their names; a script may run. Returns the folder."""
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, "utf-8")
        (folder / name).chmod(0o755 if text.startswith("#!") else 0o644)
    return folder


def edit(world: Path, text: str) -> None:
    """Another source of ours."""
    (world / "ggml_ops" / "op.c").write_text(f"int {text};\n")


def runs(world: Path) -> int:
    """How often ninja ran."""
    log = world / "ninja.log"
    return len(log.read_text().splitlines()) if log.exists() else 0


def use(folder: Path) -> None:
    """Make this process build in that world."""
    os.environ["SPARQ_CACHE"] = str(folder / "cache")
    os.environ["SPARQ_LLAMA_SOURCE"] = str(folder / "sdist")
    paths.data = lambda name: folder / name
    cmake.tool = lambda name: str(folder / "bin" / name)
    cpu = probe.Probe((), (), {}, True)
    probe.probe = lambda compiler, native: cpu
    smoke.fault = lambda folder, gpu=False: None  # what these builds make is no library


if __name__ == "__main__":
    use(Path(sys.argv[1]))
    print(build.build(build.Options()))
