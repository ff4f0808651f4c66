#pragma once

#include <span>
#include <vector>

#include "ddp/process_group.h"
#include "ddp/worker/call.h"
#include "ddp/worker/slices.h"

namespace ddp {

/// A collective or messages, as ProcessGroup has checked them; each backend starts it in its own way. Where
/// this rank receives nothing (the result of a reduce, as a rank that is not the root), `out` is empty;
/// where it gives nothing, `in` is.
struct Operation {
    Call call = {};  ///< as peers see it, without its sequence number
    int root = -1;   ///< or the peer of a message
    Buffer out = {};
    ConstBuffer in = {};  ///< the same memory as `out` in a call that works in place
    /// Elements of each rank's slice of `out` and of `in`; both empty where all slices have equal lengths,
    /// which is call.bytes.
    Counts received = {}, sent = {};
    std::vector<Message> messages = {};  ///< of a batch; empty for a single message

    [[nodiscard]] bool is_uneven() const { return call.root == kUnevenMark; }
    [[nodiscard]] bool is_message() const {
        return call.operation == ddprun::SegmentOp::Send || call.operation == ddprun::SegmentOp::Recv;
    }
    [[nodiscard]] Slices slices_of_out() const { return slices(received); }
    [[nodiscard]] Slices slices_of_in() const { return slices(sent); }
    /// All counts, sent ones first: ranks exchange them before an uneven collective (see compare_counts).
    [[nodiscard]] Counts counts() const {
        Counts both = sent;
        both.insert(both.end(), received.begin(), received.end());
        return both;
    }

  private:
    [[nodiscard]] Slices slices(const Counts& counts) const {
        return counts.empty() ? Slices::even(call.bytes) : Slices(counts, call.dtype);
    }
};

/// The call of coalesced operations, which share one sequence number.
inline Call call_of(std::span<const Operation> operations) {
    Call call = operations.front().call;
    for (const Operation& other : operations.subspan(1)) {
        call.bytes += other.call.bytes;
        call.root = kCoalescedMark;
    }
    return call;
}

/// Calls `use` with the messages of a send, a receive or a batch.
template <class Use>
void with_messages(const Operation& operation, Use use) {
    if (!operation.messages.empty()) return use(std::span(operation.messages));
    const bool sends = operation.call.operation == ddprun::SegmentOp::Send;
    const Message one{sends ? Message::Direction::Send : Message::Direction::Recv,
                      sends ? writable(operation.in) : operation.out, operation.root};
    use(std::span(&one, 1));
}

}  // namespace ddp
