#!/bin/sh
# Packs what a bare machine with a CUDA toolkit, but no package index, needs for bench/gpu/all.sh:
#
#   bench/gpu/pack.sh FOLDER            the pinned source, to be built there      (below 64 MiB; needs the built cache, see `make build`)
#   bench/gpu/pack.sh FOLDER --built    the library, where time on that machine is short: first, here,
#                                       sparq-cpp build --portable --cuda 90    (20 minutes on two cores; packed, 42 MB)
#   bench/gpu/pack.sh . --built         the same into this checkout, which is taken there itself: vendor/ and library.tar.xz
#
# Our files as committed, Python packages without compiled parts, and, to be built, the pinned source without what no target of ours compiles. The
# machine brings python3 with numpy, a C++ compiler, CUDA's libraries, and for a build cmake, ninja and nvcc.
set -eu
[ $# = 1 ] || [ "$#-${2:-}" = 2---built ] || { sed -n '2,10p' "$0"; exit 2; }
root=$(cd "$(dirname "$0")/../.." && pwd)
[ "$1" = . ] && out=$root || out=$(realpath -m "$1")
[ ! -e "$out" ] || [ "$out" = "$root" ] || { echo "error: $out is there already"; echo "hint: name a new folder"; exit 2; }
python=${PYTHON:-$root/.venv/bin/python}
rm -rf "$out/vendor" "$out/library"
mkdir -p "$out/vendor"

[ "$out" = "$root" ] || git -C "$root" archive HEAD -- . ':!bench/results' ':!bench/figures' | tar -x -C "$out"

if [ $# = 2 ]; then
    built=$(cd "$root" && "$python" - <<'PY'
from pyorch.native import build
found = [f for f, stamp in build.finished() if stamp["inputs"]["options"] == "sparq-portable-cuda"]
print(found[0] if found else "", build.bindings())
PY
    )
    [ -n "${built% *}" ] || { echo "error: no portable build with CUDA"; echo "hint: sparq-cpp build --portable --cuda 90"; exit 1; }
    mkdir "$out/library"
    cp -R "${built% *}/." "$out/library"
    cp -R "${built#* }" "$out/library/python"
    tar -C "$out" -cf - library | xz -T0 > "$out/library.tar.xz"
    rm -r "$out/library"
else
    # the source that the build is pinned to, as a folder (SPARQ_LLAMA_SOURCE)
    (cd "$root" && "$python" - "$out/llama-source" <<'PY'
import shutil, sys
from pathlib import Path
from pyorch.native import source
pin, into = source.read_pin(), Path(sys.argv[1])
where = source.locate(pin)
for folder in (pin.folder, "llama_cpp"):
    source.unpack(where, folder, into / folder, ("models", "docs", "media", "benches", "gguf-py"))
upstream = into / pin.folder
for name in ("ggml-sycl", "ggml-vulkan", "ggml-opencl", "ggml-metal", "ggml-cann", "ggml-hexagon", "ggml-webgpu", "ggml-musa"):
    folder = upstream / "ggml" / "src" / name
    for file in [f for f in folder.rglob("*") if f.is_file() and f.name != "CMakeLists.txt"]:
        file.unlink()
for name in ("examples", "tests", "ci", ".devops", ".github", "tools/ui", "tools/server/public", "tools/server/tests", "tools/server/webui"):
    shutil.rmtree(upstream / name, ignore_errors=True)
PY
    )
fi

# Python packages; what is compiled in them is left out, each of them runs without
"$python" -m pip install --quiet --no-compile --no-deps --target "$out/vendor" \
    click rich markdown-it-py mdurl pygments gguf pyyaml tqdm jinja2 markupsafe diskcache typing-extensions \
    platformdirs filelock pytest pluggy iniconfig packaging tomli exceptiongroup
find "$out/vendor" -name '*.so' -delete
rm -rf "$out/vendor/bin" "$out"/vendor/*.dist-info/RECORD

[ "$out" = "$root" ] || du -sh "$out" | sed 's/\t.*/ packed/'
