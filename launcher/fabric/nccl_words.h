#pragma once

#include <functional>
#include <memory>
#include <string>

#include "env/os/event_loop.h"
#include "env/result.h"
#include "env/unique_fd.h"

namespace ddprun {

/// Reads what NCCL in one worker says of itself: its NCCL_DEBUG_FILE is a pipe of ours, so that no file is
/// left and nothing reaches the worker's own output. Looks for the network that it takes; all else is
/// dropped.
///
/// Lives on the loop's thread, longer than the worker (who writes to a pipe without a reader dies).
class NcclWords {
  public:
    /// `found` is called once, with the name. Error: System.
    static Result<std::unique_ptr<NcclWords>> open(os::EventLoop& loop,
                                                   std::function<void(const std::string& network)> found);
    ~NcclWords();
    NcclWords(const NcclWords&) = delete;
    NcclWords& operator=(const NcclWords&) = delete;

    /// For NCCL_DEBUG_FILE, while this process lives.
    [[nodiscard]] std::string path() const;

  private:
    NcclWords(os::EventLoop& loop, UniqueFd read, UniqueFd write,
              std::function<void(const std::string&)> found);
    void on_readable();
    void take(std::string_view bytes);

    os::EventLoop& loop_;
    UniqueFd read_;
    UniqueFd write_;  ///< held: a pipe that nobody has opened yet would always be at its end
    std::function<void(const std::string&)> found_;
    std::string line_;  ///< as far as it has come
};

}  // namespace ddprun
