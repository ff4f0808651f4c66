#include <algorithm>
#include <cstring>

#include "ddp/net/across_calls.h"
#include "ddp/net/node_rendezvous.h"

/// All collectives between nodes except all_reduce, which has its own file.
namespace ddp::net {

using ddprun::SegmentOp;

namespace {

std::span<std::byte> slice_of(const Buffer& whole, const Slices& slices, std::uint32_t rank) {
    return {bytes_of(whole) + slices.offset(rank), slices.length(rank)};
}
std::span<const std::byte> slice_of(const ConstBuffer& whole, const Slices& slices, std::uint32_t rank) {
    return {bytes_of(whole) + slices.offset(rank), slices.length(rank)};
}

}  // namespace

/// Broadcasts `length` bytes of one rank to its node.
void AcrossNodes::broadcast_on_node(std::uint32_t from_place, std::byte* bytes, std::size_t length) {
    if (size_ == 1) return;
    in_steps(
        length,
        [&](std::size_t at, std::size_t part) {
            if (rank_ == from_place)
                kernels_.stream(arena_.staging(rank_, steps_.next_step()), bytes + at, part);
        },
        [&](std::size_t at, std::size_t part) {
            if (rank_ != from_place)
                copy_bytes(bytes + at, arena_.staging(from_place, steps_.current_step()), part);
        });
}

/// After this step all ranks of this node are in the same call. From here on they may wait for other nodes.
void AcrossNodes::meet_on_node() {
    meet();
    steps_.extend_deadline(2 * deadline_extension());
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

void AcrossNodes::run(const Operation& operation) {
    const Call& call = operation.call;
    if (operation.is_message()) return with_messages(operation, [this](auto messages) { batch(messages); });
    in_call(call, [&] {
        const std::size_t longest = operation.is_uneven() ? agree_on_counts(operation) : call.bytes;
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
            case SegmentOp::Gather: return gather(operation);
            case SegmentOp::Scatter: return scatter(operation);
            case SegmentOp::AllToAll:
                return all_to_all(operation.out, operation.slices_of_out(), operation.in,
                                  operation.slices_of_in(), longest);
            default: return meet_all_nodes();  // a barrier
        }
    });
}

/// Sends pieces down a tree of nodes; the root sends for its node, the leaders for the others.
void AcrossNodes::broadcast(const Operation& operation) {
    meet_all_nodes();
    const auto from = static_cast<std::uint32_t>(operation.root);
    const Buffer buffer = layout_.rank == from ? writable(operation.in) : operation.out;
    const std::uint32_t home = layout_.node_of[from], here = layout_.node();
    const auto n = static_cast<std::uint32_t>(layout_.nodes.size());
    const auto sender = [&](std::uint32_t node) { return node == home ? from : layout_.nodes[node].front(); };
    for (std::size_t at = 0; at < buffer.bytes(); at += cpu::kAreaBytes) {
        const std::span<std::byte> piece(bytes_of(buffer) + at,
                                         std::min(cpu::kAreaBytes, buffer.bytes() - at));
        if (sender(here) == layout_.rank) {
            Batch batch(*this);
            if (here != home) batch.receive(sender(parent_in_tree(here, home, n)), piece);
            batch.wait();
            for (const std::uint32_t child : children_in_tree(here, home, n))
                batch.send(sender(child), piece);
            batch.wait();
        }
        broadcast_on_node(layout_.place_of[sender(here)], piece.data(), piece.size());
    }
}

/// Each rank sends its slice to one rank of every other node, which broadcasts it there.
void AcrossNodes::all_gather(const Buffer& output, const ConstBuffer& input, const Slices& slices) {
    const std::span<std::byte> own = slice_of(output, slices, layout_.rank);
    if (!own.empty())
        std::memmove(own.data(), input.data, own.size());  // `input` may overlap the slices received
    meet_all_nodes();
    const auto holder = [&](std::uint32_t rank) { return layout_.holder(rank, layout_.node()); };
    Batch batch(*this);
    for (std::uint32_t rank = 0; rank < layout_.size(); ++rank) {
        if (!layout_.is_local(rank) && holder(rank) == layout_.place())
            batch.receive(rank, slice_of(output, slices, rank));
    }
    for (std::uint32_t node = 0; node < layout_.nodes.size(); ++node) {
        if (node != layout_.node()) batch.send(layout_.nodes[node][layout_.holder(layout_.rank, node)], own);
    }
    batch.wait();
    for (std::uint32_t rank = 0; rank < layout_.size(); ++rank) {
        const std::span<std::byte> slice = slice_of(output, slices, rank);
        broadcast_on_node(holder(rank), slice.data(), slice.size());
    }
}

/// Each slice has a holder on every node, which sums it over the node and sends the sum to the slice's rank;
/// that rank sums over the nodes. In each round every rank of the node holds one slice, for which the others
/// stage their parts.
void AcrossNodes::reduce_scatter(const Buffer& output, const ConstBuffer& input, const Slices& slices,
                                 ReduceOp op) {
    meet_all_nodes();
    const Sum how = sum_of(input.dtype, op);
    const std::size_t own_length = how.partial_bytes(slices.length(layout_.rank));
    std::vector<std::vector<std::byte>> sums(layout_.size()), came(layout_.nodes.size());
    std::vector<std::byte> mine(own_length);              // `output` may be a part of `input`
    std::vector<std::vector<std::uint32_t>> held(size_);  // by place: the ranks whose slices it sums
    for (std::uint32_t rank = 0; rank < layout_.size(); ++rank)
        held[layout_.holder(rank, layout_.node())].push_back(rank);
    const auto longer = [](const auto& a, const auto& b) { return a.size() < b.size(); };
    const std::size_t rounds = std::max_element(held.begin(), held.end(), longer)->size();
    const std::size_t part = cpu::kAreaBytes / size_ / cpu::kLine * cpu::kLine;
    for (std::size_t round = 0; round < rounds; ++round) {
        std::vector<std::span<const std::byte>> summed(size_);  // by place
        for (std::uint32_t place = 0; place < size_; ++place) {
            if (round < held[place].size()) summed[place] = slice_of(input, slices, held[place][round]);
        }
        const std::size_t longest = std::max_element(summed.begin(), summed.end(), longer)->size();
        std::vector<std::byte>* sum = &mine;
        if (round < held[rank_].size() && held[rank_][round] != layout_.rank) sum = &sums[held[rank_][round]];
        if (!summed[rank_].empty()) sum->resize(how.partial_bytes(summed[rank_].size()));
        for (std::size_t at = 0; at < longest; at += part) {
            const auto piece_of = [&](std::uint32_t place) {
                const std::size_t begin = std::min(at, summed[place].size());
                return summed[place].subspan(begin, std::min(part, summed[place].size() - begin));
            };
            for (std::uint32_t place = 0; place < size_; ++place) {
                const std::span<const std::byte> piece = piece_of(place);
                if (place == rank_ || piece.empty()) continue;
                kernels_.stream(arena_.staging(rank_, steps_.next_step()) + place * part, piece.data(),
                                piece.size());
            }
            meet();
            const std::span<const std::byte> own = piece_of(rank_);
            if (own.empty()) continue;
            for (std::uint32_t place = 0; place < size_; ++place)
                sources_[place] =
                    place == rank_ ? own.data() : arena_.staging(place, steps_.current_step()) + rank_ * part;
            how.here(sum->data() + how.partial_bytes(at), sources_.data(), static_cast<int>(size_),
                     own.size() / size_of(input.dtype));
        }
    }
    std::vector<const void*> sources(layout_.nodes.size(), mine.data());
    Batch batch(*this);
    for (std::uint32_t node = 0; node < layout_.nodes.size(); ++node) {
        if (node == layout_.node()) continue;
        came[node].resize(own_length);
        sources[node] = came[node].data();
        batch.receive(layout_.nodes[node][layout_.holder(layout_.rank, node)], came[node]);
    }
    for (std::uint32_t rank = 0; rank < layout_.size(); ++rank) {
        if (!layout_.is_local(rank)) batch.send(rank, sums[rank]);
    }
    batch.wait();
    how.across(mine.data(), sources.data(), static_cast<int>(sources.size()), output.count);
    finish_sum(how, output.data, mine.data(), output.bytes());
}

/// Uses all_reduce, which gives equal bits; only the root keeps the result.
void AcrossNodes::reduce(const Operation& operation) {
    const ConstBuffer& in = operation.in;
    std::vector<std::byte> copy(bytes_of(in), bytes_of(in) + in.bytes());
    all_reduce({copy.data(), in.count, in.dtype, {}}, operation.call.op);
    copy_bytes(operation.out.data, copy.data(), operation.out.bytes());
}

/// Ranks of other nodes send to the root directly.
void AcrossNodes::gather(const Operation& operation) {
    const Buffer& output = operation.out;
    const ConstBuffer& input = operation.in;
    meet_all_nodes();
    const auto to = static_cast<std::uint32_t>(operation.root);
    const Slices slices = Slices::even(input.bytes());
    const bool is_root = layout_.rank == to;
    if (is_root && input.bytes() > 0)
        std::memmove(slice_of(output, slices, to).data(), input.data, input.bytes());
    Batch batch(*this);
    if (!layout_.is_local(to)) {
        batch.send(to, {bytes_of(input), input.bytes()});
        return batch.wait();
    }
    for (std::uint32_t rank = 0; is_root && rank < layout_.size(); ++rank) {
        if (!layout_.is_local(rank)) batch.receive(rank, slice_of(output, slices, rank));
    }
    in_steps(
        input.bytes(),
        [&](std::size_t at, std::size_t part) {
            if (!is_root)
                kernels_.stream(arena_.staging(rank_, steps_.next_step()), bytes_of(input) + at, part);
        },
        [&](std::size_t at, std::size_t part) {
            for (const std::uint32_t rank : layout_.locals()) {
                if (is_root && rank != to)
                    copy_bytes(slice_of(output, slices, rank).data() + at,
                               arena_.staging(layout_.place_of[rank], steps_.current_step()), part);
            }
        });
    batch.wait();
}

void AcrossNodes::scatter(const Operation& operation) {
    const Buffer& output = operation.out;
    const ConstBuffer& input = operation.in;
    meet_all_nodes();
    const auto from = static_cast<std::uint32_t>(operation.root);
    const Slices slices = Slices::even(output.bytes());
    const bool is_root = layout_.rank == from;
    Batch batch(*this);
    if (!layout_.is_local(from)) {
        batch.receive(from, {bytes_of(output), output.bytes()});
        return batch.wait();
    }
    for (std::uint32_t rank = 0; is_root && rank < layout_.size(); ++rank) {
        if (!layout_.is_local(rank)) batch.send(rank, slice_of(input, slices, rank));
    }
    for (const std::uint32_t rank : layout_.locals()) {
        if (rank == from) continue;
        in_steps(
            output.bytes(),
            [&](std::size_t at, std::size_t part) {
                if (is_root)
                    kernels_.stream(arena_.staging(rank_, steps_.next_step()),
                                    slice_of(input, slices, rank).data() + at, part);
            },
            [&](std::size_t at, std::size_t part) {
                if (rank == layout_.rank)
                    copy_bytes(bytes_of(output) + at,
                               arena_.staging(layout_.place_of[from], steps_.current_step()), part);
            });
    }
    batch.wait();
    if (is_root && output.bytes() > 0)
        std::memmove(output.data, slice_of(input, slices, from).data(), output.bytes());
}

/// Between nodes each pair exchanges directly; within the node each rank has another partner in each round.
void AcrossNodes::all_to_all(const Buffer& output, const Slices& received, const ConstBuffer& input,
                             const Slices& sent, std::size_t longest) {
    meet_all_nodes();
    const std::uint32_t own = layout_.rank;
    copy_bytes(slice_of(output, received, own).data(), slice_of(input, sent, own).data(), sent.length(own));
    Batch batch(*this);
    for (std::uint32_t rank = 0; rank < layout_.size(); ++rank) {
        if (!layout_.is_local(rank)) batch.receive(rank, slice_of(output, received, rank));
    }
    for (std::uint32_t step = 1; step < layout_.size();
         ++step) {  // ranks do not all start with the same peer
        const auto rank = static_cast<std::uint32_t>((own + step) % layout_.size());
        if (!layout_.is_local(rank)) batch.send(rank, slice_of(input, sent, rank));
    }
    for (std::uint32_t distance = 1; distance < size_; ++distance) {
        const std::uint32_t to = layout_.locals()[(rank_ + distance) % size_],
                            place = (rank_ + size_ - distance) % size_;
        const std::uint32_t from = layout_.locals()[place];
        in_steps(
            longest,
            [&](std::size_t at, std::size_t part) {
                kernels_.stream(arena_.staging(rank_, steps_.next_step()),
                                slice_of(input, sent, to).data() + at, sent.within(to, at, part));
            },
            [&](std::size_t at, std::size_t part) {
                copy_bytes(slice_of(output, received, from).data() + at,
                           arena_.staging(place, steps_.current_step()), received.within(from, at, part));
            });
    }
    batch.wait();
}

std::vector<std::string> AcrossNodes::all_gather_bytes(std::string_view mine, std::int16_t mark) {
    std::vector<std::string> all;
    in_call({.operation = SegmentOp::AllGather, .root = mark}, [&] { all = gather_everywhere(mine); });
    return all;
}

/// A leader collects the bytes of its node, exchanges them with the other leaders and distributes all.
std::vector<std::string> AcrossNodes::gather_everywhere(std::string_view mine) {
    const std::string ours = pack(node_.gather_bytes(mine));
    steps_.extend_deadline(2 * deadline_extension());
    std::vector<std::string> theirs(layout_.nodes.size());
    if (is_leader()) {
        const std::uint64_t length = ours.size();
        send_header(std::as_bytes(std::span(&length, 1)));
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

/// Throws MismatchError when the counts of the ranks do not fit each other. Returns the length of the longest
/// slice of any rank.
std::size_t AcrossNodes::agree_on_counts(const Operation& operation) {
    Counts counts = operation.counts();
    counts.insert(counts.begin(), static_cast<std::size_t>(env_.rank));
    std::vector<Counts> all;
    for (const std::string& text : gather_everywhere(
             {reinterpret_cast<const char*>(counts.data()), counts.size() * sizeof counts[0]})) {
        if (text.size() != counts.size() * sizeof counts[0])
            fail<MismatchError>(attempt() + ": other ranks called another collective");
        std::memcpy(all.emplace_back(counts.size()).data(), text.data(), text.size());
    }
    if (const std::string why = compare_counts(call_.operation, all); !why.empty()) steps_.fail_mismatch(why);
    return longest_of(all) * size_of(call_.dtype);
}

}  // namespace ddp::net
