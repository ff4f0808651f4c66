#include "env/nodes/exchange.h"

#include <fcntl.h>
#include <fmt/core.h>
#include <poll.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <vector>

#include "env/io/file.h"
#include "env/text.h"

namespace ddprun {

namespace {

constexpr std::size_t kMaxExchangeFile = 64 * 1024;
constexpr Duration kFirstPause = std::chrono::milliseconds(5);
constexpr Duration kLongestPause = std::chrono::milliseconds(250);
/// The allowed difference between the clocks of two hosts and the file server.
constexpr std::int64_t kClockSkewSeconds = 120;
constexpr std::string_view kFirstLine = "ddprun exchange 1";

std::string file_word(std::string_view text) {
    std::string word;
    for (const char c : text)
        word +=
            std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '.' || c == '_' || c == '-' ? c : '_';
    return word;
}

/// The content of one rank's file.
struct RankFile {
    int size = 0;
    std::int64_t written = 0;
    std::vector<std::pair<std::string, std::string>> words;
};

Result<RankFile> parse_rank_file(std::string_view content) {
    const Error malformed{Errc::Protocol, "is no complete file of ddprun's", 0};
    std::vector<std::string_view> lines = split(content, '\n');
    if (lines.size() < 3 || lines[0] != kFirstLine || !lines.back().empty()) return malformed;
    RankFile said;
    const std::vector<std::string_view> head = split(lines[1], ' ');
    if (head.size() != 2) return malformed;
    const Result<std::int64_t> size = parse_int_between(head[0], 1, 1 << 24), written = parse_int(head[1]);
    if (!size || !written) return malformed;
    said.size = static_cast<int>(*size);
    said.written = *written;
    for (std::size_t i = 2; i + 1 < lines.size(); ++i) {
        const std::size_t blank = lines[i].find(' ');
        if (blank == std::string_view::npos) return malformed;
        said.words.emplace_back(lines[i].substr(0, blank), lines[i].substr(blank + 1));
    }
    return said;
}

/// Opens the directory, because a network file system may cache that a name does not exist.
void refresh_directory(const std::string& directory) {
    const UniqueFd fd(::open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
}

Result<std::string> read_own_file(const std::string& path) {
    const Result<UniqueFd> fd = open_regular_file(path);
    if (!fd) return fd.error();
    struct stat status {};
    if (::fstat(fd->get(), &status) != 0) return Error::system("stat " + path);
    if (status.st_uid != ::geteuid()) {
        return Error{Errc::Refused,
                     fmt::format("{}: belongs to user {}, not to {}: that user could redirect us", path,
                                 status.st_uid, ::geteuid()),
                     0};
    }
    return read_file(fmt::format("/proc/self/fd/{}", fd->get()), kMaxExchangeFile);
}

class Files final : public Exchange {
  public:
    Files(FileExchange where, TimePoint deadline) : where_(std::move(where)), deadline_(deadline) {}
    ~Files() override {
        if (is_written_) ::unlink(path_of(where_.rank).c_str());
    }

    Status put(std::string_view key, std::string_view value) override {
        if (const Status checked = check_exchange_word(key, kMaxExchangeKey); !checked) return checked;
        if (const Status checked = check_exchange_word(value, kMaxExchangeValue); !checked) return checked;
        words_ += fmt::format("{} {}\n", key, value);
        return {};
    }

    Status fence() override {
        if (words_.empty()) return {};
        const std::string content =
            fmt::format("{}\n{} {}\n{}", kFirstLine, where_.size, ::time(nullptr), words_);
        if (const Status written = write_file_atomically(path_of(where_.rank), content, 0600); !written) {
            return written.error().with("the nodes' file (DDPRUN_EXCHANGE_DIR names another directory)");
        }
        is_written_ = true;
        return {};
    }

    Result<std::string> get(int rank, std::string_view key) override {
        Duration pause = kFirstPause;
        for (;;) {
            Result<std::string> value = read_value(rank, key);
            if (value || (value.error().code != Errc::NotFound)) return value;
            const TimePoint now = MonotonicClock::now();
            if (now >= deadline_) {
                return Error{Errc::Timeout,
                             fmt::format("{}: is {} a directory that all nodes share? (DDPRUN_EXCHANGE_DIR)",
                                         value.error().what, where_.directory),
                             0};
            }
            ::poll(nullptr, 0, poll_milliseconds(now, std::min(deadline_, deadline_after(now, pause))));
            pause = std::min(pause * 2, kLongestPause);
        }
    }

    [[nodiscard]] bool keeps_what_was_put() const override { return true; }

  private:
    [[nodiscard]] std::string path_of(int rank) const {
        return fmt::format("{}/.ddprun-{}.{}", where_.directory, where_.job, rank);
    }

    /// Reads a value. Error: NotFound while it is not there.
    [[nodiscard]] Result<std::string> read_value(int rank, std::string_view key) const {
        const std::string path = path_of(rank);
        refresh_directory(where_.directory);
        const Result<std::string> content = read_own_file(path);
        if (!content && content.error().code == Errc::System)
            return Error{Errc::NotFound, content.error().what, 0};
        if (!content) return content.error();
        const Result<RankFile> said = parse_rank_file(*content);
        if (!said) return said.error().with(path);
        if (said->written + kClockSkewSeconds < where_.began) {
            return Error{Errc::NotFound, fmt::format("{}: is older than this job", path), 0};
        }
        if (said->size != where_.size) {
            return Error{
                Errc::NotFound,
                fmt::format("{}: is of a job of {} processes, we are {}", path, said->size, where_.size), 0};
        }
        for (const auto& [name, value] : said->words) {
            if (name == key) return value;
        }
        return Error{Errc::NotFound, fmt::format("{}: has no '{}'", path, key), 0};
    }

    FileExchange where_;
    TimePoint deadline_;
    std::string words_;
    bool is_written_ = false;
};

std::int64_t job_start_in(const EnvironmentLookup& lookup) {
    if (const auto told = lookup("SLURM_JOB_START_TIME")) return parse_int(*told).value_or(0);
    struct stat status {};
    const auto nodefile = lookup("PBS_NODEFILE");
    if (nodefile && ::stat(nodefile->c_str(), &status) == 0) return status.st_mtim.tv_sec;
    return 0;
}

}  // namespace

FileExchange file_exchange_of(std::string directory, const Placement& placement,
                              const EnvironmentLookup& lookup) {
    FileExchange where;
    where.directory = std::move(directory);
    where.job = file_word(fmt::format("{}-{}", name_of(placement.family), placement.job));
    // A requeued job keeps its id, so add the restart count.
    if (const auto restarts = lookup("SLURM_RESTART_COUNT")) where.job += file_word("-" + *restarts);
    where.rank = placement.rank.value_or(0);
    where.size = placement.size.value_or(1);
    where.began = job_start_in(lookup);
    return where;
}

Result<std::unique_ptr<Exchange>> open_file_exchange(FileExchange exchange, TimePoint deadline) {
    struct stat status {};
    if (::stat(exchange.directory.c_str(), &status) != 0)
        return Error::system("the nodes' file: " + exchange.directory);
    if (!S_ISDIR(status.st_mode)) return Error::system("the nodes' file: " + exchange.directory, ENOTDIR);
    return std::unique_ptr<Exchange>(std::make_unique<Files>(std::move(exchange), deadline));
}

}  // namespace ddprun
