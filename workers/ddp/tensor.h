#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "ddp/process_group.h"

namespace ddp {

/// A named piece of memory with a shape: a parameter of a model, or a state of its optimizer. Contiguous, row
/// major. Borrowed: whoever made the memory keeps it alive as long as this description is in use.
struct Tensor {
    std::string name;
    std::vector<std::int64_t> shape;
    Buffer memory;
};

/// A tensor over `values`. Throws InvalidInput when the shape does not hold exactly values.size() elements.
template <class T>
Tensor tensor_of(std::string name, std::span<T> values, std::vector<std::int64_t> shape);

/// "float32[128, 64]", as errors name it.
std::string describe(DType dtype, std::span<const std::int64_t> shape);
inline std::string describe(const Tensor& tensor) { return describe(tensor.memory.dtype, tensor.shape); }

/// Throws InvalidInput unless names are non-empty and unique and every shape holds its memory's count.
void check_tensors(std::span<const Tensor> tensors);

template <class T>
Tensor tensor_of(std::string name, std::span<T> values, std::vector<std::int64_t> shape) {
    Tensor tensor{std::move(name), std::move(shape), buffer_of(values)};
    check_tensors({&tensor, 1});
    return tensor;
}

}  // namespace ddp
