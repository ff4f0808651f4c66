#pragma once

#include "ddp/worker/operation.h"

namespace ddp::testing {

/// A group whose memory is said to be symmetric, and which refuses averages, as the kernels for such memory
/// do; or one that only refuses averages. All calls go to another group.
class SymmetricGroup final : public ProcessGroup {
  public:
    enum class Memory { Symmetric, Any };
    explicit SymmetricGroup(ProcessGroup& other, Memory memory = Memory::Symmetric)
        : other_(other), memory_(memory) {
        set_identity({.rank = other.rank(),
                      .size = other.size(),
                      .device = other.device(),
                      .backend = "symmetric",
                      .world_rank = other.rank(),
                      .timeout = other.timeout()});
    }
    [[nodiscard]] bool shared_memory_is_symmetric() const override { return memory_ == Memory::Symmetric; }
    [[nodiscard]] void* stream() const override { return other_.stream(); }
    std::string describe() const override { return "symmetric"; }
    double communication_seconds() const override { return other_.communication_seconds(); }
    void report_progress(std::uint64_t, std::uint64_t) override {}

  private:
    struct AnyGroup : ProcessGroup {
        using ProcessGroup::start;
    };
    Work start(std::span<const Operation> operations) override {
        for (const Operation& operation : operations)
            if (operation.call.op == ReduceOp::Avg) throw InvalidInput("symmetric memory is summed only");
        return (other_.*&AnyGroup::start)(operations);
    }
    std::span<std::byte> do_allocate_shared(std::size_t bytes) override {
        return other_.allocate_shared(bytes);
    }
    std::vector<std::string> do_all_gather_bytes(std::string_view mine, std::int16_t) override {
        return other_.all_gather_bytes(mine);
    }
    std::unique_ptr<ProcessGroup> do_split(const SubGroup&) override { return nullptr; }

    ProcessGroup& other_;
    const Memory memory_;
};

}  // namespace ddp::testing
