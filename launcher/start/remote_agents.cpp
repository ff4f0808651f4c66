#include "launcher/start/remote_agents.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <optional>
#include <utility>

#include "env/io/file.h"
#include "env/io/socket.h"
#include "env/os/keepalive.h"

namespace ddprun {
namespace {

/// While hosts are missing, their failures and the timeout are checked this often.
constexpr Duration kCheckInterval = std::chrono::milliseconds(50);
constexpr std::size_t kWordsBytes = 2048;
constexpr std::size_t kPipeBytes = 64 << 10;

/// The exit code of a child that has exited, without reaping it; nullopt while it runs.
std::optional<int> exit_of_child(pid_t pid) {
    siginfo_t info{};
    if (::waitid(P_PID, static_cast<id_t>(pid), &info, WEXITED | WNOHANG | WNOWAIT) != 0 ||
        info.si_pid != pid)
        return std::nullopt;
    return info.si_code == CLD_EXITED ? info.si_status : 128 + info.si_status;
}

/// A process closes its pipes a moment before its exit can be seen.
void await_end_of(pid_t pid) {
    const UniqueFd process(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));
    if (process)
        (void)wait_readable(process.get(),
                            deadline_after(MonotonicClock::now(), std::chrono::milliseconds(100)));
}

}  // namespace

RemoteAgents::RemoteAgents(Parts parts, Plan plan)
    : parts_(std::move(parts)), plan_(std::move(plan)), processes_(plan_.start.starters.size()) {
    feed(start_event::TimePassed{});
    check_at(deadline_after(parts_.loop.now(), kCheckInterval));
}

RemoteAgents::~RemoteAgents() {
    *alive_ = false;
    ::unlink(plan_.secret_file.c_str());
    parts_.loop.cancel(timer_);
    for (const Process& process : processes_) {
        if (process.pipes > 0) (void)parts_.system.signal_group(process.pid, SIGKILL);
    }
}

void RemoteAgents::feed(const StartEvent& event) {
    StartActions actions = step(plan_.start, event, MonotonicClock::now());
    while (actions.begin) {
        const start_event::Begun begun{*actions.begin, run(*actions.begin)};
        actions = step(plan_.start, begun, MonotonicClock::now());
    }
    if (actions.settled) {
        ::unlink(plan_.secret_file.c_str());
        // Post it, so that on_failure is not called from the constructor or the caller of an event.
        parts_.loop.post([this, still = alive_] {
            if (*still && !done_ && !plan_.start.failures.empty()) parts_.on_failure(plan_.start.failures);
        });
    }
    for (const std::size_t starter : actions.kill) {
        (void)parts_.system.signal_group(processes_[starter].pid, SIGKILL);
        processes_[starter].pipes = 0;
    }
    if (actions.ended) parts_.loop.post(std::exchange(done_, nullptr));
}

Status RemoteAgents::run(std::size_t starter) {
    const os::BlockingCall executes(parts_.loop.keepalive());
    const std::vector<std::string>& words = plan_.start.starters[starter].command.words;
    os::SpawnSpec spec;
    spec.program = find_executable(words.front(), plan_.path);
    if (spec.program.empty()) return Error{Errc::NotFound, words.front() + ": not found in PATH", 0};
    spec.arguments = words;
    spec.environment = plan_.environment;
    spec.is_tool = true;
    int in[2];
    if (::pipe2(in, O_CLOEXEC) != 0) return Error::system("pipe");
    UniqueFd read_in(in[0]), write_in(in[1]);
    Result<os::System::Pipe> out = parts_.system.make_pipe(kPipeBytes),
                             err = parts_.system.make_pipe(kPipeBytes);
    if (!out || !err) return out ? err.error() : out.error();
    spec.descriptors = {{read_in.get(), 0}, {out->write.get(), 1}, {err->write.get(), 2}};
    const std::string line = plan_.token + "\n";
    // The line is far smaller than a pipe's buffer.
    if (!plan_.token.empty() &&
        ::write(write_in.get(), line.data(), line.size()) != static_cast<ssize_t>(line.size()))
        return Error::system("write");
    const Result<pid_t> pid = parts_.system.spawn(spec);
    if (!pid) return pid.error();
    Process& process = processes_[starter];
    process.pid = *pid;
    if (!plan_.token.empty()) process.input = std::move(write_in);
    for (UniqueFd* pipe : {&out->read, &err->read}) {
        const Output::Stream stream = pipe == &out->read ? Output::Stream::Out : Output::Stream::Err;
        const auto seen = [this, still = alive_, starter](std::string_view piece) {
            if (!*still) return;
            std::string& said = plan_.start.starters[starter].words.append(piece);
            if (said.size() > 2 * kWordsBytes) said.erase(0, said.size() - kWordsBytes);
        };
        const auto closed = [this, still = alive_, starter] {
            if (*still && --processes_[starter].pipes == 0) ended(starter);
        };
        if (const Status relayed = parts_.relay(std::move(*pipe), stream, seen, closed); !relayed)
            return relayed;
        ++process.pipes;
    }
    return {};
}

void RemoteAgents::children_ended() {
    if (plan_.start.phase != StartState::Phase::Starting) return;
    for (Process& process : processes_) {
        if (process.pid > 0 && !process.exit_code) process.exit_code = exit_of_child(process.pid);
    }
}

void RemoteAgents::ended(std::size_t starter) {
    Process& process = processes_[starter];
    process.input.reset();
    if (plan_.start.phase == StartState::Phase::Starting) {
        ask_why(plan_.start.starters[starter].command.nodes);
        if (!process.exit_code) {
            await_end_of(process.pid);
            process.exit_code = exit_of_child(process.pid);
        }
    }
    feed(start_event::Ended{starter, process.exit_code});
}

void RemoteAgents::ask_why(const std::vector<int>& nodes) {
    for (const int node : nodes) plan_.start.hosts[node].told = parts_.failure_of(node);
}

void RemoteAgents::check_at(TimePoint when) {
    parts_.loop.cancel(timer_);
    timer_ = parts_.loop.call_at(when, [this] {
        ask_why(plan_.start.missing());
        feed(start_event::TimePassed{});
        if (plan_.start.phase == StartState::Phase::Starting)
            check_at(deadline_after(parts_.loop.now(), kCheckInterval));
    });
}

void RemoteAgents::finish(Duration timeout, std::function<void()> done) {
    done_ = std::move(done);
    feed(start_event::Finish{timeout});
    if (done_) check_at(plan_.start.kill_at);
}

}  // namespace ddprun
