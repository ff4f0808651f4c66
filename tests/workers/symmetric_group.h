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
        : group_(group), memory_(memory) {}
    [[nodiscard]] bool shared_memory_is_symmetric() const override { return memory_ == Memory::Symmetric; }
    Work all_reduce(Buffer buffer, ReduceOp op) override {
        if (op == ReduceOp::Avg) throw InvalidInput("symmetric memory is summed only");
        return group_.all_reduce(buffer, op);
    }

    [[nodiscard]] int rank() const override { return group_.rank(); }
    [[nodiscard]] int size() const override { return group_.size(); }
    [[nodiscard]] std::string describe() const override { return group_.describe(); }
    [[nodiscard]] Device device() const override { return group_.device(); }
    [[nodiscard]] void* stream() const override { return group_.stream(); }
    Work broadcast(Buffer buffer, int root) override { return group_.broadcast(buffer, root); }
    Work all_gather(Buffer output, Buffer input) override { return group_.all_gather(output, input); }
    Work reduce_scatter(Buffer output, Buffer input, ReduceOp op) override {
        return group_.reduce_scatter(output, input, op);
    }
    Work reduce(Buffer buffer, int root, ReduceOp op) override { return group_.reduce(buffer, root, op); }
    Work gather(Buffer output, Buffer input, int root) override { return group_.gather(output, input, root); }
    Work scatter(Buffer output, Buffer input, int root) override {
        return group_.scatter(output, input, root);
    }
    Work all_to_all(Buffer output, Buffer input) override { return group_.all_to_all(output, input); }
    Work barrier() override { return group_.barrier(); }
    Work send(Buffer buffer, int to) override { return group_.send(buffer, to); }
    Work recv(Buffer buffer, int from) override { return group_.recv(buffer, from); }
    std::unique_ptr<ProcessGroup> split(int color, int key) override { return group_.split(color, key); }
    std::span<std::byte> allocate_shared(std::size_t bytes) override { return group_.allocate_shared(bytes); }
    std::vector<std::string> all_gather_bytes(std::string_view mine) override {
        return group_.all_gather_bytes(mine);
    }
    [[nodiscard]] double communication_seconds() const override { return group_.communication_seconds(); }
    void report_progress(std::uint64_t step, std::uint64_t samples) override {
        group_.report_progress(step, samples);
    }

  private:
    ProcessGroup& group_;
    Memory memory_;
};

}  // namespace ddp::testing
