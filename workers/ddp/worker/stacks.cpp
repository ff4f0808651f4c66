#include "ddp/worker/stacks.h"

#include <cxxabi.h>
#include <dlfcn.h>
#include <execinfo.h>
#include <fmt/core.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <mutex>
#include <thread>
#include <utility>

#include "env/clock.h"
#include "env/lifeline.h"

namespace ddp {
namespace {

constexpr int kMaxFrames = 64;

std::string readable(const char* mangled) {
    int status = 0;
    const std::unique_ptr<char, decltype(&std::free)> name(
        abi::__cxa_demangle(mangled, nullptr, nullptr, &status), &std::free);
    return status == 0 ? name.get() : mangled;
}

/// The load address of the object that holds `frame`; 0 when it is unknown.
std::uintptr_t base_of(const Dl_info& info) { return reinterpret_cast<std::uintptr_t>(info.dli_fbase); }

}  // namespace

std::string stack_trace(int skip) {
    void* frames[kMaxFrames];
    const int count = ::backtrace(frames, kMaxFrames);
    std::string text;
    for (int i = 1 + skip; i < count; ++i) {
        const auto address = reinterpret_cast<std::uintptr_t>(frames[i]);
        Dl_info info{};
        const bool known = ::dladdr(frames[i], &info) != 0;
        const char* symbol = known && info.dli_sname != nullptr ? info.dli_sname : nullptr;
        text += fmt::format("#{} {} [{}+{:#x}]\n", i - 1 - skip, symbol != nullptr ? readable(symbol) : "??",
                            known ? info.dli_fname : "?", address - base_of(info));
    }
    return text;
}

std::size_t raw_stack_trace(char* text, std::size_t size) {
    void* frames[kMaxFrames];
    const int count = ::backtrace(frames, kMaxFrames);
    SignalText out(text, size);
    for (int i = 1; i < count; ++i) {
        const auto address = reinterpret_cast<std::uintptr_t>(frames[i]);
        Dl_info info{};
        const bool known = ::dladdr(frames[i], &info) != 0;
        out.add("#").add_number(static_cast<std::uint64_t>(i - 1)).add(" ");
        out.add(known && info.dli_sname != nullptr ? info.dli_sname : "??").add(" [");
        out.add(known ? info.dli_fname : "?").add("+0x").add_hex(address - base_of(info)).add("]\n");
    }
    return out.size();
}

void prepare_stack_trace() {
    void* frames[2];
    ::backtrace(frames, 2);
}

namespace {

/// The segment of the current generation, which the handler borrows, so it is not freed at the end of the
/// process. One per process, as signals are.
std::shared_ptr<SegmentMap>* segment_of_line = nullptr;
std::atomic<ddprun::RankLine*> line = nullptr;
std::atomic<int> handlers = 0;  ///< that run now
int lifeline = -1;

void on_request(int) {
    handlers.fetch_add(1);
    const int saved = errno;
    char text[ddprun::lifeline::kMaxPacket];
    SignalText out(text, sizeof text);
    const char kind[] = {ddprun::lifeline::kStack, '\0'};
    const long thread = ::syscall(SYS_gettid);  // glibc has gettid since 2.30
    out.add(kind).add("thread ").add_number(static_cast<std::uint64_t>(thread)).add(":\n");
    const std::size_t size = out.size() + raw_stack_trace(text + out.size(), sizeof text - out.size());
    // A launcher that does not read misses it; sending must not block.
    if (::send(lifeline, text, size, MSG_DONTWAIT | MSG_NOSIGNAL) >= 0)
        line.load()->stacks_sent.fetch_add(1, std::memory_order_release);
    handlers.fetch_sub(1);
    errno = saved;
}

/// False where the program handles the signal itself.
bool install(int signal, int lifeline_fd) {
    struct sigaction action {};
    ::sigaction(signal, nullptr, &action);
    if (action.sa_handler != SIG_DFL) return false;
    prepare_stack_trace();
    lifeline = lifeline_fd;
    action.sa_handler = on_request;
    action.sa_flags = SA_RESTART;
    return ::sigaction(signal, &action, nullptr) == 0;
}

}  // namespace

void answer_stack_requests(std::shared_ptr<SegmentMap> segment, std::uint32_t local_rank, int lifeline_fd) {
    static std::mutex mutex;
    static std::uint64_t generation = 0;
    const std::lock_guard lock(mutex);
    if (line != nullptr && generation == segment->header().generation) return;
    generation = segment->header().generation;
    const int signal = SIGRTMIN + 5;
    auto* const before = std::exchange(segment_of_line, new std::shared_ptr<SegmentMap>(std::move(segment)));
    line = &(*segment_of_line)->line(local_rank);
    static const bool is_installed = install(signal, lifeline_fd);
    if (is_installed)
        line.load()->stack_signal.store(static_cast<std::uint32_t>(signal), std::memory_order_release);
    while (handlers.load() > 0) std::this_thread::yield();  // they may use the line of `before`
    delete before;
}

HangDetectionPause::HangDetectionPause(std::chrono::nanoseconds limit) {
    if (line != nullptr)
        line.load()->awaited_until_ns.store(
            (ddprun::MonotonicClock::now() + limit).time_since_epoch().count());
}

HangDetectionPause::~HangDetectionPause() {
    if (line != nullptr) line.load()->awaited_until_ns.store(0);
}

}  // namespace ddp
