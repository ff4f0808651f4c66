#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace ddp {

/// torch's error.json: {"message": {"message": ..., "extraInfo": {"py_callstack": ..., "timestamp": ...}}};
/// extraInfo also has the last "nccl_error" and "cuda_error", if any (device_error.h).
std::string error_json(std::string_view message, std::string_view stack, std::int64_t unix_seconds);

/// "rank 3: what"; the text itself when it begins like that already, or without RANK in the environment.
std::string with_rank(std::string_view what);
/// The rank for with_rank() in place of RANK. Recovery sets it, because a process may get another rank.
void set_reported_rank(int rank);

}  // namespace ddp
