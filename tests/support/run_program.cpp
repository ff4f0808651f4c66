#include "tests/support/run_program.h"

#include <dirent.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <sstream>
#include <stdexcept>
#include <thread>

#include "tests/support/default_signals.h"
#include "tests/support/temporary_directory.h"

extern char** environ;

namespace ddprun::test {

namespace {

using Clock = std::chrono::steady_clock;

/// The directory of the user's secret: one of this test program, never the real home directory.
const std::string& config_home() {
    static const TemporaryDirectory directory;
    return directory.path();
}

std::vector<std::string> environment_for(const RunOptions& options) {
    std::vector<std::string> result = options.environment;
    const auto is_config = [](const std::string& variable) {
        return variable.starts_with("XDG_CONFIG_HOME=");
    };
    const bool is_said = std::any_of(result.begin(), result.end(), is_config) ||
                         std::count(options.unset.begin(), options.unset.end(), "XDG_CONFIG_HOME") > 0;
    if (!is_said) result.push_back("XDG_CONFIG_HOME=" + config_home());
    const auto name = [](const std::string& variable) { return variable.substr(0, variable.find('=')); };
    for (char** one = environ; *one != nullptr; ++one) {
        const std::string variable = *one;
        const bool replaced = std::any_of(result.begin(), result.end(),
                                          [&](const auto& other) { return name(other) == name(variable); });
        const bool unset = std::count(options.unset.begin(), options.unset.end(), name(variable)) > 0;
        if (!replaced && !unset) result.push_back(variable);
    }
    return result;
}

std::vector<char*> pointers(std::vector<std::string>& words) {
    std::vector<char*> result;
    for (std::string& word : words) result.push_back(word.data());
    result.push_back(nullptr);
    return result;
}

UniqueFd input_file(const std::string& content) {
    if (content.empty()) return UniqueFd(::open("/dev/null", O_RDONLY | O_CLOEXEC));
    UniqueFd file(::memfd_create("input", MFD_CLOEXEC));
    if (::write(file.get(), content.data(), content.size()) != static_cast<ssize_t>(content.size()))
        std::abort();
    ::lseek(file.get(), 0, SEEK_SET);
    return file;
}

/// Appends the available bytes; false at end of file.
bool append_from(int fd, std::string& into) {
    std::array<char, 65536> piece;
    const ssize_t n = ::read(fd, piece.data(), piece.size());
    if (n > 0) into.append(piece.data(), static_cast<std::size_t>(n));
    return n > 0 || (n < 0 && (errno == EAGAIN || errno == EINTR));
}

}  // namespace

RunOptions with_environment(std::vector<std::string> environment) {
    RunOptions options;
    options.environment = std::move(environment);
    return options;
}

std::string without_leak_check() {
    const char* const options = std::getenv("ASAN_OPTIONS");
    return std::string("ASAN_OPTIONS=") + (options == nullptr ? "" : options) + ":detect_leaks=0";
}

Program::Program(const std::vector<std::string>& command, const RunOptions& options)
    : options_(options), started_(Clock::now()), deadline_(started_ + options.timeout) {
    std::array<int, 2> out{}, err{};
    if (::pipe2(out.data(), O_CLOEXEC) != 0 || ::pipe2(err.data(), O_CLOEXEC) != 0)
        throw std::runtime_error("pipe2");
    out_.reset(out[0]);
    err_.reset(err[0]);
    const UniqueFd out_write(out[1]), err_write(err[1]);
    const UniqueFd input = input_file(options.input);
    std::vector<std::string> words = command, environment = environment_for(options);
    const std::vector<char*> argv = pointers(words), envp = pointers(environment);
    pid_ = ::fork();
    if (pid_ < 0) throw std::runtime_error("fork");
    if (pid_ > 0) return;

    take_default_signals();
    ::setpgid(0, 0);  // the program does not get signals to the test's group
    ::dup2(input.get(), 0);
    ::dup2(out_write.get(), 1);
    ::dup2(err_write.get(), 2);
    if (!options.directory.empty() && ::chdir(options.directory.c_str()) != 0) ::_exit(126);
    ::execvpe(argv[0], argv.data(), envp.data());
    ::_exit(127);
}

Program::~Program() {
    if (reaped_) return;
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
}

void Program::signal(int number) const { ::kill(pid_, number); }

/// Waits once for output; false when both streams are closed or the time is over.
bool Program::read_some(Clock::time_point until) {
    std::array<pollfd, 2> streams{{{out_.get(), POLLIN, 0}, {err_.get(), POLLIN, 0}}};
    if (!out_ && !err_) return false;
    const auto left =
        std::chrono::ceil<std::chrono::milliseconds>(std::min(until, deadline_) - Clock::now()).count();
    if (left <= 0) return false;
    if (::poll(streams.data(), streams.size(), static_cast<int>(left)) <= 0) return true;
    if (streams[0].revents != 0 && !append_from(out_.get(), outcome_.out)) out_.reset();
    if (streams[1].revents != 0 && !append_from(err_.get(), outcome_.err)) err_.reset();
    return true;
}

bool Program::wait_for_output(const std::string& text, std::chrono::milliseconds patience) {
    const Clock::time_point until = Clock::now() + patience;
    const auto seen = [&] {
        return outcome_.out.find(text) != std::string::npos || outcome_.err.find(text) != std::string::npos;
    };
    while (!seen()) {
        if (!read_some(until)) return seen();
    }
    return true;
}

Outcome Program::wait() {
    while (read_some(deadline_)) {
    }
    outcome_.timed_out = out_ || err_;
    int status = 0;
    while (::waitpid(pid_, &status, WNOHANG) == 0) {
        if (Clock::now() > deadline_) {
            outcome_.timed_out = true;
            ::kill(pid_, SIGKILL);
            ::waitpid(pid_, &status, 0);
            break;
        }
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    reaped_ = true;
    outcome_.signaled = WIFSIGNALED(status);
    outcome_.status = outcome_.signaled ? WTERMSIG(status) : WEXITSTATUS(status);
    outcome_.took = std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - started_);
    return outcome_;
}

Outcome run(const std::vector<std::string>& command, const RunOptions& options) {
    return Program(command, options).wait();
}

std::string said_of_its_own_job(const Outcome& outcome) {
    std::string said;
    for (std::size_t at = 0; at < outcome.err.size();) {
        const std::size_t end = std::min(outcome.err.find('\n', at), outcome.err.size() - 1) + 1;
        const std::string line = outcome.err.substr(at, end - at);
        if (line.find("a ddprun that was killed had left ") == std::string::npos) said += line;
        at = end;
    }
    return said;
}

namespace {

/// Processes whose /proc file, a list of texts that end with NUL, contains `wanted`.
std::vector<pid_t> processes_whose(const char* file_name, const std::string& wanted) {
    std::vector<pid_t> found;
    DIR* proc = ::opendir("/proc");
    while (const dirent* entry = ::readdir(proc)) {
        const pid_t pid = std::atoi(entry->d_name);
        if (pid <= 0) continue;
        std::ifstream file("/proc/" + std::to_string(pid) + "/" + file_name, std::ios::binary);
        const std::string content{std::istreambuf_iterator<char>(file), {}};
        const std::string padded = std::string(1, '\0') + content;
        if (padded.find(std::string(1, '\0') + wanted + std::string(1, '\0')) != std::string::npos)
            found.push_back(pid);
    }
    ::closedir(proc);
    return found;
}

}  // namespace

std::vector<pid_t> processes_with(const std::string& variable) {
    return processes_whose("environ", variable);
}

std::vector<pid_t> processes_called_with(const std::string& argument) {
    return processes_whose("cmdline", argument);
}

std::vector<pid_t> children_named(pid_t parent, const std::string& name) {
    const std::string self = std::to_string(parent);
    std::ifstream file("/proc/" + self + "/task/" + self + "/children");
    // One read takes the whole list: a list that is read in pieces also has processes that start meanwhile.
    std::string all;
    std::getline(file, all);
    std::vector<pid_t> found;
    std::istringstream children(all);
    for (pid_t pid = 0; children >> pid;) {
        std::ifstream comm("/proc/" + std::to_string(pid) + "/comm");
        std::string word;
        if (comm >> word && word == name) found.push_back(pid);
    }
    return found;
}

bool all_gone(const std::string& variable, std::chrono::milliseconds timeout) {
    const Clock::time_point until = Clock::now() + timeout;
    while (!processes_with(variable).empty()) {
        if (Clock::now() > until) return false;
        std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
    return true;
}

std::string path_of(const char* variable) {
    const char* path = std::getenv(variable);
    if (path == nullptr)
        throw std::runtime_error(std::string(variable) + " is not set; run this test through meson test");
    return path;
}

std::vector<std::string> ddprun_probe(const std::vector<std::string>& options,
                                      const std::vector<std::string>& acts) {
    std::vector<std::string> command{path_of("DDPRUN")};
    command.insert(command.end(), options.begin(), options.end());
    command.push_back(path_of("PROBE"));
    command.insert(command.end(), acts.begin(), acts.end());
    return command;
}

std::vector<std::string> with_refused_calls(long first, long last, int error,
                                            std::vector<std::string> command) {
    const std::vector<std::string> filter{path_of("REFUSED_CALLS"), std::to_string(first),
                                          std::to_string(last), std::to_string(error)};
    command.insert(command.begin(), filter.begin(), filter.end());
    return command;
}

std::string unique_name(const std::string& stem) {
    static std::atomic<int> counter{0};
    return stem + "-" + std::to_string(::getpid()) + "-" + std::to_string(++counter);
}

}  // namespace ddprun::test
