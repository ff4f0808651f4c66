#include "scaling.h"

#include <algorithm>
#include <cmath>

namespace train {
namespace {

struct ColumnFactors {
    double mean, factor;
};

ColumnFactors factors_of(const Samples& samples, std::span<const std::size_t> rows, std::size_t column) {
    const auto value = [&](std::size_t row) {
        return static_cast<double>(samples.values[row * samples.features + column]);
    };
    const auto count = static_cast<double>(std::max<std::size_t>(rows.size(), 1));
    double sum = 0, squares = 0;
    bool differs = false;
    for (const std::size_t row : rows) {
        sum += value(row);
        differs = differs || value(row) != value(rows.front());
    }
    const double mean = sum / count;
    for (const std::size_t row : rows) squares += (value(row) - mean) * (value(row) - mean);
    return {mean, differs ? 1 / std::sqrt(squares / count) : 0};
}

}  // namespace

Scaling::Scaling(const Samples& samples, std::span<const std::size_t> rows) {
    for (std::size_t column = 0; column < samples.features; ++column) {
        const auto [mean, factor] = factors_of(samples, rows, column);
        means_.push_back(mean);
        factors_.push_back(factor);
    }
}

void Scaling::apply(Samples& samples) const {
    for (std::size_t i = 0; i < samples.values.size(); ++i) {
        const std::size_t column = i % samples.features;
        samples.values[i] =
            static_cast<float>((static_cast<double>(samples.values[i]) - means_[column]) * factors_[column]);
    }
}

std::vector<ddp::Tensor> Scaling::state() const {
    const auto columns = static_cast<std::int64_t>(means_.size());
    return {ddp::tensor_of("mean", std::span(means_), {columns}),
            ddp::tensor_of("factor", std::span(factors_), {columns})};
}

}  // namespace train
