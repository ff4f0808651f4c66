// The inner loops, compiled once per instruction set with DDP_KERNELS (the table's name), DDP_KERNELS_NAME
// and DDP_VECTOR_BYTES (meson.build). Everything except the table is in an unnamed namespace and calls no
// function of the standard library: an inline function compiled here for AVX-512 must never be the copy that
// the linker keeps for all callers. The code that selects a table at run time is compiled with the first set
// only, which every CPU has.

#include "ddp/shm/kernels.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

namespace ddp::cpu {

extern const Kernels DDP_KERNELS;

namespace {

using U8 = unsigned char;
using I8 = signed char;
using U16 = unsigned short;
using U32 = unsigned int;
using U64 = unsigned long;
using I32 = int;
using I64 = long;

constexpr std::size_t kVector = DDP_VECTOR_BYTES;
template <class T, std::size_t Bytes>
struct VectorOf {
    using Type __attribute__((vector_size(Bytes))) = T;
};
template <class T, std::size_t Bytes = kVector>
using Vector = typename VectorOf<T, Bytes>::Type;

// Element types: in memory (at any address) and in the accumulator

template <class T>
struct Plain {
    using Stored = T;
    static constexpr std::size_t kLanes = kVector / sizeof(T);
    using Lanes = Vector<T>;
    static Lanes load(const T* from) {
        Lanes lanes;
        __builtin_memcpy(&lanes, from, sizeof lanes);
        return lanes;
    }
    static void store(T* to, Lanes lanes) { __builtin_memcpy(to, &lanes, sizeof lanes); }
    static T load_one(const T* from) {
        T value;
        __builtin_memcpy(&value, from, sizeof value);
        return value;
    }
    static void store_one(T* to, T value) { __builtin_memcpy(to, &value, sizeof value); }
};

template <class To, class From>
To cast(From from) {
    return __builtin_bit_cast(To, from);
}

/// A type of 16 bits, as `Format` converts its bits from and to those of a float: B is one U32 or a vector of
/// them, and F as many floats.
template <class Format>
struct Half {
    using Stored = U16;
    static constexpr std::size_t kLanes = kVector / sizeof(float);
    using Lanes = Vector<float>;
    using Bits = Vector<U32>;
    using Halves = Vector<U16, kVector / 2>;

    static Lanes load(const U16* from) {
        Halves halves;
        __builtin_memcpy(&halves, from, sizeof halves);
        return cast<Lanes>(Format::template widened<Bits, Lanes>(__builtin_convertvector(halves, Bits)));
    }
    static void store(U16* to, Lanes lanes) {
        const Halves halves =
            __builtin_convertvector((Format::template rounded<Bits, Lanes>(cast<Bits>(lanes))), Halves);
        __builtin_memcpy(to, &halves, sizeof halves);
    }
    static float load_one(const U16* from) {
        return cast<float>(Format::template widened<U32, float>(Plain<U16>::load_one(from)));
    }
    static void store_one(U16* to, float value) {
        Plain<U16>::store_one(to, static_cast<U16>(Format::template rounded<U32, float>(cast<U32>(value))));
    }
};

struct BrainFormat {
    template <class B, class F>
    static B widened(B half) {
        return half << 16;
    }
    template <class B, class F>
    static B rounded(B bits) {  // to nearest even; NaN becomes a quiet NaN
        const B even = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
        const B nan = (bits >> 16) | 0x40u;
        return (bits & 0x7fffffffu) > 0x7f800000u ? nan : even;
    }
};
using Bfloat16 = Half<BrainFormat>;

/// Converts every value of this type exactly to float; the way back rounds to nearest even. It uses no
/// conversion instruction, so that all sets give the same bits, and no subnormal floats, which are slow on
/// some CPUs.
struct IeeeFormat {
    static constexpr U32 kExponent = 0x1fu << 23;       // a half's, at a float's place
    static constexpr U32 kRebias = (127u - 15u) << 23;  // from a half's exponent to a float's
    static constexpr U32 kSmallest = 113u << 23;        // 2^-14, the smallest normal half
    static constexpr U32 kOverflow = 143u << 23;        // 2^16: from here on values become infinite
    static constexpr U32 kHalfStep = 126u << 23;  // 0.5: its last bit has the weight of a half's last bit

    template <class B, class F>
    static B widened(B half) {
        const B shifted = (half & 0x7fffu) << 13;
        const B exponent = shifted & kExponent;
        const B normal = shifted + kRebias;
        // Computes 1.m * 2^-14 - 2^-14, which is exact.
        const F scaled = cast<F>(normal + (B{} + (1u << 23))) - cast<F>(B{} + kSmallest);
        const B nonzero = exponent == kExponent ? normal + kRebias : normal;
        return (exponent == 0u ? cast<B>(scaled) : nonzero) | (half & 0x8000u) << 16;
    }
    template <class B, class F>
    static B rounded(B bits) {
        const B magnitude = bits & 0x7fffffffu;
        const B special = magnitude > 0x7f800000u ? B{} + 0x7e00u : B{} + 0x7c00u;
        const B small = cast<B>(cast<F>(magnitude) + cast<F>(B{} + kHalfStep)) - kHalfStep;
        const B normal = (magnitude - kRebias + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
        const B finite = magnitude < kSmallest ? small : normal;
        return (magnitude >= kOverflow ? special : finite) | (bits & 0x80000000u) >> 16;
    }
};
using Float16 = Half<IeeeFormat>;

// Reductions, written once for a vector and for one element

struct Add {
    template <class V>
    static V apply(V a, V x) {
        return a + x;
    }
    template <class V>
    static V finish(V a, int) {
        return a;
    }
};
struct Multiply : Add {
    template <class V>
    static V apply(V a, V x) {
        return a * x;
    }
};
struct Average {
    template <class V>
    static V apply(V a, V x) {
        return a + x;
    }
    static float finish(float a, int count) { return a / static_cast<float>(count); }
    static double finish(double a, int count) { return a / static_cast<double>(count); }
    static Vector<float> finish(Vector<float> a, int count) { return a / static_cast<float>(count); }
    static Vector<double> finish(Vector<double> a, int count) { return a / static_cast<double>(count); }
};
struct Greatest : Add {
    template <class V>
    static V apply(V a, V x) {
        const auto take = (x > a) | (x != x);
        return take ? x : a;
    }
};
struct Least : Add {
    template <class V>
    static V apply(V a, V x) {
        const auto take = (x < a) | (x != x);
        return take ? x : a;
    }
};

// Loops over kCount sources, known at compile time, or 0; E is their type, To that of the result

template <class E, class Op, class To, int kCount>
void reduce_counted(typename To::Stored* out, const void* const* sources, int given, std::size_t n) {
    using Stored = typename E::Stored;
    const int count = kCount > 0 ? kCount : given;
    const auto source = [sources](int s) { return static_cast<const Stored*>(sources[s]); };
    constexpr int kUnroll = 4;
    std::size_t i = 0;
    for (; i + kUnroll * E::kLanes <= n; i += kUnroll * E::kLanes) {
        typename E::Lanes sum[kUnroll];
        for (int u = 0; u < kUnroll; ++u)
            sum[u] = E::load(source(0) + i + static_cast<std::size_t>(u) * E::kLanes);
        for (int s = 1; s < count; ++s) {
            const Stored* from = source(s) + i;
            for (int u = 0; u < kUnroll; ++u) {
                sum[u] = Op::apply(sum[u], E::load(from + static_cast<std::size_t>(u) * E::kLanes));
            }
        }
        for (int u = 0; u < kUnroll; ++u) {
            To::store(out + i + static_cast<std::size_t>(u) * E::kLanes, Op::finish(sum[u], count));
        }
    }
    for (; i < n; ++i) {
        auto sum = E::load_one(source(0) + i);
        for (int s = 1; s < count; ++s) sum = Op::apply(sum, E::load_one(source(s) + i));
        To::store_one(out + i, Op::finish(sum, count));
    }
}

template <class E, class Op, class To = E>
void reduce(void* out, const void* const* sources, int count, std::size_t n) {
    auto* to = static_cast<typename To::Stored*>(out);
    switch (count) {
        case 2: return reduce_counted<E, Op, To, 2>(to, sources, count, n);
        case 4: return reduce_counted<E, Op, To, 4>(to, sources, count, n);
        default: return reduce_counted<E, Op, To, 0>(to, sources, count, n);
    }
}

template <class To>
void round_floats(void* to, const float* from, std::size_t n) {
    const void* const sources[] = {from};
    reduce_counted<Plain<float>, Add, To, 1>(static_cast<typename To::Stored*>(to), sources, 1, n);
}

template <class E>
void divide(void* values, int by, std::size_t n) {
    auto* const at = static_cast<typename E::Stored*>(values);
    std::size_t i = 0;
    for (; i + E::kLanes <= n; i += E::kLanes) E::store(at + i, Average::finish(E::load(at + i), by));
    for (; i < n; ++i) E::store_one(at + i, Average::finish(E::load_one(at + i), by));
}

#if defined(__x86_64__) && !defined(__SANITIZE_THREAD__)

void stream_vector(char* to, const char* from) {
#if DDP_VECTOR_BYTES == 64
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to), _mm512_loadu_si512(from));
#elif DDP_VECTOR_BYTES == 32
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to),
                        _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#else
    _mm_stream_si128(reinterpret_cast<__m128i*>(to), _mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#endif
}

void stream(void* to, const void* from, std::size_t bytes) {
    if (bytes == 0) return;  // `from` may be null here
    auto* out = static_cast<char*>(to);
    const auto* in = static_cast<const char*>(from);
    // Whole cache lines only: a half-written line would be flushed as two slow partial writes.
    std::size_t head = (64 - reinterpret_cast<U64>(out) % 64) % 64;
    if (head > bytes) head = bytes;
    __builtin_memcpy(out, in, head);
    std::size_t i = head;
    for (; i + 64 <= bytes; i += 64) {
        for (std::size_t part = 0; part < 64; part += kVector) stream_vector(out + i + part, in + i + part);
    }
    __builtin_memcpy(out + i, in + i, bytes - i);
}

void fence() { _mm_sfence(); }

#else
// ThreadSanitizer does not see streaming stores, so it checks these copies; test_streaming.cpp checks that
// the real ones are fenced before a peer is told. Other CPUs have no such stores that we know of.

void stream(void* to, const void* from, std::size_t bytes) {
    if (bytes > 0) __builtin_memcpy(to, from, bytes);
}
void fence() {}

#endif

}  // namespace

// Integer sums and products wrap, so they are computed unsigned.
const Kernels DDP_KERNELS = {
    DDP_KERNELS_NAME,
    {
        {reduce<Plain<float>, Add>, reduce<Plain<float>, Greatest>, reduce<Plain<float>, Least>,
         reduce<Plain<float>, Average>, reduce<Plain<float>, Multiply>},
        {reduce<Plain<double>, Add>, reduce<Plain<double>, Greatest>, reduce<Plain<double>, Least>,
         reduce<Plain<double>, Average>, reduce<Plain<double>, Multiply>},
        {reduce<Plain<U32>, Add>, reduce<Plain<I32>, Greatest>, reduce<Plain<I32>, Least>, nullptr,
         reduce<Plain<U32>, Multiply>},
        {reduce<Plain<U64>, Add>, reduce<Plain<I64>, Greatest>, reduce<Plain<I64>, Least>, nullptr,
         reduce<Plain<U64>, Multiply>},
        {reduce<Bfloat16, Add>, reduce<Bfloat16, Greatest>, reduce<Bfloat16, Least>,
         reduce<Bfloat16, Average>, reduce<Bfloat16, Multiply>},
        {reduce<Float16, Add>, reduce<Float16, Greatest>, reduce<Float16, Least>, reduce<Float16, Average>,
         reduce<Float16, Multiply>},
        {reduce<Plain<U8>, Add>, reduce<Plain<U8>, Greatest>, reduce<Plain<U8>, Least>, nullptr,
         reduce<Plain<U8>, Multiply>},
        {reduce<Plain<U8>, Add>, reduce<Plain<I8>, Greatest>, reduce<Plain<I8>, Least>, nullptr,
         reduce<Plain<U8>, Multiply>},
        {nullptr, reduce<Plain<U8>, Greatest>, reduce<Plain<U8>, Least>, nullptr, nullptr},
    },
    {{},
     {},
     {},
     {},
     {reduce<Bfloat16, Add, Plain<float>>, reduce<Bfloat16, Multiply, Plain<float>>, round_floats<Bfloat16>},
     {reduce<Float16, Add, Plain<float>>, reduce<Float16, Multiply, Plain<float>>, round_floats<Float16>}},
    {divide<Plain<float>>, divide<Plain<double>>, nullptr, nullptr, divide<Bfloat16>, divide<Float16>},
    stream,
    fence,
};

#if DDP_VECTOR_BYTES == 16

#if defined(__x86_64__)
extern const Kernels kernels_avx2;
extern const Kernels kernels_avx512;

namespace {

struct WideVectors {
    bool avx2 = false;
    bool avx512 = false;
};

/// What the processor has and the kernel saves. It avoids __builtin_cpu_supports, which in programs that Zig
/// links always says no.
WideVectors wide_vectors() {
    constexpr U32 kSavesAvx = 0x6, kSavesAvx512 = 0xe6;  // bits of the register XCR0
    constexpr U32 kAvx512 = bit_AVX512F | bit_AVX512BW | bit_AVX512VL;
    U32 a = 0, b = 0, c = 0, d = 0;
    if (__get_cpuid(1, &a, &b, &c, &d) == 0 || (c & bit_OSXSAVE) == 0) return {};
    U32 saved = 0, saved_high = 0;
    __asm__("xgetbv" : "=a"(saved), "=d"(saved_high) : "c"(0));
    if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0) return {};
    return {.avx2 = (b & bit_AVX2) != 0 && (saved & kSavesAvx) == kSavesAvx,
            .avx512 = (b & kAvx512) == kAvx512 && (saved & kSavesAvx512) == kSavesAvx512};
}

}  // namespace
#endif

std::vector<const Kernels*> supported_kernels() {
    std::vector<const Kernels*> sets{&kernels_baseline};
#if defined(__x86_64__)
    const WideVectors has = wide_vectors();
    if (has.avx2) sets.push_back(&kernels_avx2);
    if (has.avx512) sets.push_back(&kernels_avx512);
#endif
    return sets;
}

const Kernels& kernels() {
    static const Kernels& best = *supported_kernels().back();
    return best;
}

#endif

}  // namespace ddp::cpu
