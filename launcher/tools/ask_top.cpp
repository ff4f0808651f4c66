#include <fmt/core.h>
#include <poll.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <termios.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <map>
#include <optional>
#include <vector>

#include "env/print.h"
#include "env/text.h"
#include "launcher/tools/ask.h"

namespace ddprun {
namespace {

volatile sig_atomic_t end_asked = 0;

void on_end(int) { end_asked = 1; }

/// Sets the terminal up for a full screen, and restores it in the destructor.
class Screen {
  public:
    Screen() {
        struct sigaction action {};
        action.sa_handler = on_end;
        for (const int signal : {SIGINT, SIGTERM, SIGHUP, SIGQUIT}) ::sigaction(signal, &action, nullptr);
        if (::tcgetattr(0, &before_) == 0) {
            keys_ = true;
            termios raw = before_;
            raw.c_lflag &= ~static_cast<tcflag_t>(ICANON | ECHO);
            ::tcsetattr(0, TCSANOW, &raw);
        }
        ddprun::print("\x1b[?1049h\x1b[?25l");
    }
    ~Screen() {
        ddprun::print("\x1b[?25h\x1b[?1049l");
        std::fflush(stdout);
        if (keys_) ::tcsetattr(0, TCSANOW, &before_);
    }
    Screen(const Screen&) = delete;
    Screen& operator=(const Screen&) = delete;

    static winsize size() {
        winsize size{};
        if (::ioctl(1, TIOCGWINSZ, &size) != 0 || size.ws_col == 0 || size.ws_row == 0) size = {24, 80, 0, 0};
        return size;
    }

    static void show(const std::string& text) {
        const winsize window = size();
        std::vector<std::string_view> lines = split(text, '\n');
        while (!lines.empty() && trim(lines.back()).empty()) lines.pop_back();
        const auto room = static_cast<std::size_t>(std::max<int>(window.ws_row, 2)) - 1;
        const std::string more =
            lines.size() > room
                ? fmt::format("... {} more lines: a larger window shows them", lines.size() - room + 1)
                : "";
        if (!more.empty()) {
            lines.resize(room - 1);
            lines.push_back(more);
        }
        std::string out = "\x1b[H";
        for (const std::string_view line : lines)
            out += std::string(line.substr(0, window.ws_col)) + "\x1b[K\n";
        ddprun::print("{}\x1b[J", out);
        std::fflush(stdout);
    }

    /// Waits a second; false when the user quits.
    bool wait() const {
        pollfd keyboard{keys_ ? 0 : -1, POLLIN, 0};
        const int ready = ::poll(&keyboard, 1, 1000);
        if (end_asked != 0) return false;
        if (ready <= 0) return true;
        char key = 0;
        return ::read(0, &key, 1) == 1 && key != 'q' && key != 'Q';
    }

  private:
    termios before_{};
    bool keys_ = false;
};

/// Renders the jobs' statuses, with rates since the last time.
class Watch {
  public:
    explicit Watch(std::optional<RunningJob> only) : only_(std::move(only)) {}

    std::string render(int width) {
        std::map<std::string, JobStatus> now;
        std::string text;
        AskedJobs asked = ask_all(only_ ? std::vector{*only_} : running_jobs());
        for (const Error& failure : asked.failures) text += printable(failure.what) + '\n';
        for (JobStatus& status : asked.statuses) {
            const auto before = before_.find(status.job);
            text += render_status(before == before_.end() ? nullptr : &before->second, status, width) + '\n';
            now.emplace(status.job, std::move(status));
        }
        before_ = std::move(now);
        return text;
    }
    [[nodiscard]] bool saw_any() const { return !before_.empty(); }

  private:
    std::optional<RunningJob> only_;
    std::map<std::string, JobStatus> before_;
};

enum class Ending : std::uint8_t { Left, JobEnded };

Ending watch_on_screen(Watch& watch, bool until_it_ends) {
    const Screen screen;
    do {
        const std::string text = watch.render(Screen::size().ws_col);
        if (until_it_ends && !watch.saw_any()) return Ending::JobEnded;
        Screen::show(watch.saw_any() ? text : "no job of this user runs on this host\n" + text);
    } while (screen.wait());
    return Ending::Left;
}

}  // namespace

int watch_jobs(const AskOptions& options) {
    std::optional<RunningJob> only;
    if (!options.job.empty()) {
        const Result<RunningJob> job = choose_job(options.job);
        if (!job) return complain("top", job.error());
        only = *job;
    }
    Watch watch(only);
    if (::isatty(1) == 0) {
        ddprun::print("{}", watch.render(0));
        if (!watch.saw_any()) ddprun::print(stderr, "no job of this user runs on this host\n");
        return 0;
    }
    if (watch_on_screen(watch, only.has_value()) == Ending::JobEnded)
        ddprun::print("job {} has ended\n", printable(only->id));
    return 0;
}

}  // namespace ddprun
