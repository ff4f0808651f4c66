#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "ddp/checkpoint/durable_file.h"
#include "ddp/checkpoint/parts.h"
#include "ddp/process_group.h"

/// Files of tensors whose parts lie on several ranks. Each tensor is written whole, by one rank, which gets
/// the other ranks' parts; an index lists the file of each tensor.
namespace ddp {

inline constexpr std::string_view kFileSuffix = ".safetensors", kIndexSuffix = ".index.json";
/// Metadata of every file and of its index: a random name of the save, and the bytes of all tensors.
inline constexpr const char *kSaveKey = "save", *kTotalKey = "total_size";

/// The elements of a tensor that one rank holds.
struct Piece {
    std::size_t rank = 0, begin = 0, count = 0;
};
struct PlannedTensor {
    std::size_t writer = 0;
    std::vector<Piece> pieces;  ///< in the order of their elements
};
/// The files of one CheckpointPart.
struct ShardPlan {
    std::vector<PlannedTensor> tensors;
    std::vector<std::string> files;  ///< by rank; "" for a rank that writes none
};

bool is_sharded(std::span<const Tensor> tensors);
/// Throws InvalidInput, beginning with `path`, for a part of a tensor.
void require_whole(const std::string& path, std::span<const Tensor> tensors);
/// What this rank holds of the sharded parts, for plan_shards on all ranks.
std::string pieces_of(std::span<const CheckpointPart> parts, std::size_t rank);
/// Shares the tensors out by bytes: one plan for each part, without tensors where the part is not sharded.
/// `held` has every rank's pieces_of, and all ranks get the same plans. Throws InvalidInput unless the ranks
/// list the same tensors and the pieces make up each.
std::vector<ShardPlan> plan_shards(std::span<const CheckpointPart> parts, std::span<const std::string> held);

/// Bytes that gather_shards needs.
std::size_t gathered_bytes(std::span<const Tensor> tensors, const ShardPlan& plan, std::size_t rank);
/// Collective. Returns the tensors that this rank writes, whole, in `memory` on the group's device.
std::vector<Tensor> gather_shards(ProcessGroup& group, std::span<const Tensor> tensors, const ShardPlan& plan,
                                  std::byte* memory);
/// The index's content, as Hugging Face's.
std::string index_of(std::span<const Tensor> tensors, const ShardPlan& plan, const std::string& save);

void write_safetensors(DurableFile& file, std::span<const Tensor> tensors, const Metadata& metadata);

}  // namespace ddp
