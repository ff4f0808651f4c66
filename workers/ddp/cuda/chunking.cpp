#include "ddp/cuda/chunking.h"

#include <fmt/core.h>

#include <algorithm>

namespace ddp::cuda {
namespace {

using device::ElementType;
using device::U32;

/// What a block moves at once: chunks of whole ones keep all its threads busy.
constexpr std::uint64_t kBlockElements = std::uint64_t{device::kBlockThreads} * device::kPack;
constexpr std::uint64_t kFewest = 2 * kBlockElements, kMost = 32 * kBlockElements;
/// Chunks for each block that the device holds at once: the last ones even out.
constexpr std::uint64_t kRounds = 4;

ElementType required(DType type) {
    if (const auto element = element_type(type)) return *element;
    throw InvalidInput(fmt::format(
        "no kernel for gradients or copies of {}; float32, bfloat16 and float16 have one", name_of(type)));
}

void* at(const Buffer& buffer, std::size_t element) {
    return static_cast<std::byte*>(buffer.data) + element * size_of(buffer.dtype);
}

/// Calls `chunk(first, count)` for run after run of so many elements.
template <class Chunk>
void for_chunks(std::size_t count, U32 elements, const Chunk& chunk) {
    for (std::size_t first = 0; first < count; first += elements)
        chunk(first, static_cast<U32>(std::min<std::size_t>(elements, count - first)));
}

}  // namespace

std::optional<ElementType> element_type(DType type) {
    switch (type) {
        case DType::F32:
            return ElementType::F32;
        case DType::BF16:
            return ElementType::BF16;
        case DType::F16:
            return ElementType::F16;
        case DType::F64:
        case DType::I32:
        case DType::I64:
        case DType::U8:
            return std::nullopt;
    }
    return std::nullopt;
}

U32 chunk_elements(std::uint64_t elements, unsigned blocks) {
    const std::uint64_t even = elements / (kRounds * blocks) + 1;
    const std::uint64_t whole = (even + kBlockElements - 1) / kBlockElements * kBlockElements;
    return static_cast<U32>(std::clamp(whole, kFewest, kMost));
}

void append_chunks(std::vector<device::ParameterChunk>& chunks, const ParameterMemory& parameter,
                   U32 elements) {
    const Buffer& copy = parameter.copy;
    const ElementType gradient_type = required(parameter.gradient.dtype);
    const bool has_copy = copy.data != nullptr;
    // Without a copy its type does not matter to the kernel.
    const ElementType copy_type = has_copy ? required(copy.dtype) : ElementType::BF16;
    if (copy_type == ElementType::F32)
        throw InvalidInput(fmt::format("a copy of {} saves nothing", name_of(copy.dtype)));
    for_chunks(parameter.gradient.count, elements, [&](std::size_t first, U32 count) {
        const auto part = [first](float* values) { return values != nullptr ? values + first : nullptr; };
        chunks.push_back({.value = parameter.value + first,
                          .gradient = at(parameter.gradient, first),
                          .copy = has_copy ? at(copy, first) : nullptr,
                          .states = {part(parameter.states[0]), part(parameter.states[1])},
                          .count = count,
                          .gradient_type = gradient_type,
                          .copy_type = copy_type});
    });
}

std::vector<device::GradientChunk> gradient_chunks(std::span<const Buffer> gradients, U32 elements) {
    std::vector<device::GradientChunk> chunks;
    for (const Buffer& gradient : gradients) {
        if (gradient.data == nullptr) continue;
        const ElementType type = required(gradient.dtype);
        for_chunks(gradient.count, elements, [&](std::size_t first, U32 count) {
            chunks.push_back({at(gradient, first), count, type});
        });
    }
    return chunks;
}

}  // namespace ddp::cuda
