#pragma once

#include <span>

#include "collective_loop.h"
#include "ddp/process_group.h"

namespace bench {

/// libddp's call of a collective on `count` values, for the loop.
inline void call_libddp(ddp::ProcessGroup& group, Collective collective, float* from, float* to,
                        std::size_t count) {
    const std::size_t each = count / static_cast<std::size_t>(group.size());
    const auto first = [](float* values, std::size_t n) {
        return ddp::buffer_of(std::span<float>(values, n));
    };
    switch (collective) {
        case Collective::AllReduce: return group.all_reduce(first(from, count)).wait();
        case Collective::ReduceScatter:
            return group.reduce_scatter(first(to, each), first(from, count)).wait();
        case Collective::AllGather: return group.all_gather(first(to, count), first(from, each)).wait();
        case Collective::AllToAll: return group.all_to_all(first(to, count), first(from, count)).wait();
        case Collective::Broadcast: return group.broadcast(first(from, count), group.size() - 1).wait();
    }
}

}  // namespace bench
