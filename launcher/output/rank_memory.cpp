#include "launcher/output/rank_memory.h"

#include <algorithm>

#include "env/io/file.h"
#include "launcher/output/log_files.h"

namespace ddprun {
namespace {

constexpr std::size_t kTailBytes = 16 * 1024;
constexpr std::size_t kReportLines = 20;
/// One question asks for all ranks: the file times that it has read serve the other ranks too.
constexpr Duration kFileTimesLast = std::chrono::milliseconds(100);
constexpr Duration kLongestWaitForFiles = std::chrono::milliseconds(50);

}  // namespace

void RankMemory::begin(int rank, TimePoint now) {
    Rank& one = ranks_[rank];
    one.tail.clear();
    one.tail_is_cut = false;
    one.last_output = now;
}

void RankMemory::on_output(int rank, Streams stream, std::string_view chunk, TimePoint now) {
    Rank& one = ranks_[rank];
    one.last_output = now;
    if (stream == Streams::Err) remember(one, chunk);
}

void RankMemory::remember(Rank& rank, std::string_view chunk) {
    if (chunk.size() >= kTailBytes) {
        rank.tail_is_cut = true;
        rank.tail = chunk.substr(chunk.size() - kTailBytes);
        return;
    }
    rank.tail += chunk;
    if (rank.tail.size() <= 2 * kTailBytes) return;
    rank.tail_is_cut = true;
    rank.tail.erase(0, rank.tail.size() - kTailBytes);
}

void RankMemory::add_direct_file(int rank, Streams stream, const std::string& path) {
    std::vector<std::string>& files = ranks_[rank].direct_files;
    if (std::find(files.begin(), files.end(), path) == files.end()) files.push_back(path);
    if (stream == Streams::Err) ranks_[rank].stderr_path = path;
}

bool RankMemory::has_direct_files() const {
    return std::any_of(ranks_.begin(), ranks_.end(),
                       [](const auto& one) { return !one.second.direct_files.empty(); });
}

std::vector<std::string> RankMemory::last_stderr(int rank) const {
    const auto found = ranks_.find(rank);
    if (found == ranks_.end()) return {};
    const Rank& one = found->second;
    if (one.stderr_path.empty()) return last_lines(one.tail, kReportLines, one.tail_is_cut);
    const std::string end = read_file_end(one.stderr_path, kTailBytes);
    return last_lines(end, kReportLines, end.size() == kTailBytes);
}

/// Waits for another thread only when it has just begun: one that a file system holds up must not delay every
/// question.
void RankMemory::read_file_times() {
    const TimePoint now = MonotonicClock::now();
    TimePoint deadline = now;
    if (!reading_) {
        if (file_times_read_ != TimePoint{} && now - file_times_read_ < kFileTimesLast) return;
        std::vector<std::string> paths;
        for (const auto& [rank, one] : ranks_)
            paths.insert(paths.end(), one.direct_files.begin(), one.direct_files.end());
        reading_.emplace([paths = std::move(paths)] {
            FileTimes times;
            for (const std::string& path : paths) times[path] = last_write(path);
            return times;
        });
        deadline += kLongestWaitForFiles;
    }
    std::optional<FileTimes> times = reading_->wait(deadline);
    if (!times) return;
    file_times_ = *std::move(times);
    file_times_read_ = MonotonicClock::now();
    reading_.reset();
}

TimePoint RankMemory::last_output(int rank) {
    const auto found = ranks_.find(rank);
    if (found == ranks_.end()) return {};
    const Rank& one = found->second;
    TimePoint latest = one.last_output;
    if (one.direct_files.empty()) return latest;
    read_file_times();
    for (const std::string& path : one.direct_files) {
        if (const auto time = file_times_.find(path); time != file_times_.end())
            latest = std::max(latest, time->second);
    }
    return latest;
}

}  // namespace ddprun
