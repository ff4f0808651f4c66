#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>

#include "ddp/cuda/cast.h"
#include "tests/workers/cuda_fixture.h"

namespace {

using ddp::DType;
using ddp::cuda::Gpu;
using ddp::testing::gpu;
using ddp::testing::OnDevice;

std::vector<float> some_floats(std::size_t count) {
    std::mt19937 random(static_cast<unsigned>(count));
    std::uniform_real_distribution<float> mantissa(-1, 1);
    std::uniform_int_distribution<int> exponent(-30, 20);
    std::vector<float> values(count);
    for (float& value : values) value = std::ldexp(mantissa(random), exponent(random));
    return values;
}

/// Rounds to nearest even by trying both neighbours: slow, and unlike the kernels' method.
std::uint16_t nearest_bf16(float value) {
    const auto truncated = static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(value) >> 16);
    const auto as_float = [](std::uint16_t bits) { return std::bit_cast<float>(std::uint32_t{bits} << 16); };
    const auto above = static_cast<std::uint16_t>(truncated + 1);
    const double below_by = std::abs(double{value} - double{as_float(truncated)});
    const double above_by = std::abs(double{as_float(above)} - double{value});
    if (below_by != above_by) return below_by < above_by ? truncated : above;
    return truncated % 2 == 0 ? truncated : above;
}

const std::vector<std::size_t> kSizes = {1, 2, 7, 8, 9, 15, 16, 31, 64, 1000, 4099};

TEST(ScaleCast, RoundsToBf16AtEverySizeAndAlignment) {
    for (const std::size_t size : kSizes) {
        const std::vector<float> values = some_floats(size);
        std::vector<std::uint16_t> expected(size);
        for (std::size_t i = 0; i < size; ++i) expected[i] = nearest_bf16(values[i] * 0.125F);
        for (const std::size_t from_offset : {0, 1, 2, 3}) {
            for (const std::size_t to_offset : {0, 1, 4, 7}) {
                const OnDevice<float> from(gpu(), values, DType::F32, from_offset);
                const OnDevice<std::uint16_t> to(gpu(), std::vector<std::uint16_t>(size), DType::BF16,
                                                 to_offset);
                ddp::cuda::scale_cast(*gpu(), from.buffer(), to.buffer(), 0.125F, nullptr);
                ASSERT_EQ(to.values(), expected) << size << " at " << from_offset << " and " << to_offset;
            }
        }
    }
}

TEST(ScaleCast, WritesOnlyItsTarget) {
    const OnDevice<float> from(gpu(), some_floats(21), DType::F32);
    const OnDevice<std::uint16_t> to(gpu(), std::vector<std::uint16_t>(40, 77), DType::BF16);
    ddp::Buffer inner = to.buffer();
    inner.data = to.data() + 9;
    inner.count = 21;
    ddp::cuda::scale_cast(*gpu(), from.buffer(), inner, 1, nullptr);
    const std::vector<std::uint16_t> after = to.values();
    for (std::size_t i = 0; i < 40; ++i) EXPECT_EQ(after[i] == 77, i < 9 || i >= 30) << i;
}

TEST(ScaleCast, ScalesInPlace) {
    std::vector<float> values = some_floats(1003);
    const OnDevice<float> on_device(gpu(), values, DType::F32, 1);
    ddp::cuda::scale_cast(*gpu(), on_device.buffer(), on_device.buffer(), 1.0F / 3, nullptr);
    for (float& value : values) value *= 1.0F / 3;
    EXPECT_EQ(on_device.values(), values);
}

TEST(ScaleCast, ReturnsEveryHalfUnchanged) {
    std::vector<std::uint16_t> halves;
    for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
        const bool is_nan = (bits & 0x7FFF) > 0x7C00;
        halves.push_back(static_cast<std::uint16_t>(is_nan ? 0x7FFF : bits));
    }
    const OnDevice<std::uint16_t> from(gpu(), halves, DType::F16);
    const OnDevice<float> wide(gpu(), std::vector<float>(halves.size()), DType::F32);
    const OnDevice<std::uint16_t> back(gpu(), std::vector<std::uint16_t>(halves.size()), DType::F16);
    ddp::cuda::scale_cast(*gpu(), from.buffer(), wide.buffer(), 1, nullptr);
    ddp::cuda::scale_cast(*gpu(), wide.buffer(), back.buffer(), 1, nullptr);
    EXPECT_EQ(back.values(), halves);
    const std::vector<float> floats = wide.values();
    EXPECT_EQ(floats[0x3C00], 1.0F);
    EXPECT_EQ(floats[0x0001], 0x1p-24F);
    EXPECT_EQ(floats[0xFBFF], -65504.0F);
    EXPECT_TRUE(std::isnan(floats[0x7C01]));
}

TEST(ScaleCast, RoundsToTheNearestHalfAndToEven) {
    const float infinity = std::numeric_limits<float>::infinity();
    const std::vector<float> values = {1 + 0x1p-11F, 1 + 3 * 0x1p-11F, 65519,      65520,
                                       -1e9F,        0x1p-25F,         0x1.8p-25F, 0x1p-14F,
                                       1e-30F,       infinity,         -0.0F,      0x1.ffcp-15F + 0x1p-26F};
    const std::vector<std::uint16_t> expected = {0x3C00, 0x3C02, 0x7BFF, 0x7C00, 0xFC00, 0x0000,
                                                 0x0001, 0x0400, 0x0000, 0x7C00, 0x8000, 0x0400};
    const OnDevice<float> from(gpu(), values, DType::F32);
    const OnDevice<std::uint16_t> to(gpu(), std::vector<std::uint16_t>(values.size()), DType::F16);
    ddp::cuda::scale_cast(*gpu(), from.buffer(), to.buffer(), 1, nullptr);
    EXPECT_EQ(to.values(), expected);
}

TEST(ScaleCast, KeepsInfinitiesAndNansInBf16) {
    const OnDevice<float> from(gpu(), {INFINITY, -INFINITY, std::bit_cast<float>(0x7FFFFFFFU)}, DType::F32);
    const OnDevice<std::uint16_t> to(gpu(), std::vector<std::uint16_t>(3), DType::BF16);
    ddp::cuda::scale_cast(*gpu(), from.buffer(), to.buffer(), 1, nullptr);
    EXPECT_EQ(to.values(), (std::vector<std::uint16_t>{0x7F80, 0xFF80, 0x7FFF}));
}

TEST(ScaleCast, RefusesTypesAndCountsThatDoNotFit) {
    const OnDevice<float> four(gpu(), {1, 2, 3, 4}, DType::F32), three(gpu(), {1, 2, 3}, DType::F32);
    const OnDevice<std::int32_t> whole(gpu(), {1, 2, 3, 4}, DType::I32);
    const auto cast = [](const ddp::Buffer& from, const ddp::Buffer& to) {
        ddp::cuda::scale_cast(*gpu(), from, to, 1, nullptr);
    };
    EXPECT_THROW(cast(four.buffer(), three.buffer()), ddp::InvalidInput);
    EXPECT_THROW(cast(four.buffer(), whole.buffer()), ddp::InvalidInput);
}

}  // namespace
