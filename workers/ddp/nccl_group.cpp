#include "ddp/nccl_group.h"

#include <fmt/core.h>

#include <algorithm>
#include <bit>
#include <utility>

#include "ddp/argument_checks.h"
#include "ddp/division.h"

namespace ddp::nccl {

using ddprun::MonotonicClock;
using ddprun::SegmentOp;

namespace {

cpu::Call call_of(SegmentOp operation, const Buffer& buffer, ReduceOp op = ReduceOp::Sum, int root = -1) {
    return {.bytes = buffer.bytes(),
            .operation = operation,
            .root = static_cast<std::int16_t>(root),
            .dtype = buffer.dtype,
            .op = op};
}

/// Several calls as one: none waits for another.
template <class Calls>
Code grouped(const Api& api, Calls calls) {
    if (const Code begun = api.group_start(); begun != Code::Success) return begun;
    const Code code = calls();
    const Code ended = api.group_end();
    return code != Code::Success && code != Code::InProgress ? code : ended;
}

/// The first of some calls that fails ends them.
class Until {
  public:
    template <class Call>
    void then(Call call) {
        if (code == Code::Success || code == Code::InProgress) code = call();
    }
    Code code = Code::Success;
};

std::byte* slice(const Buffer& buffer, int rank, std::size_t each) {
    return static_cast<std::byte*>(buffer.data) + static_cast<std::size_t>(rank) * each;
}

}  // namespace

Group::Group(NcclParts parts, Membership membership, SessionParts session,
             std::shared_ptr<Communicator> communicator)
    : parts_(std::move(parts)), membership_(std::move(membership)), session_parts_(session) {
    session_ = std::make_unique<Session>(std::move(session), std::move(communicator));
    const cuda::DeviceScope here = on_device();
    const std::size_t bytes = sizeof(std::int64_t) * (static_cast<std::size_t>(size()) + 1);
    scratch_ = std::make_unique<DeviceMemory>(*parts_.nccl, *parts_.cuda, bytes);
    session_->clear(scratch_->get(), scratch_->bytes());
}

Group::~Group() {
    session_.reset();
    memory_.clear();
}

std::string Group::describe() const {
    int runtime = 0, driver = 0;
    parts_.cuda->runtime_get_version(&runtime);
    parts_.cuda->driver_get_version(&driver);
    return fmt::format("nccl ({}, CUDA runtime {}.{}, driver {}.{}, rank {} on device {})",
                       parts_.nccl->describe(), runtime / 1000, runtime % 1000 / 10, driver / 1000,
                       driver % 1000 / 10, session_parts_.env.rank, session_parts_.device);
}

void Group::report_progress(std::uint64_t step, std::uint64_t samples) {
    ddprun::RankLine& line = parts_.segment->line(static_cast<std::uint32_t>(session_parts_.env.local_rank));
    line.step.store(step, std::memory_order_relaxed);
    line.samples.store(samples, std::memory_order_relaxed);
    line.progress_ns.store(MonotonicClock::now().time_since_epoch().count(), std::memory_order_relaxed);
}

// ---- collectives

Work Group::all_reduce(Buffer buffer, ReduceOp op) {
    require_on_device("all_reduce", buffer);
    require_reducible("all_reduce", buffer, op);
    return session_->start(call_of(SegmentOp::AllReduce, buffer, op),
                           [=](const Api& api, Handle comm, cuda::Stream stream) {
                               return api.all_reduce(buffer.data, buffer.data, buffer.count,
                                                     type_of(buffer.dtype), op_of(op), comm, stream);
                           });
}

Work Group::broadcast(Buffer buffer, int root) {
    require_on_device("broadcast", buffer);
    require_root("broadcast", root, size());
    return session_->start(call_of(SegmentOp::Broadcast, buffer, ReduceOp::Sum, root),
                           [=](const Api& api, Handle comm, cuda::Stream stream) {
                               return api.broadcast(buffer.data, buffer.data, buffer.count,
                                                    type_of(buffer.dtype), root, comm, stream);
                           });
}

Work Group::all_gather(Buffer output, Buffer input) {
    require_on_device("all_gather", output);
    require_on_device("all_gather", input);
    require_n_times("all_gather", "output", output, input, size());
    return session_->start(
        call_of(SegmentOp::AllGather, input), [=](const Api& api, Handle comm, cuda::Stream stream) {
            return api.all_gather(input.data, output.data, input.count, type_of(input.dtype), comm, stream);
        });
}

Work Group::reduce_scatter(Buffer output, Buffer input, ReduceOp op) {
    require_on_device("reduce_scatter", output);
    require_on_device("reduce_scatter", input);
    require_n_times("reduce_scatter", "input", input, output, size());
    require_reducible("reduce_scatter", input, op);
    return session_->start(call_of(SegmentOp::ReduceScatter, output, op),
                           [=](const Api& api, Handle comm, cuda::Stream stream) {
                               return api.reduce_scatter(input.data, output.data, output.count,
                                                         type_of(output.dtype), op_of(op), comm, stream);
                           });
}

Work Group::reduce(Buffer buffer, int root, ReduceOp op) {
    require_on_device("reduce", buffer);
    require_root("reduce", root, size());
    require_reducible("reduce", buffer, op);
    return session_->start(call_of(SegmentOp::Reduce, buffer, op, root),
                           [=](const Api& api, Handle comm, cuda::Stream stream) {
                               return api.reduce(buffer.data, buffer.data, buffer.count,
                                                 type_of(buffer.dtype), op_of(op), root, comm, stream);
                           });
}

// Before 2.28 NCCL has no gather, scatter and all-to-all: groups of messages, as it does them itself.

Work Group::gather(Buffer output, Buffer input, int root) {
    require_on_device("gather", input);
    require_root("gather", root, size());
    const bool is_root = rank() == root;
    if (is_root) {
        require_on_device("gather", output);
        require_n_times("gather", "output", output, input, size());
    }
    const int ranks = size();
    return session_->start(
        call_of(SegmentOp::Gather, input, ReduceOp::Sum, root),
        [=](const Api& api, Handle comm, cuda::Stream stream) {
            const Type type = type_of(input.dtype);
            if (api.gather != nullptr)
                return api.gather(input.data, output.data, input.count, type, root, comm, stream);
            return grouped(api, [&] {
                Until all;
                all.then([&] { return api.send(input.data, input.count, type, root, comm, stream); });
                for (int r = 0; is_root && r < ranks; ++r) {
                    all.then([&] {
                        return api.recv(slice(output, r, input.bytes()), input.count, type, r, comm, stream);
                    });
                }
                return all.code;
            });
        });
}

Work Group::scatter(Buffer output, Buffer input, int root) {
    require_on_device("scatter", output);
    require_root("scatter", root, size());
    const bool is_root = rank() == root;
    if (is_root) {
        require_on_device("scatter", input);
        require_n_times("scatter", "input", input, output, size());
    }
    const int ranks = size();
    return session_->start(
        call_of(SegmentOp::Scatter, output, ReduceOp::Sum, root),
        [=](const Api& api, Handle comm, cuda::Stream stream) {
            const Type type = type_of(output.dtype);
            if (api.scatter != nullptr)
                return api.scatter(input.data, output.data, output.count, type, root, comm, stream);
            return grouped(api, [&] {
                Until all;
                for (int r = 0; is_root && r < ranks; ++r) {
                    all.then([&] {
                        return api.send(slice(input, r, output.bytes()), output.count, type, r, comm, stream);
                    });
                }
                all.then([&] { return api.recv(output.data, output.count, type, root, comm, stream); });
                return all.code;
            });
        });
}

Work Group::all_to_all(Buffer output, Buffer input) {
    require_on_device("all_to_all", output);
    require_on_device("all_to_all", input);
    require_slices("all_to_all", output, input, size());
    const int ranks = size();
    const std::size_t count = input.count / static_cast<std::size_t>(ranks);
    return session_->start(
        call_of(SegmentOp::AllToAll, {input.data, count, input.dtype, input.device}),
        [=](const Api& api, Handle comm, cuda::Stream stream) {
            const Type type = type_of(input.dtype);
            if (api.all_to_all != nullptr)
                return api.all_to_all(input.data, output.data, count, type, comm, stream);
            const std::size_t each = count * size_of(input.dtype);
            return grouped(api, [&] {
                Until all;
                for (int r = 0; r < ranks; ++r) {
                    all.then([&] { return api.send(slice(input, r, each), count, type, r, comm, stream); });
                    all.then([&] { return api.recv(slice(output, r, each), count, type, r, comm, stream); });
                }
                return all.code;
            });
        });
}

Work Group::send(Buffer buffer, int to) {
    require_on_device("send", buffer);
    require_peer("send", to, rank(), size());
    return session_->start(call_of(SegmentOp::Send, buffer, ReduceOp::Sum, to),
                           [=](const Api& api, Handle comm, cuda::Stream stream) {
                               return api.send(buffer.data, buffer.count, type_of(buffer.dtype), to, comm,
                                               stream);
                           });
}

Work Group::recv(Buffer buffer, int from) {
    require_on_device("recv", buffer);
    require_peer("recv", from, rank(), size());
    return session_->start(call_of(SegmentOp::Recv, buffer, ReduceOp::Sum, from),
                           [=](const Api& api, Handle comm, cuda::Stream stream) {
                               return api.recv(buffer.data, buffer.count, type_of(buffer.dtype), from, comm,
                                               stream);
                           });
}

/// NCCL has none: the smallest all-reduce. Its end is a matter of the host, so waiting for it blocks.
Work Group::barrier() {
    void* const word = scratch_->get();
    Work work = session_->start({.operation = SegmentOp::Barrier},
                                [=](const Api& api, Handle comm, cuda::Stream stream) {
                                    return api.all_reduce(word, word, 1, Type::Int32, Op::Sum, comm, stream);
                                });
    work.synchronize();
    return work;
}

// ---- sub-groups

std::unique_ptr<ProcessGroup> Group::split(int color, int key) {
    const std::vector<SplitRequest> requests = decode(all_gather_bytes(encode({color, key})));
    const int own_rank = rank();
    std::vector<std::uint32_t> members;
    if (color >= 0) members = members_of(color, requests);
    const auto place = std::find(members.begin(), members.end(), static_cast<std::uint32_t>(own_rank));
    const Membership part{.rank = static_cast<int>(place - members.begin()),
                          .size = static_cast<int>(members.size()),
                          .name = fmt::format("sub-group {} of {}", ++splits_, membership_.name)};
    auto communicator = divide(color, key, part, members);
    if (communicator == nullptr) return nullptr;
    SessionParts session = session_parts_;
    session.name = part.name;
    session.lines = SessionParts::Lines::Private;
    return std::make_unique<Group>(parts_, part, std::move(session), std::move(communicator));
}

// Before 2.18 NCCL cannot split: the first of each color makes an id, and all join as at the start.
std::shared_ptr<Communicator> Group::divide(int color, int key, const Membership& part,
                                            const std::vector<std::uint32_t>& members) {
    if (parts_.nccl->comm_split != nullptr) return session_->split(color < 0 ? kNoColor : color, key);
    const cuda::DeviceScope here = on_device();
    const std::string attempt = fmt::format("rank {}: joining {}", session_parts_.env.rank, part.name);
    const bool leads = !members.empty() && part.rank == 0;
    UniqueId id{};
    Code code = Code::Success;
    if (leads) code = parts_.nccl->get_unique_id(&id);
    const std::string made = code == Code::Success ? std::string(id.internal, sizeof id.internal) : "";
    const std::vector<std::string> ids = all_gather_bytes(leads ? made : "");
    if (members.empty()) return nullptr;
    const std::string& theirs = ids[members.front()];
    if (theirs.size() != sizeof id.internal) {
        throw Error(fmt::format("{}: ncclGetUniqueId of rank {} failed{}", attempt, members.front(),
                                leads ? ": " + parts_.nccl->explain(code, nullptr) : ""));
    }
    std::copy(theirs.begin(), theirs.end(), id.internal);
    return Communicator::join(parts_.nccl, {id}, part.rank, part.size, session_->patience(attempt), attempt);
}

// ---- memory and bytes

std::span<std::byte> Group::allocate_shared(std::size_t bytes) {
    const cuda::DeviceScope here = on_device();
    const auto& memory = memory_.emplace_back(
        std::make_unique<DeviceMemory>(*parts_.nccl, *parts_.cuda, std::max<std::size_t>(bytes, 1)));
    session_->clear(memory->get(), memory->bytes());
    const bool in_window = make_known(*memory);
    symmetry_ = in_window && symmetry_ != Symmetry::Partial ? Symmetry::Whole : Symmetry::Partial;
    return {memory->get(), bytes};
}

/// What all ranks can do: registering is a collective, and whoever asks whether buffers are symmetric must
/// get the same answer everywhere.
Registration Group::agree_on(Registration mine, std::size_t bytes) {
    if (size() == 1) return mine;
    auto value = static_cast<std::int32_t>(mine);
    void* const word = scratch_->get();
    session_->copy(word, &value, sizeof value, cuda::CopyKind::HostToDevice);
    session_
        ->start({.bytes = bytes, .operation = SegmentOp::Barrier, .root = cpu::kAllocateMark},
                [=](const Api& api, Handle comm, cuda::Stream stream) {
                    return api.all_reduce(word, word, 1, Type::Int32, Op::Min, comm, stream);
                })
        .synchronize();
    session_->copy(&value, word, sizeof value, cuda::CopyKind::DeviceToHost);
    return static_cast<Registration>(value);
}

/// Registers it in the best way that all ranks have. True: as a symmetric window.
bool Group::make_known(const DeviceMemory& memory) {
    const Registration how = agree_on(memory.best_registration(), memory.bytes());
    if (how == Registration::None) return false;
    const bool made = session_->register_memory(memory.get(), memory.bytes(), how);
    if (how == Registration::Plain) return false;
    if (agree_on(made ? Registration::Symmetric : Registration::None, memory.bytes()) ==
        Registration::Symmetric)
        return true;
    if (agree_on(parts_.nccl->comm_register != nullptr ? Registration::Plain : Registration::None,
                 memory.bytes()) == Registration::Plain) {
        session_->register_memory(memory.get(), memory.bytes(), Registration::Plain);
    }
    return false;
}

std::vector<std::string> Group::all_gather_bytes(std::string_view mine) {
    const auto ranks = static_cast<std::size_t>(size());
    const std::int64_t length = static_cast<std::int64_t>(mine.size());
    std::vector<std::int64_t> lengths(ranks);
    gather_host(lengths.data(), &length, sizeof length, *scratch_);
    const auto longest = static_cast<std::size_t>(*std::max_element(lengths.begin(), lengths.end()));
    if (longest == 0) return std::vector<std::string>(ranks);

    std::string padded(mine), all(longest * ranks, '\0');
    padded.resize(longest);
    gather_host(all.data(), padded.data(), longest, room_for(longest * (ranks + 1)));
    std::vector<std::string> messages;
    for (std::size_t r = 0; r < ranks; ++r) {
        messages.push_back(all.substr(r * longest, static_cast<std::size_t>(lengths[r])));
    }
    return messages;
}

/// Kept for the next message: making device memory takes a thousand times as long as a small collective.
const DeviceMemory& Group::room_for(std::size_t bytes) {
    if (!room_ || room_->bytes() < bytes) {
        const cuda::DeviceScope here = on_device();
        room_.reset();
        room_ = std::make_unique<DeviceMemory>(*parts_.nccl, *parts_.cuda, std::bit_ceil(bytes));
    }
    return *room_;
}

/// Everyone's `bytes` bytes of host memory, by rank; `room` holds size() + 1 times as many.
void Group::gather_host(void* all, const void* mine, std::size_t bytes, const DeviceMemory& room) {
    std::byte* const sent = room.get();
    std::byte* const received = room.get() + bytes;
    session_->copy(sent, mine, bytes, cuda::CopyKind::HostToDevice);
    session_
        ->start({.bytes = bytes, .operation = SegmentOp::AllGather, .root = cpu::kBytesMark},
                [=](const Api& api, Handle comm, cuda::Stream stream) {
                    return api.all_gather(sent, received, bytes, Type::UInt8, comm, stream);
                })
        .synchronize();
    session_->copy(all, received, bytes * static_cast<std::size_t>(size()), cuda::CopyKind::DeviceToHost);
}

// Events, memory and the default stream are those of the calling thread's device, and it may be another by now.
cuda::DeviceScope Group::on_device() const { return {*parts_.cuda, session_parts_.device}; }

void Group::require_on_device(const char* call, const Buffer& buffer) const {
    require_memory_of("nccl", call, buffer, device(), session_parts_.env.rank);
}

}  // namespace ddp::nccl
