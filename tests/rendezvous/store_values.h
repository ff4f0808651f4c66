#pragma once

#include <string>

#include "rendezvous/serve/store.h"

namespace ddprun::rdzv {

/// The time at which a test begins.
inline const TimePoint t0{std::chrono::seconds(1000)};

inline store_op::Set set_of(const std::string& key, const std::string& value) { return {key, Blob(value)}; }
inline StoreReply value(const std::string& bytes) { return Value{Blob(bytes)}; }

}  // namespace ddprun::rdzv
