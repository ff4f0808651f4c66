#include <fcntl.h>
#include <fmt/core.h>
#include <poll.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>

#include "env/print.h"

#include "launcher/ask.h"
#include "launcher/exit_codes.h"

namespace ddprun {
namespace {

/// Files on a network file system tell nobody that they grow: they are looked at.
constexpr int kLookEveryMs = 200;
constexpr int kAskEveryLooks = 5;
/// An unfinished line is held back up to this, so that lines of several files are not mixed.
constexpr std::size_t kMaxHeldLine = 1024 * 1024;

/// One log file, read as it grows, also through its rotation.
class FollowedFile {
  public:
    FollowedFile(std::string path, std::string prefix) : path_(std::move(path)), prefix_(std::move(prefix)) {}

    /// Prints what is new. True: something has been read since the beginning.
    bool print_new() {
        for (;;) {
            read_to_end();
            struct stat here{}, there{};
            if (fd_ && (::stat(path_.c_str(), &there) != 0 || ::fstat(fd_.get(), &here) != 0 ||
                        (here.st_ino == there.st_ino && here.st_dev == there.st_dev))) {
                return true;
            }
            // Not opened yet, or rotated: what has its name now is the next piece.
            UniqueFd next(::open(path_.c_str(), O_RDONLY | O_CLOEXEC));
            if (!next) return static_cast<bool>(fd_);
            read_to_end();  // what came between the first look and the rotation
            fd_ = std::move(next);
        }
    }
    /// The file has come to its end: its half line too.
    void print_rest() {
        print_new();
        if (!held_.empty()) print(std::exchange(held_, {}) + '\n');
    }

  private:
    void read_to_end() {
        if (!fd_) return;
        char piece[64 * 1024];
        for (ssize_t n = 0; (n = ::read(fd_.get(), piece, sizeof piece)) > 0;) {
            held_.append(piece, static_cast<std::size_t>(n));
            const std::size_t end = held_.rfind('\n');
            if (end != std::string::npos) {
                print(held_.substr(0, end + 1));
                held_.erase(0, end + 1);
            } else if (held_.size() > kMaxHeldLine) {
                print(std::exchange(held_, {}) + '\n');
            }
        }
        std::fflush(stdout);
    }

    void print(std::string_view lines) const {
        if (prefix_.empty()) {
            std::fwrite(lines.data(), 1, lines.size(), stdout);
            return;
        }
        while (!lines.empty()) {
            const std::size_t end = std::min(lines.find('\n'), lines.size() - 1) + 1;
            ddprun::print("{}{}", prefix_, lines.substr(0, end));
            lines.remove_prefix(end);
        }
    }

    std::string path_, prefix_;
    UniqueFd fd_;
    std::string held_;
};

std::vector<FollowedFile> files_of(const JobStatus& status, std::optional<int> rank) {
    std::vector<FollowedFile> files;
    for (const WorkerStatus& worker : status.workers) {
        if (rank && worker.rank != *rank) continue;
        const std::string prefix = rank ? "" : fmt::format("[{}]: ", worker.rank);
        for (const char* stream : {"stdout", "stderr"}) {
            files.emplace_back(fmt::format("{}/{}/{}.log", status.log_directory, worker.rank, stream), prefix);
        }
    }
    return files;
}

/// "" when there is something to show.
std::string obstacle(const JobStatus& status, std::optional<int> rank) {
    if (status.log_directory.empty()) return fmt::format("job {} keeps no log files (start it with --log-dir DIR)", status.job);
    if (!rank) return {};
    const bool is_here = std::any_of(status.workers.begin(), status.workers.end(), [&](const WorkerStatus& w) { return w.rank == *rank; });
    return is_here ? "" : fmt::format("job {} has no rank {} on {}", status.job, *rank, status.host);
}

/// Until the job is gone. A restart has a directory of its own.
void follow(const RunningJob& job, std::string directory, std::vector<FollowedFile> files, std::optional<int> rank) {
    for (int look = 1;; ++look) {
        ::poll(nullptr, 0, kLookEveryMs);
        if (look % kAskEveryLooks == 0) {
            const Result<JobStatus> status = ask_status(job);
            const bool is_gone = !status && (status.error().code == Errc::NotFound || status.error().code == Errc::Closed);
            const bool is_next = status && !status->log_directory.empty() && status->log_directory != directory;
            if (is_gone || is_next) {
                for (FollowedFile& file : files) file.print_rest();
            }
            if (is_gone) break;
            if (is_next) {
                directory = status->log_directory;
                files = files_of(*status, rank);
            }
        }
        for (FollowedFile& file : files) file.print_new();
    }
    std::fflush(stdout);
}

}  // namespace

int show_logs(const AskOptions& options) {
    const auto complain = [](std::string_view why, ExitCode code) {
        ddprun::print(stderr, "ddprun logs: {}\n", why);
        return static_cast<int>(code);
    };
    if (!options.words.empty()) return complain(fmt::format("'{}': expected -r RANK", options.words.front()), ExitCode::Usage);
    const Result<RunningJob> job = choose_job(options.job);
    if (!job) return complain(job.error().what, job.error().code == Errc::NotFound ? ExitCode::Unavailable : ExitCode::Usage);
    const Result<JobStatus> status = ask_status(*job);
    if (!status) return complain(status.error().what, ExitCode::Unavailable);
    if (const std::string why = obstacle(*status, options.rank); !why.empty()) return complain(why, ExitCode::Unavailable);

    std::vector<FollowedFile> files = files_of(*status, options.rank);
    bool found = false;
    for (FollowedFile& file : files) found = file.print_new() || found;
    if (options.follow) {
        follow(*job, status->log_directory, std::move(files), options.rank);
        return 0;
    }
    for (FollowedFile& file : files) file.print_rest();
    std::fflush(stdout);
    if (!found) return complain(fmt::format("no log files in {} yet", status->log_directory), ExitCode::Unavailable);
    return 0;
}

}  // namespace ddprun
