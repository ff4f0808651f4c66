#include "env/os/run_tool.h"

#include <fcntl.h>
#include <fmt/core.h>
#include <signal.h>
#include <sys/epoll.h>
#include <unistd.h>

#include <cerrno>
#include <memory>
#include <utility>

#include "env/io/socket.h"
#include "env/os/keepalive.h"
#include "env/text.h"

namespace ddprun {
namespace {

/// Kept alive by what it has posted to the loop.
class ToolRun : public std::enable_shared_from_this<ToolRun> {
  public:
    using Done = std::function<void(Result<std::string>)>;
    ToolRun(os::EventLoop& loop, os::System& system, std::size_t max_bytes, Done done)
        : loop_(loop), system_(system), max_bytes_(max_bytes), done_(std::move(done)) {}

    void begin(os::SpawnSpec tool, Duration patience) {
        if (const Status started = start(std::move(tool)); !started) return std::exchange(done_, nullptr)(started.error());
        timer_ = loop_.call_after(patience, [self = shared_from_this(), patience] {
            self->end(Error{Errc::Timeout, fmt::format("{} took longer than {}", self->name_, format_duration(patience)), 0});
        });
    }

  private:
    Status start(os::SpawnSpec tool) {
        name_ = tool.program;
        int ends[2];
        if (::pipe2(ends, O_CLOEXEC) != 0) return Error::system("pipe");
        UniqueFd read(ends[0]), write(ends[1]), null(::open("/dev/null", O_RDWR | O_CLOEXEC));
        if (!null) return Error::system("open /dev/null");
        if (const Status set = set_nonblocking(read.get()); !set) return set;
        tool.is_tool = true;
        tool.descriptors = {{null.get(), 0}, {write.get(), 1}, {null.get(), 2}};
        const Result<pid_t> pid = [&] {
            const os::BlockingCall executes(loop_.keepalive());
            return system_.spawn(tool);
        }();
        if (!pid) return pid.error();
        pid_ = *pid;
        output_ = std::move(read);
        const Status watched = loop_.watch(output_.get(), EPOLLIN, [self = shared_from_this()](std::uint32_t) { self->read_some(); });
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
        // At its own end it may have been reaped already: the number is not ours any more.
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

}  // namespace

void run_tool(os::EventLoop& loop, os::System& system, os::SpawnSpec tool, Duration patience, std::size_t max_bytes,
              std::function<void(Result<std::string>)> done) {
    std::make_shared<ToolRun>(loop, system, max_bytes, std::move(done))->begin(std::move(tool), patience);
}

}  // namespace ddprun
