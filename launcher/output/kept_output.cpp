#include "launcher/output/kept_output.h"

#include <fcntl.h>
#include <fmt/core.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <utility>

#include "env/hmac.h"
#include "env/io/file.h"
#include "env/text.h"

namespace ddprun {

namespace {

const char* file_name(Streams stream) { return stream == Streams::Out ? "stdout.log" : "stderr.log"; }

bool wants_files(const OutputSpec& output) {
    const auto any = [](const StreamsMap& map) {
        return map.everyone != Streams::None || !map.by_local_rank.empty();
    };
    return any(output.redirects) || any(output.tee) || !output.stdout_filters.empty() ||
           !output.stderr_filters.empty();
}

/// A run id as part of a path: those of PBS array jobs have brackets, users' may have any character and
/// length.
std::string as_file_name(std::string id) {
    constexpr std::size_t kLongest = 200;  // of the 255 bytes of a name, with what stands around it
    if (id.size() > kLongest) id.resize(kLongest);
    std::replace_if(
        id.begin(), id.end(), [](unsigned char c) { return std::isalnum(c) == 0 && c != '-' && c != '.'; },
        '_');
    return id;
}

constexpr std::size_t kTailBytes = 16 * 1024;
constexpr std::size_t kReportLines = 20;
/// One question asks for all ranks: the file times that it has read serve the other ranks too.
constexpr Duration kFileTimesLast = std::chrono::milliseconds(100);
constexpr Duration kLongestWaitForFiles = std::chrono::milliseconds(50);

}  // namespace

StreamRoute route_of(const OutputSpec& spec, int local_rank, Streams stream, bool has_directory) {
    const bool redirected = has(spec.redirects.of(local_rank), stream);
    const bool teed = has(spec.tee.of(local_rank), stream);
    const bool is_kept = spec.log_dir.empty() || has_directory;
    const std::vector<int>& shown = spec.local_ranks;
    const bool is_shown = shown.empty() || std::find(shown.begin(), shown.end(), local_rank) != shown.end();
    StreamRoute route;
    route.to_console = is_shown && (!redirected || teed || !is_kept);
    route.to_file = (redirected || teed) && has_directory;
    route.is_filtered = !filters_of(spec, stream).empty();
    if (route.to_console || route.is_filtered) route.needs_pipe = true;
    else if (route.to_file) route.needs_pipe = spec.max_file_bytes != 0;
    else route.needs_pipe = stream == Streams::Err;  // the report needs its last lines
    return route;
}

const std::vector<std::string>& filters_of(const OutputSpec& spec, Streams stream) {
    return stream == Streams::Out ? spec.stdout_filters : spec.stderr_filters;
}

Status AttemptFiles::begin(int attempt) {
    for (LogWriter::Handle* file : {&filtered_out_, &filtered_err_}) {
        if (*file) writer_.close(std::exchange(*file, nullptr));
    }
    directory_.clear();
    if (spec_.log_dir.empty()) return {};
    std::string directory = fmt::format("{}/attempt_{}", spec_.log_dir, attempt);
    if (Status made = make_directories(directory); !made) return made;
    directory_ = std::move(directory);
    return {};
}

Status AttemptFiles::make_rank_directory(const StreamOwner& owner) const {
    if (directory_.empty()) return {};
    return make_directories(fmt::format("{}/{}", directory_, owner.rank));
}

std::string AttemptFiles::path_of(const StreamOwner& owner, Streams stream) const {
    return fmt::format("{}/{}/{}", directory_, owner.rank, file_name(stream));
}

Result<LogWriter::Handle> AttemptFiles::open(const std::string& path) {
    Result<LogFile> opened = LogFile::open(path, spec_.max_file_bytes);
    if (!opened) return opened.error();
    return writer_.add(*std::move(opened));
}

Result<LogWriter::Handle> AttemptFiles::filtered(Streams stream) {
    if (filters_of(spec_, stream).empty() || directory_.empty()) return LogWriter::Handle();
    LogWriter::Handle& file = stream == Streams::Out ? filtered_out_ : filtered_err_;
    if (file) return file;
    Result<LogWriter::Handle> opened = open(fmt::format("{}/filtered_{}", directory_, file_name(stream)));
    if (opened) file = *opened;
    return opened;
}

Status check_room(const std::string& directory) {
    const std::string some(4096, 'x');
    std::string path = directory + "/.room-XXXXXX";
    UniqueFd file(::mkostemp(path.data(), O_CLOEXEC));
    bool has_room =
        file && ::write(file.get(), some.data(), some.size()) == static_cast<ssize_t>(some.size());
    // close(2) is where NFS reports a full disk.
    if (has_room) has_room = ::close(file.release()) == 0;
    const int error = errno;
    ::unlink(path.c_str());
    const bool is_full = !has_room && (error == ENOSPC || error == EDQUOT);
    return is_full ? Status(Error::system("write into " + directory, error)) : Status();
}

std::string read_file_end(const std::string& path, std::size_t max_bytes) {
    const Result<UniqueFd> fd = open_regular_file(path);
    if (!fd) return "";
    const off_t size = ::lseek(fd->get(), 0, SEEK_END);
    const off_t start = std::max<off_t>(0, size - static_cast<off_t>(max_bytes));
    std::string text(static_cast<std::size_t>(std::max<off_t>(0, size - start)), '\0');
    const ssize_t n = ::pread(fd->get(), text.data(), text.size(), start);
    text.resize(n > 0 ? static_cast<std::size_t>(n) : 0);
    return text;
}

std::vector<std::string> last_lines(std::string_view text, std::size_t count, bool is_cut) {
    if (text.ends_with('\n')) text.remove_suffix(1);
    if (text.empty()) return {};
    std::vector<std::string> lines;
    for (const std::string_view line : split(text, '\n')) lines.emplace_back(line);
    if (is_cut && lines.size() > 1) lines.erase(lines.begin());
    if (lines.size() > count) lines.erase(lines.begin(), lines.end() - static_cast<std::ptrdiff_t>(count));
    return lines;
}

Result<OutputSpec> prepare_log_directory(const JobSpec& spec, os::Log& log) {
    OutputSpec output = spec.output;
    if (output.log_dir.empty() && !wants_files(output)) return output;
    const char* temporary = std::getenv("TMPDIR");
    const std::string base = !output.log_dir.empty() ? output.log_dir
                             : temporary != nullptr  ? temporary
                                                     : "/tmp";
    const std::string stem = output.log_dir.empty() ? "ddprun_" : "";
    output.log_dir = fmt::format("{}/{}{}_{}", base, stem, as_file_name(spec.rendezvous.run_id),
                                 random_hex(4).value_or("0"));
    const Status made = make_directories(output.log_dir);
    if (made) {
        if (spec.output.log_dir.empty())
            log.info("log files are in {} (no --log-dir was given)", output.log_dir);
        return output;
    }
    if (!spec.output.log_dir.empty())
        return Error{Errc::InvalidArgument, "--log-dir: " + made.error().what, 0};
    log.warning("no log files: {}; output goes to the console only", made.error().what);
    return without_files(std::move(output));
}

OutputSpec without_files(OutputSpec output) {
    output.log_dir.clear();
    output.redirects = output.tee = {};
    output.stdout_filters.clear();
    output.stderr_filters.clear();
    return output;
}

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
