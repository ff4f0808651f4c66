#include "ddp/tensor.h"

#include <fmt/core.h>
#include <fmt/format.h>

#include <unordered_set>

namespace ddp {
namespace {

bool holds_exactly(std::span<const std::int64_t> shape, std::size_t count) {
    std::size_t product = 1;
    for (const std::int64_t extent : shape) {
        if (extent < 0 || __builtin_mul_overflow(product, static_cast<std::size_t>(extent), &product))
            return false;
    }
    return product == count;
}

}  // namespace

std::string describe(DType dtype, std::span<const std::int64_t> shape) {
    return fmt::format("{}[{}]", name_of(dtype), fmt::join(shape.begin(), shape.end(), ", "));
}

void check_tensors(std::span<const Tensor> tensors) {
    std::unordered_set<std::string> names;
    for (const Tensor& tensor : tensors) {
        if (tensor.name.empty()) throw InvalidInput("a tensor has no name");
        if (!names.insert(tensor.name).second)
            throw InvalidInput(fmt::format("two tensors are named '{}'", tensor.name));
        if (!holds_exactly(tensor.shape, tensor.memory.count))
            throw InvalidInput(fmt::format("tensor '{}': {} does not hold {} elements", tensor.name,
                                           describe(tensor), tensor.memory.count));
        if (tensor.memory.data == nullptr && tensor.memory.count > 0)
            throw InvalidInput(fmt::format("tensor '{}' has no memory", tensor.name));
    }
}

}  // namespace ddp
