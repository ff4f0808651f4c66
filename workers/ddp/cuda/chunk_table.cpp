#include "ddp/cuda/chunk_table.h"

#include <fmt/core.h>

#include <bit>
#include <cstring>

#include "ddp/cuda/graph.h"

namespace ddp::cuda {

DeviceTable::DeviceTable(std::shared_ptr<const Gpu> gpu, std::string owner, std::size_t bytes)
    : gpu_(std::move(gpu)), owner_(std::move(owner)), stages_{Stage(gpu_), Stage(gpu_)} {
    for (Stage& stage : stages_) stage.memory = std::make_unique<PinnedMemory>(gpu_, bytes);
    memories_.emplace_back(gpu_, bytes);
}

const PinnedMemory& DeviceTable::free_stage(Stage& stage, std::size_t bytes) const {
    if (stage.copied.query() != Code::Success) stage.copied.synchronize();
    if (stage.memory->bytes() < bytes)
        stage.memory = std::make_unique<PinnedMemory>(gpu_, std::bit_ceil(bytes));
    return *stage.memory;
}

void DeviceTable::replace(std::span<const std::byte> entries, Stream stream) {
    if (is_capturing(gpu_->api(), stream))
        throw Error(
            fmt::format("{}: this step cannot be captured: its gradients are not those of the step "
                        "before; do one step with them outside of the capture first",
                        owner_));
    Stage& stage = stages_[turn_];
    const PinnedMemory& from = free_stage(stage, entries.size());
    if (captured_ || memories_.back().bytes() < entries.size()) {
        DeviceMemory grown(gpu_, std::bit_ceil(entries.size()));
        if (!captured_) memories_.pop_back();
        memories_.push_back(std::move(grown));
        captured_ = false;
    }
    std::memcpy(from.get(), entries.data(), entries.size());
    copy(*gpu_, memories_.back().get(), from.get(), entries.size(), stream);
    stage.copied.record(stream);
    turn_ = 1 - turn_;
}

const std::byte* DeviceTable::for_launch(Stream stream) {
    captured_ = captured_ || is_capturing(gpu_->api(), stream);
    return memories_.back().get();
}

}  // namespace ddp::cuda
