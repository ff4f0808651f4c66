#pragma once

#include <exception>

#include "ddp/net/across_nodes.h"

/// The templates of AcrossNodes, for its own sources.
namespace ddp::net {

using cpu::bytes_of;
using cpu::copy_bytes;

/// Compares the calls of this node first. A group that failed in a call is unusable: later code may reuse the
/// memory, so the link must not write there.
template <class Body>
void AcrossNodes::in_call(const Call& call, Body body) {
    try {
        steps_.begin(call);
        call_ = steps_.call();
        began_ns_ = 0;
        body();
        steps_.end();
    } catch (...) {
        fail_group(std::current_exception());
        throw;
    }
}

template <class Exception>
void AcrossNodes::fail(const std::string& what) {
    announce_failure(std::make_exception_ptr(Exception(what)));
    throw Exception(what);
}

/// One step of the node for each piece of `total` bytes, and none for 0: `give` shows a piece, `take` reads
/// the others' pieces.
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
