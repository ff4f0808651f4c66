#pragma once

#include <exception>
#include <string>
#include <string_view>

/// Failures, encoded for other ranks.
namespace ddp {

/// A failure as text, for ranks in which throw_encoded_failure throws it with `context` before its message: a
/// TimeoutError or MismatchError as such, another one as PeerLostError, because it ends the rank that had it.
/// Never empty; the end may be cut off.
std::string encode_failure(const std::exception_ptr& failure);
[[noreturn]] void throw_encoded_failure(std::string_view text, const std::string& context);

}  // namespace ddp
