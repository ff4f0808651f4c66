#pragma once

#include <sys/types.h>

#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include "env/unique_fd.h"

namespace ddprun::test {

/// A program's end and output.
struct Outcome {
    bool timed_out = false;
    bool signaled = false;
    int status = 0;  ///< exit code, or the signal
    std::string out;
    std::string err;
    std::chrono::milliseconds took{};
};

struct RunOptions {
    std::vector<std::string> environment;  ///< "NAME=value", added to (and winning over) ours
    std::vector<std::string> unset;
    std::string directory;
    std::string input;  ///< its standard input; "" is /dev/null
    /// The limit prevents endless tests; it is generous, because a slow machine may take a minute for work of
    /// seconds.
    std::chrono::milliseconds timeout = std::chrono::minutes(3);
};

/// Default options with these variables.
RunOptions with_environment(std::vector<std::string> environment);

/// The variable by which a program that is built with AddressSanitizer does not look for leaks at its end.
std::string without_leak_check();

/// A running program, whose output this object collects (call wait). The destructor kills it.
class Program {
  public:
    explicit Program(const std::vector<std::string>& command, const RunOptions& options = {});
    ~Program();
    Program(const Program&) = delete;
    Program& operator=(const Program&) = delete;

    [[nodiscard]] pid_t pid() const { return pid_; }
    void signal(int number) const;
    /// Reads until `text` has appeared in stdout or stderr; false if the program ends or the time is over
    /// first.
    bool wait_for_output(const std::string& text,
                         std::chrono::milliseconds patience = std::chrono::minutes(1));
    /// Waits until the program has ended and closed its output.
    Outcome wait();

  private:
    bool read_some(std::chrono::steady_clock::time_point until);
    RunOptions options_;
    pid_t pid_ = -1;
    UniqueFd out_, err_;
    Outcome outcome_;
    std::chrono::steady_clock::time_point started_, deadline_;
    bool reaped_ = false;
};

Outcome run(const std::vector<std::string>& command, const RunOptions& options = {});

/// The stderr of a ddprun without lines about jobs that another test has killed meanwhile.
std::string said_of_its_own_job(const Outcome& outcome);

/// Living processes (no zombies) whose environment holds "NAME=value".
std::vector<pid_t> processes_with(const std::string& variable);
/// Living processes that have this argument.
std::vector<pid_t> processes_called_with(const std::string& argument);
/// The children a process has now whose command name (/proc/<pid>/comm) is `name`, oldest first.
std::vector<pid_t> children_named(pid_t parent, const std::string& name);
/// Waits until no such process is left; false after `timeout`.
bool all_gone(const std::string& variable, std::chrono::milliseconds timeout = std::chrono::minutes(1));
/// The programs' paths, which meson gives to the tests as environment variables: DDPRUN, PROBE, TRAIN.
std::string path_of(const char* variable);
/// ddprun with options, and the probe (tests/system/probe.cpp) with its acts as the program.
std::vector<std::string> ddprun_probe(const std::vector<std::string>& options,
                                      const std::vector<std::string>& acts);
/// The command, under a filter that refuses the system calls with these numbers.
std::vector<std::string> with_refused_calls(long first, long last, int error,
                                            std::vector<std::string> command);
/// A unique name: "<stem>-<pid>-<counter>".
std::string unique_name(const std::string& stem);

}  // namespace ddprun::test
