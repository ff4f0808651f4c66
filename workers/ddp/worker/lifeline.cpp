#include "ddp/lifeline.h"

#include <fmt/core.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
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
constinit StopRequests terminations, interrupts;
/// The process that has the Lifeline. A forked child has its handlers and nobody who asks for the request.
std::atomic<pid_t> owner = 0;

/// The signal takes its default action when the handler returns.
void end_by(int signal) {
    ::signal(signal, SIG_DFL);
    ::raise(signal);
}

void on_stop(int signal, siginfo_t* info, void*) {
    if (::getpid() != owner) return end_by(signal);
    StopRequests& requests = signal == SIGTERM ? terminations : interrupts;
    const auto meaning = requests.note(ddprun::MonotonicClock::now(), info->si_code == SI_KERNEL);
    if (meaning == StopRequests::Meaning::EndNow) return end_by(signal);
    stop_signal = signal;
}
void ignore_signal(int, siginfo_t*, void*) {}

using Handler = void (*)(int, siginfo_t*, void*);
struct Caught {
    int signal;
    Handler handler;
};
constexpr std::array kCaught = {Caught{SIGTERM, on_stop}, Caught{SIGINT, on_stop},
                                Caught{SIGUSR1, ignore_signal}, Caught{SIGUSR2, ignore_signal}};

struct sigaction action_of(int signal) {
    struct sigaction action {};
    ::sigaction(signal, nullptr, &action);
    return action;
}

/// Signals that the program handles stay its own.
void catch_signal(const Caught& caught) {
    if (action_of(caught.signal).sa_handler != SIG_DFL) return;
    struct sigaction action {};
    action.sa_sigaction = caught.handler;
    action.sa_flags = SA_RESTART | SA_SIGINFO;
    ::sigaction(caught.signal, &action, nullptr);
}

void release_signal(const Caught& caught) {
    const struct sigaction action = action_of(caught.signal);
    const bool is_ours = (action.sa_flags & SA_SIGINFO) != 0 && action.sa_sigaction == caught.handler;
    if (is_ours) ::signal(caught.signal, SIG_DFL);
}

}  // namespace

Lifeline::Lifeline(const Context& context) {
    if (context.env().lifeline_fd >= 0) socket_ = std::make_shared<LifelineSocket>(context.env().lifeline_fd);
    follow(context);
    stop_signal = 0;
    terminations.forget();
    interrupts.forget();
    owner = ::getpid();
    std::ranges::for_each(kCaught, catch_signal);
}

// The repetition of a request may come while the process ends.
Lifeline::~Lifeline() {
    if (stop_signal == 0) std::ranges::for_each(kCaught, release_signal);
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
