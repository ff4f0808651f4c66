#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace ddp {

/// Element types of buffers.
enum class DType : std::uint8_t { F32, F64, I32, I64, BF16, F16, U8 };
constexpr std::size_t size_of(DType type) {
    switch (type) {
        case DType::F32: case DType::I32: return 4;
        case DType::F64: case DType::I64: return 8;
        case DType::BF16: case DType::F16: return 2;
        case DType::U8: return 1;
    }
    return 0;
}
/// "float32", "bfloat16" and so on.
const char* name_of(DType type);

/// Reductions. Avg is the sum divided by the group's size; not for integer types.
enum class ReduceOp : std::uint8_t { Sum, Max, Min, Avg };
const char* name_of(ReduceOp op);

/// Where memory lives. `index` is the device's number, -1 for host memory.
struct Device {
    enum class Kind : std::uint8_t { Cpu, Cuda } kind = Kind::Cpu;
    int index = -1;
    bool operator==(const Device&) const = default;
};

/// Any failure of libddp's public API. what() is one line that names rank, object and remedy.
class Error : public std::runtime_error {
  public:
    using std::runtime_error::runtime_error;
};
/// A value the caller passed, or the environment or a file holds, is wrong.
class InvalidInput : public Error {
  public:
    using Error::Error;
};
/// Ranks called different collectives, or disagree about shapes or world size; what() shows both sides.
class MismatchError : public Error {
  public:
    using Error::Error;
};
/// A collective did not finish by its deadline; what() says what every peer was doing.
class TimeoutError : public Error {
  public:
    using Error::Error;
};
/// A peer died, or the launcher ended this generation; what() names the rank, collective and sequence number.
class PeerLostError : public Error {
  public:
    using Error::Error;
};

}  // namespace ddp
