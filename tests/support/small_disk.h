#pragma once

#include <sys/mount.h>

#include <string>

#include "tests/support/temporary_directory.h"

namespace ddprun::test {

/// A small file system, if this user may mount one.
class SmallDisk {
  public:
    explicit SmallDisk(const std::string& options)
        : mounted_(::mount("tmpfs", directory_.path().c_str(), "tmpfs", 0, options.c_str()) == 0) {}
    ~SmallDisk() {
        if (mounted_) ::umount2(directory_.path().c_str(), MNT_DETACH);
    }
    SmallDisk(const SmallDisk&) = delete;
    SmallDisk& operator=(const SmallDisk&) = delete;
    [[nodiscard]] bool mounted() const { return mounted_; }
    [[nodiscard]] const std::string& path() const { return directory_.path(); }

  private:
    TemporaryDirectory directory_;
    bool mounted_;
};

}  // namespace ddprun::test
