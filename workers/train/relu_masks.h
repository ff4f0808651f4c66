#pragma once

#include <compare>
#include <cstddef>
#include <map>
#include <optional>
#include <unordered_set>

#include "tuning.h"

namespace train {

/// Which ReLU layers note where they let something through: whoever writes a mask and whoever reads it have
/// to agree, though one of them is asked in the forward pass and the other on the way back.
class ReluMasks {
  public:
    /// A layer with so many samples: its mask and what goes through it are known by these.
    struct Layer {
        const void* mask = nullptr;
        std::size_t rows = 0;
        auto operator<=>(const Layer&) const = default;
    };

    /// In the forward pass: whether the mask has been written, or what it holds is of an older pass.
    void set_written(const void* mask, bool is_written);
    [[nodiscard]] bool is_written(const void* mask) const { return written_.contains(mask); }

    /// What the forward pass takes, before the way back is known. Only the first word on a layer counts.
    void note_forward(const Layer& layer, const ForwardTimes& times);
    /// With what the way back takes it is decided, once: the next forward pass asks is_wanted. Without
    /// note_forward nothing is.
    void note_backward(const Layer& layer, const BackwardTimes& times);
    /// True until it is known better: without a mask there would be nothing to compare with.
    [[nodiscard]] bool is_wanted(const Layer& layer) const;

  private:
    struct Known {
        ForwardTimes forward;
        std::optional<bool> pays;
    };
    std::unordered_set<const void*> written_;
    std::map<Layer, Known> layers_;
};

}  // namespace train
