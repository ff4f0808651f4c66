#pragma once

#include <fcntl.h>
#include <sys/mount.h>
#include <sys/stat.h>

#include <filesystem>
#include <string>
#include <vector>

#include "env/unique_fd.h"

namespace ddprun::test {

/// Directories that stay visible although a mount hides their parents: sources and builds may be in /tmp or
/// in a home directory.
class KeptDirectories {
  public:
    explicit KeptDirectories(const std::vector<std::string>& paths) {
        for (const std::string& path : paths)
            kept_.push_back({path, UniqueFd(::open(path.c_str(), O_PATH | O_DIRECTORY | O_CLOEXEC))});
    }

    /// Call it after the mounts: binds the hidden directories to their old places.
    void show_again() const {
        for (const Kept& one : kept_) {
            struct stat before {
            }, now{};
            if (!one.directory || ::fstat(one.directory.get(), &before) != 0) continue;
            if (::stat(one.path.c_str(), &now) == 0 && now.st_ino == before.st_ino &&
                now.st_dev == before.st_dev)
                continue;
            std::error_code ignored;
            std::filesystem::create_directories(one.path, ignored);
            const std::string opened = "/proc/self/fd/" + std::to_string(one.directory.get());
            ::mount(opened.c_str(), one.path.c_str(), nullptr, MS_BIND | MS_REC, nullptr);
        }
    }

  private:
    struct Kept {
        std::string path;
        UniqueFd directory;
    };
    std::vector<Kept> kept_;
};

}  // namespace ddprun::test
