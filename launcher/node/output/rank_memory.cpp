#include "launcher/node/output/rank_memory.h"

#include <algorithm>

#include "env/io/file.h"
#include "launcher/node/output/log_files.h"

namespace ddprun {
namespace {

constexpr std::size_t kTailBytes = 16 * 1024;
constexpr std::size_t kReportLines = 20;

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

std::vector<std::string> RankMemory::last_stderr(int rank) const {
    const auto found = ranks_.find(rank);
    if (found == ranks_.end()) return {};
    const Rank& one = found->second;
    if (one.stderr_path.empty()) return last_lines(one.tail, kReportLines, one.tail_is_cut);
    const std::string end = read_file_end(one.stderr_path, kTailBytes);
    return last_lines(end, kReportLines, end.size() == kTailBytes);
}

TimePoint RankMemory::last_output(int rank) const {
    const auto found = ranks_.find(rank);
    if (found == ranks_.end()) return {};
    TimePoint latest = found->second.last_output;
    for (const std::string& path : found->second.direct_files) latest = std::max(latest, last_write(path));
    return latest;
}

}  // namespace ddprun
