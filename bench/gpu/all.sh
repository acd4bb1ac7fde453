#!/bin/sh
# Everything that needs a CUDA device, in one command: build, tests, benches, figures. A step that fails does not stop the others; the exit
# code is 1 if one failed, or tests were all skipped. Results: bench/results/<machine>, bench/figures, gpu-all.log.
#
#   bench/gpu/all.sh            what it wants: python3 (3.10+) with numpy, cmake, ninja, a C++ compiler, nvcc, a device
#   bench/gpu/all.sh STEP...    only these, by the names below, again if need be
#
# No step takes more than ten minutes: what is not through by then is cut off, and goes on when the script is called again. Steps that succeeded
# with the same sources are left out (gpu-all.done), builds go on with the next file, benches with the next case. In a pack (bench/gpu/pack.sh) nothing is downloaded; in a checkout `make build` comes first.
cd "$(dirname "$0")/../.." || exit 1
python=python3
[ -x .venv/bin/python ] && python=$PWD/.venv/bin/python
if [ -d vendor ]; then
    # the machine's own packages first: they may have compiled parts
    export PYTHONPATH="$PWD:$("$python" -c 'import site; print(":".join(site.getsitepackages()))'):$PWD/vendor"
    [ -d library ] || tar -xJf library.tar.xz
    export PIP_NO_INDEX=1 SPARQ_CACHE="${SPARQ_CACHE:-$PWD/cache}" SPARQ_LIBRARY="$PWD/library"
    # CUDA's libraries, which may be those of torch
    lib=$("$python" -c 'import site; print(site.getsitepackages()[0])')/nvidia/cu13/lib
    export LD_LIBRARY_PATH="$lib:/usr/local/cuda/lib64:${LD_LIBRARY_PATH:-}"
fi
export OPENBLAS_NUM_THREADS=1
sources=$(find pyorch ggml_ops patches tests bench -type f \( -name '*.py' -o -name '*.c*' -o -name '*.h' -o -name '*.patch' -o -name '*.sh' \) |
    LC_ALL=C sort | xargs cat | cksum | cut -d' ' -f1)
failed=0
wanted=" $* "

step() { # step NAME COMMAND...
    name=$1; shift
    if [ "$wanted" = "  " ]; then
        grep -qsx "$sources $name" gpu-all.done && { echo "== $name: done before"; return; }
    else
        case "$wanted" in *" $name "*) ;; *) return ;; esac
    fi
    echo "== $name" | tee -a gpu-all.log
    start=$(date +%s)
    timeout -k 20 570 "$@" > step.log 2>&1
    code=$?
    if grep -Eq '^[0-9]+ skipped' step.log; then # tests, and none of them ran
        code=5
    fi
    cat step.log >> gpu-all.log
    tail -n 30 step.log
    echo "== $name: exit code $code, $(($(date +%s) - start)) s" | tee -a gpu-all.log
    if [ $code = 0 ]; then echo "$sources $name" >> gpu-all.done; else failed=1; fi
    rm -f step.log
}
ops="tests/ops/test_steps.py tests/ops/test_attn.py tests/ops/test_quant.py tests/ops/test_mixed_kinds.py"
sparq="$python -m pyorch"
pytest="$python -m pytest -q -rs -p no:cacheprovider -W ignore::DeprecationWarning"
if "$python" -c 'import xdist' 2> /dev/null; then
    pytest="$pytest -n auto"
fi

step doctor $sparq doctor
[ -n "${SPARQ_LIBRARY:-}" ] || step build $sparq build --cuda native
step ops env SPARQ_TEST_DEVICE=cuda $pytest -m 'not slow' $ops
step decode $pytest -m 'gpu and not slow' tests/gpu -k 'not sanitizer'
# the wheels, if they were taken here (make wheels and, for this device alone, make wheel-cuda ARGS=90: dist/, 45 MB)
[ -z "$(ls dist/sparq_cpp_cuda-*.whl 2> /dev/null)" ] || step wheels $pytest -m gpu tests/test_package.py
step attention "$python" -m bench gpu_attention
for depth in 8192 16384 32768 46080; do
    step tokens-$depth "$python" -m bench gpu_tokens -d $depth
done
step tokens-shared "$python" -m bench gpu_tokens --like llama3-8b -d 32768,131072
# what a token launches per layer, as a table in gpu-all.log
traced() { # traced NAME SPEC
    step nodes-$1 sh -c "nsys profile -t cuda --cuda-graph-trace=node -f true -o nodes-$1 \
        $python -m bench gpu_tokens --force --out nodes -d 8192 -n 32 -r 1 -a $2 &&
        nsys stats --force-export=true -r cuda_gpu_kern_sum:base -f csv nodes-$1.nsys-rep > nodes-$1.csv"
}
if command -v nsys > /dev/null; then
    traced dense off
    traced sparse sparq,ratio=1/8,gpu_min_mb=0
    step nodes "$python" -m bench gpu_nodes nodes-dense.csv nodes-sparse.csv
fi
for tool in memcheck racecheck synccheck initcheck; do
    step $tool $pytest -m 'gpu and not slow' tests/gpu -k $tool
done
if [ -z "${SPARQ_LIBRARY:-}" ]; then
    step in-memory $sparq bench --yes --like llama3-8b -nkvo -d 131072 -a dense -a sparq,ratio=1/8,gpu_min_mb=0
    step cores $sparq bench --yes --like llama3-8b --layers 4 -ngl 0 -d 8192,32768,131072 -t 1,2,4,8,16 -r 1
    # what no device has timed yet (ggml_ops/cuda/sparse-switches.cuh): a library of each, built from a copy
    for switches in EARLY HEADS_8 SINGLE FENCE "FENCE SMEM_KEYS" PIPE_SCAN PIPE_ROWS "FENCE DSMEM_FINISH" \
            FORCED_EARLY MMA "HEADS_8 MMA" "EARLY SINGLE FENCE SMEM_KEYS PIPE_SCAN PIPE_ROWS DSMEM_FINISH FORCED_EARLY MMA"; do
        name=$(echo "$switches" | tr ' ' -)
        tree=gpu-all.switches/$name
        mkdir -p "$tree" && cp -r pyorch ggml_ops patches bench "$tree"
        for switch in $switches; do
            sed -i "s/define SPARQ_$switch 0/define SPARQ_$switch 1/" "$tree/ggml_ops/cuda/sparse-switches.cuh"
        done
        step "switch-$name" sh -c "cd $tree && $python -m pyorch build --cuda native && $python -m bench gpu_attention --out $name"
    done
fi
step figures "$python" -m bench draw gpu_attention gpu_end_to_end
exit $failed
