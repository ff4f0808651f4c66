#include "ddp/stack_answer.h"

#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <mutex>
#include <utility>

#include "ddp/signal_text.h"
#include "ddp/stack_trace.h"
#include "env/lifeline.h"

namespace ddp {
namespace {

/// Borrowed by the handler for ever, so never freed. One per process: signals are the process's. Nobody reads it;
/// `used` keeps the compiler from dropping it, and with it what a leak checker follows.
[[gnu::used]] std::shared_ptr<SegmentMap>* kept_segment = nullptr;
ddprun::RankLine* line = nullptr;
int lifeline = -1;

void on_request(int) {
    const int saved = errno;
    char text[ddprun::lifeline::kMaxPacket];
    SignalText out(text, sizeof text);
    const char kind[] = {ddprun::lifeline::kStack, '\0'};
    out.add(kind).add("thread ").add_number(static_cast<std::uint64_t>(::gettid())).add(":\n");
    const std::size_t size = out.size() + raw_stack_trace(text + out.size(), sizeof text - out.size());
    // A launcher that does not read misses it; it must not hold us up.
    if (::send(lifeline, text, size, MSG_DONTWAIT | MSG_NOSIGNAL) >= 0) line->stacks_sent.fetch_add(1, std::memory_order_release);
    errno = saved;
}

void install(std::shared_ptr<SegmentMap> segment, std::uint32_t local_rank, int lifeline_fd) {
    const int signal = SIGRTMIN + 5;
    struct sigaction action {};
    ::sigaction(signal, nullptr, &action);
    if (action.sa_handler != SIG_DFL) return;
    prepare_stack_trace();
    kept_segment = new std::shared_ptr<SegmentMap>(std::move(segment));
    line = &(*kept_segment)->line(local_rank);
    lifeline = lifeline_fd;
    action.sa_handler = on_request;
    action.sa_flags = SA_RESTART;
    if (::sigaction(signal, &action, nullptr) != 0) return;
    line->stack_signal.store(static_cast<std::uint32_t>(signal), std::memory_order_release);
}

}  // namespace

void answer_stack_requests(std::shared_ptr<SegmentMap> segment, std::uint32_t local_rank, int lifeline_fd) {
    static std::once_flag once;
    std::call_once(once, [&] { install(std::move(segment), local_rank, lifeline_fd); });
}

}  // namespace ddp
