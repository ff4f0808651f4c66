#include "launcher/tools/commands.h"

#include <fmt/core.h>
#include <poll.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <termios.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <deque>
#include <map>
#include <optional>
#include <vector>

#include "env/io/background_call.h"
#include "env/print.h"
#include "env/text.h"
#include "launcher/machine/gpu/gpu_usage.h"
#include "launcher/spec/exit_codes.h"
#include "launcher/spec/signals.h"

namespace ddprun {
namespace {

/// A job answers at once, unless its host is in trouble.
constexpr Duration kTimeout = std::chrono::seconds(5);
/// The first timeout of a search, so that a stopped job does not delay finding another.
constexpr Duration kShortTimeout = std::chrono::milliseconds(500);
constexpr std::size_t kAskedAtOnce = 64;

constexpr int kRefused = 1;

Result<JobStatus> ask_status(const RunningJob& job, const ControlRequest& request, TimePoint deadline) {
    const Result<std::string> line = ask_job(job, request, deadline);
    if (!line) return line.error();
    Result<JobStatus> status = job_status_from_json(*line);
    if (status) status->uid = job.uid;
    return status;
}

int code_for(const Error& error) {
    switch (error.code) {
        case Errc::InvalidArgument: return static_cast<int>(ExitCode::Usage);
        case Errc::NotFound:
        case Errc::Timeout:
        case Errc::Closed: return static_cast<int>(ExitCode::Unavailable);
        default: return kRefused;
    }
}

/// A job and the text of its answer.
using JobText = std::pair<RunningJob, std::string>;

Result<JobText> request_text(const std::string& which, const ControlRequest& request, Duration timeout) {
    const Result<RunningJob> job = choose_job(which);
    if (!job) return job.error();
    const Result<std::string> line = ask_job(*job, request, deadline_after(MonotonicClock::now(), timeout));
    if (!line) return line.error();
    Result<std::string> text = decode_control_text(*line);
    return text ? Result<JobText>(JobText(*job, *std::move(text))) : text.error();
}

/// Sends a request to the job and prints the answer.
int send_request(const std::string& command, const std::string& which, const ControlRequest& request) {
    const Result<JobText> answer = request_text(which, request, kTimeout);
    if (!answer) return complain(command, answer.error());
    // The status has the id that ps shows on every node; each ddprun of a job also has an id of its own.
    const Result<JobStatus> status = ask_status(answer->first);
    const std::string& name = status ? status->job : answer->first.id;
    const std::string run = status ? fmt::format(" (run id {})", status->run_id) : "";
    ddprun::print("job {}{}: {}\n", printable(name), printable(run), printable(answer->second));
    return 0;
}

/// Asks many jobs at once, so that a stopped one delays no other. The results are in the order of `jobs`.
std::vector<Result<JobStatus>> ask_each(const std::vector<RunningJob>& jobs, const ControlRequest& request,
                                        Duration timeout) {
    // Root asks other users' jobs too. All of these jobs together get the time of one job of ours.
    const TimePoint others = deadline_after(MonotonicClock::now(), timeout);
    std::vector<Result<JobStatus>> answers;
    while (answers.size() < jobs.size()) {
        std::deque<BackgroundCall<Result<JobStatus>>> asked;
        for (std::size_t i = answers.size(); i < jobs.size() && asked.size() < kAskedAtOnce; ++i) {
            const TimePoint deadline =
                jobs[i].uid == ::geteuid() ? deadline_after(MonotonicClock::now(), timeout) : others;
            asked.emplace_back(
                [job = jobs[i], request, deadline] { return ask_status(job, request, deadline); });
        }
        for (auto& one : asked) answers.push_back(*one.wait(kNever));
    }
    return answers;
}

/// The statuses of several jobs with their GPUs.
struct AskedJobs {
    std::vector<JobStatus> statuses;
    std::vector<Error> failures;
};

/// Asks each job once, even if several of its nodes are on this host. Leaves out jobs that have ended.
AskedJobs ask_all(const std::vector<RunningJob>& jobs) {
    AskedJobs asked;
    for (Result<JobStatus>& status : ask_each(jobs, {"status", {{"gpus", "shown"}}}, kTimeout)) {
        // The job may have ended since it was listed.
        if (!status && (status.error().code == Errc::NotFound || status.error().code == Errc::Closed))
            continue;
        if (!status) asked.failures.push_back(status.error());
        // Compare the uid, too: a user who answers with another's job id must not hide that job from root.
        else if (std::none_of(asked.statuses.begin(), asked.statuses.end(), [&](const JobStatus& other) {
                     return other.job == status->job && other.uid == status->uid;
                 }))
            asked.statuses.push_back(*std::move(status));
    }
    return asked;
}

struct FoundJobs {
    std::vector<RunningJob> one_each;  ///< one node of each job, although a host may run several nodes
    std::vector<RunningJob> silent;    ///< those that did not answer
};
/// Finds the jobs with this run id; "" finds all.
FoundJobs find_jobs(const std::vector<RunningJob>& jobs, const std::string& run_id, Duration timeout) {
    FoundJobs result;
    const std::vector<Result<JobStatus>> answers = ask_each(jobs, {"status", {}}, timeout);
    std::vector<std::optional<JobStatus>> fitting(jobs.size());
    for (std::size_t i = 0; i < jobs.size(); ++i) {
        if (answers[i] && (run_id.empty() || answers[i]->run_id == run_id)) fitting[i] = *answers[i];
        if (!answers[i] && answers[i].error().code == Errc::Timeout) result.silent.push_back(jobs[i]);
    }
    for (const std::size_t i : one_answer_each(fitting)) result.one_each.push_back(jobs[i]);
    if (!result.one_each.empty() || result.silent.empty() || timeout == kTimeout) return result;
    return find_jobs(result.silent, run_id, kTimeout);
}

/// The columns of the terminal on standard output; 0: it is none, or its width is not known.
int terminal_width() {
    winsize size{};
    return ::ioctl(1, TIOCGWINSZ, &size) == 0 ? size.ws_col : 0;
}

std::string ids_of(const std::vector<RunningJob>& jobs) {
    return join(jobs, ", ", [](const RunningJob& job) { return job.id; });
}

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

int complain(const std::string& command, const Error& error) {
    ddprun::print(stderr, "ddprun {}: {}\n", command, printable(error.what));
    return code_for(error);
}

Result<RunningJob> choose_job(const std::string& which) {
    std::vector<RunningJob> jobs = running_jobs();
    if (jobs.empty()) return Error{Errc::NotFound, "no job of this user runs on this host", 0};
    std::vector<RunningJob> fitting;
    std::copy_if(jobs.begin(), jobs.end(), std::back_inserter(fitting),
                 [&](const RunningJob& job) { return job.id.starts_with(which); });
    std::vector<RunningJob> silent;
    if (fitting.size() != 1) {
        FoundJobs found =
            fitting.empty() ? find_jobs(jobs, which, kShortTimeout) : find_jobs(fitting, "", kShortTimeout);
        fitting = std::move(found.one_each);
        silent = std::move(found.silent);
    }
    if (fitting.size() == 1) return fitting.front();
    if (!fitting.empty())
        return Error::invalid(fmt::format("several jobs fit; choose with --job: {}", ids_of(fitting)));
    const std::string but =
        silent.empty()
            ? ""
            : fmt::format(", unless it is one that does not answer (stopped?): {}", ids_of(silent));
    return Error{
        Errc::NotFound,
        fmt::format("--job: '{}' does not run on this host (running: {}){}", which, ids_of(jobs), but), 0};
}

Result<JobStatus> ask_status(const RunningJob& job) {
    return ask_status(job, {"status", {}}, deadline_after(MonotonicClock::now(), kTimeout));
}

int show_jobs(const AskOptions& options) {
    std::vector<RunningJob> jobs = running_jobs();
    if (!options.job.empty()) {
        const Result<RunningJob> job = choose_job(options.job);
        if (!job) return complain("ps", job.error());
        jobs = {*job};
    }
    if (jobs.empty() && !options.json) ddprun::print(stderr, "no job of this user runs on this host\n");
    const AskedJobs asked = ask_all(jobs);
    for (const JobStatus& status : asked.statuses) {
        ddprun::print("{}",
                      options.json ? to_json(status) : render_status(nullptr, status, terminal_width()));
    }
    int code = 0;
    for (const Error& failure : asked.failures) code = complain("ps", failure);
    return code;
}

int show_gpus(const AskOptions& options) {
    const std::vector<GpuUsage> gpus = measure_gpus();
    if (gpus.empty() && !options.json) ddprun::print(stderr, "no NVIDIA GPU can be asked on this host\n");
    ddprun::print("{}", options.json ? answer_of("gpus", gpus) : render_gpu_usage(gpus));
    return 0;
}

int send_signal(const AskOptions& options) {
    if (options.words.size() != 1)
        return complain("signal", Error::invalid("expected one signal, as in: ddprun signal USR1 --rank 3"));
    if (!signal_from_name(options.words.front())) {
        return complain("signal", Error::invalid(fmt::format(
                                      "'{}' is not a signal (expected a name or number, as in USR1)",
                                      options.words.front())));
    }
    ControlRequest request{"signal", {{"signal", options.words.front()}}};
    if (options.rank) request.arguments["rank"] = std::to_string(*options.rank);
    return send_request("signal", options.job, request);
}

int show_stacks(const AskOptions& options) {
    ControlRequest request{"stacks", {}};
    if (options.rank) request.arguments["rank"] = std::to_string(*options.rank);
    const Result<JobText> answer = request_text(options.job, request, kStackTimeout + kTimeout);
    if (!answer) return complain("stacks", answer.error());
    ddprun::print("{}", printable_lines(answer->second));
    return 0;
}

int drain(const AskOptions& options) { return send_request("drain", options.job, {"drain", {}}); }

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
