#pragma once

#include <sys/eventfd.h>
#include <sys/socket.h>

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "env/clock.h"
#include "env/io/socket.h"
#include "env/result.h"
#include "env/unique_fd.h"

/// The system's resolver has no deadline of its own: a name server that does not answer holds a caller for 10
/// s a name and more. So names are looked up on threads of their own.
namespace ddprun {

/// So long ddprun waits for the resolver before it goes on without the answer.
inline constexpr Duration kResolverPatience = std::chrono::seconds(5);

/// Calls `call` on a thread of its own that hears no signals; where there is no thread to be had, here.
void call_in_background(std::function<void()> call);

/// A question to the resolver, asked on a thread of its own. A thread that is still waiting when the
/// ResolverCall is destroyed is left to itself, so `ask` owns what it uses.
template <class T>
class ResolverCall {
  public:
    explicit ResolverCall(std::function<Result<T>()> ask) {
        auto call = [state = state_, ask = std::move(ask)] {
            state->answer = ask();
            state->is_there.store(true, std::memory_order_release);
            ::eventfd_write(state->done.get(), 1);
        };
        if (state_->done) call_in_background(std::move(call));
        else call();
    }

    /// Becomes readable when the answer is there; -1 where no descriptor was to be had.
    [[nodiscard]] int done() const { return state_->done.get(); }
    /// Waits for the answer, which is told once. Error: the resolver's, or Timeout.
    Result<T> wait(TimePoint deadline) {
        const auto is_there = [&] { return state_->is_there.load(std::memory_order_acquire); };
        if (!is_there()) (void)wait_readable(done(), deadline);
        if (!is_there()) return Error{Errc::Timeout, "the resolver has not answered", 0};
        return *std::move(state_->answer);
    }

  private:
    struct State {
        UniqueFd done{::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)};
        std::optional<Result<T>> answer;
        std::atomic<bool> is_there = false;
    };
    std::shared_ptr<State> state_ = std::make_shared<State>();
};

/// Where a TCP socket can be bound or connected to.
struct SocketAddress {
    sockaddr_storage storage{};
    socklen_t length = 0;

    [[nodiscard]] const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage); }
};
using SocketAddresses = std::vector<SocketAddress>;

/// The addresses of a name, with the port. `flags` are getaddrinfo's; without AI_NUMERICHOST a name blocks as
/// long as the resolver does. Error: NotFound (the resolver's own sentence), System.
Result<SocketAddresses> resolve(const Endpoint& endpoint, int flags);
/// The same by a deadline. Error: Timeout, too.
Result<SocketAddresses> resolve_by(const Endpoint& endpoint, TimePoint deadline);

/// Of each name the addresses (as numeric_host), of each numeric address the names, as the resolver knows
/// them; all asked at once. Error of each: NotFound (the resolver's own sentence), System, Timeout.
using ResolverAnswer = Result<std::vector<std::string>>;
std::vector<ResolverAnswer> addresses_of_all(const std::vector<std::string>& names, TimePoint deadline);
std::vector<ResolverAnswer> names_of_all(const std::vector<std::string>& addresses, TimePoint deadline);

/// The servers that the resolver asks, for messages: "10.0.0.53 and 10.0.0.54 (/etc/resolv.conf)".
std::string name_servers();

}  // namespace ddprun
