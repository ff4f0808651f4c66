#pragma once

#include <atomic>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>

#include "ddp/loader.h"

namespace ddp::testing {

/// Sample i: {i, i + 0.5} and the label 10 i.
class Numbers final : public Dataset {
  public:
    explicit Numbers(std::size_t size, std::size_t broken = SIZE_MAX) : size_(size), broken_(broken) {}
    std::size_t size() const override { return size_; }
    std::vector<std::size_t> field_bytes() const override {
        return {2 * sizeof(float), sizeof(std::int32_t)};
    }
    void read(std::size_t index, std::span<const std::span<std::byte>> fields) const override {
        if (index == broken_) throw std::runtime_error("sample " + std::to_string(index) + " is broken");
        const float pair[2] = {static_cast<float>(index), static_cast<float>(index) + 0.5F};
        const auto label = static_cast<std::int32_t>(10 * index);
        std::memcpy(fields[0].data(), pair, sizeof(pair));
        std::memcpy(fields[1].data(), &label, sizeof(label));
        reads_.fetch_add(1);
    }
    std::size_t reads() const { return reads_.load(); }

  private:
    std::size_t size_, broken_;
    mutable std::atomic<std::size_t> reads_{0};
};

}  // namespace ddp::testing
