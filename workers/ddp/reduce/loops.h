#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "ddp/types.h"

namespace ddp {

/// Multiplies all elements in host memory by `factor`. Throws InvalidInput for integer types.
void scale_elements(const Buffer& buffer, double factor);
/// The sum of the products, as sixteen partial sums; a single one could not be vectorised.
float dot(const float* a, const float* b, std::size_t count);
/// to[i] += factor * from[i], which must not overlap.
void add_scaled(float* to, const float* from, float factor, std::size_t count);
/// The sum of the squares of all elements in host memory; 0 without memory.
double squares_of(const Buffer& buffer);
/// Appends the sum of squares of each `chunk` bytes; the last chunk may be shorter, as if zeros followed.
void append_squares(const Buffer& buffer, std::size_t chunk, std::vector<double>& sums);
/// A hash for finding flipped bits, at the speed of memory: it differs where one word of 8 bytes does. `seed`
/// is the hash of what came before.
std::uint64_t hash_of(std::string_view bytes, std::uint64_t seed);
/// The factor by which clip_grad_norm scales; 1 for a norm within the limit. Throws InvalidInput for a
/// `max_norm` that is not positive.
double clip_factor(double norm, double max_norm);

}  // namespace ddp
