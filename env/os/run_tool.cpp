#include "env/os/run_tool.h"

#include <fcntl.h>
#include <fmt/core.h>
#include <poll.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <memory>
#include <utility>

#include "env/io/socket.h"
#include "env/os/keepalive.h"
#include "env/os/spawn.h"
#include "env/text.h"

namespace ddprun {
namespace {

/// A pipe whose read end is non-blocking.
Result<os::System::Pipe> open_pipe() {
    int ends[2];
    if (::pipe2(ends, O_CLOEXEC) != 0) return Error::system("pipe");
    os::System::Pipe pipe{UniqueFd(ends[0]), UniqueFd(ends[1])};
    if (const Status set = set_nonblocking(pipe.read.get()); !set) return set.error();
    return pipe;
}

Result<UniqueFd> open_null() {
    UniqueFd null(::open("/dev/null", O_RDWR | O_CLOEXEC));
    if (!null) return Error::system("open /dev/null");
    return null;
}

/// One run of a tool. Its handlers in the loop keep it alive.
class ToolRun : public std::enable_shared_from_this<ToolRun> {
  public:
    using Done = std::function<void(Result<std::string>)>;
    ToolRun(os::EventLoop& loop, os::System& system, std::size_t max_bytes, Done done)
        : loop_(loop), system_(system), max_bytes_(max_bytes), done_(std::move(done)) {}

    void begin(os::SpawnSpec tool, Duration timeout) {
        if (const Status started = start(std::move(tool)); !started)
            return std::exchange(done_, nullptr)(started.error());
        timer_ = loop_.call_after(timeout, [self = shared_from_this(), timeout] {
            self->end(Error{Errc::Timeout,
                            fmt::format("{} took longer than {}", self->name_, format_duration(timeout)), 0});
        });
    }

  private:
    Status start(os::SpawnSpec tool) {
        name_ = tool.program;
        Result<os::System::Pipe> pipe = open_pipe();
        const Result<UniqueFd> null = open_null();
        if (!pipe || !null) return !pipe ? pipe.error() : null.error();
        tool.is_tool = true;
        tool.descriptors = {{null->get(), 0}, {pipe->write.get(), 1}, {null->get(), 2}};
        const Result<pid_t> pid = [&] {
            const os::BlockingCall executes(loop_.keepalive());
            return system_.spawn(tool);
        }();
        if (!pid) return pid.error();
        pid_ = *pid;
        output_ = std::move(pipe->read);
        const Status watched = loop_.watch(output_.get(), EPOLLIN,
                                           [self = shared_from_this()](std::uint32_t) { self->read_some(); });
        if (!watched) (void)system_.signal_group(pid_, SIGKILL);
        return watched;
    }

    void read_some() {
        char piece[16 * 1024];
        const ssize_t n = ::read(output_.get(), piece, sizeof piece);
        if (n < 0 && (errno == EAGAIN || errno == EINTR)) return;
        if (n > 0) text_.append(piece, static_cast<std::size_t>(n));
        if (n > 0 && text_.size() < max_bytes_) return;
        ended_ = n <= 0;
        end(std::move(text_));
    }

    void end(Result<std::string> result) {
        if (!done_) return;
        loop_.cancel(timer_);
        loop_.unwatch(output_.get());
        output_.reset();
        // After its own end it may have been reaped: the pid may be another's.
        if (!ended_) (void)system_.signal_group(pid_, SIGKILL);
        std::exchange(done_, nullptr)(std::move(result));
    }

    os::EventLoop& loop_;
    os::System& system_;
    std::size_t max_bytes_;
    Done done_;
    std::string name_, text_;
    pid_t pid_ = 0;
    bool ended_ = false;  ///< it has closed its output
    UniqueFd output_;
    os::EventLoop::TimerId timer_ = 0;
};

/// Reads one piece and keeps as much as `max_bytes` allows; closes the pipe at its end.
void read_piece(UniqueFd& pipe, std::string& text, std::size_t max_bytes) {
    char piece[16 * 1024];
    const ssize_t n = ::read(pipe.get(), piece, sizeof piece);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (n <= 0) return pipe.reset();
    text.append(piece, std::min(static_cast<std::size_t>(n), max_bytes - text.size()));
}

/// A running program that is waited for, and its output so far.
struct RunningTool {
    pid_t pid;
    UniqueFd out, err;
    ToolEnd end;

    /// True when it has closed its output and ended; false when the deadline passed first.
    bool wait(TimePoint deadline, std::size_t max_bytes) {
        constexpr int kPauseMilliseconds = 2;  // a program that has closed its output ends soon
        for (;;) {
            const bool prints = out || err;
            int status = 0;
            if (!prints && ::waitpid(pid, &status, WNOHANG) != 0) {
                end.exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
                return true;
            }
            const TimePoint now = MonotonicClock::now();
            if (now >= deadline) return false;
            pollfd ready[2] = {{out.get(), POLLIN, 0}, {err.get(), POLLIN, 0}};
            (void)::poll(ready, 2, prints ? poll_milliseconds(now, deadline) : kPauseMilliseconds);
            if (ready[0].revents != 0) read_piece(out, end.out, max_bytes);
            if (ready[1].revents != 0) read_piece(err, end.err, max_bytes);
        }
    }
};

}  // namespace

void run_tool(os::EventLoop& loop, os::System& system, os::SpawnSpec tool, Duration timeout,
              std::size_t max_bytes, std::function<void(Result<std::string>)> done) {
    std::make_shared<ToolRun>(loop, system, max_bytes, std::move(done))->begin(std::move(tool), timeout);
}

Result<ToolEnd> run_tool_and_wait(os::SpawnSpec tool, const ToolLimits& limits) {
    Result<os::System::Pipe> out = open_pipe(), err = open_pipe();
    const Result<UniqueFd> null = open_null();
    if (!out || !err || !null) return !out ? out.error() : !err ? err.error() : null.error();
    tool.descriptors = {{null->get(), 0}, {out->write.get(), 1}, {err->write.get(), 2}};
    os::SpawnSlots slots;
    const Result<pid_t> pid = os::spawn_process(tool, slots);
    if (!pid) return pid.error();
    out->write.reset();
    err->write.reset();
    RunningTool running{*pid, std::move(out->read), std::move(err->read), {}};
    const auto ends_within = [&](Duration span) {
        return running.wait(deadline_after(MonotonicClock::now(), span), limits.max_bytes);
    };
    running.end.is_in_time = ends_within(limits.timeout);
    bool has_ended = running.end.is_in_time;
    if (!has_ended && limits.grace > Duration::zero()) {
        ::kill(-*pid, SIGTERM);
        has_ended = ends_within(limits.grace);
    }
    if (!has_ended) {
        ::kill(-*pid, SIGKILL);
        running.out.reset();  // a process outside of the group may hold the other ends
        running.err.reset();
        (void)running.wait(kNever, limits.max_bytes);
    }
    return std::move(running.end);
}

}  // namespace ddprun
