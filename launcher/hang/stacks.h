#pragma once

#include <sys/types.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "env/os/event_loop.h"
#include "env/os/system.h"
#include "env/segment.h"

namespace ddprun {

/// How the stack of a worker is had.
enum class StackMethod : std::uint8_t {
    Handler,  ///< libddp sends it through the lifeline, each thread its own
    PySpy,
    Gdb,
    EuStack,
    Kernel,  ///< no stack, but what the kernel says the process waits for
};
/// "its own handler", "gdb".
const char* describe(StackMethod method);

struct StackFacts {
    bool has_handler = false;
    bool stopped = false;  ///< cannot run a handler
    bool python = false;
};
/// Programs that are installed; "" is not.
struct StackTools {
    std::string py_spy, gdb, eu_stack;
};
/// Looks along PATH.
StackTools find_stack_tools();
/// Pure: the best there is.
StackMethod choose_stack_method(const StackFacts& facts, const StackTools& tools);

struct StackTarget {
    int rank = 0;
    pid_t pid = 0;
    /// Of the segment, whose share this is: a restart in the meantime must not unmap it.
    std::shared_ptr<const RankLine> line;
    std::function<std::string()> take;  ///< what its handler has sent; called once it has
};
struct RankStack {
    int rank = 0;
    pid_t pid = 0;
    StackMethod method = StackMethod::Kernel;
    std::string text;       ///< lines
    std::string host = {};  ///< "" of a job of one node
    bool operator==(const RankStack&) const = default;
};

/// Long enough for a debugger that reads the symbols of a large program.
inline constexpr Duration kStackPatience = std::chrono::seconds(15);

/// Gets the stacks of all targets and calls `done` once, with one entry per target in the same order, after
/// `patience` at the latest: whoever gave none by then is told of by the kernel. Blocks nobody. The programs
/// it starts are children of ours; whoever sees SIGCHLD reaps them. Borrows loop and system until `done`.
void collect_stacks(os::EventLoop& loop, os::System& system, std::vector<StackTarget> targets,
                    Duration patience, std::function<void(std::vector<RankStack>)> done);

/// What the kernel says about a process: its state, and where it waits.
std::string kernel_view(pid_t pid);

}  // namespace ddprun
