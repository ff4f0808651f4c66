#include "ddp/lifeline.h"

#include <fmt/core.h>
#include <signal.h>

#include <array>
#include <atomic>

#include "ddp/worker/lifeline_socket.h"
#include "ddp/worker/stop_line.h"
#include "env/lifeline.h"

namespace ddp {
namespace {

/// The signal that requested the stop, 0 without one. Written by the handler.
std::atomic<int> stop_signal = 0;
static_assert(std::atomic<int>::is_always_lock_free, "a handler must not wait");

void on_stop(int signal) { stop_signal = signal; }
void ignore_signal(int) {}

struct Caught {
    int signal;
    void (*handler)(int);
    int flags;
};
/// SA_RESETHAND: a second signal ends the process at once.
constexpr std::array kCaught = {Caught{SIGTERM, on_stop, static_cast<int>(SA_RESETHAND)},
                                Caught{SIGINT, on_stop, static_cast<int>(SA_RESETHAND)},
                                Caught{SIGUSR1, ignore_signal, 0}, Caught{SIGUSR2, ignore_signal, 0}};

void replace(const Caught& caught, void (*expected)(int), void (*handler)(int)) {
    struct sigaction action {};
    ::sigaction(caught.signal, nullptr, &action);
    if (action.sa_handler != expected) return;
    action = {};
    action.sa_handler = handler;
    action.sa_flags = SA_RESTART | caught.flags;
    ::sigaction(caught.signal, &action, nullptr);
}

}  // namespace

Lifeline::Lifeline(const Context& context) {
    if (context.env().lifeline_fd >= 0) socket_ = std::make_shared<LifelineSocket>(context.env().lifeline_fd);
    follow(context);
    stop_signal = 0;
    for (const Caught& caught : kCaught) replace(caught, SIG_DFL, caught.handler);
}

Lifeline::~Lifeline() {
    for (const Caught& caught : kCaught) replace(caught, caught.handler, SIG_DFL);
}

bool Lifeline::should_stop(std::uint64_t steps_done) {
    if (!stop_line_ || !stop_line_->should_stop(steps_done)) return false;
    requested_ = true;
    reason_ = stop_line_->reason();
    return true;
}

bool Lifeline::preemption_requested() {
    if (requested_) return true;
    if (socket_) socket_->receive();
    const bool is_asked = socket_ && socket_->stop_request();
    if (is_asked || stop_signal != 0) {
        requested_ = true;
        reason_ = is_asked ? *socket_->stop_request() : stop_signal == SIGTERM ? "SIGTERM" : "SIGINT";
    }
    return requested_;
}

void Lifeline::follow(const Context& context) { stop_line_ = StopLine::open(context.env()); }

// A launcher that is too busy to read misses one packet of many; ignoring.
void Lifeline::ready() {
    if (socket_) socket_->tell(ddprun::lifeline::kReady, "");
}

void Lifeline::heartbeat(std::uint64_t steps_done) {
    if (socket_) socket_->tell(ddprun::lifeline::kHeartbeat, fmt::format("{}", steps_done));
}

}  // namespace ddp
