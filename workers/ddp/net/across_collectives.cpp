#include <algorithm>
#include <cstring>

#include "ddp/net/across_nodes.h"
#include "ddp/net/node_rendezvous.h"

/// All collectives between nodes except all_reduce, which has its own file.
namespace ddp::net {

using ddprun::SegmentOp;

namespace {

template <class Memory>
auto slice_of(const Memory& whole, const Slices& slices, std::uint32_t rank) {
    return std::span(bytes_of(whole) + slices.offset(rank), slices.length(rank));
}
std::size_t most_slices(const std::vector<std::vector<std::uint32_t>>& held) {
    const auto shorter = [](const auto& a, const auto& b) { return a.size() < b.size(); };
    return std::ranges::max_element(held, shorter)->size();
}

/// The bytes of a slice that move at a time: whole cache lines, `most` at the most.
std::size_t piece_bytes(std::size_t longest_slice, std::size_t most) {
    return std::min({kLanePieceBytes, most, longest_slice + cpu::kLine - 1}) / cpu::kLine * cpu::kLine;
}

// Pieces of a call that are in transit at a time.
constexpr std::size_t kWindow = 4;

}  // namespace

std::vector<std::vector<std::uint32_t>> AcrossNodes::slices_held() const {
    std::vector<std::vector<std::uint32_t>> held(size_);
    for (std::uint32_t rank = 0; rank < layout_.size(); ++rank)
        held[layout_.holder(rank, layout_.node())].push_back(rank);
    return held;
}

/// After this step all ranks of this node are in the same call. From here on they may wait for other nodes.
void AcrossNodes::meet_on_node() {
    meet();
    steps_.extend_deadline(3 * deadline_extension());
}

/// After this step all ranks of all nodes are in the same call: none can finish a call that others are not
/// in.
void AcrossNodes::meet_all_nodes() {
    meet_on_node();
    if (is_leader()) {
        send_header();
        receive_headers();
    }
    meet();
}

/// Meets the ranks of this node, which tell where their memory lies, and sends the header. Returns that
/// memory by place, or nothing unless all of it is shared.
std::vector<std::byte*> AcrossNodes::begin_with(const void* data, std::size_t bytes) {
    node_.tell_place(data, bytes);
    meet_on_node();
    if (is_leader()) send_header();
    return node_.shared_buffers();
}

void AcrossNodes::run(const Operation& operation) {
    const Call& call = operation.call;
    if (operation.is_message()) return with_messages(operation, [this](auto messages) { batch(messages); });
    in_call(call, [&] {
        if (run_by_leaders(operation)) return;
        const std::size_t longest =
            operation.is_uneven()
                ? cpu::agree_on_counts(operation, node_,
                                       [&](const std::string& counts) { return gather_everywhere(counts); })
                : call.bytes;
        switch (call.operation) {
            case SegmentOp::AllReduce:
                copy_bytes(operation.out.data, operation.in.data, call.bytes);
                return all_reduce(operation.out, call.op);
            case SegmentOp::Broadcast: return broadcast(operation);
            case SegmentOp::AllGather:
                return all_gather(operation.out, operation.in, operation.slices_of_out());
            case SegmentOp::ReduceScatter:
                return reduce_scatter(operation.out, operation.in, operation.slices_of_in(), call.op);
            case SegmentOp::Reduce: return reduce(operation);
            case SegmentOp::Gather:
            case SegmentOp::Scatter: return move_slices(operation);
            case SegmentOp::AllToAll:
                return all_to_all(operation.out, operation.slices_of_out(), operation.in,
                                  operation.slices_of_in(), longest);
            default: return meet_all_nodes();  // a barrier
        }
    });
}

/// A call of few bytes. Each leader makes a payload of what the ranks of its node give, exchanges it with its
/// header, and shows its node the sum of all payloads, or all of them. False: the call has too many bytes.
bool AcrossNodes::run_by_leaders(const Operation& operation) {
    const Call& call = operation.call;
    const auto is = [&](auto... operations) { return ((call.operation == operations) || ...); };
    if (operation.is_uneven() || is(SegmentOp::Barrier)) return false;
    const bool sums = is(SegmentOp::AllReduce, SegmentOp::Reduce, SegmentOp::ReduceScatter);
    const bool from_root = is(SegmentOp::Broadcast, SegmentOp::Scatter);
    const bool is_cut = is(SegmentOp::ReduceScatter, SegmentOp::AllToAll, SegmentOp::Scatter);
    const std::size_t given = is_cut ? call.bytes * layout_.size() : call.bytes;  // by a rank
    const Sum how = sums ? sum_of(call.dtype, call.op) : Sum{};
    const std::size_t payload = sums        ? how.partial_bytes(given)
                                : from_root ? given
                                            : given * layout_.largest_node();
    const std::size_t nodes = layout_.nodes.size(), shown = sums ? given : payload * nodes;
    if (payload > header_payload_bytes(nodes) || shown > cpu::kAreaBytes) return false;

    if (!is_leader())
        kernels_.stream(arena_.staging(rank_, steps_.next_step()), operation.in.data, operation.in.bytes());
    meet_on_node();
    if (is_leader()) {
        for (std::uint32_t place = 0; place < size_; ++place)
            sources_[place] =
                place == rank_ ? operation.in.data : arena_.staging(place, steps_.current_step());
        if (sums)
            how.here(own_payload(), sources_.data(), static_cast<int>(size_), given / size_of(call.dtype));
        for (std::uint32_t place = 0; place < size_ && !sums; ++place) {
            if (!from_root) copy_bytes(own_payload() + place * given, sources_[place], given);
            else if (layout_.locals()[place] == static_cast<std::uint32_t>(operation.root))
                copy_bytes(own_payload(), sources_[place], given);
        }
        send_header(payload);
        receive_headers();
        std::byte* const area = arena_.staging(rank_, steps_.next_step());
        std::vector<const void*> payloads;
        for (std::uint32_t node = 0; node < nodes; ++node) {
            payloads.push_back(payload_of(node));
            if (!sums) copy_bytes(area + node * payload, payloads.back(), payload);
        }
        if (sums) {
            how.across(own_payload(), payloads.data(), static_cast<int>(nodes), given / size_of(call.dtype));
            finish_sum(how, area, own_payload(), given);
        }
    }
    meet();
    const std::byte* const area = arena_.staging(0, steps_.current_step());
    const std::size_t own_slice = is_cut ? layout_.rank * call.bytes : 0;
    const auto given_by = [&](std::uint32_t rank) {
        return area + layout_.node_of[rank] * payload + (from_root ? 0 : layout_.place_of[rank] * given);
    };
    if (sums || from_root) {
        const std::byte* const from = sums ? area : given_by(static_cast<std::uint32_t>(operation.root));
        copy_bytes(operation.out.data, from + own_slice, operation.out.bytes());
        return true;
    }
    for (std::uint32_t rank = 0; rank < layout_.size() && operation.out.bytes() > 0; ++rank)
        copy_bytes(bytes_of(operation.out) + rank * call.bytes, given_by(rank) + own_slice, call.bytes);
    return true;
}

/// Sends pieces down a tree of nodes; the root sends for its node, the leaders for the others. The ranks of a
/// node take them from shared memory, if all their buffers lie there: the root's as it is, that of a leader
/// piece by piece.
void AcrossNodes::broadcast(const Operation& operation) {
    const auto from = static_cast<std::uint32_t>(operation.root);
    const Buffer buffer = layout_.rank == from ? writable(operation.in) : operation.out;
    const std::uint32_t home = layout_.node_of[from], here = layout_.node();
    const auto n = static_cast<std::uint32_t>(layout_.nodes.size());
    const auto sender = [&](std::uint32_t node) { return node == home ? from : layout_.nodes[node].front(); };
    const auto piece_at = [&](std::size_t at) {
        const std::size_t begin = std::min(at, buffer.bytes());
        return std::span(bytes_of(buffer) + begin, std::min(kLanePieceBytes, buffer.bytes() - begin));
    };
    const std::vector<std::byte*> buffers = begin_with(buffer.data, buffer.bytes());
    const bool sends = sender(here) == layout_.rank;
    const std::uint32_t place = layout_.place_of[sender(here)];
    if (!buffers.empty() && here == home && !sends) copy_bytes(buffer.data, buffers[place], buffer.bytes());
    std::deque<Batch> received;
    Batch sent(*this);
    for (std::size_t at = 0, begun = 0; at < buffer.bytes(); at += kLanePieceBytes) {
        const std::span<std::byte> piece = piece_at(at);
        for (; sends && here != home && begun < at + kWindow * kLanePieceBytes; begun += kLanePieceBytes)
            received.emplace_back(*this).receive(sender(parent_in_tree(here, home, n)), piece_at(begun));
        if (!received.empty()) {
            received.front().wait();
            received.pop_front();
        }
        for (const std::uint32_t child : children_in_tree(here, home, n)) {
            if (sends) sent.send(sender(child), piece);
        }
        if (buffers.empty() && size_ > 1) {
            if (rank_ == place)
                kernels_.stream(arena_.staging(rank_, steps_.next_step()), piece.data(), piece.size());
            meet();
            if (rank_ != place)
                copy_bytes(piece.data(), arena_.staging(place, steps_.current_step()), piece.size());
        }
        for (std::uint32_t other = 0; other < buffers.size(); ++other) {
            if (sends && here != home && other != rank_)
                kernels_.stream(buffers[other] + at, piece.data(), piece.size());
        }
    }
    sent.wait();
    receive_headers();
    meet();
}

/// Each rank sends its slice to one rank of every other node, which holds it there. A rank gives pieces of
/// the slices that it holds to the other ranks of its node when they have arrived: it writes them to the
/// outputs if all of these are shared, and stages them otherwise.
void AcrossNodes::all_gather(const Buffer& output, const ConstBuffer& input, const Slices& slices) {
    const std::span<std::byte> own = slice_of(output, slices, layout_.rank);
    copy_bytes(own.data(), input.data, own.size());
    const std::vector<std::byte*> outputs = begin_with(output.data, output.bytes());
    const std::vector<std::vector<std::uint32_t>> held = slices_held();
    const std::size_t most = most_slices(held);
    const bool staged = outputs.empty() && size_ > 1;
    const std::size_t part = piece_bytes(slices.longest(), kLanePieceBytes);  // the same on all nodes
    const std::size_t step = staged ? piece_bytes(part, cpu::kAreaBytes / most) : part;
    const auto piece_of = [&](std::uint32_t rank, std::size_t at) {
        return std::span(bytes_of(output) + slices.offset(rank) + at, slices.within(rank, at, part));
    };
    std::deque<Batch> pieces;
    const auto begin = [&](std::size_t at) {
        Batch& batch = pieces.emplace_back(*this);
        for (const std::uint32_t rank : held[rank_]) {
            if (!layout_.is_local(rank)) batch.receive(rank, piece_of(rank, at));
        }
        for (std::uint32_t node = 0; node < layout_.nodes.size(); ++node) {
            if (node != layout_.node())
                batch.send(layout_.nodes[node][layout_.holder(layout_.rank, node)],
                           piece_of(layout_.rank, at));
        }
    };
    const auto write_to_all = [&](std::uint32_t rank, std::size_t at) {
        const std::span<const std::byte> piece = piece_of(rank, at);
        for (std::uint32_t place = 0; place < size_; ++place) {
            if (place != rank_)
                kernels_.stream(outputs[place] + slices.offset(rank) + at, piece.data(), piece.size());
        }
    };
    for (std::size_t at = 0, begun = 0; at < slices.longest(); at += part) {
        for (; begun < slices.longest() && begun < at + kWindow * part; begun += part) begin(begun);
        if (!staged) write_to_all(layout_.rank, at);
        pieces.front().wait();
        pieces.pop_front();
        for (const std::uint32_t rank : held[rank_]) {
            if (!staged && rank != layout_.rank) write_to_all(rank, at);
        }
        for (std::size_t from = at, end = std::min(at + part, slices.longest()); staged && from < end;
             from += step) {
            const std::size_t length = std::min(step, end - from);
            for (std::size_t i = 0; i < held[rank_].size(); ++i) {
                const std::uint32_t rank = held[rank_][i];
                copy_bytes(arena_.staging(rank_, steps_.next_step()) + i * step,
                           bytes_of(output) + slices.offset(rank) + from, slices.within(rank, from, length));
            }
            meet();
            for (std::uint32_t place = 0; place < size_; ++place) {
                for (std::size_t i = 0; place != rank_ && i < held[place].size(); ++i) {
                    const std::uint32_t rank = held[place][i];
                    copy_bytes(bytes_of(output) + slices.offset(rank) + from,
                               arena_.staging(place, steps_.current_step()) + i * step,
                               slices.within(rank, from, length));
                }
            }
        }
    }
    receive_headers();
    meet();
}

/// Each slice has a holder on every node, which sums it over the node and sends the sum to the slice's rank;
/// that rank sums over the nodes. All slices move in pieces: a rank sums the next while one is in transit.
/// Sums read the inputs of the node's ranks if all are shared, and pieces that they stage otherwise.
void AcrossNodes::reduce_scatter(const Buffer& output, const ConstBuffer& input, const Slices& slices,
                                 ReduceOp op) {
    const std::vector<std::byte*> inputs = begin_with(input.data, input.bytes());
    const Sum how = sum_of(input.dtype, op);
    const std::vector<std::vector<std::uint32_t>> held = slices_held();
    const std::size_t most = most_slices(held), nodes = layout_.nodes.size();
    const bool staged = inputs.empty() && size_ > 1;
    const std::size_t part = piece_bytes(slices.longest(), kLanePieceBytes);  // the same on all nodes
    const std::size_t step = staged ? piece_bytes(part, cpu::kAreaBytes / (size_ * most)) : part;
    const std::size_t room = how.partial_bytes(part);
    for (std::vector<std::byte>& scratch : scratch_)
        if (scratch.size() < (most + nodes) * room) scratch.resize((most + nodes) * room);

    const auto stage = [&](std::size_t at, std::size_t length) {
        std::byte* const area = arena_.staging(rank_, steps_.next_step());
        for (std::uint32_t place = 0; place < size_; ++place) {
            for (std::size_t i = 0; place != rank_ && i < held[place].size(); ++i)
                copy_bytes(area + (place * most + i) * step,
                           bytes_of(input) + slices.offset(held[place][i]) + at,
                           slices.within(held[place][i], at, length));
        }
    };
    // The node's sum of a part of the slice `i` that this rank holds.
    const auto sum_on_node = [&](std::size_t i, std::size_t at, std::size_t length, std::byte* to) {
        const std::size_t begin = slices.offset(held[rank_][i]) + at;
        for (std::uint32_t place = 0; place < size_; ++place) {
            if (place == rank_) sources_[place] = bytes_of(input) + begin;
            else if (!staged) sources_[place] = inputs[place] + begin;
            else sources_[place] = arena_.staging(place, steps_.current_step()) + (rank_ * most + i) * step;
        }
        how.here(to, sources_.data(), static_cast<int>(size_),
                 slices.within(held[rank_][i], at, length) / size_of(how.type));
    };
    Batch even(*this), odd(*this);
    const auto batch_of = [&](std::size_t at) -> Batch& { return at / part % 2 == 0 ? even : odd; };
    // Scratch: the sums of the slices held, then a piece from each node.
    const auto scratch_of = [&](std::size_t at, std::size_t index) {
        return scratch_[at / part % 2].data() + index * room;
    };
    const auto own_index =
        static_cast<std::size_t>(std::ranges::find(held[rank_], layout_.rank) - held[rank_].begin());
    const auto own_sum = [&](std::size_t at) {
        return how.is_wide() ? scratch_of(at, own_index) : bytes_of(output) + at;
    };
    const auto begin = [&](std::size_t at) {
        const std::size_t own_bytes = how.partial_bytes(slices.within(layout_.rank, at, part));
        for (std::uint32_t node = 0; node < nodes; ++node) {
            if (node != layout_.node())
                batch_of(at).receive(layout_.nodes[node][layout_.holder(layout_.rank, node)],
                                     {scratch_of(at, most + node), own_bytes});
        }
        for (std::size_t from = at, end = std::min(at + part, slices.longest()); from < end; from += step) {
            const std::size_t length = std::min(step, end - from), done = how.partial_bytes(from - at);
            if (staged) {
                stage(from, length);
                meet();
            }
            for (std::size_t i = 0; i < held[rank_].size(); ++i)
                sum_on_node(i, from, length, (i == own_index ? own_sum(at) : scratch_of(at, i)) + done);
        }
        for (std::size_t i = 0; i < held[rank_].size(); ++i) {
            const std::uint32_t rank = held[rank_][i];
            if (i != own_index)
                batch_of(at).send(rank,
                                  {scratch_of(at, i), how.partial_bytes(slices.within(rank, at, part))});
        }
    };
    const auto finish = [&](std::size_t at) {
        batch_of(at).wait();
        const std::size_t length = slices.within(layout_.rank, at, part);
        if (length == 0) return;
        std::vector<const void*> sources;
        for (std::uint32_t node = 0; node < nodes; ++node)
            sources.push_back(node == layout_.node() ? own_sum(at) : scratch_of(at, most + node));
        how.across(own_sum(at), sources.data(), static_cast<int>(nodes), length / size_of(how.type));
        finish_sum(how, bytes_of(output) + at, own_sum(at), length);
    };
    for (std::size_t at = 0; at < slices.longest(); at += part) {
        begin(at);
        if (at > 0) finish(at - part);
        if (at + part >= slices.longest()) finish(at);
    }
    receive_headers();
    meet();
}

/// Uses all_reduce, which gives equal bits; only the root keeps the result.
void AcrossNodes::reduce(const Operation& operation) {
    const ConstBuffer& in = operation.in;
    std::vector<std::byte> copy(bytes_of(in), bytes_of(in) + in.bytes());
    all_reduce({copy.data(), in.count, in.dtype, {}}, operation.call.op);
    copy_bytes(operation.out.data, copy.data(), operation.out.bytes());
}

/// Moves the slices of a gather or scatter as messages to or from the root.
void AcrossNodes::move_slices(const Operation& operation) {
    const bool gathers = operation.call.operation == SegmentOp::Gather, is_root = rank() == operation.root;
    const Buffer slice = gathers ? writable(operation.in) : operation.out;
    const Buffer all = gathers ? operation.out : writable(operation.in);
    const Slices slices = Slices::even(operation.call.bytes);
    const auto sends_or_receives = [](bool sends) {
        return sends ? Message::Direction::Send : Message::Direction::Recv;
    };
    meet_all_nodes();
    if (!is_root) {
        const Message one{sends_or_receives(gathers), slice, operation.root};
        return batch(std::span(&one, 1));
    }
    std::vector<Message> messages;
    for (int peer = 0; peer < size(); ++peer) {
        if (peer != rank()) messages.push_back({sends_or_receives(!gathers), slices.of(all, peer), peer});
    }
    const Buffer own = slices.of(all, rank());
    if (gathers) std::memmove(own.data, slice.data, slice.bytes());
    batch(messages);
    if (!gathers) std::memmove(slice.data, own.data, slice.bytes());
}

/// Between nodes each pair exchanges directly. Within the node each rank reads the slices from the inputs of
/// the others, if all are shared; otherwise each has another partner in each round.
void AcrossNodes::all_to_all(const Buffer& output, const Slices& received, const ConstBuffer& input,
                             const Slices& sent, std::size_t longest) {
    const std::vector<std::byte*> inputs = begin_with(input.data, input.bytes());
    const std::uint32_t own = layout_.rank;
    Batch batch(*this);
    for (std::uint32_t rank = 0; rank < layout_.size(); ++rank) {
        if (!layout_.is_local(rank)) batch.receive(rank, slice_of(output, received, rank));
    }
    for (std::uint32_t step = 1; step < layout_.size();
         ++step) {  // ranks do not all start with the same peer
        const auto rank = static_cast<std::uint32_t>((own + step) % layout_.size());
        if (!layout_.is_local(rank)) batch.send(rank, slice_of(input, sent, rank));
    }
    copy_bytes(slice_of(output, received, own).data(), slice_of(input, sent, own).data(), sent.length(own));
    const bool direct = !inputs.empty() && sent.are_even();
    for (std::uint32_t distance = 1; distance < size_; ++distance) {
        const std::uint32_t to = layout_.locals()[(rank_ + distance) % size_],
                            place = (rank_ + size_ - distance) % size_;
        const std::uint32_t from = layout_.locals()[place];
        if (direct) {
            copy_bytes(slice_of(output, received, from).data(), inputs[place] + sent.offset(own), longest);
            continue;
        }
        for (std::size_t at = 0; at < longest; at += cpu::kAreaBytes) {
            kernels_.stream(arena_.staging(rank_, steps_.next_step()), bytes_of(input) + sent.offset(to) + at,
                            sent.within(to, at, cpu::kAreaBytes));
            meet();
            copy_bytes(bytes_of(output) + received.offset(from) + at,
                       arena_.staging(place, steps_.current_step()),
                       received.within(from, at, cpu::kAreaBytes));
        }
    }
    batch.wait();
    receive_headers();
    meet();
}

std::vector<std::string> AcrossNodes::all_gather_bytes(std::string_view mine, std::int16_t mark) {
    std::vector<std::string> all;
    in_call({.root = mark, .operation = SegmentOp::AllGather}, [&] { all = gather_everywhere(mine); });
    return all;
}

/// A leader collects the bytes of its node, exchanges them with the other leaders and distributes all.
std::vector<std::string> AcrossNodes::gather_everywhere(std::string_view mine) {
    const std::string ours = pack(node_.gather_bytes(mine));
    steps_.extend_deadline(3 * deadline_extension());
    std::vector<std::string> theirs(layout_.nodes.size());
    if (is_leader()) {
        const std::uint64_t length = ours.size();
        std::memcpy(own_payload(), &length, sizeof length);
        send_header(sizeof length);
        receive_headers();
        Batch batch(*this);
        for (std::uint32_t node = 0; node < theirs.size(); ++node) {
            if (node == layout_.node()) continue;
            std::uint64_t expected = 0;
            std::memcpy(&expected, payload_of(node), sizeof expected);
            theirs[node].resize(expected);
            batch.receive(layout_.nodes[node].front(), std::as_writable_bytes(std::span(theirs[node])));
        }
        for (const auto& ranks : layout_.nodes) {
            if (ranks.front() != layout_.rank) batch.send(ranks.front(), std::as_bytes(std::span(ours)));
        }
        batch.wait();
        theirs[layout_.node()] = ours;
    }
    const std::vector<std::string> by_node =
        unpack(node_.gather_bytes(is_leader() ? pack(theirs) : "").front());
    std::vector<std::string> all(layout_.size());
    for (std::uint32_t node = 0; node < by_node.size(); ++node) {
        const std::vector<std::string> texts = unpack(by_node[node]);
        for (std::uint32_t place = 0; place < texts.size(); ++place)
            all[layout_.nodes[node].at(place)] = texts[place];
    }
    return all;
}

}  // namespace ddp::net
