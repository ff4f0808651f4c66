#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "env/os/event_loop.h"
#include "env/os/log.h"
#include "env/os/system.h"
#include "launcher/ends/explain.h"
#include "launcher/guard/guards.h"
#include "launcher/node/workers.h"
#include "launcher/output/output.h"

namespace ddprun {

/// Reports when a file has been written: closed after writing, or replaced by a rename. On the event loop.
class FileWatch {
  public:
    /// Error: System (the user's inotify instances are used up).
    static Result<std::unique_ptr<FileWatch>> open(os::EventLoop& loop);
    ~FileWatch();
    FileWatch(const FileWatch&) = delete;
    FileWatch& operator=(const FileWatch&) = delete;

    /// Forgets all files. Cheap, unlike the destructor: the kernel takes 4 to 16 ms to close the descriptor.
    void clear();
    /// Calls `written` each time. The directory of a file that does not exist yet must exist. Error: System,
    /// naming the path.
    Status add(const std::string& path, std::function<void()> written);

  private:
    struct File {
        std::string name;  ///< in the directory that is watched; "": the file itself is watched
        std::function<void()> written;
    };
    FileWatch(os::EventLoop& loop, UniqueFd fd) : loop_(loop), fd_(std::move(fd)) {}
    void read_events();

    os::EventLoop& loop_;
    UniqueFd fd_;
    std::map<int, File> files_;  ///< by watch descriptor
};

/// Reports the ends of this node's workers with all that is known of each, and kills workers that have failed
/// and do not exit. For the loop's thread.
class WorkerEnds {
  public:
    struct Parts {
        os::EventLoop& loop;
        os::System& system;
        Output& output;
        Warden* warden;  ///< null: there is none
        os::Log& log;
        const AgentConfig& config;
        NodeWorkers& workers;
        SendToHead send;
        /// Called when a worker has written its error report, before it exits.
        std::function<void(int local_rank)> reported_error;
    };
    /// Borrows the parts for its whole life.
    explicit WorkerEnds(Parts parts) : parts_(std::move(parts)), workers_(parts_.workers) {}
    ~WorkerEnds();
    WorkerEnds(const WorkerEnds&) = delete;
    WorkerEnds& operator=(const WorkerEnds&) = delete;

    /// Another generation begins. `in_place`: its surviving workers keep their files.
    void begin_generation(bool in_place);
    /// Watches the error reports from a second after the start on: a short job need not pay for it.
    void watch_reports_later();
    /// Adds the report of an end. send() sends those that were seen together in the order of their likely
    /// causes.
    void add(const agent_action::ReportExit& end);
    void send();
    /// Kills a worker that has done what it should exit after, if it has not exited within --failure-grace.
    void await_exit(int local_rank, const std::string& what_it_did);

    /// The content of the error file of this node's worker `rank`; "" none, or not this node's worker.
    [[nodiscard]] std::string error_report(int rank) const;
    /// The first worker of this node that failed by itself in this generation; nullopt: none.
    [[nodiscard]] const std::optional<rdzv::WorkerExited>& first_failure() const { return first_failure_; }
    /// When the last end was seen.
    [[nodiscard]] TimePoint last_seen() const { return last_seen_; }

  private:
    void watch_reports();
    void report_written(int local_rank);
    void kill_failing(int local_rank, pid_t pid, const std::string& what_it_did);
    [[nodiscard]] std::string read_report(const Worker& worker) const;
    [[nodiscard]] Duration lead_of_reports();
    [[nodiscard]] rdzv::WorkerExited facts_of(const agent_action::ReportExit& end) const;
    void note_error_report(const agent_action::ReportExit& end, const std::string& content,
                           rdzv::WorkerExited& report);
    void explain(int local_rank, const std::string& error_report, rdzv::WorkerExited& report);
    [[nodiscard]] std::string meaning_of(int local_rank, const std::string& error_report,
                                         const rdzv::WorkerExited& report) const;

    Parts parts_;
    NodeWorkers& workers_;
    std::unique_ptr<FileWatch> files_;  ///< null: error reports are not watched
    os::EventLoop::TimerId watch_timer_ = 0;
    DeathWitness witness_;
    std::optional<rdzv::WorkerExited> first_failure_;
    std::optional<Duration> clock_lead_;     ///< lead of the error files' clock; nullopt: not measured
    std::vector<rdzv::WorkerExited> exits_;  ///< not sent yet
    TimePoint last_seen_{};
};

/// Finds and ends processes that workers leave behind. For the loop's thread.
class LeftProcesses {
  public:
    /// Borrows all for its whole life; `warden` null: there is none.
    LeftProcesses(os::EventLoop& loop, os::System& system, Warden* warden, os::Log& log,
                  const AgentConfig& config, NodeWorkers& workers)
        : loop_(loop), system_(system), warden_(warden), log_(log), config_(config), workers_(workers) {}

    /// Signals the rest of a worker's group and reaps the worker.
    void bury(const agent_action::BuryGroup& action);
    /// Searches for what is left and signals it. Returns what was found.
    std::vector<pid_t> sweep(int signal);

  private:
    void kill_rest_of_group(pid_t group, int rank);
    void end_rest_of(const WorkerMark& worker, int rank, int signal);
    [[nodiscard]] std::vector<pid_t> find() const;
    [[nodiscard]] bool has_been_asked(pid_t pid) const;

    os::EventLoop& loop_;
    os::System& system_;
    Warden* warden_;
    os::Log& log_;
    const AgentConfig& config_;
    NodeWorkers& workers_;
};

/// "1 process", "3 processes".
std::string count_processes(std::size_t processes);

}  // namespace ddprun
