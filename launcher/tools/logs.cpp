#include "launcher/tools/logs.h"

#include <fcntl.h>
#include <fmt/core.h>
#include <poll.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <utility>

#include "env/print.h"
#include "env/text.h"
#include "launcher/output/kept_output.h"
#include "launcher/tools/commands.h"

namespace ddprun {
namespace {

/// The limit on an unfinished line that is held back.
constexpr std::size_t kMaxHeldLine = 1024 * 1024;

/// Network file systems do not notify about growing files, so we poll.
constexpr int kPollMs = 200;
constexpr int kPollsPerQuestion = 5;

void print_lines(const std::string& prefix, std::string_view lines) {
    if (prefix.empty()) {
        std::fwrite(lines.data(), 1, lines.size(), stdout);
        return;
    }
    while (!lines.empty()) {
        const std::size_t end = std::min(lines.find('\n'), lines.size() - 1) + 1;
        ddprun::print("{}{}", prefix, lines.substr(0, end));
        lines.remove_prefix(end);
    }
}

std::string log_directory_of(const JobStatus& status, const WorkerStatus& worker) {
    const auto node = static_cast<std::size_t>(worker.node);
    return node < status.hosts.size() ? status.hosts[node].log_directory : status.log_directory;
}

/// The log directories of all nodes, which a restart changes.
std::vector<std::string> log_directories(const JobStatus& status) {
    std::vector<std::string> directories;
    for (const HostStatus& host : status.hosts) directories.push_back(host.log_directory);
    return directories;
}

std::vector<FollowedLog> files_of(const JobStatus& status, std::optional<int> rank) {
    std::vector<FollowedLog> files;
    for (const WorkerStatus& worker : status.workers) {
        if (rank && worker.rank != *rank) continue;
        const std::string prefix = rank ? "" : fmt::format("[{}]: ", worker.rank);
        for (const char* stream : {"stdout", "stderr"}) {
            files.emplace_back(
                fmt::format("{}/{}/{}.log", log_directory_of(status, worker), worker.rank, stream),
                [prefix](std::string_view lines) { print_lines(prefix, lines); },
                [](const std::string& what) { ddprun::print(stderr, "ddprun logs: {}\n", printable(what)); });
        }
    }
    return files;
}

/// The reason why no log can be shown; "" when one can.
std::string obstacle(const JobStatus& status, std::optional<int> rank) {
    const auto keeps_none = [&] {
        return fmt::format("job {} keeps no log files (start it with --log-dir DIR)", status.job);
    };
    if (!rank) return status.log_directory.empty() ? keeps_none() : "";
    const auto worker = std::find_if(status.workers.begin(), status.workers.end(),
                                     [&](const WorkerStatus& w) { return w.rank == *rank; });
    if (worker == status.workers.end())
        return fmt::format("job {} has no rank {}; it has {} workers", status.job, *rank, status.world_size);
    const std::string directory = log_directory_of(status, *worker);
    if (directory.empty()) return keeps_none();
    // The directory often lies on a file system that all nodes share.
    if (::access(directory.c_str(), R_OK | X_OK) == 0) return "";
    const auto node = static_cast<std::size_t>(worker->node);
    return fmt::format("rank {} runs on {}; its log files are there, in {}", *rank,
                       node < status.hosts.size() ? status.hosts[node].host : status.host, directory);
}

/// Follows the files until the job has ended. A restart has another directory.
void follow(const RunningJob& job, std::vector<std::string> directories, std::vector<FollowedLog> files,
            std::optional<int> rank) {
    for (int polls = 1;; ++polls) {
        ::poll(nullptr, 0, kPollMs);
        if (polls % kPollsPerQuestion == 0) {
            const Result<JobStatus> status = ask_status(job);
            const bool is_gone =
                !status && (status.error().code == Errc::NotFound || status.error().code == Errc::Closed);
            const bool is_next =
                status && !status->log_directory.empty() && log_directories(*status) != directories;
            if (is_gone || is_next) {
                for (FollowedLog& file : files) file.read_rest();
            }
            if (is_gone) break;
            if (is_next) {
                directories = log_directories(*status);
                files = files_of(*status, rank);
            }
        }
        for (FollowedLog& file : files) file.read_new();
        std::fflush(stdout);
    }
    std::fflush(stdout);
}

}  // namespace

/// The pieces, newest first. In this order a rotation meanwhile shows a piece twice, but hides none. The next
/// call finds a piece that is newer than the first.
std::vector<FollowedLog::Piece> FollowedLog::pieces() const {
    std::vector<Piece> found;
    for (int number = 0; number <= LogFile::kKept; ++number) {
        const std::string path = number == 0 ? path_ : fmt::format("{}.{}", path_, number);
        Piece piece{UniqueFd(::open(path.c_str(), O_RDONLY | O_CLOEXEC)), 0, 0};
        struct stat status {};
        if (!piece.fd || ::fstat(piece.fd.get(), &status) != 0) continue;
        piece.device = status.st_dev;
        piece.inode = status.st_ino;
        const auto same = [&](const Piece& other) {
            return other.device == piece.device && other.inode == piece.inode;
        };
        if (std::none_of(found.begin(), found.end(), same)) found.push_back(std::move(piece));
    }
    return found;
}

/// The index of the piece that is being read; the number of pieces when it is gone.
std::size_t FollowedLog::place_in(const std::vector<Piece>& pieces) const {
    std::size_t place = 0;
    while (place < pieces.size() &&
           (pieces[place].device != here_.device || pieces[place].inode != here_.inode))
        ++place;
    return place;
}

bool FollowedLog::read_new() {
    for (;;) {
        read_to_end();
        std::vector<Piece> all = pieces();
        if (all.empty()) return static_cast<bool>(here_.fd);
        const std::size_t place = here_.fd ? place_in(all) : all.size();
        if (place == 0) return true;
        // The piece has been rotated: it no longer grows, but may have grown since it was read.
        read_to_end();
        if (here_.fd && place == all.size())
            loss_(fmt::format("{}: some lines were rotated away before they could be read", path_));
        here_ = std::move(all[place - 1]);
    }
}

void FollowedLog::read_rest() {
    read_new();
    if (!held_.empty()) lines_(std::exchange(held_, {}) + '\n');
}

void FollowedLog::read_to_end() {
    if (!here_.fd) return;
    char bytes[64 * 1024];
    for (ssize_t n = 0; (n = ::read(here_.fd.get(), bytes, sizeof bytes)) > 0;)
        hand_over({bytes, static_cast<std::size_t>(n)});
}

void FollowedLog::hand_over(std::string_view bytes) {
    held_.append(bytes);
    const std::size_t end = held_.rfind('\n');
    if (end != std::string::npos) {
        lines_(std::string_view(held_).substr(0, end + 1));
        held_.erase(0, end + 1);
    } else if (held_.size() > kMaxHeldLine) {
        held_ += '\n';
        lines_(std::exchange(held_, {}));
    }
}

int show_logs(const AskOptions& options) {
    const auto cannot = [](std::string why) { return complain("logs", {Errc::NotFound, std::move(why), 0}); };
    const Result<RunningJob> job = choose_job(options.job);
    if (!job) return complain("logs", job.error());
    const Result<JobStatus> status = ask_status(*job);
    if (!status) return cannot(status.error().what);
    if (std::string why = obstacle(*status, options.rank); !why.empty()) return cannot(std::move(why));

    std::vector<FollowedLog> files = files_of(*status, options.rank);
    bool found = false;
    for (FollowedLog& file : files) found = file.read_new() || found;
    std::fflush(stdout);
    if (options.follow) {
        follow(*job, log_directories(*status), std::move(files), options.rank);
        return 0;
    }
    for (FollowedLog& file : files) file.read_rest();
    std::fflush(stdout);
    return found ? 0 : cannot(fmt::format("no log files in {} yet", status->log_directory));
}

}  // namespace ddprun
