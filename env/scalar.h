#pragma once

#include <string_view>

namespace ddprun {

/// A number of a training step: {"loss", 0.31}. A name with a slash, as "train/loss", belongs to a group.
struct Scalar {
    std::string_view name;
    double value = 0;
};

}  // namespace ddprun
