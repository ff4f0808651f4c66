#include "launcher/output/log_writer.h"

#include <fcntl.h>
#include <fmt/core.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <mutex>
#include <thread>
#include <utility>

#include "env/io/background_call.h"

namespace ddprun {

namespace {

Result<UniqueFd> open_log(const std::string& path, int extra_flags) {
    UniqueFd fd(::open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC | extra_flags, 0644));
    if (!fd) return Error::system("open " + path);
    return fd;
}

/// The part of `bytes` to write before the rotation: the whole lines that fit, or a line that fits no file.
std::size_t bytes_before_rotation(std::string_view bytes, std::uint64_t room, bool file_is_empty) {
    const std::size_t fitting = bytes.substr(0, room).rfind('\n');
    if (fitting != std::string_view::npos) return fitting + 1;
    if (!file_is_empty) return 0;
    const std::size_t end = bytes.find('\n');
    return end == std::string_view::npos ? bytes.size() : end + 1;
}

void wake(int event_fd) {
    const std::uint64_t one = 1;
    // The write fails only when the counter is full, and then the loop is already awake. Ignoring.
    if (::write(event_fd, &one, sizeof one) < 0) return;
}

}  // namespace

Result<LogFile> LogFile::open(std::string path, std::uint64_t max_bytes) {
    Result<UniqueFd> fd = open_log(path, 0);
    if (!fd) return fd.error();
    struct stat status {};
    LogFile file;
    if (::fstat(fd->get(), &status) == 0) file.size_ = static_cast<std::uint64_t>(status.st_size);
    file.path_ = std::move(path);
    file.fd_ = *std::move(fd);
    file.max_bytes_ = max_bytes;
    return file;
}

void LogFile::lose(std::uint64_t bytes, std::string_view attempt) {
    if (loss_.empty()) loss_ = fmt::format("{} {}: {}", attempt, path_, ::strerror(errno));
    lost_bytes_ += bytes;
}

void LogFile::write_all(std::string_view bytes) {
    while (!bytes.empty()) {
        const ssize_t written = ::write(fd_.get(), bytes.data(), bytes.size());
        if (written < 0 && errno == EINTR) continue;
        if (written < 0) return lose(bytes.size(), "write");
        size_ += static_cast<std::uint64_t>(written);
        bytes.remove_prefix(static_cast<std::size_t>(written));
    }
}

void LogFile::write(std::string_view bytes) {
    if (!fd_) {
        lost_bytes_ += bytes.size();
        return;
    }
    while (max_bytes_ != 0 && size_ + bytes.size() > max_bytes_) {
        const std::uint64_t room = max_bytes_ > size_ ? max_bytes_ - size_ : 0;
        const std::size_t now = bytes_before_rotation(bytes, room, size_ == 0);
        const std::uint64_t lost_before = lost_bytes_;
        write_all(bytes.substr(0, now));
        bytes.remove_prefix(now);
        // A file that is too long is better than lost lines; the next write tries again.
        if (bytes.empty() || lost_bytes_ > lost_before || !rotate()) break;
    }
    write_all(bytes);
}

/// False: the file could not be rotated, and nothing has changed.
bool LogFile::rotate() {
    const std::string next = path_ + ".next";
    Result<UniqueFd> fresh = open_log(next, O_TRUNC);
    if (!fresh) return false;
    for (int number = kKept; number > 1; --number) {
        const std::string from = fmt::format("{}.{}", path_, number - 1);
        (void)::rename(from.c_str(), fmt::format("{}.{}", path_, number).c_str());
    }
    if (::rename(path_.c_str(), (path_ + ".1").c_str()) != 0 || ::rename(next.c_str(), path_.c_str()) != 0) {
        ::unlink(next.c_str());
        return false;
    }
    fd_ = *std::move(fresh);
    size_ = 0;
    return true;
}

class LogWriter::File {
  public:
    explicit File(LogFile opened) : file(std::move(opened)) {}
    LogFile file;       ///< used by the thread only
    std::string queue;  ///< guarded by Shared's lock
};

struct LogWriter::Shared {
    std::mutex lock;
    std::condition_variable work, written;
    std::deque<Handle> waiting;  ///< files whose queue is not empty, each once
    std::size_t pending = 0;     ///< bytes queued or being written
    std::uint64_t lost_bytes = 0;
    std::string loss;
    bool was_full = false;
    bool ended = false;
    UniqueFd news;  ///< eventfd, non-blocking
};

LogWriter::LogWriter(os::EventLoop& loop, std::function<void()> on_news)
    : loop_(loop), on_news_(std::move(on_news)), shared_(std::make_shared<Shared>()) {}

LogWriter::~LogWriter() {
    if (!started_) return;
    loop_.unwatch(shared_->news.get());
    const std::lock_guard held(shared_->lock);
    shared_->ended = true;
    shared_->work.notify_one();
}

Status LogWriter::start() {
    shared_->news.reset(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    if (!shared_->news) return Error::system("eventfd");
    const int news = shared_->news.get();
    const Status watched = loop_.watch(news, EPOLLIN, [this, news](std::uint32_t) {
        std::uint64_t count = 0;
        if (::read(news, &count, sizeof count) > 0) on_news_();
    });
    if (!watched) return watched;
    Result<std::thread> thread =
        start_thread("start a thread for log files", [shared = shared_] { run(shared); });
    started_ = thread.has_value();
    if (!thread) {
        loop_.unwatch(news);
        return thread.error();
    }
    thread->detach();
    return {};
}

Result<LogWriter::Handle> LogWriter::add(LogFile file) {
    if (!started_) {
        if (const Status began = start(); !began) return began.error();
    }
    return std::make_shared<File>(std::move(file));
}

void LogWriter::write(const Handle& file, std::string_view bytes) {
    const std::lock_guard held(shared_->lock);
    if (file->queue.empty()) shared_->waiting.push_back(file);
    file->queue.append(bytes);
    shared_->pending += bytes.size();
    kick_is_due_ = true;
}

void LogWriter::kick() {
    if (std::exchange(kick_is_due_, false)) shared_->work.notify_one();
}

bool LogWriter::is_full() {
    const std::lock_guard held(shared_->lock);
    shared_->was_full = shared_->was_full || shared_->pending >= kHighWater;
    return shared_->pending >= kHighWater;
}

bool LogWriter::is_written() const {
    const std::lock_guard held(shared_->lock);
    return shared_->pending == 0;
}

void LogWriter::flush(TimePoint deadline) {
    kick();
    std::unique_lock held(shared_->lock);
    const std::chrono::steady_clock::time_point until(
        std::min(deadline, MonotonicClock::now() + std::chrono::hours(1)).time_since_epoch());
    shared_->written.wait_until(held, until, [this] { return shared_->pending == 0; });
}

std::uint64_t LogWriter::lost_bytes() const {
    const std::lock_guard held(shared_->lock);
    return shared_->lost_bytes;
}

std::string LogWriter::loss() const {
    const std::lock_guard held(shared_->lock);
    return shared_->loss;
}

void LogWriter::close(Handle file) {
    const std::lock_guard held(shared_->lock);
    if (file->queue.empty()) shared_->waiting.push_back(std::move(file));
    kick_is_due_ = true;
}

void LogWriter::run(const std::shared_ptr<Shared>& shared) {
    std::unique_lock held(shared->lock);
    std::string batch;
    for (;;) {
        shared->work.wait(held, [&] { return !shared->waiting.empty() || shared->ended; });
        if (shared->waiting.empty()) return;
        Handle file = std::move(shared->waiting.front());
        shared->waiting.pop_front();
        batch.clear();
        batch.swap(file->queue);
        held.unlock();
        const std::uint64_t lost_before = file->file.lost_bytes();
        file->file.write(batch);
        const std::uint64_t lost = file->file.lost_bytes() - lost_before;
        std::string why = file->file.loss();
        file.reset();  // may close the file, which takes as long as its disk does: do it without the lock
        held.lock();
        shared->pending -= batch.size();
        if (lost > 0 && shared->loss.empty()) shared->loss = std::move(why);
        shared->lost_bytes += lost;
        const bool has_room = shared->was_full && shared->pending <= kLowWater;
        if (has_room) shared->was_full = false;
        if (has_room || lost > 0) wake(shared->news.get());
        if (shared->pending == 0) shared->written.notify_all();
    }
}

}  // namespace ddprun
