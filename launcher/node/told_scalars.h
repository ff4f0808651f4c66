#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "env/segment.h"

namespace ddprun {

/// A number that a worker told: ddprun.step(step, name=value) in Python.
struct ToldScalar {
    std::uint64_t step = 0;
    double time = 0;  ///< seconds from the epoch
    double value = 0;
    std::string name;
    bool operator==(const ToldScalar&) const = default;
};

/// Takes at most `most` records from the ring, the oldest first. The ring belongs to a worker and is not
/// trusted: a record whose name is not in the table is left out.
std::vector<ToldScalar> take_scalars(ScalarRing& ring, std::size_t most);

/// One line for each: "300 1700000000.5 0.25 loss"; and back, what is no such line left out. Pure.
std::string encode_scalars(const std::vector<ToldScalar>& scalars);
std::vector<ToldScalar> decode_scalars(std::string_view lines);

}  // namespace ddprun
