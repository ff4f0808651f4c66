#include "launcher/hang/stacks.h"

#include <fmt/core.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <utility>

#include "env/describe.h"
#include "env/io/background_call.h"
#include "env/io/file.h"
#include "env/io/proc.h"
#include "env/os/process_tree.h"
#include "env/os/run_tool.h"
#include "env/text.h"
#include "env/worker_env.h"
#include "launcher/ends/error_file.h"

namespace ddprun {
namespace {

constexpr int kToolsAtOnce = 4;  ///< debuggers are large
constexpr std::size_t kMaxToolOutput = 256 * 1024;
constexpr std::size_t kMaxThreads = 64;  ///< of one worker
constexpr Duration kHandlerTimeout = std::chrono::seconds(1);
constexpr Duration kHandlerInterval = std::chrono::milliseconds(10);
/// How long a search for the tools may take: longer where a directory of PATH hangs.
constexpr Duration kSearchTimeout = std::chrono::seconds(1);

bool runs_python(pid_t pid) {
    char path[4096];
    const ssize_t n = ::readlink(fmt::format("{}/{}/exe", own_proc(), pid).c_str(), path, sizeof path);
    const std::string_view exe(path, n > 0 ? static_cast<std::size_t>(n) : 0);
    return exe.substr(exe.rfind('/') + 1).starts_with("python");
}

std::uint64_t ticks_of(pid_t pid) {
    const ProcStat stat = proc_stat_of(pid).value_or(ProcStat{});
    return stat.ticks + stat.child_ticks;
}

/// The process of the worker's tree with the most CPU time: the worker may be a shell that started the
/// program.
pid_t busiest_of(pid_t pid) {
    pid_t busiest = pid;
    std::uint64_t most = ticks_of(pid);
    for (const pid_t process : os::descendants_of(pid)) {
        const std::uint64_t ticks = ticks_of(process);
        if (ticks >= most) busiest = process, most = ticks;
    }
    return busiest;
}

bool is_below(pid_t root, pid_t pid) {
    const std::vector<pid_t> tree = os::descendants_of(root);
    return pid == root || std::find(tree.begin(), tree.end(), pid) != tree.end();
}

std::vector<pid_t> threads_of(pid_t pid) {
    std::vector<pid_t> threads = numbers_in(fmt::format("{}/{}/task", own_proc(), pid));
    if (threads.size() > kMaxThreads) threads.resize(kMaxThreads);
    return threads;
}

os::SpawnSpec tool_command(StackMethod method, const StackTools& tools, pid_t pid) {
    const std::string target = std::to_string(pid);
    os::SpawnSpec spec;
    // Leave the user's environment out: a .gdbinit, a symbol server or another Python would delay the tool.
    spec.environment = {"PATH=/usr/bin:/bin", "HOME=/", "LC_ALL=C"};
    switch (method) {
        case StackMethod::PySpy:
            spec.program = tools.py_spy;
            spec.arguments = {"py-spy", "dump", "--pid", target};
            break;
        case StackMethod::EuStack:
            spec.program = tools.eu_stack;
            spec.arguments = {"eu-stack", "-p", target};
            break;
        case StackMethod::Gdb:
        case StackMethod::Handler:
        case StackMethod::Kernel:
            spec.program = tools.gdb;
            spec.arguments = {"gdb",
                              "-nx",
                              "-batch",
                              "-p",
                              target,
                              "-ex",
                              "set pagination off",
                              "-ex",
                              "thread apply all bt 64"};
            break;
    }
    return spec;
}

/// The Python that runs the process, as its command line names it; "" where that is no path.
std::string python_of(pid_t pid) {
    const std::string command = read_file(fmt::format("{}/{}/cmdline", own_proc(), pid), 4096).value_or("");
    return command.substr(0, command.find('\0'));
}

/// The py-spy beside a Python, where it often is installed without being in our PATH; "" none.
std::string py_spy_beside(const std::string& python) {
    if (!python.starts_with('/')) return "";
    std::string candidate = python.substr(0, python.rfind('/')) + "/py-spy";
    return ::access(candidate.c_str(), X_OK) == 0 ? candidate : "";
}

/// The tools for each of the processes: those on PATH, and the py-spy of its own Python. Blocks as the file
/// systems do.
std::vector<StackTools> find_stack_tools(const std::string& path, const std::vector<pid_t>& pids) {
    std::vector<StackTools> found(pids.size());
    if (!has_own_proc()) return found;  // debuggers would look for the worker's pid there
    const StackTools on_path{find_executable("py-spy", path), find_executable("gdb", path),
                             find_executable("eu-stack", path)};
    for (std::size_t i = 0; i < pids.size(); ++i) {
        found[i] = on_path;
        if (found[i].py_spy.empty() && runs_python(pids[i]))
            found[i].py_spy = py_spy_beside(python_of(pids[i]));
    }
    return found;
}

StackTools without(StackTools tools, StackMethod failed) {
    if (failed == StackMethod::PySpy) tools.py_spy.clear();
    if (failed == StackMethod::Gdb) tools.gdb.clear();
    if (failed == StackMethod::EuStack) tools.eu_stack.clear();
    return tools;
}

/// True for output with frames: "#0" of gdb and eu-stack, "Thread 4171 (idle)" of py-spy.
bool has_frames(std::string_view output) {
    return output.find("#0") != std::string_view::npos || output.find("Thread ") != std::string_view::npos;
}

/// One request for stacks. Its handlers in the loop keep it alive.
class Collection : public std::enable_shared_from_this<Collection> {
  public:
    using Done = std::function<void(std::vector<RankStack>)>;
    Collection(os::EventLoop& loop, os::System& system, std::vector<StackTarget> targets, Done done)
        : loop_(loop), system_(system), done_(std::move(done)) {
        for (const StackTarget& target : targets) jobs_.push_back(job_for(target));
    }

    /// Searches for the tools in a thread, because a directory of PATH may hang.
    void begin(Duration timeout) {
        ends_at_ = deadline_after(loop_.now(), timeout);
        std::vector<pid_t> pids;
        for (const Job& job : jobs_) pids.push_back(job.stack.pid);
        search_.emplace([pids, path = process_environment("PATH").value_or("/usr/bin:/bin")] {
            return find_stack_tools(path, pids);
        });
        deadline_ = loop_.call_after(std::min(timeout, kSearchTimeout),
                                     [self = shared_from_this()] { self->end_search(); });
        const Result<int> found = search_->done();
        if (!found ||
            !loop_.watch(*found, EPOLLIN, [self = shared_from_this()](std::uint32_t) { self->end_search(); }))
            end_search();
    }

  private:
    /// Goes on with the tools that were found in time.
    void end_search() {
        loop_.cancel(deadline_);
        if (const Result<int> found = search_->done(); found) loop_.unwatch(*found);
        const std::vector<StackTools> tools =
            search_->wait(loop_.now()).value_or(std::vector<StackTools>(jobs_.size()));
        deadline_ = loop_.call_at(ends_at_, [self = shared_from_this()] { self->give_up(); });
        for (std::size_t i = 0; i < jobs_.size(); ++i) {
            choose(jobs_[i], tools[i]);
            if (jobs_[i].stack.method == StackMethod::Handler) ask(jobs_[i]);
            else waiting_.push_back(i);
        }
        poll_handlers();
        go_on();
    }

    struct Job {
        StackTarget target;
        RankStack stack;  ///< has the kernel's view until a stack arrives
        bool done = false;
        std::uint32_t sent_before = 0, asked = 0;
        StackFacts facts;
        StackTools tools;  ///< that have not failed
    };

    static Job job_for(const StackTarget& target) {
        Job job;
        job.target = target;
        StackFacts& facts = job.facts;
        job.stack.rank = target.rank;
        job.stack.pid = target.pid;
        facts.has_handler = target.line != nullptr && target.line->stack_signal.load() != 0;
        // A program that uses the segment writes its own pid there.
        const auto own_pid = facts.has_handler ? static_cast<pid_t>(target.line->pid.load()) : 0;
        // In a container pids count from 1: do not signal such a number.
        facts.has_handler = own_pid != 0 && is_below(target.pid, own_pid);
        job.stack.pid = facts.has_handler ? own_pid : busiest_of(target.pid);
        const char state = proc_stat_of(job.stack.pid).value_or(ProcStat{}).state;
        facts.stopped = state == 'T' || state == 't' || state == 'D';
        facts.python = runs_python(job.stack.pid);
        // Ask the kernel before any debugger runs: one that fails may leave the process stopped.
        job.stack.text = kernel_view(job.stack.pid);
        return job;
    }

    static void choose(Job& job, const StackTools& tools) {
        job.tools = tools;
        job.stack.method = choose_stack_method(job.facts, tools);
        if (job.facts.python && tools.py_spy.empty())
            job.stack.text += "\npy-spy, in PATH or beside this Python, would tell its lines";
    }

    static void ask(Job& job) {
        job.sent_before = job.target.line->stacks_sent.load();
        (void)job.target.take();  // drop late stacks of an older request
        for (const pid_t thread : threads_of(job.stack.pid)) {
            const auto signal = static_cast<int>(job.target.line->stack_signal.load());
            if (::syscall(SYS_tgkill, job.stack.pid, thread, signal) == 0) ++job.asked;
        }
    }

    void poll_handlers() {
        bool some_wait = false;
        for (std::size_t i = 0; i < jobs_.size(); ++i) {
            Job& job = jobs_[i];
            if (job.done || job.stack.method != StackMethod::Handler) continue;
            const std::uint32_t sent = job.target.line->stacks_sent.load() - job.sent_before;
            const bool late = loop_.now() - begun_ > kHandlerTimeout;
            if (sent >= job.asked || (late && sent > 0)) {
                job.stack.text = with_readable_names(job.target.take());
                job.done = job.asked > 0;
            }
            if (!job.done && (late || job.asked == 0)) {  // it blocks the signal, or has ended
                job.stack.method = choose_stack_method({false, true, job.facts.python}, job.tools);
                waiting_.push_back(i);
            }
            some_wait = some_wait || (!job.done && job.stack.method == StackMethod::Handler);
        }
        if (some_wait) {
            loop_.call_after(kHandlerInterval, [self = shared_from_this()] {
                if (self->done_) self->poll_handlers();
            });
        }
        go_on();
    }

    void go_on() {
        while (running_ < kToolsAtOnce && !waiting_.empty()) {
            const std::size_t index = waiting_.front();
            waiting_.pop_front();
            Job& job = jobs_[index];
            if (job.stack.method == StackMethod::Kernel || is_late_) ask_kernel(job);
            else start_tool(job, index);
        }
        if (done_ && std::all_of(jobs_.begin(), jobs_.end(), [](const Job& job) { return job.done; }))
            finish();
    }

    /// Runs the tool until the end of the whole request at most.
    void start_tool(Job& job, std::size_t index) {
        ++running_;
        os::SpawnSpec spec = tool_command(job.stack.method, job.tools, job.stack.pid);
        run_tool(loop_, system_, std::move(spec), ends_at_ - loop_.now(), kMaxToolOutput,
                 [self = shared_from_this(), index](const Result<std::string>& output) {
                     --self->running_;
                     self->take_output(self->jobs_[index], index, output ? *output : "");
                 });
    }

    /// Takes the output, or tries the next best tool when this one may not attach or does not fit the
    /// program.
    void take_output(Job& job, std::size_t index, std::string output) {
        if (has_frames(output)) {
            job.stack.text = std::move(output);
            job.done = true;
        } else {
            job.tools = without(job.tools, job.stack.method);
            job.stack.method = choose_stack_method({false, true, job.facts.python}, job.tools);
            waiting_.push_back(index);
        }
        loop_.post([self = shared_from_this()] { self->go_on(); });
    }

    static void ask_kernel(Job& job) {
        job.stack.method = StackMethod::Kernel;
        job.done = true;
    }

    /// Starts no other tool. Running tools end by themselves at the same moment.
    void give_up() {
        if (!done_) return;
        is_late_ = true;
        for (Job& job : jobs_) {
            if (!job.done && job.stack.method == StackMethod::Handler) ask_kernel(job);
        }
        go_on();
    }

    void finish() {
        loop_.cancel(deadline_);
        std::vector<RankStack> stacks;
        for (Job& job : jobs_) stacks.push_back(std::move(job.stack));
        std::exchange(done_, nullptr)(std::move(stacks));
    }

    os::EventLoop& loop_;
    os::System& system_;
    Done done_;
    std::optional<BackgroundCall<std::vector<StackTools>>> search_;
    std::deque<Job> jobs_;
    std::deque<std::size_t> waiting_;
    int running_ = 0;
    bool is_late_ = false;
    TimePoint ends_at_ = kNever;
    TimePoint begun_ = MonotonicClock::now();
    os::EventLoop::TimerId deadline_ = 0;
};

}  // namespace

StackMethod choose_stack_method(const StackFacts& facts, const StackTools& tools) {
    if (facts.has_handler && !facts.stopped) return StackMethod::Handler;
    if (facts.python && !tools.py_spy.empty()) return StackMethod::PySpy;
    if (!tools.gdb.empty()) return StackMethod::Gdb;
    if (!tools.eu_stack.empty()) return StackMethod::EuStack;
    return StackMethod::Kernel;
}

std::string kernel_view(pid_t pid) {
    constexpr std::size_t kMax = 64 * 1024;
    const auto file = [pid](const char* name) {
        return read_file(fmt::format("{}/{}/{}", own_proc(), pid, name), kMax).value_or("");
    };
    std::string text = "state unknown";
    const std::string status = file("status");
    for (const std::string_view line : split(status, '\n')) {
        if (line.starts_with("State:")) text = fmt::format("state {}", trim(line.substr(6)));
    }
    const std::string where(trim(file("wchan")));
    if (!where.empty() && where != "0") text += fmt::format(", waits in {}", where);
    const std::string call = file("syscall");
    const std::string_view number = std::string_view(call).substr(0, call.find_first_of(" \n"));
    if (parse_uint(number)) text += fmt::format(", system call {}", number);
    return text;
}

void collect_stacks(os::EventLoop& loop, os::System& system, std::vector<StackTarget> targets,
                    Duration timeout, std::function<void(std::vector<RankStack>)> done) {
    std::make_shared<Collection>(loop, system, std::move(targets), std::move(done))->begin(timeout);
}

namespace {

/// The text without gdb's messages before the first thread: libraries loaded, files not found.
std::string_view without_preamble(StackMethod method, std::string_view text) {
    if (method != StackMethod::Gdb) return text;
    const std::size_t first = text.starts_with("Thread ") ? 0 : text.find("\nThread ");
    return first == std::string_view::npos ? text : text.substr(first);
}

std::vector<std::string_view> lines_of(const RankStack& stack) {
    std::vector<std::string_view> lines;
    for (const std::string_view line : split(without_preamble(stack.method, stack.text), '\n')) {
        const bool is_farewell = line.starts_with("[Inferior ");  // gdb's
        if (!trim(line).empty() && !is_farewell) lines.push_back(line);
    }
    return lines;
}

/// The line without "0x7f12...", "+0x1c]" and the arguments in a frame's brackets ("#3 step (rank=3, x=...)
/// at a.c:7").
std::string frame_key(std::string_view line) {
    std::string key;
    int depth = 0;
    for (std::size_t at = 0; at < line.size(); ++at) {
        const char c = line[at];
        if (c == '(' && line.front() == '#') ++depth;
        else if (c == ')' && depth > 0) --depth;
        else if (depth > 0) continue;
        else if (c == '0' && at + 1 < line.size() && line[at + 1] == 'x') {
            while (at + 1 < line.size() &&
                   (std::isxdigit(static_cast<unsigned char>(line[at + 1])) != 0 || line[at + 1] == 'x'))
                ++at;
        } else {
            key += c;
        }
    }
    return key;
}

/// The line without the place of the wait, where the kernel names the system call too: it hides the place
/// until the scheduler has taken a sleeping thread off its queue.
std::string without_place(std::string_view line) {
    const std::size_t begin = line.find(", waits in "), end = line.find(", system call ");
    if (begin == std::string_view::npos || end == std::string_view::npos) return std::string(line);
    return std::string(line.substr(0, begin)).append(line.substr(end));
}

/// True for a line that names a thread or process: "Thread 4171 (idle)", "Thread 1 (Thread 0x7f.. (LWP 7)
/// "x"):", "TID 7:", "Process 7: python ...".
bool is_heading(std::string_view line) {
    for (const std::string_view start : {"Thread ", "TID ", "PID ", "Process ", "Python v", "thread "}) {
        if (trim(line).starts_with(start)) return true;
    }
    return false;
}

std::string stack_key(const RankStack& stack) {
    std::string key(describe(stack.method));
    for (const std::string_view line : lines_of(stack))
        key += '\n' + (is_heading(line) ? "thread" : frame_key(without_place(line)));
    return key;
}

}  // namespace

void describe(Visitor& v, RankStack& stack) {
    v("rank", stack.rank);
    v("host", stack.host);
    v("pid", stack.pid);
    v.choice("method", stack.method, kStackMethods);
    v("text", stack.text);
}

std::string render_stacks(const std::vector<RankStack>& stacks) {
    std::map<std::string, std::vector<int>> alike;
    for (const RankStack& stack : stacks) alike[stack_key(stack)].push_back(stack.rank);
    std::string text;
    for (const RankStack& stack : stacks) {
        const std::vector<int>& ranks = alike[stack_key(stack)];
        if (ranks.front() != stack.rank) continue;
        const std::string where = stack.host.empty() ? "" : " on " + stack.host;
        text +=
            fmt::format("rank {}{} (pid {}), by {}", stack.rank, where, stack.pid, describe(stack.method));
        const std::vector<int> others(ranks.begin() + 1, ranks.end());
        if (!others.empty())
            text += fmt::format("; rank{} {} stand{} alike", others.size() == 1 ? "" : "s",
                                format_ranges(others), others.size() == 1 ? "s" : "");
        text += ":\n";
        for (const std::string_view line : lines_of(stack)) text += fmt::format("    {}\n", line);
    }
    return text;
}

}  // namespace ddprun
