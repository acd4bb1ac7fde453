#!/bin/sh
# Everything that needs a CUDA device, in one command: build, tests, benches, figures. Stops at nothing: each step says how it
# ended, and the exit code is 1 if one failed. Results: bench/results/<machine>, bench/figures, gpu-all.log.
#
#   bench/gpu_all.sh            what it wants: python3 (3.10+) with numpy, cmake, ninja, a C++ compiler, nvcc, a device
#   bench/gpu_all.sh --cpu      only what runs without a device: the build for the CPU and its op tests
#
# In a pack (bench/gpu_pack.sh) nothing is downloaded; in a checkout `make build` comes first.
cd "$(dirname "$0")/.." || exit 1
python=python3
[ -x .venv/bin/python ] && python=.venv/bin/python
if [ -d vendor ]; then
    # the machine's own packages first: they may have compiled parts
    export PYTHONPATH="$PWD:$("$python" -c 'import site; print(":".join(site.getsitepackages()))'):$PWD/vendor"
    export SPARQ_LLAMA_SOURCE="$PWD/llama-source" PIP_NO_INDEX=1
fi
export SPARQ_CACHE="${SPARQ_CACHE:-$PWD/cache}" OPENBLAS_NUM_THREADS=1
failed=0
: > gpu-all.log

step() { # step NAME SECONDS COMMAND...
    name=$1; limit=$2; shift 2
    echo "== $name"
    start=$(date +%s)
    timeout "$limit" "$@" > step.log 2>&1
    code=$?
    cat step.log >> gpu-all.log
    tail -n 5 step.log
    echo "== $name: exit code $code, $(($(date +%s) - start)) s"
    [ $code = 0 ] || failed=1
    rm -f step.log
}
ops="tests/ops/test_steps.py tests/ops/test_attn.py tests/ops/test_quant.py"
sparq="$python -c __import__('pyorch.cli').cli.main()"

if [ "${1:-}" = --cpu ]; then
    export SPARQ_CUDA=0
    step "build for the CPU" 3000 $sparq build
    step "op tests on the CPU" 1800 "$python" -m pytest -q -p no:cacheprovider -m 'not slow' $ops
    step "the harness of the device tests" 600 "$python" -m pytest -q -p no:cacheprovider -m 'not gpu' tests/gpu
    exit $failed
fi
step doctor 120 $sparq doctor
step "build with CUDA" 1800 $sparq build --cuda --cuda-arch native
step "stock, with CUDA" 1800 $sparq build --stock --cuda --cuda-arch native
step "op tests on the device" 1800 env SPARQ_TEST_DEVICE=cuda "$python" -m pytest -q -p no:cacheprovider -m 'not slow' $ops
step "CPU against CUDA, decoding, graphs, sanitizer; kernels by themselves" 3600 "$python" -m pytest -q -p no:cacheprovider -m 'gpu and not slow' tests/gpu tests/cuda
step "attention by itself" 1800 "$python" bench/gpu.py
step "tokens" 3600 $sparq bench --like llama2-7b --quant f16 -d 8192,16384,32768,46080 -n 16 -r 3 --spec sparq,ratio=1/8,gpu_min_mb=0
step figures 300 "$python" bench/draw_gpu.py
exit $failed
