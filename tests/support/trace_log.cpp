#include "tests/support/trace_log.h"

#include <unistd.h>

#include <chrono>
#include <cinttypes>
#include <cstdio>
#include <cstdlib>

namespace ddprun::test {

namespace {

std::string with_process_id(std::string file) {
    constexpr std::string_view kMark = "%p";
    if (const std::size_t at = file.find(kMark); at != std::string::npos)
        file.replace(at, kMark.size(), std::to_string(::getpid()));
    return file;
}

}  // namespace

TraceLog::TraceLog(std::string file) : file_(with_process_id(std::move(file))) {
    static TraceLog* only;
    only = this;
    std::atexit([] { only->write(); });
}

std::uint64_t TraceLog::now() {
    const auto since = std::chrono::steady_clock::now().time_since_epoch();
    return static_cast<std::uint64_t>(std::chrono::nanoseconds(since).count());
}

void TraceLog::add(int depth, std::uint64_t start, std::string_view function, std::string_view kernel) {
    const std::uint64_t end = now();
    const int thread = ::gettid();
    const std::lock_guard lock(mutex_);
    calls_.push_back({thread, depth, start, end, keep(function), keep(kernel)});
}

const char* TraceLog::keep(std::string_view name) {
    const auto known = names_.find(name);
    return known != names_.end() ? known->c_str() : names_.emplace(name).first->c_str();
}

void TraceLog::write() {
    const std::lock_guard lock(mutex_);
    if (calls_.empty()) return;
    std::FILE* const out = std::fopen(file_.c_str(), "we");
    if (out == nullptr) {
        std::perror(("cuda-trace: " + file_).c_str());
        return;
    }
    std::fputs("# cuda-trace 1\n", out);
    for (const Call& call : calls_) {
        std::fprintf(out, "%d %d %" PRIu64 " %" PRIu64 " %s%s%s\n", call.thread, call.depth, call.start,
                     call.end, call.function, *call.kernel != '\0' ? " " : "", call.kernel);
    }
    if (std::fclose(out) != 0) std::perror(("cuda-trace: " + file_).c_str());
}

}  // namespace ddprun::test
