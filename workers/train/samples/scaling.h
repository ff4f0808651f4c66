#pragma once

#include <span>
#include <vector>

#include "data.h"
#include "ddp/types.h"

namespace train {

/// Brings columns of different scale to mean 0 and deviation 1, by the samples that are trained on: held-out
/// ones and later ones are scaled by the same factors, so they are part of a checkpoint.
class Scaling final : public ddp::Stateful {
  public:
    /// By the samples of these rows. A column that is the same in all of them becomes 0.
    Scaling(const Samples& samples, std::span<const std::size_t> rows);
    /// Scales all rows. The samples are as they were read, and of as many features.
    void apply(Samples& samples) const;
    [[nodiscard]] std::vector<ddp::Tensor> state() const override;

  private:
    mutable std::vector<double> means_, factors_;  ///< of each column
};

}  // namespace train
