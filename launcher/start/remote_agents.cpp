#include "launcher/start/remote_agents.h"

#include <fcntl.h>
#include <fmt/core.h>
#include <signal.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "env/io/file.h"
#include "env/io/socket.h"
#include "env/os/keepalive.h"
#include "env/text.h"

namespace ddprun {
namespace {

/// While hosts are missing: whether one has told why, and whether the time is over.
constexpr Duration kLook = std::chrono::milliseconds(50);
/// After the first host that failed, the others may still fail, and are named with it.
constexpr Duration kMoreFailures = std::chrono::seconds(2);
constexpr std::size_t kWordsBytes = 2048;
constexpr std::size_t kWordsLines = 3;

/// The last lines that say something, as one.
std::string last_words(std::string_view text) {
    std::vector<std::string> lines;
    for (const std::string_view line : split(text, '\n')) {
        if (const std::string_view said = trim(line); !said.empty()) lines.push_back(printable(said));
    }
    if (lines.size() > kWordsLines) lines.erase(lines.begin(), lines.end() - static_cast<std::ptrdiff_t>(kWordsLines));
    return join(lines, "; ");
}

}  // namespace

std::string render_start_failures(const std::vector<StartFailure>& failures, std::size_t hosts) {
    constexpr std::size_t kNamed = 8;
    std::vector<std::string> names;
    for (std::size_t i = 0; i < std::min(failures.size(), kNamed); ++i) names.push_back(failures[i].host);
    const std::string more = failures.size() > kNamed ? fmt::format(" and {} more", failures.size() - kNamed) : "";
    return fmt::format("{} of {} hosts cannot take part: {}{}", failures.size(), hosts, join(names, ", "), more);
}

std::optional<std::size_t> next_starter(std::span<const StarterPhase> starters) {
    const auto waiting = std::find(starters.begin(), starters.end(), StarterPhase::Waiting);
    const auto starting = std::count(starters.begin(), starters.end(), StarterPhase::Starting);
    if (waiting == starters.end() || static_cast<std::size_t>(starting) >= kMostStarting) return std::nullopt;
    return static_cast<std::size_t>(waiting - starters.begin());
}

namespace {

/// Of a child that has exited by now; leaves it to be reaped.
std::optional<int> exit_of_child(pid_t pid) {
    siginfo_t info{};
    if (::waitid(P_PID, static_cast<id_t>(pid), &info, WEXITED | WNOHANG | WNOWAIT) != 0 || info.si_pid != pid) return std::nullopt;
    return info.si_code == CLD_EXITED ? info.si_status : 128 + info.si_status;
}

/// A process closes its pipes a moment before its exit can be seen.
void await_end_of(pid_t pid) {
    const UniqueFd process(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));
    if (process) (void)wait_readable(process.get(), deadline_after(MonotonicClock::now(), std::chrono::milliseconds(100)));
}

}  // namespace

struct RemoteAgents::Starter {
    const StarterCommand* command = nullptr;
    pid_t pid = 0;
    UniqueFd input;     ///< held open: its end tells the other side that we are gone
    int pipes = 0;      ///< that it has not closed
    bool begun = false;
    bool is_silent = false;  ///< the host at its other end is
    std::string words;  ///< the end of what it wrote
    std::optional<int> exit_code;
    [[nodiscard]] bool runs() const { return begun && pipes > 0; }
};

RemoteAgents::RemoteAgents(Parts parts, Plan plan) : parts_(std::move(parts)), plan_(std::move(plan)), nodes_(plan_.hosts.size(), Node::Joined) {
    for (int node = plan_.nodes.first; node <= plan_.nodes.last; ++node) nodes_[static_cast<std::size_t>(node)] = Node::Open;
    for (const StarterCommand& command : plan_.commands) {
        starters_.push_back(std::make_unique<Starter>());
        starters_.back()->command = &command;
    }
    start_some();
    timer_ = parts_.loop.call_after(kLook, [this] { look(); });
}

RemoteAgents::~RemoteAgents() {
    *alive_ = false;
    remove_secret();
    parts_.loop.cancel(timer_);
    parts_.loop.cancel(end_timer_);
    for (const auto& starter : starters_) {
        if (starter->runs()) (void)parts_.system.signal_group(starter->pid, SIGKILL);
    }
}

bool RemoteAgents::is_open(int node) const {
    return node >= 0 && static_cast<std::size_t>(node) < nodes_.size() && nodes_[static_cast<std::size_t>(node)] == Node::Open;
}

StarterPhase RemoteAgents::phase_of(const Starter& starter) const {
    if (!starter.begun) return StarterPhase::Waiting;
    const std::vector<int>& nodes = starter.command->nodes;
    const bool is_starting =
        starter.runs() && std::any_of(nodes.begin(), nodes.end(), [this](int node) { return is_open(node); });
    return is_starting ? StarterPhase::Starting : StarterPhase::Settled;
}

void RemoteAgents::start_some() {
    if (done_) return;
    std::vector<StarterPhase> phases;
    for (const auto& starter : starters_) phases.push_back(phase_of(*starter));
    while (const std::optional<std::size_t> next = next_starter(phases)) {
        Starter& starter = *starters_[*next];
        starter.begun = true;
        const Status started = start(starter);
        if (!started) {
            for (const int node : starter.command->nodes) fail(node, started.error().what);
        }
        phases[*next] = phase_of(starter);
        deadline_ = deadline_after(MonotonicClock::now(), plan_.timeout);
    }
}

Status RemoteAgents::start(Starter& starter) {
    const os::BlockingCall executes(parts_.loop.keepalive());
    const std::vector<std::string>& words = starter.command->words;
    os::SpawnSpec spec;
    spec.program = find_executable(words.front(), plan_.path);
    if (spec.program.empty()) return Error{Errc::NotFound, words.front() + ": not found in PATH", 0};
    spec.arguments = words;
    spec.environment = plan_.environment;
    spec.is_tool = true;
    int in[2], out[2], err[2];
    if (::pipe2(in, O_CLOEXEC) != 0) return Error::system("pipe");
    UniqueFd read_in(in[0]), write_in(in[1]);
    if (::pipe2(out, O_CLOEXEC) != 0) return Error::system("pipe");
    UniqueFd read_out(out[0]), write_out(out[1]);
    if (::pipe2(err, O_CLOEXEC) != 0) return Error::system("pipe");
    UniqueFd read_err(err[0]), write_err(err[1]);
    spec.descriptors = {{read_in.get(), 0}, {write_out.get(), 1}, {write_err.get(), 2}};
    const std::string line = plan_.token + "\n";
    // Far less than a pipe holds.
    if (!plan_.token.empty() && ::write(write_in.get(), line.data(), line.size()) != static_cast<ssize_t>(line.size())) return Error::system("write");
    const Result<pid_t> pid = parts_.system.spawn(spec);
    if (!pid) return pid.error();
    starter.pid = *pid;
    if (!plan_.token.empty()) starter.input = std::move(write_in);
    for (auto* pipe : {&read_out, &read_err}) {
        if (const Status set = set_nonblocking(pipe->get()); !set) return set;
        const Console console = pipe == &read_out ? Console::Out : Console::Err;
        const auto seen = [this, still = alive_, &starter](std::string_view piece) {
            if (!*still) return;
            starter.words.append(piece);
            if (starter.words.size() > 2 * kWordsBytes) starter.words.erase(0, starter.words.size() - kWordsBytes);
        };
        const auto closed = [this, still = alive_, &starter] {
            if (*still && --starter.pipes == 0) ended(starter);
        };
        if (const Status relayed = parts_.relay(std::move(*pipe), console, seen, closed); !relayed) return relayed;
        ++starter.pipes;
    }
    return {};
}

void RemoteAgents::children_ended() {
    if (is_over_) return;
    for (const auto& starter : starters_) {
        if (starter->pid > 0 && !starter->exit_code) starter->exit_code = exit_of_child(starter->pid);
    }
}

void RemoteAgents::ended(Starter& starter) {
    starter.input.reset();
    settle_end();
    if (is_over_) return;
    if (!starter.exit_code) {
        await_end_of(starter.pid);
        starter.exit_code = exit_of_child(starter.pid);
    }
    // Nothing runs before all have joined: who has and is gone cannot take part either.
    for (const int node : starter.command->nodes) {
        Node& state = nodes_[static_cast<std::size_t>(node)];
        if (state == Node::Joined) state = Node::Open;
        if (state == Node::Open) fail(node, last_words_of(node));
    }
    start_some();
}

std::string RemoteAgents::last_words_of(int node) const {
    if (std::string told = parts_.failure_of(node); !told.empty()) return told;
    for (const auto& starter : starters_) {
        const auto& nodes = starter->command->nodes;
        if (std::find(nodes.begin(), nodes.end(), node) == nodes.end()) continue;
        const std::string said = last_words(starter->words);
        if (!starter->begun) return fmt::format("not started: {} others took all the time", kMostStarting);
        if (!starter->runs()) return words_of_ended(*starter->command, said, starter->exit_code);
        return said.empty() ? fmt::format("{} has said nothing", starter->command->words.front()) : said;
    }
    return "";
}

/// What hosts tell by themselves, and those that tell nothing.
void RemoteAgents::look() {
    timer_ = 0;
    const bool is_late = MonotonicClock::now() >= deadline_;
    for (std::size_t i = 0; i < nodes_.size() && !is_over_; ++i) {
        const int node = static_cast<int>(i);
        if (!is_open(node)) continue;
        if (const std::string told = parts_.failure_of(node); !told.empty()) fail(node, told);
        else if (is_late) fail(node, fmt::format("has not joined within {} (--start-timeout); {}", format_duration(plan_.timeout), last_words_of(node)));
    }
    if (is_over_) return;
    if (parts_.loop.now() >= conclude_at_) return conclude();
    timer_ = parts_.loop.call_after(kLook, [this] { look(); });
}

void RemoteAgents::fail(int node, std::string why) {
    if (is_over_ || !is_open(node)) return;
    nodes_[static_cast<std::size_t>(node)] = Node::Failed;
    failures_.push_back({plan_.hosts[static_cast<std::size_t>(node)], std::move(why)});
    if (conclude_at_ == kNever) conclude_at_ = deadline_after(parts_.loop.now(), kMoreFailures);
    // Not from within the constructor, or whoever told of it.
    if (std::find(nodes_.begin(), nodes_.end(), Node::Open) == nodes_.end()) {
        parts_.loop.post([this, still = alive_] {
            if (*still) conclude();
        });
    }
}

void RemoteAgents::joined(int node) {
    for (const auto& starter : starters_) {
        if (starter->command->nodes.front() == node) starter->is_silent = false;
    }
    if (!is_open(node)) return;
    nodes_[static_cast<std::size_t>(node)] = Node::Joined;
    for (const auto& starter : starters_) {
        if (starter->command->nodes == std::vector<int>{node}) starter->words.clear();
    }
    if (std::find(nodes_.begin(), nodes_.end(), Node::Open) == nodes_.end()) conclude();
    else start_some();
}

void RemoteAgents::conclude() {
    if (std::exchange(is_over_, true)) return;
    parts_.loop.cancel(timer_);
    remove_secret();
    if (!failures_.empty()) parts_.on_failure(failures_);
}

void RemoteAgents::remove_secret() {
    if (!plan_.secret_file.empty()) ::unlink(plan_.secret_file.c_str());
    plan_.secret_file.clear();
}

void RemoteAgents::finish(Duration patience, std::function<void()> done) {
    is_over_ = true;
    parts_.loop.cancel(timer_);
    done_ = std::move(done);
    // Where hosts are missing no worker has run, and what starts them may wait for them for ever (Hydra does).
    const bool all_have_come = failures_.empty() && std::find(nodes_.begin(), nodes_.end(), Node::Open) == nodes_.end();
    if (!all_have_come) patience = std::min(patience, kMoreFailures);
    end_timer_ = parts_.loop.call_after(patience, [this] {
        for (const auto& starter : starters_) give_up(*starter);
        settle_end();
    });
    for (const auto& starter : starters_) {
        if (starter->is_silent) give_up(*starter);
    }
    settle_end();
}

void RemoteAgents::fell_silent(int node) {
    for (const auto& starter : starters_) {
        // One program for many hosts (srun) ends without the dead one.
        if (starter->command->nodes != std::vector<int>{node}) continue;
        starter->is_silent = true;
        if (done_) give_up(*starter);
    }
    settle_end();
}

void RemoteAgents::give_up(Starter& starter) const {
    if (starter.runs()) (void)parts_.system.signal_group(starter.pid, SIGKILL);
    starter.pipes = 0;
}

void RemoteAgents::settle_end() {
    if (!done_ || std::any_of(starters_.begin(), starters_.end(), [](const auto& one) { return one->runs(); })) return;
    parts_.loop.cancel(end_timer_);
    parts_.loop.post(std::exchange(done_, nullptr));
}

}  // namespace ddprun
