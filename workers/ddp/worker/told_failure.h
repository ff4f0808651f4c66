#pragma once

#include <exception>
#include <string>
#include <string_view>

/// Failures on their way to other ranks.
namespace ddp {

/// A failure as words, and back: of the same type, with `context` before what it says. Never empty; the end
/// may be cut off.
std::string told(const std::exception_ptr& failure);
[[noreturn]] void throw_told(std::string_view words, const std::string& context);

}  // namespace ddp
