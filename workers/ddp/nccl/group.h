#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "ddp/nccl/join.h"
#include "ddp/nccl/session.h"

namespace ddp::nccl {

/// The ProcessGroup of one communicator: passes NCCL calls to the session.
class Group final : public ProcessGroup {
  public:
    Group(std::shared_ptr<const Api> nccl, int rank, int size, SessionParts session,
          std::shared_ptr<Communicator> communicator);
    ~Group() override;

    void* stream() const override { return session_parts_.user_stream; }
    bool shared_memory_is_symmetric() const override { return symmetry_ == Symmetry::Whole; }
    std::string describe() const override;
    double communication_seconds() const override { return session_->communication_seconds(); }
    void report_progress(std::uint64_t step, std::uint64_t samples) override;

    Work launch_graph(const std::function<void()>& launch) override {
        require_own_process("launch_graph");
        refuse_recovery("CUDA graphs hold the communicator that they were captured with");
        return session_->launch_graph(timeout(), launch);
    }

  private:
    /// Waits for all queued collectives, those of sub-groups too, and throws the failure of one.
    void require_quiet() override { session_parts_.latest->wait(); }
    Work start(std::span<const Operation> operations) override;
    std::span<std::byte> do_allocate_shared(std::size_t bytes) override;
    std::vector<std::string> do_all_gather_bytes(std::string_view mine, std::int16_t mark) override;
    std::unique_ptr<ProcessGroup> do_split(const SubGroup& part) override;

    Code enqueue(const Operation& operation, const Api& api, Handle comm, cuda::Stream stream) const;
    Work track(Call call, const Session::Enqueue& enqueue);
    cuda::DeviceScope on_device() const;
    Registration lowest_registration(Registration mine, std::size_t bytes);
    bool register_memory(const NcclMemory& memory);
    const NcclMemory& scratch_for(std::size_t bytes);
    void gather_host(void* all, const void* mine, std::size_t bytes, const NcclMemory& scratch,
                     std::int16_t mark);
    std::shared_ptr<Communicator> divide(const SubGroup& part, int place, const std::string& name);

    std::shared_ptr<const Api> nccl_;
    SessionParts session_parts_;
    int splits_ = 0;
    /// Covers all memory from allocate_shared; the same on all ranks.
    enum class Symmetry : std::uint8_t { Nothing, Partial, Whole } symmetry_ = Symmetry::Nothing;
    OwnedByProcess<NcclMemory> scratch_;
    OwnedByProcess<NcclMemory> gather_scratch_;  ///< for all_gather_bytes; grows
    std::vector<OwnedByProcess<NcclMemory>> memory_;
    std::shared_ptr<Communicator> communicator_;
    OwnedByProcess<Session> session_;  // destroyed first: collectives in flight use the memory
};

}  // namespace ddp::nccl
