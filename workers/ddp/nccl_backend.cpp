#include "ddp/nccl_backend.h"

#include <fmt/core.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "ddp/nccl_session.h"
#include "env/text.h"

namespace ddp {

namespace {

using ddprun::MonotonicClock;
using ddprun::SegmentOp;
using ddprun::WorkerEnv;
using nccl::Code;

std::string visible_devices() {
    const char* visible = std::getenv("CUDA_VISIBLE_DEVICES");
    return visible == nullptr ? "" : fmt::format(" (CUDA_VISIBLE_DEVICES={})", visible);
}

int choose_device(const cuda::Api& cuda, const WorkerEnv& env, const Device& wanted) {
    int count = 0;
    const cuda::Code code = cuda.get_device_count(&count);
    if (code != cuda::Code::Success) {
        throw InvalidInput(fmt::format("rank {}: counting CUDA devices: {} (CUDA error {})", env.rank,
                                       cuda.get_error_string(code), static_cast<int>(code)));
    }
    const int device = wanted.index >= 0 ? wanted.index : env.local_rank;
    if (device >= count) {
        throw InvalidInput(fmt::format(
            "rank {}: local rank {} needs CUDA device {}, {} visible{}: start at most {} workers here",
            env.rank, env.local_rank, device,
            count == 1 ? "1 device is" : fmt::format("{} devices are", count), visible_devices(), count));
    }
    cuda.check(cuda.set_device(device), "choosing the CUDA device");
    return device;
}

/// Device memory, from NCCL where it has some of its own (registered transfers), else from CUDA.
class DeviceMemory {
  public:
    DeviceMemory(const nccl::Api& nccl, const cuda::Api& cuda, std::size_t bytes)
        : nccl_(nccl), cuda_(cuda), bytes_(bytes) {
        from_nccl_ = nccl.mem_alloc != nullptr && nccl.mem_alloc(&address_, bytes) == Code::Success;
        if (!from_nccl_) {
            cuda.check(cuda.malloc(&address_, bytes),
                       fmt::format("allocating {} on the device", ddprun::format_bytes(bytes)).c_str());
        }
    }
    ~DeviceMemory() {
        from_nccl_ ? static_cast<void>(nccl_.mem_free(address_)) : static_cast<void>(cuda_.free(address_));
    }
    DeviceMemory(const DeviceMemory&) = delete;
    DeviceMemory& operator=(const DeviceMemory&) = delete;
    [[nodiscard]] std::byte* get() const { return static_cast<std::byte*>(address_); }
    [[nodiscard]] std::size_t bytes() const { return bytes_; }

  private:
    const nccl::Api& nccl_;
    const cuda::Api& cuda_;
    void* address_ = nullptr;
    std::size_t bytes_;
    bool from_nccl_;
};

cpu::Call call_of(SegmentOp operation, const Buffer& buffer, ReduceOp op = ReduceOp::Sum, int root = -1) {
    return {.bytes = buffer.bytes(),
            .operation = operation,
            .root = static_cast<std::int16_t>(root),
            .dtype = buffer.dtype,
            .op = op};
}

class NcclGroup final : public ProcessGroup {
  public:
    NcclGroup(NcclParts parts, const WorkerEnv& env, const ProcessGroupOptions& options)
        : parts_(std::move(parts)), env_(env), device_(choose_device(*parts_.cuda, env, options.device)) {
        nccl::SessionParts session{.cuda = parts_.cuda,
                                   .segment = parts_.segment,
                                   .env = env,
                                   .device = device_,
                                   .user_stream = static_cast<cuda::Stream>(options.stream),
                                   .timeout = options.timeout,
                                   .communicator = parts_.communicator};
        auto communicator = join(session);
        session_ = std::make_unique<nccl::Session>(std::move(session), std::move(communicator));
        scratch_ = std::make_unique<DeviceMemory>(*parts_.nccl, *parts_.cuda, scratch_bytes());
        session_->clear(scratch_->get(), scratch_->bytes());
    }
    ~NcclGroup() override {
        session_.reset();
        memory_.clear();
    }

    int rank() const override { return env_.rank; }
    int size() const override { return env_.world_size; }
    Device device() const override { return {Device::Kind::Cuda, device_}; }
    std::string describe() const override {
        int runtime = 0, driver = 0;
        parts_.cuda->runtime_get_version(&runtime);
        parts_.cuda->driver_get_version(&driver);
        return fmt::format("nccl ({}, CUDA runtime {}.{}, driver {}.{}, rank {} on device {})",
                           parts_.nccl->describe(), runtime / 1000, runtime % 1000 / 10, driver / 1000,
                           driver % 1000 / 10, env_.rank, device_);
    }
    double communication_seconds() const override { return session_->communication_seconds(); }
    void report_progress(std::uint64_t step, std::uint64_t samples) override {
        ddprun::RankLine& line = parts_.segment->line(static_cast<std::uint32_t>(env_.local_rank));
        line.step.store(step, std::memory_order_relaxed);
        line.samples.store(samples, std::memory_order_relaxed);
        line.progress_ns.store(MonotonicClock::now().time_since_epoch().count(), std::memory_order_relaxed);
    }

    Work all_reduce(Buffer buffer, ReduceOp op) override {
        require("all_reduce", buffer);
        require_reducible("all_reduce", buffer, op);
        return session_->start(
            call_of(SegmentOp::AllReduce, buffer, op), [=](const auto& api, auto comm, auto stream) {
                return api.all_reduce(buffer.data, buffer.data, buffer.count, nccl::type_of(buffer.dtype),
                                      nccl::op_of(op), comm, stream);
            });
    }
    Work broadcast(Buffer buffer, int root) override {
        require("broadcast", buffer);
        if (root < 0 || root >= size()) {
            throw InvalidInput(fmt::format("broadcast: root {} is not a rank of 0-{}", root, size() - 1));
        }
        return session_->start(call_of(SegmentOp::Broadcast, buffer, ReduceOp::Sum, root),
                               [=](const auto& api, auto comm, auto stream) {
                                   return api.broadcast(buffer.data, buffer.data, buffer.count,
                                                        nccl::type_of(buffer.dtype), root, comm, stream);
                               });
    }
    Work all_gather(Buffer output, Buffer input) override {
        require("all_gather", output);
        require("all_gather", input);
        require_n_times("all_gather", "output", output, input);
        return session_->start(call_of(SegmentOp::AllGather, input),
                               [=](const auto& api, auto comm, auto stream) {
                                   return api.all_gather(input.data, output.data, input.count,
                                                         nccl::type_of(input.dtype), comm, stream);
                               });
    }
    Work reduce_scatter(Buffer output, Buffer input, ReduceOp op) override {
        require("reduce_scatter", output);
        require("reduce_scatter", input);
        require_n_times("reduce_scatter", "input", input, output);
        require_reducible("reduce_scatter", input, op);
        return session_->start(
            call_of(SegmentOp::ReduceScatter, output, op), [=](const auto& api, auto comm, auto stream) {
                return api.reduce_scatter(input.data, output.data, output.count, nccl::type_of(output.dtype),
                                          nccl::op_of(op), comm, stream);
            });
    }
    /// NCCL has none: the smallest all-reduce. Its end is a matter of the host, so waiting for it blocks.
    Work barrier() override {
        void* const word = scratch_->get();
        Work work =
            session_->start({.operation = SegmentOp::Barrier}, [=](const auto& api, auto comm, auto stream) {
                return api.all_reduce(word, word, 1, nccl::Type::Int32, nccl::Op::Sum, comm, stream);
            });
        work.synchronize();
        return work;
    }
    std::span<std::byte> allocate_shared(std::size_t bytes) override {
        const auto& memory = memory_.emplace_back(
            std::make_unique<DeviceMemory>(*parts_.nccl, *parts_.cuda, std::max<std::size_t>(bytes, 1)));
        session_->clear(memory->get(), memory->bytes());
        return {memory->get(), bytes};
    }
    std::vector<std::string> all_gather_bytes(std::string_view mine) override {
        const auto ranks = static_cast<std::size_t>(size());
        const std::int64_t length = static_cast<std::int64_t>(mine.size());
        std::vector<std::int64_t> lengths(ranks);
        gather_host(lengths.data(), &length, sizeof length, *scratch_);
        const auto longest = static_cast<std::size_t>(*std::max_element(lengths.begin(), lengths.end()));
        if (longest == 0) return std::vector<std::string>(ranks);

        std::string padded(mine), all(longest * ranks, '\0');
        padded.resize(longest);
        const DeviceMemory room(*parts_.nccl, *parts_.cuda, longest * (ranks + 1));
        gather_host(all.data(), padded.data(), longest, room);
        std::vector<std::string> messages;
        for (std::size_t r = 0; r < ranks; ++r) {
            messages.push_back(all.substr(r * longest, static_cast<std::size_t>(lengths[r])));
        }
        return messages;
    }

  private:
    [[nodiscard]] std::size_t scratch_bytes() const {
        return sizeof(std::int64_t) * (static_cast<std::size_t>(env_.world_size) + 1);
    }

    std::shared_ptr<nccl::Communicator> join(const nccl::SessionParts& session) {
        const std::string attempt = fmt::format("rank {}: joining NCCL communicator {} of {} ranks",
                                                env_.rank, parts_.communicator, env_.world_size);
        const nccl::Patience patience{ddprun::deadline_after(MonotonicClock::now(), session.timeout),
                                      [&] { nccl::Session::throw_if_lost(session, attempt); }};
        ddprun::RankLine& line = parts_.segment->line(static_cast<std::uint32_t>(env_.local_rank));
        line.pid.store(static_cast<std::uint32_t>(::getpid()), std::memory_order_relaxed);
        line.joined.store(1, std::memory_order_relaxed);
        auto ids = nccl::exchange_ids(*parts_.nccl, parts_.board,
                                      {.rank = env_.rank,
                                       .ranks = env_.world_size,
                                       .generation = env_.generation,
                                       .communicator = parts_.communicator,
                                       .deadline = patience.deadline,
                                       .throw_if_lost = patience.throw_if_lost});
        return nccl::Communicator::join(parts_.nccl, std::move(ids), env_.rank, env_.world_size, patience,
                                        attempt);
    }

    /// Everyone's `bytes` bytes of host memory, by rank; `room` holds size() + 1 times as many.
    void gather_host(void* all, const void* mine, std::size_t bytes, const DeviceMemory& room) {
        std::byte* const sent = room.get();
        std::byte* const received = room.get() + bytes;
        session_->copy(sent, mine, bytes, cuda::CopyKind::HostToDevice);
        session_
            ->start({.bytes = bytes, .operation = SegmentOp::AllGather, .root = cpu::kBytesMark},
                    [=](const auto& api, auto comm, auto stream) {
                        return api.all_gather(sent, received, bytes, nccl::Type::UInt8, comm, stream);
                    })
            .synchronize();
        session_->copy(all, received, bytes * static_cast<std::size_t>(size()), cuda::CopyKind::DeviceToHost);
    }

    void require(const char* call, const Buffer& buffer) const {
        if (buffer.data == nullptr && buffer.count > 0)
            throw InvalidInput(fmt::format("{}: the buffer is null", call));
        if (buffer.device == device()) return;
        const std::string where = buffer.device.kind == Device::Kind::Cpu
                                      ? "is in host memory"
                                      : fmt::format("lies on CUDA device {}", buffer.device.index);
        throw InvalidInput(
            fmt::format("{}: rank {}'s nccl backend takes memory of CUDA device {}, the buffer {}", call,
                        env_.rank, device_, where));
    }
    static void require_reducible(const char* call, const Buffer& buffer, ReduceOp op) {
        const DType type = buffer.dtype;
        const bool is_integer = type == DType::I32 || type == DType::I64 || type == DType::U8;
        if (op != ReduceOp::Avg || !is_integer) return;
        throw InvalidInput(fmt::format("{}: no {} of {} buffers", call, name_of(op), name_of(type)));
    }
    void require_n_times(const char* call, const char* large_name, const Buffer& large,
                         const Buffer& small) const {
        if (large.dtype != small.dtype) {
            throw InvalidInput(fmt::format("{}: one buffer is {}, the other {}", call, name_of(small.dtype),
                                           name_of(large.dtype)));
        }
        const std::size_t needed = small.count * static_cast<std::size_t>(size());
        if (large.count == needed) return;
        throw InvalidInput(fmt::format("{}: {} has {} elements, {} ranks of {} need {}", call, large_name,
                                       large.count, size(), small.count, needed));
    }

    NcclParts parts_;
    WorkerEnv env_;
    int device_;
    std::unique_ptr<DeviceMemory> scratch_;
    std::vector<std::unique_ptr<DeviceMemory>> memory_;
    std::unique_ptr<nccl::Session> session_;  // ends first: what is in flight uses the memory
};

}  // namespace

std::unique_ptr<ProcessGroup> make_nccl_group(NcclParts parts, const WorkerEnv& env,
                                              const ProcessGroupOptions& options) {
    return std::make_unique<NcclGroup>(std::move(parts), env, options);
}

}  // namespace ddp
