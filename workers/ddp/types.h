#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace ddp {

/// Any failure of libddp's public API. what() is one line that names rank, object and remedy.
class Error : public std::runtime_error {
  public:
    using std::runtime_error::runtime_error;
};
/// A value from the caller, the environment or a file is wrong.
class InvalidInput : public Error {
  public:
    using Error::Error;
};
/// A file could not be written or read: the disk is full, the directory is another user's. what() names it.
class FileError : public Error {
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

/// A Bool is one byte, 0 or 1.
enum class DType : std::uint8_t { F32, F64, I32, I64, BF16, F16, U8, I8, Bool };
inline constexpr std::size_t kDTypes = 9;
constexpr std::size_t size_of(DType type) {
    switch (type) {
        case DType::F32:
        case DType::I32: return 4;
        case DType::F64:
        case DType::I64: return 8;
        case DType::BF16:
        case DType::F16: return 2;
        case DType::U8:
        case DType::I8:
        case DType::Bool: return 1;
    }
    return 0;
}
/// "float32", "bfloat16" and so on.
const char* name_of(DType type);

/// Reductions. Avg is the sum divided by the group's size; it is not for integer types. Sums and products of
/// integers wrap.
enum class ReduceOp : std::uint8_t { Sum, Max, Min, Avg, Product };
const char* name_of(ReduceOp op);
/// Whether `type` and `op` are enumerators above: bindings of other languages may cast any number.
constexpr bool is_known(DType type) { return size_of(type) > 0; }
constexpr bool is_known(ReduceOp op) { return op <= ReduceOp::Product; }
constexpr bool is_float(DType type) {
    return type == DType::F32 || type == DType::F64 || type == DType::BF16 || type == DType::F16;
}
/// Whether the reducing collectives take this combination: everything except averages of integers, and of
/// bool only Max (or) and Min (and).
constexpr bool is_reducible(DType type, ReduceOp op) {
    if (type == DType::Bool) return op == ReduceOp::Max || op == ReduceOp::Min;
    return is_known(type) && is_known(op) && (op != ReduceOp::Avg || is_float(type));
}

/// The place of memory. `index` is the device's number, -1 for host memory.
struct Device {
    enum class Kind : std::uint8_t { Cpu, Cuda } kind = Kind::Cpu;
    int index = -1;
    bool operator==(const Device&) const = default;
};

/// A contiguous buffer of `count` elements that a collective reads. Borrowed: it must live until the
/// collective's Work is done.
struct ConstBuffer {
    const void* data = nullptr;
    std::size_t count = 0;
    DType dtype = DType::F32;
    Device device = {};

    [[nodiscard]] std::size_t bytes() const { return count * size_of(dtype); }
};
/// One that a collective writes, or reads and writes.
struct Buffer {
    void* data = nullptr;
    std::size_t count = 0;
    DType dtype = DType::F32;
    Device device = {};

    [[nodiscard]] std::size_t bytes() const { return count * size_of(dtype); }
    // NOLINTNEXTLINE(google-explicit-constructor): a buffer can be read wherever it is expected to be.
    operator ConstBuffer() const { return {data, count, dtype, device}; }
};
template <class T>
using BufferOver = std::conditional_t<std::is_const_v<T>, ConstBuffer, Buffer>;

template <class T>
constexpr DType dtype_of() {
    if constexpr (std::is_same_v<T, float>) return DType::F32;
    else if constexpr (std::is_same_v<T, double>) return DType::F64;
    else if constexpr (std::is_same_v<T, std::int32_t>) return DType::I32;
    else if constexpr (std::is_same_v<T, std::int64_t>) return DType::I64;
    else if constexpr (std::is_same_v<T, std::uint8_t>) return DType::U8;
    else if constexpr (std::is_same_v<T, std::int8_t>) return DType::I8;
    else {
        static_assert(std::is_same_v<T, bool>, "there is no DType of this type");
        return DType::Bool;
    }
}
/// A Buffer over contiguous host memory that stays in place: a vector, an array, a span. A ConstBuffer over
/// const elements.
template <class Values>
auto buffer_of(Values&& values) {
    const std::span view(std::forward<Values>(values));
    using View = decltype(view);
    return BufferOver<typename View::element_type>{
        view.data(), view.size(), dtype_of<typename View::value_type>(), {}};
}
/// One over elements that C++ has no type for: bfloat16 and float16, held in 16-bit integers or in a
/// compiler's own type. Throws InvalidInput when the sizes differ.
template <class Values>
auto buffer_of(Values&& values, DType type) {
    const std::span view(std::forward<Values>(values));
    using View = decltype(view);
    if (size_of(type) != sizeof(view[0]))
        throw InvalidInput(std::string("a buffer of ") + name_of(type) + " cannot lie in elements of " +
                           std::to_string(sizeof(view[0])) + " bytes");
    return BufferOver<typename View::element_type>{view.data(), view.size(), type, {}};
}

/// A named piece of memory with a shape: a parameter of a model, or a state of its optimizer. Contiguous, row
/// major. Borrowed: the memory outlives every use of this description.
struct Tensor {
    std::string name;
    std::vector<std::int64_t> shape;
    Buffer memory;
    /// Set where training is sharded: `shape` is that of the whole tensor, and `memory` holds its elements
    /// from this one on, possibly none. The parts of all ranks make up the tensor.
    std::optional<std::size_t> part_begin = std::nullopt;
};

/// "float32[128, 64]": type and shape as errors show them.
std::string describe(DType dtype, std::span<const std::int64_t> shape);
inline std::string describe(const Tensor& tensor) { return describe(tensor.memory.dtype, tensor.shape); }

class ProcessGroup;

/// An object whose state a checkpoint holds, so that training can resume: a model, an optimizer, a loss
/// scale, a schedule, or the program's own.
class Stateful {
  public:
    virtual ~Stateful() = default;
    /// The tensors of the state: saving reads them, loading writes them. Every call returns the same tensors.
    [[nodiscard]] virtual std::vector<Tensor> state() const = 0;
    /// Called on every rank before a checkpoint of a group is written; rank 0's state() is saved. Collective
    /// where it is overridden.
    virtual void prepare_to_save(ProcessGroup&) {}
    /// Called on every rank after state() was filled from a checkpoint.
    virtual void state_loaded() {}
};

/// Throws InvalidInput unless names are non-empty and unique, types are known, and the product of each shape
/// is the element count of its memory; a part must lie inside its tensor.
void check_tensors(std::span<const Tensor> tensors);
/// check_tensors, and no two parameters share memory: each is stepped once.
void check_parameters(std::span<const Tensor> parameters);

/// A tensor over `values` (see buffer_of). Throws InvalidInput when the shape does not hold exactly that many
/// elements.
template <class Values>
Tensor tensor_of(std::string name, Values&& values, std::vector<std::int64_t> shape) {
    Tensor tensor{std::move(name), std::move(shape), buffer_of(std::forward<Values>(values))};
    check_tensors({&tensor, 1});
    return tensor;
}

}  // namespace ddp
