#pragma once

#include <sys/types.h>

#include <array>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "env/os/event_loop.h"
#include "env/os/system.h"
#include "env/segment.h"

namespace ddprun {

/// The way in which a worker's stack is read.
enum class StackMethod : std::uint8_t {
    Handler,  ///< each thread sends its own through the lifeline, by libddp
    PySpy,
    Gdb,
    EuStack,
    Kernel,  ///< no stack, but the system call in which the process waits
};
/// In the order of StackMethod.
inline constexpr std::array<std::string_view, 5> kStackMethods{"its own handler", "py-spy", "gdb", "eu-stack",
                                                               "the kernel"};
constexpr std::string_view describe(StackMethod method) {
    return kStackMethods[static_cast<std::size_t>(method)];
}

struct StackFacts {
    bool has_handler = false;
    bool stopped = false;  ///< cannot run a handler
    bool python = false;
};
/// Paths of the installed programs; "" not installed.
struct StackTools {
    std::string py_spy, gdb, eu_stack;
};
/// The best available method. Pure.
StackMethod choose_stack_method(const StackFacts& facts, const StackTools& tools);

struct StackTarget {
    int rank = 0;
    pid_t pid = 0;
    /// Shares the segment, so that a restart in the meantime does not unmap it.
    std::shared_ptr<const RankLine> line;
    std::function<std::string()> take;  ///< returns the text from its handler; called once it is complete
};
struct RankStack {
    int rank = 0;
    pid_t pid = 0;
    StackMethod method = StackMethod::Kernel;
    std::string text;       ///< lines
    std::string host = {};  ///< "" in a job of one node
    bool operator==(const RankStack&) const = default;
};

/// Gets the stacks of all targets and calls `done` once within `timeout`, with one entry per target in the
/// same order: of method Kernel for a target without a stack by then. Does not block. The programs it starts
/// are children of ours, which the SIGCHLD handler must reap. Borrows loop and system until `done`.
void collect_stacks(os::EventLoop& loop, os::System& system, std::vector<StackTarget> targets,
                    Duration timeout, std::function<void(std::vector<RankStack>)> done);

/// The kernel's view of a process: its state, and where it waits.
std::string kernel_view(pid_t pid);

class Visitor;

void describe(Visitor& v, RankStack& stack);

/// One block for all ranks with equal stacks: the same functions and, where known, the same line numbers.
/// Addresses, arguments and process numbers do not count. The first rank's stack is shown for all.
///
///   rank 0 on node01 (pid 4171), by its own handler; ranks 1-3, 8-15 stand alike:
std::string render_stacks(const std::vector<RankStack>& stacks);

}  // namespace ddprun
