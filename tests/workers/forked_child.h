#pragma once

#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "ddp/process_group.h"

/// Of LeakSanitizer, where a program is linked with it: test code is compiled alike for every build.
extern "C" [[gnu::weak]] void __lsan_do_leak_check();  // NOLINT(bugprone-reserved-identifier)

/// A child that a rank forks, which has the rank's group in its memory.
namespace ddp::testing {

/// Whether `call` throws Error because a forked child made it.
inline bool is_refused_in_child(const std::function<void()>& call) {
    try {
        call();
    } catch (const Error& error) {
        return std::string_view(error.what()).find("in a forked child") != std::string_view::npos;
    }
    return false;
}

/// The calls that `group` does not refuse in a forked child; "" when it refuses all. A call that waits is
/// ended by the child's alarm.
inline std::string calls_not_refused(ProcessGroup& group) {
    std::vector<float> all(static_cast<std::size_t>(group.size()));
    float own = 0;
    Buffer many = buffer_of(all), one = buffer_of(std::span(&own, 1));
    many.device = one.device = group.device();
    const Counts counts(all.size(), 1);
    const std::vector<std::pair<const char*, std::function<void()>>> calls{
        {"all_reduce", [&] { group.all_reduce(one).wait(); }},
        {"all_reduce into another buffer", [&] { group.all_reduce(many, many).wait(); }},
        {"broadcast", [&] { group.broadcast(one, 0).wait(); }},
        {"all_gather", [&] { group.all_gather(many, one).wait(); }},
        {"reduce_scatter", [&] { group.reduce_scatter(one, many).wait(); }},
        {"reduce", [&] { group.reduce(one, 0).wait(); }},
        {"gather", [&] { group.gather(many, one, 0).wait(); }},
        {"scatter", [&] { group.scatter(one, many, 0).wait(); }},
        {"all_to_all", [&] { group.all_to_all(many, many).wait(); }},
        {"all_gather_v", [&] { group.all_gather_v(many, one, counts).wait(); }},
        {"reduce_scatter_v", [&] { group.reduce_scatter_v(one, many, counts).wait(); }},
        {"all_to_all_v", [&] { group.all_to_all_v(many, counts, many, counts).wait(); }},
        {"barrier", [&] { group.barrier().wait(); }},
        {"monitored_barrier", [&] { group.monitored_barrier(std::chrono::seconds(1)); }},
        {"send", [&] { group.send(one, 0).wait(); }},
        {"recv", [&] { group.recv(one, 0).wait(); }},
        {"batch_send_recv", [&] { group.batch_send_recv({}).wait(); }},
        {"coalesced", [&] { group.coalesced([] {}).wait(); }},
        {"split", [&] { static_cast<void>(group.split(0, 0)); }},
        {"create_part", [&] { static_cast<void>(group.create_part({group.rank()}, "alone")); }},
        {"allocate_shared", [&] { group.allocate_shared(64); }},
        {"launch_graph", [&] { group.launch_graph([] {}).wait(); }},
        {"all_gather_bytes", [&] { group.all_gather_bytes("word"); }}};
    std::string not_refused;
    for (const auto& [name, call] : calls) {
        if (!is_refused_in_child(call)) not_refused += std::string(name) + " ";
    }
    return not_refused;
}

/// Ends as a program does whose main returns.
[[noreturn]] inline void end_like_main(int code) {
    // The leak check would find what only the parent may free.
    if (__lsan_do_leak_check != nullptr) ::_exit(code);
    std::exit(code);
}

enum class InChild : std::uint8_t { DestroysGroup, LeavesGroup };

/// Forks a child that makes every call on `group`, destroys it or not, and exits. "" when all calls were
/// refused and the child came to its end.
inline std::string misdeeds_of_child(ProcessGroup& group, InChild what) {
    const pid_t child = ::fork();
    if (child == 0) {
        ::alarm(30);
        const std::string not_refused = calls_not_refused(group);
        if (!not_refused.empty()) ::dprintf(2, "a forked child was not refused: %s\n", not_refused.c_str());
        if (what == InChild::DestroysGroup) delete &group;
        end_like_main(not_refused.empty() ? 42 : 43);
    }
    int status = 0;
    if (::waitpid(child, &status, 0) != child) return "there is no child";
    if (WIFSIGNALED(status)) return "the child was ended by signal " + std::to_string(WTERMSIG(status));
    return WEXITSTATUS(status) == 42 ? "" : "the child exited with " + std::to_string(WEXITSTATUS(status));
}

}  // namespace ddp::testing
