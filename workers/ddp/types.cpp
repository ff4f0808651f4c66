#include "ddp/types.h"

#include <fmt/core.h>
#include <fmt/format.h>

#include <algorithm>
#include <unordered_set>

namespace ddp {

const char* name_of(DType type) {
    switch (type) {
        case DType::F32: return "float32";
        case DType::F64: return "float64";
        case DType::I32: return "int32";
        case DType::I64: return "int64";
        case DType::BF16: return "bfloat16";
        case DType::F16: return "float16";
        case DType::U8: return "uint8";
        case DType::I8: return "int8";
        case DType::Bool: return "bool";
    }
    return "unknown type";
}

const char* name_of(ReduceOp op) {
    switch (op) {
        case ReduceOp::Sum: return "sum";
        case ReduceOp::Max: return "max";
        case ReduceOp::Min: return "min";
        case ReduceOp::Avg: return "avg";
        case ReduceOp::Product: return "product";
    }
    return "unknown reduction";
}

namespace {

/// The memory of a whole tensor has as many elements as its shape; that of a part has some of them.
bool fits_shape(const Tensor& tensor) {
    std::size_t elements = 1, end = tensor.memory.count;
    for (const std::int64_t extent : tensor.shape) {
        if (extent < 0 || __builtin_mul_overflow(elements, static_cast<std::size_t>(extent), &elements))
            return false;
    }
    if (!tensor.part_begin) return elements == end;
    return !__builtin_add_overflow(*tensor.part_begin, end, &end) && end <= elements;
}

}  // namespace

std::string describe(DType dtype, std::span<const std::int64_t> shape) {
    constexpr std::size_t kShown = 8;
    if (shape.size() <= kShown)
        return fmt::format("{}[{}]", name_of(dtype), fmt::join(shape.begin(), shape.end(), ", "));
    const auto first = shape.first(kShown);
    return fmt::format("{}[{}, ... {} dimensions]", name_of(dtype),
                       fmt::join(first.begin(), first.end(), ", "), shape.size());
}

void check_tensors(std::span<const Tensor> tensors) {
    std::unordered_set<std::string> names;
    for (const Tensor& tensor : tensors) {
        if (tensor.name.empty()) throw InvalidInput("a tensor has no name");
        if (!names.insert(tensor.name).second)
            throw InvalidInput(fmt::format("two tensors are named '{}'", tensor.name));
        if (!is_known(tensor.memory.dtype))
            throw InvalidInput(fmt::format("tensor '{}': there is no element type {}", tensor.name,
                                           static_cast<int>(tensor.memory.dtype)));
        if (!fits_shape(tensor))
            throw InvalidInput(fmt::format("tensor '{}': {} does not hold {} elements", tensor.name,
                                           describe(tensor), tensor.memory.count));
        if (tensor.memory.data == nullptr && tensor.memory.count > 0)
            throw InvalidInput(fmt::format("tensor '{}' has no memory", tensor.name));
    }
}

void check_parameters(std::span<const Tensor> parameters) {
    check_tensors(parameters);
    std::vector<const Tensor*> by_address;
    for (const Tensor& parameter : parameters) {
        if (parameter.memory.bytes() > 0) by_address.push_back(&parameter);
    }
    const auto begin_of = [](const Tensor* tensor) {
        return reinterpret_cast<std::uintptr_t>(tensor->memory.data);
    };
    std::ranges::sort(by_address, {}, begin_of);
    for (std::size_t i = 1; i < by_address.size(); ++i) {
        const Tensor &one = *by_address[i - 1], &other = *by_address[i];
        if (begin_of(&other) - begin_of(&one) >= one.memory.bytes()) continue;
        throw InvalidInput(fmt::format(
            "parameters '{}' and '{}' share memory, which would be stepped twice: list a parameter "
            "that two layers share once, and add up its gradients",
            one.name, other.name));
    }
}

}  // namespace ddp
