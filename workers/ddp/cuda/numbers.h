#pragma once

#include <cstddef>
#include <cstdint>

/// Elements of arrays in kernels: read as float32 whatever their type, several at once where alignment allows
/// it. For the device and for the host, where tests run the same functions in loops.
#if defined(__CUDACC__)
#include <cuda_fp16.h>
#define DDP_BOTH __host__ __device__
#else
#define DDP_BOTH
#endif

namespace ddp::device {

enum class ElementType : std::uint32_t { F32, BF16, F16 };

/// bfloat16 in memory.
struct Bf16 {
    std::uint16_t bits;
};
/// IEEE half precision in memory.
struct F16 {
    std::uint16_t bits;
};

/// Calls `use` with a value of that type.
#if defined(__CUDACC__)
#pragma nv_exec_check_disable  // `use` may be for the host only
#endif
template <class Use>
DDP_BOTH auto with_type(ElementType type, const Use& use) {
    switch (type) {
        case ElementType::F32: return use(float{});
        case ElementType::BF16: return use(Bf16{});
        case ElementType::F16: break;
    }
    return use(F16{});
}

DDP_BOTH inline std::uint32_t bits_of(float value) {
    std::uint32_t bits;
    __builtin_memcpy(&bits, &value, sizeof bits);
    return bits;
}
DDP_BOTH inline float float_of(std::uint32_t bits) {
    float value;
    __builtin_memcpy(&value, &bits, sizeof value);
    return value;
}
/// True unless infinite or NaN.
DDP_BOTH inline bool is_finite(float value) { return (bits_of(value) & 0x7F800000U) != 0x7F800000U; }

DDP_BOTH inline float to_float(float value) { return value; }
DDP_BOTH inline float to_float(Bf16 value) { return float_of(std::uint32_t{value.bits} << 16); }
DDP_BOTH inline float to_float(F16 value) {
#if defined(__CUDACC__)
    return __half2float(__half(__half_raw{value.bits}));
#else
    const std::uint32_t sign = (value.bits & 0x8000U) << 16;
    const std::uint32_t exponent = (value.bits >> 10) & 0x1FU, fraction = value.bits & 0x3FFU;
    if (exponent == 0x1F) return float_of(sign | 0x7F800000U | fraction << 13);
    if (exponent == 0) return (sign != 0 ? -1.0F : 1.0F) * static_cast<float>(fraction) * 0x1p-24F;
    return float_of(sign | ((exponent + 112) << 23) | fraction << 13);
#endif
}

/// Rounds to the nearest value, ties to even; a NaN becomes 0x7FFF.
DDP_BOTH inline void round_to(float value, float& to) { to = value; }
DDP_BOTH inline void round_to(float value, Bf16& to) {
    const std::uint32_t bits = bits_of(value);
    const bool is_nan = (bits & 0x7FFFFFFFU) > 0x7F800000U;
    to.bits = is_nan ? std::uint16_t{0x7FFF}
                     : static_cast<std::uint16_t>((bits + 0x7FFFU + ((bits >> 16) & 1U)) >> 16);
}
DDP_BOTH inline void round_to(float value, F16& to) {
#if defined(__CUDACC__)
    to.bits = static_cast<__half_raw>(__float2half_rn(value)).x;
#else
    const std::uint32_t bits = bits_of(value), magnitude = bits & 0x7FFFFFFFU;
    const auto sign = static_cast<std::uint16_t>((bits >> 16) & 0x8000U);
    if (magnitude > 0x7F800000U) {
        to.bits = 0x7FFF;
    } else if (magnitude >= 0x477FF000U) {
        to.bits = static_cast<std::uint16_t>(sign | 0x7C00U);  // rounds to 65536 or more
    } else if (magnitude < 0x38800000U) {
        // Too small for a normal half: the addition rounds, because its last place is a half's smallest step.
        to.bits = static_cast<std::uint16_t>(sign | (bits_of(float_of(magnitude) + 0.5F) - 0x3F000000U));
    } else {
        const std::uint32_t even = magnitude + 0xFFFU + ((magnitude >> 13) & 1U);
        to.bits = static_cast<std::uint16_t>(sign | ((even - 0x38000000U) >> 13));
    }
#endif
}

/// Converts `count` elements on the host: to float32, and from it.
void to_floats(ElementType type, const void* from, float* to, std::size_t count);
void round_floats(const float* from, ElementType type, void* to, std::size_t count);

/// N elements of one array, in registers.
template <int N>
struct Floats {
    float of[N];
};
template <class T, int N>
struct alignas(sizeof(T) * N) Pack {
    T of[N];
};

/// Elements that a thread processes at once where it can: 16 bytes of float32.
inline constexpr int kPack = 4;

/// `from` is aligned to N elements.
template <int N, class T>
DDP_BOTH Floats<N> load(const T* from) {
    const Pack<T, N> raw = *reinterpret_cast<const Pack<T, N>*>(from);
    Floats<N> values;
    for (int k = 0; k < N; ++k) values.of[k] = to_float(raw.of[k]);
    return values;
}
/// `to` is aligned to N elements.
template <int N, class T>
DDP_BOTH void store(T* to, const Floats<N>& values) {
    Pack<T, N> raw;
    for (int k = 0; k < N; ++k) round_to(values.of[k], raw.of[k]);
    *reinterpret_cast<Pack<T, N>*>(to) = raw;
}

/// True when packs can be moved at once. A null pointer is an unused array.
template <class T>
DDP_BOTH bool is_aligned(const T* pointer) {
    return reinterpret_cast<std::uintptr_t>(pointer) % (sizeof(T) * kPack) == 0;
}

/// Visits the elements of one thread out of several: calls `body.run<kPack>(i)` for whole packs and
/// `body.run<1>(i)` for the rest, or for all when an array is not aligned.
template <class Body, class... T>
DDP_BOTH void for_elements(std::uint64_t thread, std::uint64_t threads, std::uint64_t count, Body& body,
                           const T*... arrays) {
    const std::uint64_t packed = (is_aligned(arrays) && ...) ? count / kPack * kPack : 0;
    for (std::uint64_t i = thread * kPack; i < packed; i += threads * kPack) body.template run<kPack>(i);
    for (std::uint64_t i = packed + thread; i < count; i += threads) body.template run<1>(i);
}

}  // namespace ddp::device
