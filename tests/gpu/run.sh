#!/usr/bin/env bash
# The whole verification on a GPU in one go: facts, correctness, compute-sanitizer, benchmarks; within eight minutes.
#
#   tests/gpu/run.sh [--binaries DIR] [--output DIR] [--only STEP,...] [--minutes N] [--python FILE] [--fake | --no-gpu]
#
# Needs a driver, a CUDA toolkit (for compute-sanitizer) and Python with PyTorch; no network, nothing is installed.
# --python: where the first python3 is not the one that has PyTorch, and neither is one of the usual virtual environments.
# Run from an unpacked bundle (tests/gpu/bundle.sh), or with --binaries and a build directory. Writes DIR/summary.md,
# DIR/summary.json and DIR/logs/<step>.log. A step that fails or takes too long does not stop the others; one that
# cannot run here says why. --fake runs it over the fake CUDA, NCCL and NVML of the test suite, --no-gpu as where no GPU
# is: both for the script's own test.
#
# Exit code: 0 every step passed or was skipped, 1 a step failed, 64 wrong usage.
set -u

here=$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")" && pwd)
root=$(cd "$here/../.." && pwd)
binaries=$root
output=gpu-results-$(date -u +%Y%m%d-%H%M%S)
only=
minutes=8
python=
fake=
no_gpu=

usage() {
    echo "run.sh: $1" >&2
    exit 64
}
while [ $# -gt 0 ]; do
    case "$1" in
        --fake) fake=yes; shift; continue ;;
        --no-gpu) no_gpu="no GPU (--no-gpu)"; shift; continue ;;
        --binaries | --output | --only | --minutes | --python) [ $# -ge 2 ] || usage "$1: needs a value" ;;
        *) usage "$1: unknown option (expected --binaries, --output, --only, --minutes, --python, --fake or --no-gpu)" ;;
    esac
    case "$1" in
        --binaries) binaries=$2 ;;
        --output) output=$2 ;;
        --only) only=,$2, ;;
        --minutes) minutes=$2 ;;
        --python) python=$2 ;;
    esac
    shift 2
done
[[ $minutes =~ ^[0-9]+$ ]] || usage "--minutes: '$minutes' is not a whole number"
[ -x "$binaries/launcher/ddprun" ] || usage "no launcher/ddprun in $binaries: unpack a bundle, or name a build directory with --binaries"
binaries=$(cd "$binaries" && pwd)
mkdir -p "$output/logs" || exit 1
output=$(cd "$output" && pwd)
scratch=$(mktemp -d) || exit 1
running=
trap 'rm -rf "$scratch"' EXIT
trap '[ -n "$running" ] && kill "$running" && wait "$running"; exit 130' INT TERM

ddprun=$binaries/launcher/ddprun
train=$binaries/workers/train/train
check=$binaries/workers/check/allreduce-check
tests=$binaries/tests/gpu
bench=$binaries/tests/bench/bench_gpu_kernels
# The same programs, linked with fakes of CUDA and its kernels.
[ -n "$fake" ] && tests=$binaries/tests/over_fakes && train=$tests/train check=$tests/allreduce-check bench=$tests/bench_gpu_kernels
support=$binaries/tests/support
deadline=$((SECONDS + minutes * 60))
tracer=$binaries/tests/gpu/cuda-trace.so

# ---- what is here

# The one that was named, else the first that has PyTorch, else the first of all.
find_python() {
    local candidate
    if [ -n "$python" ]; then
        command -v "$python" >/dev/null || usage "--python: there is no program '$python'"
        return
    fi
    for candidate in "$(command -v python3)" "${VIRTUAL_ENV:-}/bin/python3" /opt/*/bin/python3 /venv/bin/python3 "${HOME:-/root}"/*venv*/bin/python3 "${HOME:-/root}"/.venv*/bin/python3; do
        [ -x "$candidate" ] || continue
        python=${python:-$candidate}
        "$candidate" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("torch") is None)' 2>/dev/null || continue
        python=$candidate
        return
    done
}
find_python

# first_of NAME FILE...: the first that exists
first_of() {
    local file
    for file in "$@"; do
        [ -e "$file" ] && { echo "$file"; return; }
    done
}

# Libraries that the loader does not find are named to libddp and cuda-trace.so by their files: the toolkit's, else PyTorch's.
# name_library VARIABLE SONAME PATTERN...
name_library() {
    local variable=$1 soname=$2 pattern found
    shift 2
    [ -n "${!variable:-}" ] && return
    ldconfig -p 2>/dev/null | grep -q "$soname" && return
    for pattern in "$@"; do
        found=$(compgen -G "$pattern" | head -n 1)
        [ -n "$found" ] && { export "$variable=$found"; return; }
    done
}

# Containers are given the driver's files in folders that the loader may not know.
find_driver() {
    local folder
    for folder in /usr/local/nvidia/lib64 /usr/local/nvidia/lib /usr/lib64-nvidia /usr/lib/wsl/lib; do
        [ -e "$folder/libcuda.so.1" ] || continue
        ldconfig -p 2>/dev/null | grep -q 'libcuda\.so\.1' || export LD_LIBRARY_PATH=$folder${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
        break
    done
    command -v nvidia-smi >/dev/null || PATH=$PATH:/usr/local/nvidia/bin:/usr/lib/wsl/lib
}

# name_each TOOLKIT PACKAGES...: PACKAGES are the folders "nvidia" of Python's packages
name_each() {
    local toolkit=$1
    local -a places=("$toolkit/lib64" "$toolkit/extras/CUPTI/lib64")
    shift
    local packages
    for packages in "$@"; do
        # In packages of CUDA 13 all lie together, before that each in a folder of its own.
        places+=("$packages"/cu1[0-9]/lib "$packages"/{cublas,nccl,cuda_cupti}/lib)
    done
    name_library DDP_CUBLAS_LIBRARY libcublas.so.1 "${places[@]/%//libcublas.so.1[0-9]}"
    name_library DDP_NCCL_LIBRARY libnccl.so.2 "${places[@]/%//libnccl.so.2}"
    name_library CUDA_TRACE_CUPTI libcupti.so.1 "${places[@]/%//libcupti.so.1[0-9]}"
}

find_libraries() {
    local packages=
    [ -n "$python" ] && packages=$("$python" -c 'import importlib.util
found = importlib.util.find_spec("nvidia")
print(*(found.submodule_search_locations if found else []), sep="\n")' 2>/dev/null)
    local -a folders=()
    [ -n "$packages" ] && mapfile -t folders <<<"$packages"
    name_each "${CUDA_HOME:-/usr/local/cuda}" "${folders[@]}"
}

use_fakes() {
    export DDP_NCCL_LIBRARY=$support/fake_nccl/fake-nccl.so DDP_CUBLAS_LIBRARY=$support/fake_nccl/fake-nccl.so
    export DDPRUN_NVML_LIBRARY=$support/fake_nvml/fake-nvml.so FAKE_NVML=$scratch/machine.json FAKE_CUDA_DEVICES=1
    echo '{"driver": "0.0", "cuda": 13010, "gpus": [{"name": "a fake GPU", "uuid": "GPU-0", "total": 1000000}]}' >"$FAKE_NVML"
}

gpus=0
if [ -n "$fake" ]; then
    use_fakes
    gpus=4
elif [ -z "$no_gpu" ]; then
    [ -e /dev/nvidiactl ] || [ -e /dev/dxg ] || no_gpu="no GPU (there is no NVIDIA driver)"
    find_driver
    gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU')
    find_libraries
fi
sanitizer=$(command -v compute-sanitizer || first_of "${CUDA_HOME:-/usr/local/cuda}"/{bin,compute-sanitizer}/compute-sanitizer /usr/local/cuda-*/bin/compute-sanitizer)

# ---- steps

names=() outcomes=() spans=() details=()
failures=0

# Text without what Markdown tables and JSON strings cannot hold.
# shellcheck disable=SC1003
plain() { tr -d '\000-\010\013-\037\177"\\\\' | tr '|\t' '/ ' | cut -c1-300; }

note() {  # NAME OUTCOME SECONDS DETAIL
    local detail
    detail=$(printf '%s' "$4" | head -n 1 | plain)
    names+=("$1") outcomes+=("$2") spans+=("$3") details+=("$detail")
    case "$2" in failed | "timed out") failures=$((failures + 1)) ;; esac
    printf '%-24s %-9s %4s s  %s\n' "$1" "$2" "$3" "$detail"
}

# The line of a log that says most: of a failure the first that names it, of a training its proof, else the last.
telling_line() {
    local pattern
    [ "$1" = failed ] && for pattern in '^FAILED: ' '^\[[0-9]+\]: [a-z_-]+: ' 'first cause' '[Ee]rror'; do
        grep -m1 -E "$pattern" "$2" && return
    done
    [ "$1" = passed ] && [[ $2 = */train_* ]] && grep -m1 'bitwise equal' "$2" && return
    [ "$1" = passed ] && [[ $2 = */kernels.log ]] && grep -m1 '\[  PASSED  \]' "$2" && return
    grep -v '^[[:space:]]*$' "$2" | tail -n 1
}

# step NAME SECONDS COMMAND...: exit code 77 is "skipped"; the last line it wrote is the detail.
step() {
    local name=$1 bound=$2 log=$output/logs/$1.log begin=$SECONDS left outcome code
    shift 2
    [ -n "$only" ] && [[ $only != *,$name,* ]] && return
    left=$((deadline - SECONDS))
    if [ "$left" -lt 5 ]; then
        note "$name" skipped 0 "skipped: the $minutes minutes are over"
        return
    fi
    [ "$bound" -gt "$left" ] && bound=$left
    # In the background, so that a signal to this script is heard while a step runs; timeout ends all of its group.
    timeout -k 10 "$bound" "$@" >"$log" 2>&1 </dev/null &
    running=$!
    wait "$running"
    code=$?
    running=
    case $code in
        0) outcome=passed ;;
        77) outcome=skipped ;;
        124 | 137) outcome="timed out" ;;
        *) outcome=failed ;;
    esac
    note "$name" "$outcome" $((SECONDS - begin)) "$(telling_line "$outcome" "$log")"
}

skip() {  # NAME WHY
    [ -n "$only" ] && [[ $only != *,$1,* ]] && return
    echo "skipped: $2" >"$output/logs/$1.log"
    note "$1" skipped 0 "skipped: $2"
}

# gpu_step NAME SECONDS PROGRAM COMMAND...: needs a GPU, and the program to be in the bundle
gpu_step() {
    local name=$1 program=$3
    if [ -n "$no_gpu" ]; then skip "$name" "$no_gpu"
    elif [ ! -e "$program" ]; then skip "$name" "$(basename "$program") is not in $binaries"
    else step "$1" "$2" "${@:4}"
    fi
}
python_step() {
    if [ -z "$python" ]; then skip "$1" "no python3"; else gpu_step "$1" "$2" "$3" "$python" "${@:4}"; fi
}
nccl_python_step() {
    if [ -z "$python" ]; then skip "$1" "no python3"; else gpu_step "$1" "$2" "$3" bash -c "$sharing" over_nccl "$python" "${@:4}"; fi
}

# over_nccl COMMAND...: several ranks may share a GPU; an NCCL that refuses them is no failure.
over_nccl() {
    local code said=$scratch/over-nccl.$BASHPID
    "$@" 2>&1 | tee "$said"
    code=${PIPESTATUS[0]}
    [ "$code" -ne 0 ] && grep -oE 'NCCL [0-9.]+ takes one rank per GPU|needs CUDA device 1, 1 device is visible' "$said" |
        head -n 1 | sed 's/^/skipped: one GPU, and this NCCL shares none: /' | grep . && return 77
    return "$code"
}
sharing="$(declare -f over_nccl); scratch='$scratch'"'; over_nccl "$@"'

show_versions() {
    uname -srm
    ldd --version | head -n 1
    command -v nvcc >/dev/null && nvcc --version | tail -n 2
    [ -n "$python" ] && "$python" -c 'import sys; print("Python", sys.version.split()[0], sys.executable)'
    [ -n "$python" ] && "$python" -c 'import torch; print("PyTorch", torch.__version__, "CUDA", torch.version.cuda, "NCCL", torch.cuda.nccl.version())' 2>/dev/null
    env | grep -E '^(DDP_|NCCL_|CUDA_|LD_LIBRARY_PATH)' | sort
    [ -f "$root/MANIFEST" ] && head -n 5 "$root/MANIFEST"
    nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader 2>/dev/null || "$ddprun" --version
}

# Doctor's error is a failure here too; its report is the artefact.
examine() {
    local options=(--json)
    [ -n "$fake" ] && options+=(--no-run)
    "$ddprun" doctor "${options[@]}" >"$output/doctor.json"
    local code=$?
    "$ddprun" doctor --no-run
    return $code
}

# train_run NAME RANKS BACKEND OPTION...: the same training, the same samples in every step, whatever the number of ranks
train_run() {
    local name=$1 ranks=$2 backend=$3
    shift 3
    "$ddprun" --standalone --nproc-per-node="$ranks" --no-python "$train" --device cuda --backend "$backend" --deterministic \
        --data synthetic:4096,64,10 --hidden 256,256 --epochs 5 --batch-size $((512 / ranks)) --lr 0.05 --no-scale-lr --seed 1 \
        --checkpoint-dir "$scratch/checkpoints-$name" --log-json "$output/train-$name.json" "$@"
}

# trace_run NAME OPTION...: one epoch of many steps, and what the trace of its CUDA calls shows
trace_run() {
    local trace=$scratch/trace-$1.txt
    local -a listen=("CUDA_INJECTION64_PATH=$tracer" "CUDA_TRACE_FILE=$trace") how=()
    local -a shape=(--data "synthetic:142300,64,10" --hidden "256,256")
    [ -n "$fake" ] && listen=("FAKE_CUDA_TRACE=$trace") && shape=(--data "synthetic:17800,16,10" --hidden "16,16")
    [ "$1" = graph ] && how=(--graph)
    shift
    env "${listen[@]}" "$ddprun" --standalone --nproc-per-node=1 --no-python "$train" --device cuda --backend nccl \
        "${shape[@]}" --keep-data device --epochs 1 --batch-size 128 --lr 0.05 \
        --checkpoint-dir "$trace.checkpoints" "$@" || return
    [ -e "$trace" ] || { echo "FAILED: no trace came out; what cuda-trace says of it stands above"; return 1; }
    "$python" "$here/check_trace.py" "$trace" "${how[@]}"
}

# A sanitizer that cannot look into our kernels, or does not know them by their names, finds nothing in any.
find_planted_error() {
    local said
    said=$("$sanitizer" --tool memcheck --error-exitcode 1 --report-api-errors no "$only_kernels" kns=ScaleCast "$kernels" --out-of-bounds 2>&1)
    echo "$said"
    [[ $said = *"Invalid __global__ write"* ]] || { echo "FAILED: a write past the end was not found"; return 1; }
    echo "the write past the end was found"
}

step versions 60 bash -c "$(declare -f show_versions); ddprun='$ddprun' python='$python' root='$root' show_versions"
step doctor 60 bash -c "$(declare -f examine); ddprun='$ddprun' output='$output' fake='$fake' examine"

kernels=$tests/gpu_kernel_test
gpu_step kernels 90 "$kernels" "$kernels"
size=(--bytes 64MiB) && [ -n "$fake" ] && size=(--bytes 1MiB)
gpu_step all_reduce_nccl_1 40 "$check" "$ddprun" --standalone --nproc-per-node=1 --no-python "$check" --device cuda --backend nccl --seconds 1 "${size[@]}"
for ranks in 2 4 8; do
    gpu_step all_reduce_staged_$ranks 40 "$check" "$ddprun" --standalone --nproc-per-node=$ranks --no-python "$check" --device cuda --backend staged --seconds 1 --bytes 1MiB
done
training="$(declare -f train_run); ddprun='$ddprun' train='$train' scratch='$scratch' output='$output' train_run"
gpu_step train_nccl_1 60 "$train" bash -c "$training nccl-1 1 nccl"
for ranks in 2 4 8; do
    gpu_step train_staged_$ranks 60 "$train" bash -c "$training staged-$ranks $ranks staged"
done
python_step loss_curves 10 "$train" "$here/compare_curves.py" "$output/train-nccl-1.json" "$output"/train-staged-{2,4,8}.json
gpu_step train_bf16_graph_1 60 "$train" bash -c "$training bf16-graph 1 nccl --precision bf16 --cuda-graph"
gpu_step train_fp16_1 60 "$train" bash -c "$training fp16 1 nccl --precision fp16"
python_step loss_low_precision 10 "$train" "$here/compare_curves.py" "$output"/train-{nccl-1,bf16-graph,fp16}.json --tolerance 0.05
if [ -z "$python" ]; then skip trace_step "no python3"; skip trace_graph "no python3"
else
    tracing="$(declare -f trace_run); ddprun='$ddprun' train='$train' scratch='$scratch' here='$here' python='$python' tracer='$tracer' fake='$fake' trace_run"
    gpu_step trace_step 60 "$tracer" bash -c "$tracing step --clip 1"
    gpu_step trace_graph 60 "$tracer" bash -c "$tracing graph --precision bf16 --cuda-graph --clip 1"
fi
survivor=$tests/survivor_worker
within=1 && [ -n "$fake" ] && within=10
few=() && [ -n "$fake" ] && few=(--samples 1024 --epochs 8 --kills 1)
python_step killed_rank_staged 60 "$survivor" "$here/check_killed_rank.py" "$ddprun" "$survivor" --ranks 4 --backend staged --within $within
python_step recovery_staged 60 "$train" "$here/check_recovery.py" "$ddprun" "$train" --backend staged --json "$output/recovery-staged.json" "${few[@]}"
# Several ranks over NCCL, on one GPU if there is no other.
[ -n "$fake" ] && export FAKE_CUDA_DEVICES=$gpus
ranks=$gpus && [ "$ranks" -lt 2 ] && ranks=2
gpu_step all_reduce_nccl_$ranks 40 "$check" bash -c "$sharing" over_nccl "$ddprun" --standalone --nproc-per-node=$ranks --no-python "$check" --device cuda --backend nccl --seconds 1 --bytes 1MiB
gpu_step train_nccl_2 60 "$train" bash -c "$sharing" over_nccl bash -c "$training nccl-2 2 nccl"
[ -e "$output/train-nccl-2.json" ] && python_step loss_nccl_2 10 "$train" "$here/compare_curves.py" "$output"/train-nccl-{1,2}.json
nccl_python_step killed_rank_nccl 60 "$survivor" "$here/check_killed_rank.py" "$ddprun" "$survivor" --ranks "$ranks" --backend nccl --within $within
nccl_python_step recovery_nccl 90 "$train" "$here/check_recovery.py" "$ddprun" "$train" --backend nccl --ranks "$ranks" --json "$output/recovery-nccl.json" "${few[@]}"
[ -n "$fake" ] && export FAKE_CUDA_DEVICES=1
gradients=$tests/train_gradients
python_step gradients_torch 120 "$gradients" "$here/train_check.py" "$gradients" --json "$output/gradients.json"

few=() && [ -n "$fake" ] && few=(--elements 20000 --repetitions 2)
gpu_step bench_kernels 90 "$bench" "$bench" --json "$output/bench-kernels.json" "${few[@]}"
if [ -n "$fake" ]; then skip bench_train_torch "a fake GPU has no speed"
else python_step bench_train_torch 200 "$train" "$here/../bench/bench_train_torch.py" "$ddprun" "$train" --json "$output/bench-train.json"
fi

# The slowest last. Before 2023.3 the option had another name.
only_kernels=--kernel-name
[ -n "$sanitizer" ] && [ -z "$no_gpu" ] && ! "$sanitizer" --help 2>&1 | grep -q -e "$only_kernels" && only_kernels=--kernel-regex
if [ -n "$sanitizer" ] && [ -z "$no_gpu$fake" ]; then
    gpu_step memcheck_control 60 "$kernels" bash -c "$(declare -f find_planted_error); sanitizer='$sanitizer' kernels='$kernels' only_kernels='$only_kernels' find_planted_error"
fi
for tool in memcheck racecheck; do
    if [ -n "$no_gpu" ]; then skip $tool "$no_gpu"
    elif [ -n "$fake" ]; then skip $tool "kernels of a fake GPU run on the host"
    elif [ -z "$sanitizer" ]; then skip $tool "no compute-sanitizer (CUDA_HOME, PATH)"
    else
        # Tests ask for what must fail, and look at the answer themselves: a refused call is no finding.
        sanitize=("$sanitizer" --tool "$tool" --error-exitcode 1 --report-api-errors no)
        gpu_step $tool 120 "$kernels" "${sanitize[@]}" "$kernels"
        # Our kernels only: cuBLAS's are not ours to judge.
        gpu_step ${tool}_train 60 "$gradients" "${sanitize[@]}" $only_kernels kns=train \
            "$gradients" "$scratch/pass.safetensors" bf16
    fi
done

# ---- summary

gpu_name=$(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2>/dev/null | head -n 1 | plain)
[ -n "$fake" ] && gpu_name="a fake GPU (host memory): nothing here was measured"
when=$(date -u +%Y-%m-%dT%H:%M:%SZ)

{
    echo "# GPU verification, $when"
    echo
    echo "GPU and driver: ${gpu_name:-none}. $("$ddprun" --version | head -n 1)."
    echo
    echo "| step | outcome | seconds | |"
    echo "|---|---|---|---|"
    for i in "${!names[@]}"; do
        echo "| ${names[i]} | ${outcomes[i]} | ${spans[i]} | ${details[i]} |"
    done
    for name in bench_kernels bench_train_torch; do
        grep -qv '^skipped' "$output/logs/$name.log" 2>/dev/null || continue
        printf '\n%s:\n\n```\n' "$name"
        head -n 80 "$output/logs/$name.log"
        echo '```'
    done
} >"$output/summary.md"

# A step's own JSON is taken over as it is; what a killed step left half written is not.
artefact() {  # KEY FILE
    [ -n "$python" ] && "$python" -c 'import json, sys; json.load(open(sys.argv[1]))' "$2" 2>/dev/null || return
    printf ',\n  "%s": ' "$1"
    cat "$2"
}
{
    printf '{\n  "version": 1,\n  "when": "%s",\n  "gpu": "%s",\n  "ddprun": "%s",\n  "failures": %d,\n  "steps": [' "$when" "${gpu_name:-}" "$("$ddprun" --version | head -n 1 | plain)" "$failures"
    for i in "${!names[@]}"; do
        [ "$i" -gt 0 ] && printf ','
        printf '\n    {"name": "%s", "outcome": "%s", "seconds": %d, "detail": "%s"}' "${names[i]}" "${outcomes[i]}" "${spans[i]}" "${details[i]}"
    done
    printf '\n  ]'
    artefact doctor "$output/doctor.json"
    artefact gradients "$output/gradients.json"
    artefact recovery_staged "$output/recovery-staged.json"
    artefact recovery_nccl "$output/recovery-nccl.json"
    artefact bench_kernels "$output/bench-kernels.json"
    artefact bench_train "$output/bench-train.json"
    printf '\n}\n'
} >"$output/summary.json"

echo
echo "$failures failed; $output/summary.md, $output/summary.json"
[ "$failures" -eq 0 ]
