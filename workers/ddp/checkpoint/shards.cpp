#include "ddp/checkpoint/shards.h"

#include <fmt/core.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <utility>

#include "ddp/cuda/memory.h"
#include "ddp/worker/slices.h"
#include "env/json.h"
#include "env/text.h"

namespace ddp {
namespace {

std::size_t elements_of(const Tensor& tensor) {
    std::size_t elements = 1;
    for (const std::int64_t extent : tensor.shape) elements *= static_cast<std::size_t>(extent);
    return elements;
}

std::size_t bytes_of(const Tensor& tensor) { return elements_of(tensor) * size_of(tensor.memory.dtype); }
/// Each gathered tensor begins on a cache line.
std::size_t padded_bytes(const Tensor& tensor) { return round_up(bytes_of(tensor), 64); }

std::uint64_t digest_of(const CheckpointPart& part) {
    std::string text = part.name;
    for (const Tensor& tensor : part.tensors) text += '\n' + tensor.name + ' ' + describe(tensor);
    return std::hash<std::string>{}(text);
}

/// The pieces of tensor `i`, whose numbers stand at `at`.
std::vector<Piece> pieces_at(const std::vector<std::vector<std::uint64_t>>& held, std::size_t at,
                             const Tensor& tensor) {
    std::vector<Piece> pieces;
    for (std::size_t rank = 0; rank < held.size(); ++rank) {
        if (held[rank][at + 1] > 0) pieces.push_back({rank, held[rank][at], held[rank][at + 1]});
    }
    std::ranges::sort(pieces, {}, &Piece::begin);
    std::size_t expected = 0;
    for (const Piece& piece : pieces) {
        if (piece.begin != expected) break;
        expected += piece.count;
    }
    std::size_t held_by_all = 0;
    for (const Piece& piece : pieces) held_by_all += piece.count;
    if (expected != elements_of(tensor) || held_by_all != expected)
        throw InvalidInput(fmt::format(
            "checkpoint: the ranks' parts of tensor '{}' do not make it up: element {} is in none "
            "or in two",
            ddprun::excerpt(tensor.name), expected));
    return pieces;
}

ShardPlan plan_part(const CheckpointPart& part, const std::vector<std::vector<std::uint64_t>>& held,
                    std::size_t at) {
    ShardPlan plan;
    std::vector<std::uint64_t> bytes(held.size());
    std::vector<bool> writes(held.size());
    for (const Tensor& tensor : part.tensors) {
        std::vector<Piece> pieces = pieces_at(held, at, tensor);
        // A rank that holds all of a tensor need not send it.
        const auto least = static_cast<std::size_t>(std::ranges::min_element(bytes) - bytes.begin());
        const std::size_t writer = pieces.empty() ? 0 : pieces.size() == 1 ? pieces[0].rank : least;
        bytes[writer] += bytes_of(tensor);
        writes[writer] = true;
        plan.tensors.push_back({writer, std::move(pieces)});
        at += 2;
    }
    const auto files = std::ranges::count(writes, true);
    std::size_t number = 0;
    for (const bool writer : writes)
        plan.files.push_back(
            writer ? fmt::format("{}-{:05}-of-{:05}{}", part.name, ++number, files, kFileSuffix) : "");
    return plan;
}

}  // namespace

bool is_sharded(std::span<const Tensor> tensors) {
    return std::ranges::any_of(tensors, [](const Tensor& tensor) { return tensor.part_begin.has_value(); });
}

std::string pieces_of(std::span<const CheckpointPart> parts, std::size_t rank) {
    std::vector<std::uint64_t> numbers;
    for (const CheckpointPart& part : parts) {
        if (!is_sharded(part.tensors)) continue;
        numbers.push_back(digest_of(part));
        for (const Tensor& tensor : part.tensors) {
            // A whole tensor is on all ranks; rank 0's is saved.
            const bool counts = tensor.part_begin || rank == 0;
            numbers.insert(numbers.end(), {tensor.part_begin.value_or(0), counts ? tensor.memory.count : 0});
        }
    }
    return {reinterpret_cast<const char*>(numbers.data()), numbers.size() * sizeof numbers[0]};
}

std::vector<ShardPlan> plan_shards(std::span<const CheckpointPart> parts, std::span<const std::string> held) {
    std::vector<std::vector<std::uint64_t>> numbers;
    for (const std::string& bytes : held) {
        numbers.emplace_back(bytes.size() / sizeof(std::uint64_t));
        if (!bytes.empty()) std::memcpy(numbers.back().data(), bytes.data(), bytes.size());
    }
    std::vector<ShardPlan> plans(parts.size());
    std::size_t at = 0;
    for (std::size_t i = 0; i < parts.size(); ++i) {
        for (std::size_t rank = 0; rank < held.size(); ++rank) {
            const std::size_t all = numbers[0].size();
            if (numbers[rank].size() != all || (at < all && numbers[rank][at] != numbers[0][at]))
                throw InvalidInput(fmt::format("checkpoint: rank {} lists other tensors of '{}' than rank 0",
                                               rank, parts[i].name));
        }
        if (!is_sharded(parts[i].tensors)) continue;
        plans[i] = plan_part(parts[i], numbers, at + 1);
        at += 1 + 2 * parts[i].tensors.size();
    }
    return plans;
}

std::size_t gathered_bytes(std::span<const Tensor> tensors, const ShardPlan& plan, std::size_t rank) {
    std::size_t bytes = 0;
    for (std::size_t i = 0; i < plan.tensors.size(); ++i) {
        if (plan.tensors[i].writer == rank) bytes += padded_bytes(tensors[i]);
    }
    return bytes;
}

std::vector<Tensor> gather_shards(ProcessGroup& group, std::span<const Tensor> tensors, const ShardPlan& plan,
                                  std::byte* memory) {
    const auto self = static_cast<std::size_t>(group.rank());
    std::vector<Tensor> gathered;
    std::vector<Message> messages;
    for (std::size_t i = 0; i < plan.tensors.size(); ++i) {
        const Tensor& tensor = tensors[i];
        const auto& [writer, pieces] = plan.tensors[i];
        for (const Piece& piece : pieces) {
            const Buffer place = {memory + piece.begin * size_of(tensor.memory.dtype), piece.count,
                                  tensor.memory.dtype, group.device()};
            if (writer != self && piece.rank == self)
                messages.push_back({Message::Direction::Send, tensor.memory, static_cast<int>(writer)});
            else if (writer == self && piece.rank != self)
                messages.push_back({Message::Direction::Recv, place, static_cast<int>(piece.rank)});
            else if (writer == self && place.device == tensor.memory.device && place.device == Device{})
                std::memcpy(place.data, tensor.memory.data, tensor.memory.bytes());
            else if (writer == self) cuda::copy(place.data, tensor.memory.data, place.bytes(), nullptr);
        }
        if (writer != self) continue;
        gathered.push_back(
            {tensor.name, tensor.shape, {memory, elements_of(tensor), tensor.memory.dtype, group.device()}});
        memory += padded_bytes(tensor);
    }
    if (!messages.empty()) group.batch_send_recv(std::move(messages)).synchronize();
    return gathered;
}

std::string index_of(std::span<const Tensor> tensors, const ShardPlan& plan, const std::string& save) {
    std::vector<std::pair<std::string, ddprun::Json>> files;
    std::uint64_t bytes = 0;
    for (std::size_t i = 0; i < tensors.size(); ++i) {
        files.emplace_back(tensors[i].name, plan.files[plan.tensors[i].writer]);
        bytes += bytes_of(tensors[i]);
    }
    const ddprun::Json index = {{"metadata", {{kTotalKey, bytes}, {kSaveKey, save}}},
                                {"weight_map", ddprun::json_object(std::move(files))}};
    return ddprun::to_text(index, 2) + "\n";
}

}  // namespace ddp
