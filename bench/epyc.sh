#!/usr/bin/env bash
# A sweep for a large server: threads x depth x ratio, for each way to place memory on NUMA nodes.
#
#     bench/epyc.sh MODEL.gguf [OUT]       a model of yours
#     bench/epyc.sh llama2-7b  [OUT]       random weights of that shape: no download, any depth
#
# Stock llama.cpp (-fa 0 and -fa 1) and ours take turns in each case. Everything that is measured is
# recorded at once, below OUT; run the same line again and it goes on where it was. In place of
# editing: DEPTHS, THREADS, RATIOS, PLACES, ARGS (more options of `sparq-cpp bench`; --attn-only, with
# a NAME and an OUT of its own, times attention by itself).
set -euo pipefail
shopt -s extglob

model=${1:?usage: bench/epyc.sh MODEL.gguf|NAME [OUT]}
out=${2:-bench/results/epyc-$(basename "$model" .gguf)}
if [[ -f $model ]]; then what=(-m "$model"); else what=(--like "$model"); fi

sparq=sparq-cpp
if ! command -v "$sparq" >/dev/null; then
    sparq=$(cd "$(dirname "$0")/.." && pwd)/.venv/bin/sparq-cpp # of `make build`
    if [[ ! -x $sparq ]]; then
        echo "error: there is no sparq-cpp here, neither on PATH nor in .venv" >&2
        echo "hint: make build" >&2
        exit 1
    fi
fi

cores=$(lscpu -p=CORE,SOCKET | grep -v '^#' | sort -u | wc -l)                # without SMT twins
nodes=$(lscpu -p=NODE | grep -v '^#' | sort -u | wc -l)
node0=$(lscpu -p=CORE,SOCKET,NODE | grep -v '^#' | sort -u | grep -c ',0$' || true)

upto() { # 1,2,4,... below $1, and $1
    local n=1 list=
    while ((n < $1)); do list+=$n,; n=$((2 * n)); done
    echo "$list$1"
}
depths=${DEPTHS:-4096 16384 65536 131072}
ratios=${RATIOS:-1/4,1/8,1/16}

# place -> the command before `sparq-cpp`, the --numa mode, the threads. Weights lie where the first
# thread that used them is, the transposed K where those are that read it, K and V on one node, since
# one thread clears them; `interleave` spreads everything. `workers`: layers on one worker per node,
# each with its own memory; a token goes through the nodes one after the other
declare -A before=([plain]="" [distribute]="" [interleave]="numactl --interleave=all" \
                   [node0]="numactl --cpunodebind=0 --membind=0" [workers]="")
declare -A mode=([plain]="" [distribute]="--numa distribute" [interleave]="--numa numactl" \
                 [node0]="--numa numactl" [workers]="")
declare -A threads=([plain]=$(upto "$cores") [distribute]=$(upto "$cores") \
                    [interleave]=$(upto "$cores") [node0]=$(upto "$node0") \
                    [workers]=$node0)
places=${PLACES:-$(((nodes > 1)) && echo plain distribute interleave node0 workers || echo plain)}

echo "$cores cores, $nodes NUMA nodes ($node0 cores on node 0); places: $places" >&2
show() { [[ -r $2 ]] && echo "$1: $(<"$2")" >&2 || true; }
show "NUMA balancing, better 0" /proc/sys/kernel/numa_balancing
show "huge pages" /sys/kernel/mm/transparent_hugepage/enabled
show "governor" /sys/devices/system/cpu/cpu0/cpufreq/scaling_governor

started=()
stop_workers() { ((${#started[@]})) && kill "${started[@]}" 2>/dev/null || true; started=(); }
trap stop_workers EXIT
start_workers() { # one per node; sets `rpc`
    local node port ends=
    for ((node = 0; node < nodes; node++)); do
        port=$((${PORT:-50052} + node))
        numactl --cpunodebind="$node" --membind="$node" "$sparq" worker --port "$port" -t "$node0" &
        started+=($!)
        ends+=${ends:+,}127.0.0.1:$port
    done
    rpc=(--rpc "$ends" -ts "${ends//127.0.0.1:+([0-9])/1}")
    sleep "${WAIT:-10}" # until they listen
}

failed=0
for place in $places; do
    rpc=()
    if [[ $place == workers || ${before[$place]} == numactl* ]] && ! command -v numactl >/dev/null; then
        echo "$place: skipped, there is no numactl here" >&2
        continue
    fi
    [[ $place == workers ]] && start_workers
    for depth in $depths; do
        echo "== $place, depth $depth" >&2
        # pages of the model stay where another place put them: only root can make the kernel forget
        [[ $nodes -gt 1 && -w /proc/sys/vm/drop_caches ]] && echo 3 >/proc/sys/vm/drop_caches
        mkdir -p "$out/$place"
        ${before[$place]} "$sparq" bench --yes "${what[@]}" ${mode[$place]} -d "$depth" \
            "${rpc[@]}" -t "${THREADS:-${threads[$place]}}" --ratio "$ratios" --out "$out/$place" \
            ${ARGS:-} | tee "$out/$place/d$depth.md.partial" || { failed=1; continue; }
        mv "$out/$place/d$depth.md.partial" "$out/$place/d$depth.md"
    done
    stop_workers
done
exit $failed
