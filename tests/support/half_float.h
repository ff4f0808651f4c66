#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

/// Half-precision numbers by slow and obvious code, as the reference of tests.
namespace half_float {

inline float from_f16(std::uint16_t bits) {
    const int exponent = bits >> 10 & 31, mantissa = bits & 1023;
    double value = exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(1024 + mantissa, exponent - 25);
    if (exponent == 31) {
        value = mantissa == 0 ? std::numeric_limits<double>::infinity()
                              : std::numeric_limits<double>::quiet_NaN();
    }
    return static_cast<float>((bits & 0x8000) != 0 ? -value : value);
}

/// Rounds to nearest, ties to even.
inline std::uint16_t to_f16(float value) {
    const std::uint16_t sign = std::signbit(value) ? 0x8000 : 0;
    const double magnitude = std::abs(static_cast<double>(value));
    if (std::isnan(value)) return static_cast<std::uint16_t>(sign | 0x7e00);
    if (magnitude >= 65520) return static_cast<std::uint16_t>(sign | 0x7c00);
    if (magnitude == 0) return sign;
    const int exponent = std::max(std::ilogb(magnitude), -14);
    const auto steps = static_cast<int>(std::nearbyint(std::ldexp(magnitude, 10 - exponent)));
    return static_cast<std::uint16_t>(sign | ((exponent + 14) * 1024 + steps));
}

inline float from_bf16(std::uint16_t value) {
    const std::uint32_t bits = static_cast<std::uint32_t>(value) << 16;
    float wide;
    std::memcpy(&wide, &bits, sizeof wide);
    return wide;
}

/// Takes the nearest of the two neighbours by comparing distances; a tie goes to the even one.
inline std::uint16_t to_bf16(float value) {
    std::uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    const auto toward_zero = static_cast<std::uint16_t>(bits >> 16);
    const auto away = static_cast<std::uint16_t>(toward_zero + 1);
    const double below = std::abs(static_cast<double>(value) - from_bf16(toward_zero));
    const double above = std::abs(static_cast<double>(from_bf16(away)) - value);
    if (below != above) return below < above ? toward_zero : away;
    return toward_zero % 2 == 0 ? toward_zero : away;
}

}  // namespace half_float
