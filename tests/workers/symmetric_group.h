#pragma once

#include <utility>

#include "ddp/process_group.h"

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
    Work do_barrier() override { return other_.barrier(); }
    std::span<std::byte> do_allocate_shared(std::size_t bytes) override {
        return other_.allocate_shared(bytes);
    }
    Work do_all_reduce(Buffer buffer, ReduceOp op) override {
        if (op == ReduceOp::Avg) throw InvalidInput("symmetric memory is summed only");
        return other_.all_reduce(buffer, op);
    }
    Work do_broadcast(Buffer buffer, int root) override { return other_.broadcast(buffer, root); }
    Work do_all_gather(Buffer output, Buffer input) override { return other_.all_gather(output, input); }
    Work do_reduce_scatter(Buffer output, Buffer input, ReduceOp op) override {
        return other_.reduce_scatter(output, input, op);
    }
    Work do_reduce(Buffer buffer, int root, ReduceOp op) override { return other_.reduce(buffer, root, op); }
    Work do_gather(Buffer output, Buffer input, int root) override {
        return other_.gather(output, input, root);
    }
    Work do_scatter(Buffer output, Buffer input, int root) override {
        return other_.scatter(output, input, root);
    }
    Work do_all_to_all(Buffer output, Buffer input) override { return other_.all_to_all(output, input); }
    Work do_send(Buffer buffer, int to) override { return other_.send(buffer, to); }
    Work do_recv(Buffer buffer, int from) override { return other_.recv(buffer, from); }
    Work do_batch(std::vector<Message> messages) override {
        return other_.batch_send_recv(std::move(messages));
    }
    Work do_all_gather_v(Buffer output, Buffer input, Counts counts) override {
        return other_.all_gather_v(output, input, std::move(counts));
    }
    Work do_reduce_scatter_v(Buffer output, Buffer input, Counts counts, ReduceOp op) override {
        return other_.reduce_scatter_v(output, input, std::move(counts), op);
    }
    Work do_all_to_all_v(Buffer output, Counts received, Buffer input, Counts sent) override {
        return other_.all_to_all_v(output, std::move(received), input, std::move(sent));
    }
    std::vector<std::string> do_all_gather_bytes(std::string_view mine, std::int16_t) override {
        return other_.all_gather_bytes(mine);
    }
    std::unique_ptr<ProcessGroup> do_split(const SubGroup&) override { return nullptr; }

    ProcessGroup& other_;
    const Memory memory_;
};

}  // namespace ddp::testing
