#include "ddp/nccl/group.h"

#include <fmt/core.h>

#include <algorithm>
#include <bit>
#include <utility>

#include "ddp/worker/operation.h"

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

/// NCCL's send and recv on one stream.
struct Messages {
    const Api& api;
    Handle comm;
    cuda::Stream stream;
    Code code = Code::Success;  ///< of the first that failed; nothing is called after it

    template <class Make>
    void then(Make make) {
        if (code == Code::Success || code == Code::InProgress) code = make();
    }
    void send(const ConstBuffer& from, int to) {
        then([&] { return api.send(from.data, from.count, type_of(from.dtype), to, comm, stream); });
    }
    void recv(const Buffer& into, int from) {
        then([&] { return api.recv(into.data, into.count, type_of(into.dtype), from, comm, stream); });
    }
};

}  // namespace

Group::Group(std::shared_ptr<const Api> nccl, int rank, int size, SessionParts session,
             std::shared_ptr<Communicator> communicator)
    : nccl_(std::move(nccl)), session_parts_(session) {
    set_identity({.rank = rank,
                  .size = size,
                  .device = {Device::Kind::Cuda, session_parts_.device},
                  .backend = "nccl",
                  .world_rank = session_parts_.env.rank,
                  .timeout = session_parts_.timeout});
    communicator_ = communicator;
    session_ = make_owned<Session>(std::move(session), std::move(communicator));
    const cuda::DeviceScope here = on_device();
    const std::size_t bytes = sizeof(std::int64_t) * (static_cast<std::size_t>(size) + 1);
    scratch_ = make_owned<NcclMemory>(*nccl_, bytes);
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
    return fmt::format("nccl ({}, CUDA runtime {}.{}, driver {}.{}, rank {} on device {})", nccl_->describe(),
                       runtime / 1000, runtime % 1000 / 10, driver / 1000, driver % 1000 / 10,
                       session_parts_.env.rank, session_parts_.device);
}

void Group::report_progress(std::uint64_t step, std::uint64_t samples) {
    ddp::report_progress(
        session_parts_.segment->line(static_cast<std::uint32_t>(session_parts_.env.local_rank)), step,
        samples);
}

Work Group::track(Call call, const Session::Enqueue& enqueue) {
    return session_->start(call, timeout(), enqueue);
}

/// The host ends a barrier, so waiting for it blocks.
Work Group::start(std::span<const Operation> operations) {
    const Call call = call_of(operations);
    Work work = track(call, [&](const Api& api, Handle comm, cuda::Stream stream) {
        if (operations.size() == 1) return enqueue(operations.front(), api, comm, stream);
        return grouped(api, [&] {
            Messages all{api, comm, stream};
            for (const Operation& one : operations) all.then([&] { return enqueue(one, api, comm, stream); });
            return all.code;
        });
    });
    if (call.operation == SegmentOp::Barrier) work.synchronize();
    return work;
}

// NCCL before 2.28 has no gather, scatter and all-to-all: groups of messages replace them, as NCCL does
// itself. No NCCL has the uneven ones: groups of others, as PyTorch does them.
Code Group::enqueue(const Operation& one, const Api& api, Handle comm, cuda::Stream stream) const {
    const Call& call = one.call;
    const Buffer& out = one.out;
    const ConstBuffer& in = one.in;
    const Type type = type_of(call.dtype);
    const std::size_t each = call.bytes / size_of(call.dtype);  // elements of an even slice
    const bool is_root = rank() == one.root;
    const auto for_each_rank = [&](auto make) {
        return grouped(api, [&] {
            Messages all{api, comm, stream};
            for (int r = 0; r < size(); ++r) make(all, r);
            return all.code;
        });
    };
    const Slices sent = one.slices_of_in(), received = one.slices_of_out();
    switch (call.operation) {
        case SegmentOp::AllReduce:
            return api.all_reduce(in.data, out.data, in.count, type, op_of(call.op), comm, stream);
        case SegmentOp::Broadcast: {
            void* const memory = is_root ? writable(in).data : out.data;
            return api.broadcast(memory, memory, each, type, one.root, comm, stream);
        }
        case SegmentOp::Reduce:
            return api.reduce(in.data, writable(in).data, in.count, type, op_of(call.op), one.root, comm,
                              stream);
        case SegmentOp::AllGather:
            if (!one.is_uneven()) return api.all_gather(in.data, out.data, each, type, comm, stream);
            return for_each_rank([&](Messages& all, int r) {
                const Buffer theirs = received.of(out, r);
                all.then(
                    [&] { return api.broadcast(in.data, theirs.data, theirs.count, type, r, comm, stream); });
            });
        case SegmentOp::ReduceScatter:
            if (!one.is_uneven())
                return api.reduce_scatter(in.data, out.data, each, type, op_of(call.op), comm, stream);
            return for_each_rank([&](Messages& all, int r) {
                const ConstBuffer theirs = sent.of(in, r);
                all.then([&] {
                    return api.reduce(theirs.data, out.data, theirs.count, type, op_of(call.op), r, comm,
                                      stream);
                });
            });
        case SegmentOp::Gather:
            if (api.gather != nullptr)
                return api.gather(in.data, out.data, each, type, one.root, comm, stream);
            return for_each_rank([&](Messages& all, int r) {
                if (r == one.root) all.send(in, r);
                if (is_root) all.recv(received.of(out, r), r);
            });
        case SegmentOp::Scatter:
            if (api.scatter != nullptr)
                return api.scatter(in.data, out.data, each, type, one.root, comm, stream);
            return for_each_rank([&](Messages& all, int r) {
                if (is_root) all.send(sent.of(in, r), r);
                if (r == one.root) all.recv(out, r);
            });
        case SegmentOp::AllToAll:
            if (api.all_to_all != nullptr && !one.is_uneven())
                return api.all_to_all(in.data, out.data, each, type, comm, stream);
            return for_each_rank([&](Messages& all, int r) {
                all.send(sent.of(in, r), r);
                all.recv(received.of(out, r), r);
            });
        case SegmentOp::Barrier: {  // NCCL has none: this is the smallest all-reduce
            void* const word = scratch_->get();
            return api.all_reduce(word, word, 1, Type::Int32, Op::Sum, comm, stream);
        }
        default: break;
    }
    Code code = Code::Success;
    with_messages(one, [&](std::span<const Message> messages) {
        const auto make = [&] {
            Messages all{api, comm, stream};
            for (const Message& message : messages) {
                message.direction == Message::Direction::Send ? all.send(message.buffer, message.peer)
                                                              : all.recv(message.buffer, message.peer);
            }
            return all.code;
        };
        code = one.messages.empty() ? make() : grouped(api, make);
    });
    return code;
}

std::unique_ptr<ProcessGroup> Group::do_split(const SubGroup& part) {
    const auto own = std::find(part.members.begin(), part.members.end(), static_cast<std::uint32_t>(rank()));
    const auto place = static_cast<int>(own - part.members.begin());
    SessionParts session = session_parts_;
    session.name = fmt::format("sub-group {} of {}", ++splits_, session_parts_.name);
    session.lines = SessionParts::Lines::Private;
    auto communicator = divide(part, place, session.name);
    if (communicator == nullptr) return nullptr;
    return std::make_unique<Group>(nccl_, place, static_cast<int>(part.members.size()), std::move(session),
                                   std::move(communicator));
}

// NCCL before 2.18 cannot split: the first rank of each color makes an id, and all join as at the start.
std::shared_ptr<Communicator> Group::divide(const SubGroup& part, int place, const std::string& name) {
    if (nccl_->comm_split != nullptr)
        return session_->split(part.color < 0 ? kNoColor : part.color, part.key);
    const cuda::DeviceScope here = on_device();
    const std::string attempt = fmt::format("rank {}: joining {}", session_parts_.env.rank, name);
    const bool leads = !part.members.empty() && place == 0;
    UniqueId id{};
    Code code = Code::Success;
    if (leads) code = nccl_->get_unique_id(&id);
    const std::string made = code == Code::Success ? std::string(id.internal, sizeof id.internal) : "";
    const std::vector<std::string> ids = do_all_gather_bytes(leads ? made : "", kSplitMark);
    if (part.members.empty()) return nullptr;
    const std::string& theirs = ids[part.members.front()];
    if (theirs.size() != sizeof id.internal) {
        throw Error(fmt::format("{}: ncclGetUniqueId of rank {} failed{}", attempt, part.members.front(),
                                leads ? ": " + nccl_->explain(code, nullptr) : ""));
    }
    std::copy(theirs.begin(), theirs.end(), id.internal);
    return Communicator::join(nccl_, {id}, place, static_cast<int>(part.members.size()),
                              session_->wait_bounds(attempt), attempt);
}

std::span<std::byte> Group::do_allocate_shared(std::size_t bytes) {
    const cuda::DeviceScope here = on_device();
    const auto& memory =
        memory_.emplace_back(make_owned<NcclMemory>(*nccl_, std::max<std::size_t>(bytes, 1)));
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
    track({.bytes = bytes, .root = kAllocateMark, .operation = SegmentOp::Barrier}, [=](const Api& api,
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
    if (lowest_registration(nccl_->comm_register != nullptr ? Registration::Plain : Registration::None,
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
        gather_scratch_ = make_owned<NcclMemory>(*nccl_, std::bit_ceil(bytes));
    }
    return *gather_scratch_;
}

/// Gathers `bytes` bytes of host memory by rank; `scratch` holds size() + 1 times as many.
void Group::gather_host(void* all, const void* mine, std::size_t bytes, const NcclMemory& scratch,
                        std::int16_t mark) {
    std::byte* const sent = scratch.get();
    std::byte* const received = scratch.get() + bytes;
    session_->copy(sent, mine, bytes, cudaMemcpyHostToDevice);
    track({.bytes = bytes, .root = mark, .operation = SegmentOp::AllGather}, [=](const Api& api, Handle comm,
                                                                                 cuda::Stream stream) {
        return api.all_gather(sent, received, bytes, Type::UInt8, comm, stream);
    }).synchronize();
    session_->copy(all, received, bytes * static_cast<std::size_t>(size()), cudaMemcpyDeviceToHost);
}

// Events, memory and the default stream belong to the calling thread's device, which may have changed.
cuda::DeviceScope Group::on_device() const { return cuda::DeviceScope(session_parts_.device); }

}  // namespace ddp::nccl
