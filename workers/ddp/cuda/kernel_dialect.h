#pragma once

/// The language that kernels are written in: C++ that nvcc compiles for the device, and every compiler for
/// the host, so that tests run the very same source on a machine without a GPU.
///
/// A kernel module is one .cpp file. To add one:
///
///     // my_kernels.cpp
///     #include "ddp/cuda/kernel_dialect.h"
///     using namespace ddp::device;
///
///     DDP_KERNEL(negate, const float* from, float* to, U64 count) {
///         for (U64 i = thread(); i < count; i += threads()) to[i] = -from[i];
///     }
///     DDP_KERNEL(row_sums, const float* rows, float* sums, U64 count, U64 width) {
///         for (U64 row = warp(); row < count; row += warps()) {
///             float sum = 0;
///             for (U64 i = lane(); i < width; i += kLanes) sum += rows[row * width + i];
///             sum = warp_sum(sum);
///             if (lane() == 0) sums[row] = sum;
///         }
///     }
///
///     # meson.build: for the device, as bytes in a library's sources; and for the host, in the fake driver
///     my_lib = static_library('my', ..., kernel_image.process('my_kernels.cpp'))
///     host_kernels += static_library('my-host-kernels', 'my_kernels.cpp', cpp_args: kernel_args,
///       include_directories: workers_include, build_by_default: false)
///
///     // where it is launched (cuda/module.h)
///     DDP_KERNEL_IMAGE(my_kernels)  // named after the file, outside of every namespace
///     ddp::cuda::Module module(gpu, {"my_kernels", my_kernels_image});
///     ddp::cuda::Function negate = module.function("negate");
///     negate.launch(gpu->grid_for(count), stream, from, to, count);  // the argument types of the kernel,
///     exactly
///
/// The rules that make one source serve both: a kernel's result may not depend on how many threads run it
/// (loop from thread() by threads(), from warp() by warps(), or from block() by blocks() with
/// for_elements_in_block inside); threads work together in a warp only, by lane() and the warp_ functions,
/// which every lane reaches; a warp has 32 lanes and a block 256 threads on the device, and one on the host;
/// no shared memory, no atomics, nothing of the C or C++ library. Kernels of all modules share one name
/// space. Multiplications and additions are not contracted: the device gives the host's bits.

#if defined(__CUDACC__)
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#define DDP_DEVICE __device__ __forceinline__
#define DDP_KERNEL(name, ...) \
    extern "C" __global__ void __launch_bounds__(::ddp::device::kBlockThreads) name(__VA_ARGS__)
#else
#include "ddp/cuda/host_kernel.h"
#define DDP_DEVICE inline
#define DDP_KERNEL(name, ...)                                                 \
    static void name(__VA_ARGS__);                                            \
    static const ::ddp::device::HostKernel name##_for_the_host(#name, &name); \
    static void name(__VA_ARGS__)
#endif

namespace ddp::device {

using I32 = int;
using I64 = long long;
using U16 = unsigned short;
using U32 = unsigned int;
using U64 = unsigned long long;

/// Threads of a block; every launch has as many.
constexpr U32 kBlockThreads = 256;

// ---- who am I

#if defined(__CUDACC__)
constexpr U32 kLanes = 32;
DDP_DEVICE U64 thread() { return U64{blockIdx.x} * kBlockThreads + threadIdx.x; }
DDP_DEVICE U64 threads() { return U64{gridDim.x} * kBlockThreads; }
DDP_DEVICE U32 lane() { return threadIdx.x % kLanes; }
DDP_DEVICE U32 block() { return blockIdx.x; }
DDP_DEVICE U32 blocks() { return gridDim.x; }
#else
constexpr U32 kLanes = 1;
inline U64 thread() { return host_thread.index; }
inline U64 threads() { return host_thread.count; }
inline U32 lane() { return 0; }
inline U32 block() { return static_cast<U32>(host_thread.index); }
inline U32 blocks() { return static_cast<U32>(host_thread.count); }
#endif
DDP_DEVICE U64 warp() { return thread() / kLanes; }
DDP_DEVICE U64 warps() { return threads() / kLanes; }

// ---- a warp together: every lane gets the result, the same bits

#if defined(__CUDACC__)
DDP_DEVICE float warp_sum(float value) {
    for (int distance = 16; distance > 0; distance /= 2) value += __shfl_xor_sync(~0U, value, distance);
    return value;
}
DDP_DEVICE float warp_max(float value) {
    for (int distance = 16; distance > 0; distance /= 2)
        value = fmaxf(value, __shfl_xor_sync(~0U, value, distance));
    return value;
}
DDP_DEVICE U32 warp_min(U32 value) {
    for (int distance = 16; distance > 0; distance /= 2)
        value = min(value, __shfl_xor_sync(~0U, value, distance));
    return value;
}
#else
inline float warp_sum(float value) { return value; }
inline float warp_max(float value) { return value; }
inline U32 warp_min(U32 value) { return value; }
#endif

// ---- numbers

#if defined(__CUDACC__)
DDP_DEVICE U32 bits_of(float value) { return __float_as_uint(value); }
DDP_DEVICE float float_of(U32 bits) { return __uint_as_float(bits); }
DDP_DEVICE float square_root(float value) { return sqrtf(value); }
DDP_DEVICE double square_root(double value) { return sqrt(value); }
DDP_DEVICE float exponential(float value) { return expf(value); }
DDP_DEVICE float logarithm(float value) { return logf(value); }
#else
inline U32 bits_of(float value) { return __builtin_bit_cast(U32, value); }
inline float float_of(U32 bits) { return __builtin_bit_cast(float, bits); }
inline float square_root(float value) { return __builtin_sqrtf(value); }
inline double square_root(double value) { return __builtin_sqrt(value); }
inline float exponential(float value) { return __builtin_expf(value); }
inline float logarithm(float value) { return __builtin_logf(value); }
#endif

/// Neither infinite nor NaN.
DDP_DEVICE bool is_finite(float value) { return (bits_of(value) & 0x7F800000U) != 0x7F800000U; }

/// bfloat16 as it lies in memory.
struct Bf16 {
    U16 bits;
};
/// IEEE half precision as it lies in memory.
struct F16 {
    U16 bits;
};

DDP_DEVICE float to_float(float value) { return value; }
DDP_DEVICE float to_float(Bf16 value) { return float_of(U32{value.bits} << 16); }

template <class T>
struct Rounded;
template <>
struct Rounded<float> {
    static DDP_DEVICE float from(float value) { return value; }
};
#if defined(__CUDACC__)
DDP_DEVICE float to_float(F16 value) { return __half2float(__ushort_as_half(value.bits)); }
template <>
struct Rounded<Bf16> {
    static DDP_DEVICE Bf16 from(float value) { return {__bfloat16_as_ushort(__float2bfloat16_rn(value))}; }
};
template <>
struct Rounded<F16> {
    static DDP_DEVICE F16 from(float value) { return {__half_as_ushort(__float2half_rn(value))}; }
};
#else
inline float to_float(F16 value) { return half_to_float(value.bits); }
template <>
struct Rounded<Bf16> {
    static Bf16 from(float value) { return {float_to_bfloat16(value)}; }
};
template <>
struct Rounded<F16> {
    static F16 from(float value) { return {float_to_half(value)}; }
};
#endif

/// The nearest value of type T, ties to even.
template <class T>
DDP_DEVICE T rounded_to(float value) {
    return Rounded<T>::from(value);
}

// ---- packs: elements that are moved in accesses of 16 bytes

/// Elements that an element-wise kernel moves at once: 16 bytes of the smallest type, two accesses of float.
constexpr int kPack = 8;

template <int N>
struct Floats {
    float of[N];
};

template <class T, int N>
struct alignas(sizeof(T) * N < 16 ? sizeof(T) * N : 16) Pack {
    T of[N];
};

/// N elements; `from` is aligned to 16 bytes unless N is 1.
template <int N, class T>
DDP_DEVICE Floats<N> load(const T* from) {
    Floats<N> values;
    static_assert(N == 1 || N == kPack);
    if constexpr (sizeof(T) == 2 && N > 1) {
        // In whole words: of the elements alone the compiler makes smaller accesses.
        const Pack<U32, N / 2> words = *reinterpret_cast<const Pack<U32, N / 2>*>(from);
        for (int k = 0; k < N / 2; ++k) {
            values.of[2 * k] = to_float(T{static_cast<U16>(words.of[k] & 0xFFFFU)});
            values.of[2 * k + 1] = to_float(T{static_cast<U16>(words.of[k] >> 16)});
        }
    } else if constexpr (N > 1) {
        for (int k = 0; k < N; k += 4) {
            const Pack<T, 4> raw = *reinterpret_cast<const Pack<T, 4>*>(from + k);
            for (int part = 0; part < 4; ++part) values.of[k + part] = to_float(raw.of[part]);
        }
    } else {
        values.of[0] = to_float(*from);
    }
    return values;
}

// The compiler splits some 16-byte stores of a struct; this one it cannot.
DDP_DEVICE void store_words(void* to, const Pack<U32, 4>& words) {
#if defined(__CUDACC__)
    __stwb(static_cast<uint4*>(to), make_uint4(words.of[0], words.of[1], words.of[2], words.of[3]));
#else
    __builtin_memcpy(to, &words, sizeof words);
#endif
}

template <int N, class T>
DDP_DEVICE void store(T* to, const Floats<N>& values) {
    if constexpr (N == 1) {
        *to = rounded_to<T>(values.of[0]);
    } else if constexpr (sizeof(T) == 2) {
        Pack<U32, 4> words;
        for (int k = 0; k < 4; ++k) {
            const U32 low = rounded_to<T>(values.of[2 * k]).bits;
            const U32 high = rounded_to<T>(values.of[2 * k + 1]).bits;
            words.of[k] = low | high << 16;
        }
        store_words(to, words);
    } else {
        for (int k = 0; k < N; k += 4) {
            Pack<U32, 4> words;
            for (int part = 0; part < 4; ++part) words.of[part] = bits_of(rounded_to<T>(values.of[k + part]));
            store_words(to + k, words);
        }
    }
}

/// A pointer into device memory that was itself read from memory: only of a kernel's arguments the compiler
/// knows as much, and other accesses are slower.
template <class T>
DDP_DEVICE T* on_device(T* pointer) {
#if defined(__CUDACC__)
    __builtin_assume(__isGlobal(pointer));
#endif
    return pointer;
}

/// Elements of `pointer` before it is aligned to 16 bytes.
template <class T>
DDP_DEVICE U64 unaligned_elements(const T* pointer) {
    return ((16 - reinterpret_cast<U64>(pointer) % 16) % 16) / sizeof(T);
}
template <class T>
DDP_DEVICE bool is_aligned(const T* pointer) {
    return reinterpret_cast<U64>(pointer) % 16 == 0;
}
/// A null pointer is an array that the kernel does without.
template <class T>
DDP_DEVICE bool is_aligned_at(const T* pointer, U64 element) {
    return pointer == nullptr || is_aligned(pointer + element);
}

/// The turns of a loop that are this thread's: from `first` by `step`. Of Index U32 where that is enough: the
/// arithmetic of addresses is cheaper.
template <class Index>
struct Turns {
    Index first, step;
};
DDP_DEVICE Turns<U64> turns_of_all() { return {thread(), threads()}; }
#if defined(__CUDACC__)
DDP_DEVICE Turns<U32> turns_in_block() { return {threadIdx.x, kBlockThreads}; }
#else
inline Turns<U32> turns_in_block() { return {0, 1}; }
#endif

/// Calls `body.run<kPack>(i)` for whole packs and `body.run<1>(i)` for what is left over, until every element
/// below `count` has been taken once by the threads that share the turns. Packs begin where all pointers are
/// aligned to 16 bytes: `first` should be the one of the smallest type. If they never are together, elements
/// are taken one at a time.
template <class Index, class Body, class First, class... Others>
DDP_DEVICE void take_turns(Turns<Index> turns, Index count, Body& body, const First* first,
                           const Others*... others) {
    auto head = static_cast<Index>(unaligned_elements(first));
    if (head > count) head = count;
    const bool together = is_aligned_at(first, head) && (is_aligned_at(others, head) && ...);
    const Index packs = together ? (count - head) / kPack : 0;
    for (Index p = turns.first; p < packs; p += turns.step) body.template run<kPack>(head + p * kPack);
    const Index packed = packs * kPack;
    for (Index i = turns.first; i < count - packed; i += turns.step) {
        body.template run<1>(i < head ? i : i + packed);
    }
}

/// The elements of an array that all threads of the kernel share.
template <class Body, class First, class... Others>
DDP_DEVICE void for_elements(U64 count, const Body& body, const First* first, const Others*... others) {
    take_turns(turns_of_all(), count, body, first, others...);
}
/// Those of an array that the threads of one block share, and no other thread.
template <class Body, class First, class... Others>
DDP_DEVICE void for_elements_in_block(U32 count, Body& body, const First* first, const Others*... others) {
    take_turns(turns_in_block(), count, body, first, others...);
}

}  // namespace ddp::device
