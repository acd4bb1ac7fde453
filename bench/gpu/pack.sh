#!/bin/sh
# Packs into this checkout what bench/gpu/all.sh needs on a bare machine with CUDA's libraries, but no package index: vendor/, Python packages without
# compiled parts, and library.tar.xz. The library is compiled first, here (20 minutes on two cores; packed, 42 MB): sparq-cpp build --portable --cuda 90
set -eu
cd "$(dirname "$0")/../.."
python=${PYTHON:-.venv/bin/python}
rm -rf vendor library
mkdir vendor library

built=$("$python" - <<'PY'
from pyorch.native import build
found = [f for f, stamp in build.finished() if stamp["inputs"]["options"] == "sparq-portable-cuda"]
print(found[0] if found else "", build.bindings())
PY
)
[ -n "${built% *}" ] || { echo "error: no portable build with CUDA"; echo "hint: sparq-cpp build --portable --cuda 90"; exit 1; }
cp -R "${built% *}/." library
cp -R "${built#* }" library/python
tar -cf - library | xz -T0 > library.tar.xz
rm -r library

# Python packages; what is compiled in them is left out, each of them runs without
"$python" -m pip install --quiet --no-compile --no-deps --target vendor \
    click rich markdown-it-py mdurl pygments gguf pyyaml tqdm jinja2 markupsafe diskcache typing-extensions \
    platformdirs filelock pytest pluggy iniconfig packaging tomli exceptiongroup
find vendor -name '*.so' -delete
rm -rf vendor/bin vendor/*.dist-info/RECORD
