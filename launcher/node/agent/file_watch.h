#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>

#include "env/os/event_loop.h"
#include "env/result.h"
#include "env/unique_fd.h"

namespace ddprun {

/// Tells when somebody has written a file: closed it after writing, or moved another to its place. On the
/// event loop.
class FileWatch {
  public:
    /// Error: System (the user's inotify instances are used up).
    static Result<std::unique_ptr<FileWatch>> open(os::EventLoop& loop);
    ~FileWatch();
    FileWatch(const FileWatch&) = delete;
    FileWatch& operator=(const FileWatch&) = delete;

    /// Forgets all files. Cheap; the destructor is not: the kernel waits 4 to 16 ms in the close of the
    /// descriptor.
    void clear();
    /// Calls `written` each time. A file that is not there yet has a directory that is. Error: System, naming
    /// the path.
    Status add(const std::string& path, std::function<void()> written);

  private:
    struct File {
        std::string name;  ///< in the directory that is watched; "" it is watched itself
        std::function<void()> written;
    };
    FileWatch(os::EventLoop& loop, UniqueFd fd) : loop_(loop), fd_(std::move(fd)) {}
    void read_events();

    os::EventLoop& loop_;
    UniqueFd fd_;
    std::map<int, File> files_;  ///< by watch descriptor
};

}  // namespace ddprun
