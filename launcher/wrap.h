#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace ddprun {

/// Breaks `text` at spaces into lines of at most `width` columns; every line after the first starts with
/// `indent` spaces, which count. A word longer than a line stays whole. No newline at the end.
std::string wrap(std::string_view text, std::size_t width, std::size_t indent);

}  // namespace ddprun
