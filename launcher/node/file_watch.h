#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>

#include "env/os/event_loop.h"
#include "env/result.h"
#include "env/unique_fd.h"

namespace ddprun {

/// Reports when a file has been written: closed after writing, or replaced by a rename. On the event loop.
class FileWatch {
  public:
    /// Error: System (the user's inotify instances are used up).
    static Result<std::unique_ptr<FileWatch>> open(os::EventLoop& loop);
    ~FileWatch();
    FileWatch(const FileWatch&) = delete;
    FileWatch& operator=(const FileWatch&) = delete;

    /// Forgets all files. Cheap, unlike the destructor: the kernel takes 4 to 16 ms to close the descriptor.
    void clear();
    /// Calls `written` each time. The directory of a file that does not exist yet must exist. Error: System,
    /// naming the path.
    Status add(const std::string& path, std::function<void()> written);

  private:
    struct File {
        std::string name;  ///< in the directory that is watched; "": the file itself is watched
        std::function<void()> written;
    };
    FileWatch(os::EventLoop& loop, UniqueFd fd) : loop_(loop), fd_(std::move(fd)) {}
    void read_events();

    os::EventLoop& loop_;
    UniqueFd fd_;
    std::map<int, File> files_;  ///< by watch descriptor
};

}  // namespace ddprun
