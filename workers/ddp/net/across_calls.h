#pragma once

#include <exception>

#include "ddp/net/across_nodes.h"

/// The templates of AcrossNodes, for its own sources.
namespace ddp::net {

using cpu::bytes_of;
using cpu::copy_bytes;

/// The calls of this node are compared first. A group that failed in the middle of a call is unusable: who
/// goes on with its memory must not find the link writing there.
template <class Body>
void AcrossNodes::in_call(const Call& call, Body body) {
    try {
        steps_.begin(call);
        call_ = steps_.call();
        began_ns_ = 0;
        body();
        steps_.end();
    } catch (...) {
        end_with(std::current_exception());
        throw;
    }
}

template <class Exception>
void AcrossNodes::fail(const std::string& what) {
    pass_on(std::make_exception_ptr(Exception(what)));
    throw Exception(what);
}

/// One step of the node for each piece of `total` bytes, and none for none: `give` shows it, `take` reads
/// what others show.
template <class Give, class Take>
void AcrossNodes::in_steps(std::size_t total, Give give, Take take) {
    for (std::size_t at = 0; at < total; at += cpu::kAreaBytes) {
        const std::size_t length = std::min(cpu::kAreaBytes, total - at);
        give(at, length);
        meet();
        take(at, length);
    }
}

}  // namespace ddp::net
