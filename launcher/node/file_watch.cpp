#include "launcher/node/file_watch.h"

#include <sys/epoll.h>
#include <sys/inotify.h>
#include <unistd.h>

#include <cstring>
#include <utility>

namespace ddprun {

Result<std::unique_ptr<FileWatch>> FileWatch::open(os::EventLoop& loop) {
    UniqueFd fd(::inotify_init1(IN_NONBLOCK | IN_CLOEXEC));
    if (!fd) return Error::system("inotify_init1");
    std::unique_ptr<FileWatch> watch(new FileWatch(loop, std::move(fd)));
    if (const Status watched =
            loop.watch(watch->fd_.get(), EPOLLIN, [raw = watch.get()](std::uint32_t) { raw->read_events(); });
        !watched)
        return watched.error();
    return watch;
}

FileWatch::~FileWatch() { loop_.unwatch(fd_.get()); }

Status FileWatch::add(const std::string& path, std::function<void()> written) {
    const bool is_there = ::access(path.c_str(), F_OK) == 0;
    const std::size_t slash = path.rfind('/');
    const std::string watched = is_there ? path : path.substr(0, slash);
    const int number = ::inotify_add_watch(fd_.get(), watched.c_str(), IN_CLOSE_WRITE | IN_MOVED_TO);
    if (number < 0) return Error::system("inotify_add_watch " + watched);
    files_[number] = {is_there ? "" : path.substr(slash + 1), std::move(written)};
    return {};
}

void FileWatch::clear() {
    for (const auto& [number, file] : std::exchange(files_, {})) ::inotify_rm_watch(fd_.get(), number);
}

void FileWatch::read_events() {
    alignas(inotify_event) char events[4096];
    const ssize_t n = ::read(fd_.get(), events, sizeof events);
    for (ssize_t at = 0; at < n;) {
        inotify_event event;
        std::memcpy(&event, events + at, sizeof event);
        const char* const name = event.len == 0 ? "" : events + at + sizeof event;
        const auto file = files_.find(event.wd);
        if (file != files_.end() && (event.mask & IN_IGNORED) != 0) files_.erase(file);  // the file is gone
        else if (file != files_.end() && file->second.name == name) file->second.written();
        at += static_cast<ssize_t>(sizeof event + event.len);
    }
}

}  // namespace ddprun
