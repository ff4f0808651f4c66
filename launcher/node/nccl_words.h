#pragma once

#include <functional>
#include <memory>
#include <string>

#include "env/os/event_loop.h"
#include "env/result.h"
#include "env/unique_fd.h"

namespace ddprun {

/// Reads the log of NCCL in one worker for the network that it takes, and drops all else. NCCL_DEBUG_FILE is
/// a pipe of ours, so that no file is left and nothing reaches the worker's output.
///
/// For the loop's thread. Must outlive the worker, because a writer to a pipe without a reader dies.
class NcclWords {
  public:
    /// `found` is called once, with the name. Error: System.
    static Result<std::unique_ptr<NcclWords>> open(os::EventLoop& loop,
                                                   std::function<void(const std::string& network)> found);
    ~NcclWords();
    NcclWords(const NcclWords&) = delete;
    NcclWords& operator=(const NcclWords&) = delete;

    /// The value for NCCL_DEBUG_FILE, valid while this process lives.
    [[nodiscard]] std::string path() const;

  private:
    NcclWords(os::EventLoop& loop, UniqueFd read, UniqueFd write,
              std::function<void(const std::string&)> found);
    void on_readable();
    void take(std::string_view bytes);

    os::EventLoop& loop_;
    UniqueFd read_;
    UniqueFd write_;  ///< held open: a pipe without a writer is always at its end
    std::function<void(const std::string&)> found_;
    std::string line_;  ///< the part that has arrived
};

}  // namespace ddprun
