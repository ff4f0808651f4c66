#pragma once

#include "bare_group.h"

namespace ddp::testing {

/// A group that says that its memory is symmetric, and refuses averages as the kernels for such memory do; or
/// one that refuses them alone.
class SymmetricGroup final : public BareGroup {
  public:
    enum class Memory { Symmetric, Any };
    explicit SymmetricGroup(ProcessGroup& group, Memory memory = Memory::Symmetric)
        : BareGroup(group), memory_(memory) {}
    [[nodiscard]] bool shared_memory_is_symmetric() const override { return memory_ == Memory::Symmetric; }
    [[nodiscard]] void* stream() const override { return other().stream(); }

  private:
    Work do_all_reduce(Buffer buffer, ReduceOp op) override {
        if (op == ReduceOp::Avg) throw InvalidInput("symmetric memory is summed only");
        return BareGroup::do_all_reduce(buffer, op);
    }

    const Memory memory_;
};

}  // namespace ddp::testing
