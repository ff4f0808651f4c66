#include "ddp/lifeline.h"

#include <fcntl.h>
#include <fmt/core.h>
#include <signal.h>
#include <sys/socket.h>

#include <array>
#include <cerrno>
#include <cstring>

#include "ddp/types.h"
#include "ddp/worker/stop_line.h"
#include "env/lifeline.h"

namespace ddp {
namespace {

/// The signal that requested the stop, 0 without one. Written by the handler.
volatile sig_atomic_t stop_signal = 0;

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

ddprun::UniqueFd inherited(int fd) {
    ddprun::UniqueFd own(::fcntl(fd, F_DUPFD_CLOEXEC, 3));
    if (!own) throw InvalidInput(fmt::format("DDPRUN_LIFELINE_FD={}: {}", fd, std::strerror(errno)));
    // The program's own children would keep it open, and read packets meant for this process.
    ::fcntl(fd, F_SETFD, FD_CLOEXEC);
    return own;
}

}  // namespace

Lifeline::Lifeline(const Context& context) {
    if (context.env().lifeline_fd >= 0) fd_ = inherited(context.env().lifeline_fd);
    stop_line_ = StopLine::open(context.env());
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
    if (fd_) read_notices();
    if (!requested_ && stop_signal != 0) {
        requested_ = true;
        reason_ = stop_signal == SIGTERM ? "SIGTERM" : "SIGINT";
    }
    return requested_;
}

void Lifeline::read_notices() {
    char packet[ddprun::lifeline::kMaxPacket];
    for (;;) {
        const ssize_t n = ::recv(fd_.get(), packet, sizeof packet, MSG_DONTWAIT);
        if (n < 0) return;
        if (n == 0) {  // the agent has gone and will send nothing more
            fd_.reset();
            return;
        }
        if (packet[0] != ddprun::lifeline::kPreempt) continue;
        requested_ = true;
        reason_.assign(packet + 1, static_cast<std::size_t>(n) - 1);
    }
}

void Lifeline::send(char kind, const std::string& payload) {
    if (!fd_) return;
    const std::string packet = kind + payload;
    // A launcher that is too busy to read misses one packet of many; ignoring.
    (void)::send(fd_.get(), packet.data(), packet.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
}

void Lifeline::ready() { send(ddprun::lifeline::kReady, ""); }

void Lifeline::heartbeat(std::uint64_t steps_done) {
    send(ddprun::lifeline::kHeartbeat, fmt::format("{}", steps_done));
}

}  // namespace ddp
