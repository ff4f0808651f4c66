#include "ddp/checkpoint/writer_lock.h"

#include <fcntl.h>
#include <fmt/core.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <thread>
#include <utility>

#include "ddp/checkpoint/save.h"
#include "ddp/types.h"
#include "env/describe.h"
#include "env/hmac.h"
#include "env/io/file.h"
#include "env/io/socket.h"
#include "env/nodes/batch_job.h"
#include "env/print.h"
#include "env/text.h"
#include "env/worker_env.h"

namespace ddp {
namespace {

constexpr std::size_t kWriterBytesLimit = 4096;
constexpr std::chrono::seconds kEndOfProcess{10};
constexpr std::chrono::milliseconds kBetweenTries{20};

/// Whether `path` still is the open file: another process may have removed or replaced it.
bool is_file_at(const std::string& path, int fd) {
    struct stat named {
    }, open{};
    return ::stat(path.c_str(), &named) == 0 && ::fstat(fd, &open) == 0 && named.st_ino == open.st_ino &&
           named.st_dev == open.st_dev;
}

/// The name by which users know the job: that of --rdzv-id, else the scheduler's. "" without one.
std::string job_name(const ddprun::WorkerEnv& env) {
    if (env.run_id != "none") return env.run_id;
    const auto job = ddprun::find_batch_job(ddprun::process_environment);
    return job ? job->id : "";
}

bool is_alive(std::int64_t pid) {
    return pid > 0 && (::kill(static_cast<pid_t>(pid), 0) == 0 || errno == EPERM);
}

}  // namespace

std::string run_identity(const ddprun::WorkerEnv& env) {
    constexpr std::size_t kHexDigits = 16;
    if (!env.token.empty())
        return ddprun::to_hex(ddprun::hmac_sha256(env.token, env.run_id)).substr(0, kHexDigits);
    return env.run_id == "none" ? "" : env.run_id;
}

/// The content of `.writer`.
struct WriterLock::Writer {
    std::string run, job, host;
    std::int64_t pid = 0;

    static Writer self() {
        const ddprun::Result<ddprun::WorkerEnv> env = ddprun::worker_env_from(ddprun::process_environment);
        return {.run = env ? run_identity(*env) : "",
                .job = env ? job_name(*env) : "",
                .host = ddprun::host_name(),
                .pid = ::getpid()};
    }
    static Writer read(int fd) {
        std::string text(kWriterBytesLimit, '\0');
        const ssize_t bytes = ::pread(fd, text.data(), text.size(), 0);
        text.resize(bytes > 0 ? static_cast<std::size_t>(bytes) : 0);
        return ddprun::from_json<Writer>(text, ddprun::Strictness::Tolerant).value_or(Writer());
    }
    /// A file without a content locks as well: a full disk is the error of what is written next.
    void write(int fd) const {
        const std::string text = ddprun::to_json(*this) + "\n";
        if (::ftruncate(fd, 0) == 0) (void)!::pwrite(fd, text.data(), text.size(), 0);
    }

    [[nodiscard]] bool is_process_of(const Writer& other) const {
        return host == other.host && pid == other.pid;
    }
    [[nodiscard]] bool is_of_run(const Writer& other) const { return !run.empty() && run == other.run; }
    /// "another run (job 4711.pbs on node03, pid 12)"
    [[nodiscard]] std::string describe() const {
        if (host.empty()) return "another run";
        const std::string name = job.empty() ? "" : "job " + job + " ";
        return ddprun::printable(fmt::format("another run ({}on {}, pid {})", name, host, pid));
    }

    friend void describe(ddprun::Visitor& v, Writer& writer) {
        v("run", writer.run);
        v("job", writer.job);
        v("host", writer.host);
        v("pid", writer.pid);
    }
};

WriterLock::WriterLock(const std::string& directory) : directory_(directory), path_(directory + "/.writer") {}

WriterLock::~WriterLock() {
    if (fd_ && is_file_at(path_, fd_.get()) && Writer::read(fd_.get()).is_process_of(Writer::self()))
        ::unlink(path_.c_str());
}

/// Opens `.writer`, unless it is open, and tries to lock it.
WriterLock::Lock WriterLock::open_and_lock() {
    if (fd_ && !is_file_at(path_, fd_.get())) fd_.reset();
    for (;;) {
        if (!fd_) fd_.reset(::open(path_.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666));
        if (!fd_) throw FileError(fmt::format("checkpoint {}: create: {}", path_, std::strerror(errno)));
        struct flock whole {};
        whole.l_type = F_WRLCK;
        const int error = ::fcntl(fd_.get(), F_SETLK, &whole) == 0 ? 0 : errno;
        if (error == EACCES || error == EAGAIN) return Lock::Refused;
        // A writer that ends removes its file, perhaps between our open and our lock.
        if (is_file_at(path_, fd_.get())) return error == 0 ? Lock::Taken : Lock::Unsupported;
        fd_.reset();
    }
}

/// On this host it waits for a process of this run that has the lock: it is of the last generation, and about
/// to end.
std::pair<WriterLock::Lock, WriterLock::Writer> WriterLock::try_lock(const Writer& self) {
    const auto deadline = std::chrono::steady_clock::now() + kEndOfProcess;
    for (;;) {
        const Lock lock = open_and_lock();
        Writer other = Writer::read(fd_.get());
        const bool may_end = other.is_of_run(self) && other.host == self.host;
        if (lock != Lock::Refused || !may_end || std::chrono::steady_clock::now() > deadline)
            return {lock, std::move(other)};
        std::this_thread::sleep_for(kBetweenTries);
    }
}

void WriterLock::hold() {
    const Writer self = Writer::self();
    const auto [lock, other] = try_lock(self);
    const bool is_own = other.is_process_of(self);
    const bool is_here = other.host == self.host, is_of_run = other.is_of_run(self);
    if (lock == Lock::Refused && (is_here || !is_of_run)) refuse(other);
    if (lock == Lock::Unsupported && !is_own && is_here && is_alive(other.pid)) refuse(other);
    sees_all_ = lock != Lock::Unsupported;
    if (!sees_all_ && !is_own && !is_here && !is_of_run && !other.host.empty()) warn_once(other);
    // Also where it is ours: its time shows that this process goes on.
    self.write(fd_.get());
}

void WriterLock::refuse(const Writer& other) const {
    throw FileError(fmt::format("checkpoint {}: {} saves here: give each run its own directory", directory_,
                                other.describe()));
}

void WriterLock::warn_once(const Writer& other) {
    if (std::exchange(has_warned_, true)) return;
    ddprun::print(
        stderr,
        "ddp: checkpoint {}: {} saved here last, and this file system has no locks, which would show "
        "whether it goes on: give each run its own directory\n",
        directory_, other.describe());
}

bool WriterLock::is_left_over(const std::string& path) const {
    if (sees_all_) return true;
    // Without locks a save that is older than its time limit. The server's clock stamps both times.
    struct stat now {
    }, unfinished{};
    return ::fstat(fd_.get(), &now) == 0 && ::stat(path.c_str(), &unfinished) == 0 &&
           std::chrono::seconds(now.st_ctim.tv_sec - unfinished.st_ctim.tv_sec) > kFileTimeout;
}

}  // namespace ddp
