#include "ddp/recovery/transfer.h"

#include <algorithm>
#include <memory>
#include <utility>

namespace ddp {

namespace {

using RankList = std::vector<std::uint32_t>;

/// The receiver of `waiting` to which `from` gives: one of its node, else the first one of a node on which
/// nobody of `served` is.
RankList::iterator receiver_for(std::uint32_t from, RankList& waiting, const RankList& served,
                                std::span<const Holder> ranks) {
    const auto is_near = [&](std::uint32_t one) {
        return [&ranks, one](std::uint32_t other) { return ranks[other].node == ranks[one].node; };
    };
    const auto nearest = std::ranges::find_if(waiting, is_near(from));
    if (nearest != waiting.end()) return nearest;
    return std::ranges::find_if(
        waiting, [&](std::uint32_t rank) { return std::ranges::none_of(served, is_near(rank)); });
}

/// Rounds for `waiting`, who become holders.
void serve(RankList waiting, RankList& holders, std::span<const Holder> ranks,
           std::vector<TransferRound>& rounds) {
    while (!waiting.empty()) {
        TransferRound round;
        RankList served = holders;
        for (const std::uint32_t holder : holders) {
            const auto receiver = receiver_for(holder, waiting, served, ranks);
            if (receiver == waiting.end()) continue;
            round.push_back({holder, *receiver});
            served.push_back(*receiver);
            waiting.erase(receiver);
        }
        holders = std::move(served);
        rounds.push_back(std::move(round));
    }
}

}  // namespace

std::uint64_t newest_state(std::span<const Holder> ranks) {
    std::uint64_t newest = 0;
    for (const Holder& one : ranks) {
        if (one.is_whole) newest = std::max(newest, one.commits);
    }
    return newest;
}

std::vector<TransferRound> plan_transfers(std::span<const Holder> ranks) {
    const std::uint64_t newest = newest_state(ranks);
    RankList holders, empty, older;
    for (std::uint32_t rank = 0; rank < ranks.size(); ++rank) {
        const bool has_it = ranks[rank].is_whole && ranks[rank].commits == newest;
        (has_it ? holders : ranks[rank].is_whole ? older : empty).push_back(rank);
    }
    if (holders.empty()) return {};
    std::vector<TransferRound> rounds;
    serve(empty, holders, ranks, rounds);
    const std::size_t half = std::max<std::size_t>(older.size() / 2, 1);
    for (std::size_t begin = 0; begin < older.size(); begin += half) {
        const std::size_t end = std::min(begin + half, older.size());
        serve({older.begin() + static_cast<std::ptrdiff_t>(begin),
               older.begin() + static_cast<std::ptrdiff_t>(end)},
              holders, ranks, rounds);
    }
    return rounds;
}

void run_round(ProcessGroup& group, const TransferRound& round, std::span<const Tensor> state,
               std::atomic<std::uint64_t>* moved) {
    // A pair is a group of its own: its broadcast is more than twice as fast as messages.
    int color = -1;
    bool gives = false;
    for (const Transfer& one : round) {
        const bool is_from = static_cast<int>(one.from) == group.rank();
        if (!is_from && static_cast<int>(one.to) != group.rank()) continue;
        color = static_cast<int>(one.from);
        gives = is_from;
    }
    const auto pair = group.split(color, gives ? 0 : 1);
    if (pair == nullptr) return;
    for (const Tensor& tensor : state) {
        pair->broadcast(tensor.memory, 0).synchronize();
        if (moved != nullptr) moved->fetch_add(1, std::memory_order_relaxed);
    }
}

}  // namespace ddp
