#pragma once

#include <functional>
#include <string>
#include <vector>

#include "env/clock.h"
#include "env/result.h"

/// The system's resolver has no deadline of its own: a name server that does not answer holds a caller for 10
/// s a name and more.
namespace ddprun {

/// So long ddprun waits for the resolver before it goes on without the answer.
inline constexpr Duration kResolverPatience = std::chrono::seconds(5);

/// Calls all `questions` at once, each on a thread of its own that hears no signals, and returns when the
/// last one has returned, or at the deadline: a thread that has not returned by then is left to itself, so a
/// question owns what it uses. Where there are no threads to be had the questions are called here, one after
/// another.
void ask_all(std::vector<std::function<void()>> questions, TimePoint deadline);

/// Of each name the addresses (as numeric_host), of each numeric address the names, as the resolver knows
/// them; all asked at once. Error of each: NotFound (the resolver's own sentence), System, Timeout.
using ResolverAnswer = Result<std::vector<std::string>>;
std::vector<ResolverAnswer> addresses_of_all(const std::vector<std::string>& names, TimePoint deadline);
std::vector<ResolverAnswer> names_of_all(const std::vector<std::string>& addresses, TimePoint deadline);

/// The servers that the resolver asks, for messages: "10.0.0.53 and 10.0.0.54 (/etc/resolv.conf)".
std::string name_servers();

}  // namespace ddprun
