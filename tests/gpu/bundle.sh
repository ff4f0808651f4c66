#!/usr/bin/env bash
# Makes one file with all that tests/gpu/run.sh needs on a machine with a GPU: programs, scripts, docs.
#
#   tests/gpu/bundle.sh [FILE] [--build DIR]      default ddprun-gpu.tar.gz, build-bundle
#
# The programs carry everything but libc (and the driver, NCCL and cuBLAS, which they look for when they run); this is
# checked, as are the bundle's size and the newest C library it asks for. There: tar xzf FILE && ddprun-gpu/run.sh
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source=$(cd "$here/../.." && pwd)

file=ddprun-gpu.tar.gz
build=$source/build-bundle
limit_mb=60
while [ $# -gt 0 ]; do
    case "$1" in
        --build) build=${2:?bundle.sh: --build: needs a value}; shift 2 ;;
        -*) echo "bundle.sh: $1: unknown option (expected --build)" >&2; exit 64 ;;
        *) file=$1; shift ;;
    esac
done

# Those that exist: a program that is not written yet is a skipped step there, not a failure here.
programs=(launcher/ddprun workers/train/train workers/check/allreduce-check tests/gpu/survivor_worker tests/gpu/gpu_kernel_test
          tests/gpu/train_gradients tests/bench/bench_gpu_kernels)
for name in train allreduce-check survivor_worker gpu_kernel_test train_gradients bench_gpu_kernels; do programs+=("tests/over_fakes/$name"); done
modules=(tests/gpu/cuda-trace.so tests/support/fake_nccl/fake-nccl.so tests/support/fake_nvml/fake-nvml.so)
data=(workers/train/digits-images-idx3-ubyte workers/train/digits-labels-idx1-ubyte)

if [ ! -f "$build/build.ninja" ]; then
    # A module that showed its own libstdc++ would give it to the program too, whose exceptions then met two unwinders. (Not
    # a list with colons: mold 1.10 never ends on one.)
    meson setup "$build" "$source" -Dblas=disabled -Dpmix=disabled \
        -Dcpp_link_args='-static-libstdc++ -static-libgcc -Wl,--exclude-libs,libstdc++.a,--exclude-libs,libgcc.a,--exclude-libs,libgcc_eh.a' >"$build.log" 2>&1 ||
        { tail -n 20 "$build.log" >&2; echo "bundle.sh: meson cannot set up $build" >&2; exit 1; }
fi
# What it knows of the tree may be old.
ninja -C "$build" build.ninja >"$build.log" || { tail -n 20 "$build.log" >&2; echo "bundle.sh: $build does not fit this tree" >&2; exit 1; }
known=$(ninja -C "$build" -t targets all | cut -d: -f1)
targets=()
for target in "${programs[@]}" "${modules[@]}" "${data[@]}"; do
    if grep -qx "$target" <<<"$known"; then targets+=("$target"); else echo "bundle.sh: there is no $target in this tree: left out" >&2; fi
done
ninja --quiet -C "$build" "${targets[@]}"

stage=$(mktemp -d)
trap 'rm -rf "$stage"' EXIT
top=$stage/ddprun-gpu
for target in "${targets[@]}"; do
    install -D -m 755 "$build/$target" "$top/$target"
done
find "$top" -type f -exec sh -c 'head -c4 "$1" | grep -q ELF && strip --strip-unneeded "$1"' _ {} \;
install -D -m 755 -t "$top/tests/gpu" "$here"/*.py "$here/run.sh"
mkdir -p "$top/tests/bench" "$top/docs"
find "$source/tests/bench" -name '*.py' -exec install -m 755 -t "$top/tests/bench" {} +
cp -r "$source/docs/gpu.md" "$source/docs/doctor.md" "$source/LICENSE" "$top/docs/"
[ -d "$source/docs/gpu" ] && cp -r "$source/docs/gpu" "$top/docs/"
ln -s tests/gpu/run.sh "$top/run.sh"

# What a program may still ask the machine for.
failed=0
while read -r program; do
    needed=$(readelf -d "$program" | sed -n 's/.*(NEEDED).*\[\(.*\)\]/\1/p' | grep -vE '^(libc|libm|libdl|libpthread|librt)\.so|^ld-linux|^fake-nccl\.so' || true)
    [ -z "$needed" ] && continue
    echo "bundle.sh: ${program#"$top"/} needs $(tr '\n' ' ' <<<"$needed")" >&2
    failed=1
done < <(find "$top" -type f -exec sh -c 'head -c4 "$1" | grep -q ELF && echo "$1"' _ {} \;)
glibc=$(find "$top" -type f -exec sh -c 'head -c4 "$1" | grep -q ELF && readelf -W --dyn-syms "$1"' _ {} \; |
    grep -o 'GLIBC_[0-9.]*' | sort -uV | tail -n 1)

{
    echo "ddprun $("$top/launcher/ddprun" --version | head -n 1 | cut -d' ' -f2), commit $(git -C "$source" rev-parse --short HEAD 2>/dev/null || echo unknown)"
    echo "made $(date -u +%Y-%m-%dT%H:%M:%SZ)"
    echo "needs ${glibc:-no C library} or newer, $(uname -m)"
    echo
    (cd "$top" && find . -type f ! -name MANIFEST -printf '%s %P\n' | sort -k2)
} >"$top/MANIFEST"

tar -C "$stage" -czf "$file" ddprun-gpu
size_mb=$(($(stat -c %s "$file") / 1000000))
echo "$file: $size_mb MB, ${#targets[@]} programs and modules, needs ${glibc:-no C library} or newer"
if [ "$size_mb" -ge "$limit_mb" ]; then
    echo "bundle.sh: $file has $size_mb MB, the limit is $limit_mb" >&2
    failed=1
fi
exit "$failed"
