#include "ddp/error_report.h"

#include <fcntl.h>
#include <fmt/core.h>
#include <pthread.h>
#include <signal.h>
#include <time.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <limits>
#include <typeinfo>

#include "ddp/worker/device_error.h"
#include "ddp/worker/error_text.h"
#include "ddp/worker/stacks.h"
#include "env/json.h"
#include "env/print.h"
#include "env/text.h"
#include "env/unique_fd.h"
#include "env/worker_env.h"

namespace ddp {
namespace {

constexpr std::array kFatal = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT};

/// Everything that the signal handler uses, allocated beforehand. One per process, as signals are.
struct CrashState {
    std::array<char, 4096> error_file{};  ///< "" without one
    std::array<char, 16 * 1024> stack{};
    std::array<char, 48 * 1024> json{};
    std::array<char, 64 * 1024> alternate_stack{};
    std::atomic<bool> reported{false};
    pid_t pid = 0;
    pthread_t main_thread{};
    std::string program;
    std::terminate_handler terminate_before = nullptr;
};
CrashState crash;
std::atomic<int> reported_rank{-1};  ///< -1: RANK

bool write_whole(const char* path, const char* text, std::size_t size) {
    const int fd = ::open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
    if (fd < 0) return false;
    std::size_t done = 0;
    while (done < size) {
        const ssize_t n = ::write(fd, text + done, size - done);
        if (n <= 0) break;
        done += static_cast<std::size_t>(n);
    }
    ::close(fd);
    return done == size;
}

std::string error_file() { return ddprun::process_environment("TORCHELASTIC_ERROR_FILE").value_or(""); }

const char* name_of_signal(int signal) {
    switch (signal) {
        case SIGSEGV: return "SIGSEGV (invalid memory access)";
        case SIGBUS: return "SIGBUS (memory that is not available)";
        case SIGFPE: return "SIGFPE (impossible arithmetic)";
        case SIGILL: return "SIGILL (unknown instruction)";
        case SIGABRT: return "SIGABRT (abort)";
        default: return "a signal";
    }
}

/// Uses only async-signal-safe calls.
void report_crash(int signal) {
    const std::size_t length = raw_stack_trace(crash.stack.data(), crash.stack.size());
    char line[128];
    SignalText text(line, sizeof line);
    text.add("died of ").add(name_of_signal(signal)).add("\n");
    if (::write(2, text.data(), text.size()) < 0) return;
    if (::write(2, crash.stack.data(), length) < 0 || crash.error_file[0] == '\0') return;
    SignalText json(crash.json.data(), crash.json.size());
    json.add(R"({"message": {"message": ")").add(name_of_signal(signal));
    json.add(R"(", "extraInfo": {"py_callstack": ")").add_json(crash.stack.data(), length);
    timespec now{};
    ::clock_gettime(CLOCK_REALTIME, &now);
    json.add(R"(", "timestamp": ")").add_number(static_cast<std::uint64_t>(now.tv_sec)).add("\"");
    for (const DeviceLibrary library : {DeviceLibrary::Nccl, DeviceLibrary::Cuda}) {
        const char* const library_error = last_device_error(library);
        if (*library_error == '\0') continue;
        json.add(", \"")
            .add(report_key(library))
            .add("\": \"")
            .add_json(library_error, std::strlen(library_error))
            .add("\"");
    }
    json.add("}}}\n");
    write_whole(crash.error_file.data(), json.data(), json.size());
}

/// The disposition is the default again (SA_RESETHAND): a fault recurs on return, and a raised signal stays
/// pending until then. The process then dies of that signal.
void on_fatal_signal(int signal) {
    // A crashing child of this process (a data loader) must not overwrite the worker's report.
    if (::getpid() == crash.pid && !crash.reported.exchange(true)) report_crash(signal);
    ::raise(signal);
}

std::string text_of_exception() {
    try {
        throw;
    } catch (const std::exception& error) {
        return error.what();
    } catch (...) {
        return "an exception that is not a std::exception";
    }
}

[[noreturn]] void on_terminate() {
    // Omit this function's frame and std::terminate's own.
    const std::string stack = stack_trace(1);
    const bool uncaught = std::current_exception() != nullptr;
    const bool first = !crash.reported.exchange(true);
    if (uncaught && first) {
        const std::string what = with_rank(text_of_exception());
        write_error_report(what, stack);
        if (::pthread_equal(::pthread_self(), crash.main_thread) != 0) {
            ddprun::print(stderr, "{}: {}\n", crash.program, ddprun::printable(what));
            std::fflush(nullptr);
            ::_exit(1);
        }
    } else if (first) {
        write_error_report("std::terminate was called", stack);
    }
    if (crash.terminate_before != nullptr) crash.terminate_before();
    std::abort();
}

void install_handlers() {
    prepare_stack_trace();
    const std::string path = error_file();
    if (path.size() < crash.error_file.size()) std::memcpy(crash.error_file.data(), path.data(), path.size());
    crash.pid = ::getpid();
    crash.main_thread = ::pthread_self();
    crash.terminate_before = std::set_terminate(on_terminate);
    // A stack that overflowed cannot hold the handler's frame.
    stack_t alternate{};
    alternate.ss_sp = crash.alternate_stack.data();
    alternate.ss_size = crash.alternate_stack.size();
    ::sigaltstack(&alternate, nullptr);
    for (const int signal : kFatal) {
        struct sigaction before {};
        ::sigaction(signal, nullptr, &before);
        if (before.sa_handler != SIG_DFL) continue;
        struct sigaction action {};
        action.sa_handler = on_fatal_signal;
        action.sa_flags = SA_ONSTACK | static_cast<int>(SA_RESETHAND);
        ::sigaction(signal, &action, nullptr);
    }
}

}  // namespace

int run_main(std::string_view program, const std::function<int()>& body) {
    crash.program = program;
    install_handlers();
    // There must be no catch and no noexcept here, nor in a main that only calls this: when no frame handles
    // an exception, the runtime calls std::terminate from the throw itself, with the whole stack in place.
    return body();
}

std::string error_json(std::string_view message, std::string_view stack, std::int64_t unix_seconds) {
    ddprun::Json extra = {{"py_callstack", stack}, {"timestamp", fmt::format("{}", unix_seconds)}};
    for (const DeviceLibrary library : {DeviceLibrary::Nccl, DeviceLibrary::Cuda}) {
        const char* const library_error = last_device_error(library);
        if (*library_error != '\0') extra[report_key(library)] = library_error;
    }
    const ddprun::Json report = {{"message", {{"message", message}, {"extraInfo", extra}}}};
    return ddprun::to_text(report) + "\n";
}

bool write_error_report(std::string_view message, std::string_view stack) {
    const std::string path = error_file();
    if (path.empty()) return false;
    const std::string json = error_json(message, stack, ::time(nullptr));
    return write_whole(path.c_str(), json.data(), json.size());
}

void set_reported_rank(int rank) { reported_rank = rank; }

std::string with_rank(std::string_view what) {
    std::optional<std::string> rank = ddprun::process_environment("RANK");
    if (reported_rank >= 0) rank = std::to_string(reported_rank);
    const std::string prefix = fmt::format("rank {}", rank.value_or(""));
    if (!rank || what.starts_with(prefix)) return std::string(what);
    return fmt::format("{}: {}", prefix, what);
}

}  // namespace ddp
