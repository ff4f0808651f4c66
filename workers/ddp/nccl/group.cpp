#include "ddp/nccl/group.h"

#include <fmt/core.h>

#include <algorithm>
#include <bit>
#include <utility>

#include "ddp/worker/call.h"
#include "ddp/worker/slices.h"

namespace ddp::nccl {

using ddprun::SegmentOp;

namespace {

/// Several calls as one: none waits for another.
template <class Calls>
Code grouped(const Api& api, Calls calls) {
    if (const Code begun = api.group_start(); begun != Code::Success) return begun;
    const Code code = calls();
    const Code ended = api.group_end();
    return code != Code::Success && code != Code::InProgress ? code : ended;
}

class UntilFailure {
  public:
    template <class Call>
    void then(Call call) {
        if (code == Code::Success || code == Code::InProgress) code = call();
    }
    Code code = Code::Success;
};

Call uneven(SegmentOp operation, const Buffer& whole, ReduceOp op = ReduceOp::Sum) {
    return call_of(operation, whole, op, kUnevenMark);
}

}  // namespace

Group::Group(NcclParts parts, Membership membership, SessionParts session,
             std::shared_ptr<Communicator> communicator)
    : parts_(std::move(parts)), membership_(std::move(membership)), session_parts_(session) {
    set_identity({.rank = membership_.rank,
                  .size = membership_.size,
                  .device = {Device::Kind::Cuda, session_parts_.device},
                  .backend = "nccl",
                  .world_rank = session_parts_.env.rank,
                  .timeout = session_parts_.timeout});
    communicator_ = communicator;
    session_ = make_owned<Session>(std::move(session), std::move(communicator));
    const cuda::DeviceScope here = on_device();
    const std::size_t bytes = sizeof(std::int64_t) * (static_cast<std::size_t>(size()) + 1);
    scratch_ = make_owned<NcclMemory>(*parts_.nccl, bytes);
    session_->clear(scratch_->get(), scratch_->bytes());
}

Group::~Group() {
    if (is_in_forked_child()) return;  // OwnedByProcess frees nothing then
    session_.reset();
    for (auto& memory : memory_) communicator_->free_at_end(std::move(memory));
    communicator_->free_at_end(std::move(scratch_));
    communicator_->free_at_end(std::move(gather_scratch_));
}

std::string Group::describe() const {
    int runtime = 0, driver = 0;
    cudaRuntimeGetVersion(&runtime);
    cudaDriverGetVersion(&driver);
    return fmt::format("nccl ({}, CUDA runtime {}.{}, driver {}.{}, rank {} on device {})",
                       parts_.nccl->describe(), runtime / 1000, runtime % 1000 / 10, driver / 1000,
                       driver % 1000 / 10, session_parts_.env.rank, session_parts_.device);
}

void Group::report_progress(std::uint64_t step, std::uint64_t samples) {
    ddp::report_progress(parts_.segment->line(static_cast<std::uint32_t>(session_parts_.env.local_rank)),
                         step, samples);
}

Work Group::start(Call call, const Session::Enqueue& enqueue) {
    return session_->start(call, timeout(), enqueue);
}

Work Group::do_all_reduce(Buffer buffer, ReduceOp op) {
    return start(call_of(SegmentOp::AllReduce, buffer, op),
                 [=](const Api& api, Handle comm, cuda::Stream stream) {
                     return api.all_reduce(buffer.data, buffer.data, buffer.count, type_of(buffer.dtype),
                                           op_of(op), comm, stream);
                 });
}

Work Group::do_broadcast(Buffer buffer, int root) {
    return start(call_of(SegmentOp::Broadcast, buffer, ReduceOp::Sum, root),
                 [=](const Api& api, Handle comm, cuda::Stream stream) {
                     return api.broadcast(buffer.data, buffer.data, buffer.count, type_of(buffer.dtype), root,
                                          comm, stream);
                 });
}

Work Group::do_all_gather(Buffer output, Buffer input) {
    return start(call_of(SegmentOp::AllGather, input), [=](const Api& api, Handle comm, cuda::Stream stream) {
        return api.all_gather(input.data, output.data, input.count, type_of(input.dtype), comm, stream);
    });
}

Work Group::do_reduce_scatter(Buffer output, Buffer input, ReduceOp op) {
    return start(call_of(SegmentOp::ReduceScatter, output, op),
                 [=](const Api& api, Handle comm, cuda::Stream stream) {
                     return api.reduce_scatter(input.data, output.data, output.count, type_of(output.dtype),
                                               op_of(op), comm, stream);
                 });
}

Work Group::do_reduce(Buffer buffer, int root, ReduceOp op) {
    return start(call_of(SegmentOp::Reduce, buffer, op, root),
                 [=](const Api& api, Handle comm, cuda::Stream stream) {
                     return api.reduce(buffer.data, buffer.data, buffer.count, type_of(buffer.dtype),
                                       op_of(op), root, comm, stream);
                 });
}

// NCCL before 2.28 has no gather, scatter and all-to-all: groups of messages replace them, as NCCL does
// itself.

Work Group::do_gather(Buffer output, Buffer input, int root) {
    const bool is_root = rank() == root;
    const int ranks = size();
    return start(call_of(SegmentOp::Gather, input, ReduceOp::Sum, root), [=](const Api& api, Handle comm,
                                                                             cuda::Stream stream) {
        const Type type = type_of(input.dtype);
        if (api.gather != nullptr)
            return api.gather(input.data, output.data, input.count, type, root, comm, stream);
        return grouped(api, [&] {
            UntilFailure all;
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

Work Group::do_scatter(Buffer output, Buffer input, int root) {
    const bool is_root = rank() == root;
    const int ranks = size();
    return start(call_of(SegmentOp::Scatter, output, ReduceOp::Sum, root), [=](const Api& api, Handle comm,
                                                                               cuda::Stream stream) {
        const Type type = type_of(output.dtype);
        if (api.scatter != nullptr)
            return api.scatter(input.data, output.data, output.count, type, root, comm, stream);
        return grouped(api, [&] {
            UntilFailure all;
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

Work Group::do_all_to_all(Buffer output, Buffer input) {
    const int ranks = size();
    const std::size_t count = input.count / static_cast<std::size_t>(ranks);
    return start(
        call_of(SegmentOp::AllToAll, {input.data, count, input.dtype, input.device}),
        [=](const Api& api, Handle comm, cuda::Stream stream) {
            const Type type = type_of(input.dtype);
            if (api.all_to_all != nullptr)
                return api.all_to_all(input.data, output.data, count, type, comm, stream);
            const std::size_t each = count * size_of(input.dtype);
            return grouped(api, [&] {
                UntilFailure all;
                for (int r = 0; r < ranks; ++r) {
                    all.then([&] { return api.send(slice(input, r, each), count, type, r, comm, stream); });
                    all.then([&] { return api.recv(slice(output, r, each), count, type, r, comm, stream); });
                }
                return all.code;
            });
        });
}

// NCCL has none of these: groups of others, as PyTorch does them.

Work Group::do_all_gather_v(Buffer output, Buffer input, Counts counts) {
    return start(uneven(SegmentOp::AllGather, output),
                 [=, slices = Slices(counts, output.dtype), ranks = size()](const Api& api, Handle comm,
                                                                            cuda::Stream stream) {
                     return grouped(api, [&] {
                         UntilFailure all;
                         for (int r = 0; r < ranks; ++r) {
                             const Buffer theirs = slices.of(output, r);
                             all.then([&] {
                                 return api.broadcast(input.data, theirs.data, theirs.count,
                                                      type_of(theirs.dtype), r, comm, stream);
                             });
                         }
                         return all.code;
                     });
                 });
}

Work Group::do_reduce_scatter_v(Buffer output, Buffer input, Counts counts, ReduceOp op) {
    return start(uneven(SegmentOp::ReduceScatter, input, op),
                 [=, slices = Slices(counts, input.dtype), ranks = size()](const Api& api, Handle comm,
                                                                           cuda::Stream stream) {
                     return grouped(api, [&] {
                         UntilFailure all;
                         for (int r = 0; r < ranks; ++r) {
                             const Buffer theirs = slices.of(input, r);
                             all.then([&] {
                                 return api.reduce(theirs.data, output.data, theirs.count,
                                                   type_of(theirs.dtype), op_of(op), r, comm, stream);
                             });
                         }
                         return all.code;
                     });
                 });
}

Work Group::do_all_to_all_v(Buffer output, Counts received, Buffer input, Counts sent) {
    return start(
        uneven(SegmentOp::AllToAll, {nullptr, 0, input.dtype, input.device}),
        [=, to = Slices(sent, input.dtype), from = Slices(received, output.dtype), ranks = size()](
            const Api& api, Handle comm, cuda::Stream stream) {
            const Type type = type_of(input.dtype);
            return grouped(api, [&] {
                UntilFailure all;
                for (int r = 0; r < ranks; ++r) {
                    const Buffer given = to.of(input, r), taken = from.of(output, r);
                    all.then([&] { return api.send(given.data, given.count, type, r, comm, stream); });
                    all.then([&] { return api.recv(taken.data, taken.count, type, r, comm, stream); });
                }
                return all.code;
            });
        });
}

Work Group::do_send(Buffer buffer, int to) {
    return start(call_of(SegmentOp::Send, buffer, ReduceOp::Sum, to),
                 [=](const Api& api, Handle comm, cuda::Stream stream) {
                     return api.send(buffer.data, buffer.count, type_of(buffer.dtype), to, comm, stream);
                 });
}

Work Group::do_recv(Buffer buffer, int from) {
    return start(call_of(SegmentOp::Recv, buffer, ReduceOp::Sum, from),
                 [=](const Api& api, Handle comm, cuda::Stream stream) {
                     return api.recv(buffer.data, buffer.count, type_of(buffer.dtype), from, comm, stream);
                 });
}

Work Group::do_batch(std::vector<Message> messages) {
    std::size_t bytes = 0;
    for (const Message& one : messages) bytes += one.buffer.bytes();
    return start(
        {.bytes = bytes, .operation = SegmentOp::Send, .root = kBatchMark},
        [messages = std::move(messages)](const Api& api, Handle comm, cuda::Stream stream) {
            return grouped(api, [&] {
                UntilFailure all;
                for (const Message& one : messages) {
                    const Buffer& buffer = one.buffer;
                    const Type type = type_of(buffer.dtype);
                    all.then([&] {
                        return one.direction == Message::Direction::Send
                                   ? api.send(buffer.data, buffer.count, type, one.peer, comm, stream)
                                   : api.recv(buffer.data, buffer.count, type, one.peer, comm, stream);
                    });
                }
                return all.code;
            });
        });
}

/// NCCL has no barrier: this is the smallest all-reduce. The host ends it, so waiting for it blocks.
Work Group::do_barrier() {
    void* const word = scratch_->get();
    Work work =
        start({.operation = SegmentOp::Barrier}, [=](const Api& api, Handle comm, cuda::Stream stream) {
            return api.all_reduce(word, word, 1, Type::Int32, Op::Sum, comm, stream);
        });
    work.synchronize();
    return work;
}

std::unique_ptr<ProcessGroup> Group::do_split(const SubGroup& part) {
    const auto own = std::find(part.members.begin(), part.members.end(), static_cast<std::uint32_t>(rank()));
    const Membership place{.rank = static_cast<int>(own - part.members.begin()),
                           .size = static_cast<int>(part.members.size()),
                           .name = fmt::format("sub-group {} of {}", ++splits_, membership_.name)};
    auto communicator = divide(part, place);
    if (communicator == nullptr) return nullptr;
    SessionParts session = session_parts_;
    session.name = place.name;
    session.lines = SessionParts::Lines::Private;
    return std::make_unique<Group>(parts_, place, std::move(session), std::move(communicator));
}

// NCCL before 2.18 cannot split: the first rank of each color makes an id, and all join as at the start.
std::shared_ptr<Communicator> Group::divide(const SubGroup& part, const Membership& place) {
    if (parts_.nccl->comm_split != nullptr)
        return session_->split(part.color < 0 ? kNoColor : part.color, part.key);
    const cuda::DeviceScope here = on_device();
    const std::string attempt = fmt::format("rank {}: joining {}", session_parts_.env.rank, place.name);
    const bool leads = !part.members.empty() && place.rank == 0;
    UniqueId id{};
    Code code = Code::Success;
    if (leads) code = parts_.nccl->get_unique_id(&id);
    const std::string made = code == Code::Success ? std::string(id.internal, sizeof id.internal) : "";
    const std::vector<std::string> ids = do_all_gather_bytes(leads ? made : "", kSplitMark);
    if (part.members.empty()) return nullptr;
    const std::string& theirs = ids[part.members.front()];
    if (theirs.size() != sizeof id.internal) {
        throw Error(fmt::format("{}: ncclGetUniqueId of rank {} failed{}", attempt, part.members.front(),
                                leads ? ": " + parts_.nccl->explain(code, nullptr) : ""));
    }
    std::copy(theirs.begin(), theirs.end(), id.internal);
    return Communicator::join(parts_.nccl, {id}, place.rank, place.size, session_->wait_bounds(attempt),
                              attempt);
}

std::span<std::byte> Group::do_allocate_shared(std::size_t bytes) {
    const cuda::DeviceScope here = on_device();
    const auto& memory =
        memory_.emplace_back(make_owned<NcclMemory>(*parts_.nccl, std::max<std::size_t>(bytes, 1)));
    session_->clear(memory->get(), memory->bytes());
    const bool in_window = register_memory(*memory);
    symmetry_ = in_window && symmetry_ != Symmetry::Partial ? Symmetry::Whole : Symmetry::Partial;
    return {memory->get(), bytes};
}

/// The least registration of all ranks: registering is a collective, and whether buffers are symmetric must
/// be the same everywhere.
Registration Group::lowest_registration(Registration mine, std::size_t bytes) {
    if (size() == 1) return mine;
    auto value = static_cast<std::int32_t>(mine);
    void* const word = scratch_->get();
    session_->copy(word, &value, sizeof value, cudaMemcpyHostToDevice);
    start({.bytes = bytes, .operation = SegmentOp::Barrier, .root = kAllocateMark}, [=](const Api& api,
                                                                                        Handle comm,
                                                                                        cuda::Stream stream) {
        return api.all_reduce(word, word, 1, Type::Int32, Op::Min, comm, stream);
    }).synchronize();
    session_->copy(&value, word, sizeof value, cudaMemcpyDeviceToHost);
    return static_cast<Registration>(value);
}

/// Registers memory in the best way that all ranks support. True: as a symmetric window.
bool Group::register_memory(const NcclMemory& memory) {
    const Registration how = lowest_registration(memory.best_registration(), memory.bytes());
    if (how == Registration::None) return false;
    const bool made = session_->register_memory(memory.get(), memory.bytes(), how);
    if (how == Registration::Plain) return false;
    if (lowest_registration(made ? Registration::Symmetric : Registration::None, memory.bytes()) ==
        Registration::Symmetric)
        return true;
    if (lowest_registration(parts_.nccl->comm_register != nullptr ? Registration::Plain : Registration::None,
                            memory.bytes()) == Registration::Plain) {
        session_->register_memory(memory.get(), memory.bytes(), Registration::Plain);
    }
    return false;
}

std::vector<std::string> Group::do_all_gather_bytes(std::string_view mine, std::int16_t mark) {
    const auto ranks = static_cast<std::size_t>(size());
    const std::int64_t length = static_cast<std::int64_t>(mine.size());
    std::vector<std::int64_t> lengths(ranks);
    gather_host(lengths.data(), &length, sizeof length, *scratch_, mark);
    const auto longest = static_cast<std::size_t>(*std::max_element(lengths.begin(), lengths.end()));
    if (longest == 0) return std::vector<std::string>(ranks);

    std::string padded(mine), all(longest * ranks, '\0');
    padded.resize(longest);
    gather_host(all.data(), padded.data(), longest, scratch_for(longest * (ranks + 1)), mark);
    std::vector<std::string> messages;
    for (std::size_t r = 0; r < ranks; ++r) {
        messages.push_back(all.substr(r * longest, static_cast<std::size_t>(lengths[r])));
    }
    return messages;
}

/// Keeps the buffer for the next message: device allocation takes a thousand times as long as a small
/// collective.
const NcclMemory& Group::scratch_for(std::size_t bytes) {
    if (!gather_scratch_ || gather_scratch_->bytes() < bytes) {
        const cuda::DeviceScope here = on_device();
        gather_scratch_.reset();
        gather_scratch_ = make_owned<NcclMemory>(*parts_.nccl, std::bit_ceil(bytes));
    }
    return *gather_scratch_;
}

/// Gathers `bytes` bytes of host memory by rank; `scratch` holds size() + 1 times as many.
void Group::gather_host(void* all, const void* mine, std::size_t bytes, const NcclMemory& scratch,
                        std::int16_t mark) {
    std::byte* const sent = scratch.get();
    std::byte* const received = scratch.get() + bytes;
    session_->copy(sent, mine, bytes, cudaMemcpyHostToDevice);
    start({.bytes = bytes, .operation = SegmentOp::AllGather, .root = mark}, [=](const Api& api, Handle comm,
                                                                                 cuda::Stream stream) {
        return api.all_gather(sent, received, bytes, Type::UInt8, comm, stream);
    }).synchronize();
    session_->copy(all, received, bytes * static_cast<std::size_t>(size()), cudaMemcpyDeviceToHost);
}

// Events, memory and the default stream belong to the calling thread's device, which may have changed.
cuda::DeviceScope Group::on_device() const { return cuda::DeviceScope(session_parts_.device); }

}  // namespace ddp::nccl
