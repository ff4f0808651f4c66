#pragma once

#include <sys/eventfd.h>

#include <atomic>
#include <cerrno>
#include <functional>
#include <memory>
#include <optional>
#include <string_view>
#include <thread>
#include <utility>

#include "env/clock.h"
#include "env/io/socket.h"
#include "env/result.h"
#include "env/unique_fd.h"

namespace ddprun {

/// A thread that takes no signals: those are for whoever waits for them. Error: System, naming the attempt
/// ("start a thread for log files").
Result<std::thread> start_thread(std::string_view attempt, std::function<void()> run);

/// Calls `call` on such a thread; where there is none to be had, here.
void call_in_background(std::function<void()> call);

/// A call that may block for any time, on its own thread. The thread may outlive the BackgroundCall, so
/// `call` must own what it uses.
template <class T>
class BackgroundCall {
  public:
    explicit BackgroundCall(std::function<T()> call) {
        auto answering = [state = state_, call = std::move(call)] {
            state->answer = call();
            state->is_there.store(true, std::memory_order_release);
            ::eventfd_write(state->done.get(), 1);
        };
        if (state_->done) call_in_background(std::move(answering));
        else answering();
    }

    /// A descriptor that becomes readable when the call has returned. Error: System, when the kernel gave no
    /// descriptor; the call has then returned already.
    [[nodiscard]] Result<int> done() const {
        return state_->done ? Result<int>(state_->done.get()) : Error::system("eventfd", state_->refused);
    }
    /// Waits for the call's result, which is returned once. nullopt: the deadline passed first.
    std::optional<T> wait(TimePoint deadline) {
        const auto is_there = [&] { return state_->is_there.load(std::memory_order_acquire); };
        if (!is_there()) (void)wait_readable(state_->done.get(), deadline);
        return is_there() ? std::move(state_->answer) : std::nullopt;
    }

  private:
    struct State {
        UniqueFd done{::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)};
        int refused = errno;  ///< why there is no descriptor
        std::optional<T> answer;
        std::atomic<bool> is_there = false;
    };
    std::shared_ptr<State> state_ = std::make_shared<State>();
};

}  // namespace ddprun
