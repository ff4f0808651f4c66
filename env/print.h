#pragma once

#include <fmt/core.h>

#include <cstdio>
#include <string>
#include <utility>

namespace ddprun {

/// Formats and writes. Unlike fmt::print, which throws, it ignores a stream that cannot be written to.
template <class... Args>
void print(std::FILE* to, fmt::format_string<Args...> text, Args&&... args) {
    const std::string line = fmt::format(text, std::forward<Args>(args)...);
    (void)std::fwrite(line.data(), 1, line.size(), to);
}
template <class... Args>
void print(fmt::format_string<Args...> text, Args&&... args) {
    ddprun::print(stdout, text, std::forward<Args>(args)...);
}

}  // namespace ddprun
