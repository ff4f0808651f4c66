#pragma once

#include "ddp/process_group.h"

namespace ddp::testing {

/// A group that has nothing of its own: the calls that every backend must have go to another, of the rest it
/// has what ProcessGroup makes of those.
class BareGroup : public ProcessGroup {
  public:
    explicit BareGroup(ProcessGroup& other) : other_(other) {
        take_seat({.rank = other.rank(),
                   .size = other.size(),
                   .device = other.device(),
                   .backend = "bare",
                   .world_rank = other.rank(),
                   .timeout = other.timeout()});
    }
    std::string describe() const override { return "bare"; }
    double communication_seconds() const override { return other_.communication_seconds(); }
    void report_progress(std::uint64_t, std::uint64_t) override {}

  protected:
    Work do_barrier() override { return other_.barrier(); }
    std::span<std::byte> do_allocate_shared(std::size_t bytes) override { return other_.allocate_shared(bytes); }
    Work do_all_reduce(Buffer buffer, ReduceOp op) override { return other_.all_reduce(buffer, op); }
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
    std::vector<std::string> do_all_gather_bytes(std::string_view mine, std::int16_t) override {
        return other_.all_gather_bytes(mine);
    }
    std::unique_ptr<ProcessGroup> do_split(const Part&) override { return nullptr; }

    [[nodiscard]] ProcessGroup& other() const { return other_; }

  private:
    ProcessGroup& other_;
};

}  // namespace ddp::testing
