#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "ddp/nccl_backend.h"
#include "ddp/nccl_memory.h"
#include "ddp/nccl_session.h"

namespace ddp::nccl {

/// Which ranks a communicator joins.
struct Membership {
    int rank = 0;
    int size = 1;
    std::string name;  ///< "NCCL communicator 0"
};

/// The ProcessGroup of one communicator: checks arguments, and gives the session what to put on its stream.
class Group final : public ProcessGroup {
  public:
    Group(NcclParts parts, Membership membership, SessionParts session,
          std::shared_ptr<Communicator> communicator);
    ~Group() override;

    int rank() const override { return membership_.rank; }
    int size() const override { return membership_.size; }
    Device device() const override { return {Device::Kind::Cuda, session_parts_.device}; }
    void* stream() const override { return session_parts_.user_stream; }
    bool shared_memory_is_symmetric() const override { return symmetry_ == Symmetry::Whole; }
    std::string describe() const override;
    double communication_seconds() const override { return session_->communication_seconds(); }
    void report_progress(std::uint64_t step, std::uint64_t samples) override;

    Work all_reduce(Buffer buffer, ReduceOp op) override;
    Work broadcast(Buffer buffer, int root) override;
    Work all_gather(Buffer output, Buffer input) override;
    Work reduce_scatter(Buffer output, Buffer input, ReduceOp op) override;
    Work reduce(Buffer buffer, int root, ReduceOp op) override;
    Work gather(Buffer output, Buffer input, int root) override;
    Work scatter(Buffer output, Buffer input, int root) override;
    Work all_to_all(Buffer output, Buffer input) override;
    Work send(Buffer buffer, int to) override;
    Work recv(Buffer buffer, int from) override;
    Work barrier() override;
    Work launch_graph(const std::function<void()>& launch) override {
        return session_->launch_graph(launch);
    }
    std::unique_ptr<ProcessGroup> split(int color, int key) override;
    std::span<std::byte> allocate_shared(std::size_t bytes) override;
    std::vector<std::string> all_gather_bytes(std::string_view mine) override;

  private:
    cuda::DeviceScope on_device() const;
    void require_on_device(const char* call, const Buffer& buffer) const;
    Registration agree_on(Registration mine, std::size_t bytes);
    bool make_known(const DeviceMemory& memory);
    const DeviceMemory& room_for(std::size_t bytes);
    void gather_host(void* all, const void* mine, std::size_t bytes, const DeviceMemory& room);
    std::shared_ptr<Communicator> divide(int color, int key, const Membership& part,
                                         const std::vector<std::uint32_t>& members);

    NcclParts parts_;
    Membership membership_;
    SessionParts session_parts_;
    int splits_ = 0;
    /// Of the memory of allocate_shared so far; the same on all ranks.
    enum class Symmetry : std::uint8_t { Nothing, Partial, Whole } symmetry_ = Symmetry::Nothing;
    std::unique_ptr<DeviceMemory> scratch_;
    std::unique_ptr<DeviceMemory> room_;  ///< of all_gather_bytes; grows
    std::vector<std::unique_ptr<DeviceMemory>> memory_;
    std::unique_ptr<Session> session_;  // ends first: what is in flight uses the memory
};

}  // namespace ddp::nccl
