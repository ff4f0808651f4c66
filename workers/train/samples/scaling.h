#pragma once

#include <span>
#include <vector>

#include "data.h"
#include "ddp/types.h"

namespace train {

/// Scales columns to mean 0 and deviation 1 of the training samples. Held-out and later samples get the same
/// factors, so these are part of a checkpoint.
class Scaling final : public ddp::Stateful {
  public:
    /// Computes the factors from the samples of these rows. A column that is constant in them becomes 0.
    Scaling(const Samples& samples, std::span<const std::size_t> rows);
    /// Scales all rows. The samples must be unscaled, with as many features.
    void apply(Samples& samples) const;
    [[nodiscard]] std::vector<ddp::Tensor> state() const override;

  private:
    mutable std::vector<double> means_, factors_;  ///< by column
};

}  // namespace train
