#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "ddp/process_group.h"

namespace ddp::testing {

/// A group that says that its memory is symmetric, and refuses averages as the kernels for such memory do; or
/// one that refuses them alone.
class SymmetricGroup final : public ProcessGroup {
  public:
    enum class Memory { Symmetric, Any };
    explicit SymmetricGroup(ProcessGroup& group, Memory memory = Memory::Symmetric)
        : group_(group), memory_(memory) {
        take_seat({.rank = group.rank(), .size = group.size(), .device = group.device()});
    }
    [[nodiscard]] bool shared_memory_is_symmetric() const override { return memory_ == Memory::Symmetric; }
    [[nodiscard]] std::string describe() const override { return group_.describe(); }
    [[nodiscard]] void* stream() const override { return group_.stream(); }
    Work barrier() override { return group_.barrier(); }
    std::span<std::byte> allocate_shared(std::size_t bytes) override { return group_.allocate_shared(bytes); }
    [[nodiscard]] double communication_seconds() const override { return group_.communication_seconds(); }
    void report_progress(std::uint64_t step, std::uint64_t samples) override {
        group_.report_progress(step, samples);
    }

  private:
    Work do_all_reduce(Buffer buffer, ReduceOp op) override {
        if (op == ReduceOp::Avg) throw InvalidInput("symmetric memory is summed only");
        return group_.all_reduce(buffer, op);
    }
    Work do_broadcast(Buffer buffer, int root) override { return group_.broadcast(buffer, root); }
    Work do_all_gather(Buffer output, Buffer input) override { return group_.all_gather(output, input); }
    Work do_reduce_scatter(Buffer output, Buffer input, ReduceOp op) override {
        return group_.reduce_scatter(output, input, op);
    }
    Work do_reduce(Buffer buffer, int root, ReduceOp op) override { return group_.reduce(buffer, root, op); }
    Work do_gather(Buffer output, Buffer input, int root) override {
        return group_.gather(output, input, root);
    }
    Work do_scatter(Buffer output, Buffer input, int root) override {
        return group_.scatter(output, input, root);
    }
    Work do_all_to_all(Buffer output, Buffer input) override { return group_.all_to_all(output, input); }
    Work do_send(Buffer buffer, int to) override { return group_.send(buffer, to); }
    Work do_recv(Buffer buffer, int from) override { return group_.recv(buffer, from); }
    std::vector<std::string> do_all_gather_bytes(std::string_view mine, std::int16_t) override {
        return group_.all_gather_bytes(mine);
    }
    std::unique_ptr<ProcessGroup> do_split(const Part& part) override {
        return group_.split(part.color, part.key);
    }

    ProcessGroup& group_;
    Memory memory_;
};

}  // namespace ddp::testing
