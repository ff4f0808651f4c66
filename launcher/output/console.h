#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

#include "env/clock.h"
#include "env/os/event_loop.h"
#include "env/unique_fd.h"

namespace ddprun {

/// A queue of bytes in front of ddprun's stdout or stderr: a terminal, a pipe, a file or a socket.
///
/// Writes never block the loop (a regular file takes as long as its disk). For the loop's thread. Ignores
/// SIGPIPE for the whole process: a closed console is an error here.
class Console {
  public:
    /// Borrows `fd` for its whole life.
    Console(os::EventLoop& loop, int fd);
    ~Console();
    Console(const Console&) = delete;
    Console& operator=(const Console&) = delete;

    /// The bytes to write: append here, then call write().
    std::string& queue() { return queue_; }
    /// Writes as much as the descriptor takes now; the rest follows when it has room.
    void write();
    /// Writes, waiting for room until `deadline`. Blocks.
    void flush(TimePoint deadline);

    [[nodiscard]] std::size_t pending() const { return queue_.size() - head_; }
    /// Bytes that have left the queue so far, written or lost.
    [[nodiscard]] std::uint64_t gone() const { return gone_; }
    /// While this is true, producers should wait for on_room.
    [[nodiscard]] bool is_full() const { return pending() >= kHighWater; }
    /// `handler` is called from the loop whenever the queue has become short after it was full.
    void on_room(std::function<void()> handler) { room_handler_ = std::move(handler); }
    [[nodiscard]] bool is_terminal() const { return is_terminal_; }

    /// Bytes that could not be written and the first cause ("write to the console: Broken pipe").
    [[nodiscard]] std::uint64_t lost_bytes() const { return lost_bytes_; }
    [[nodiscard]] const std::string& loss() const { return loss_; }

    /// True when both descriptors lead to the same pipe, terminal or file.
    static bool is_same_place(int one, int other);

  private:
    static constexpr std::size_t kHighWater = 1 << 20;
    static constexpr std::size_t kLowWater = 64 * 1024;

    enum class Kind : std::uint8_t { Own, Socket, NeverBlocks, Polled };
    void open_own(int fd);
    [[nodiscard]] ssize_t write_some(std::string_view bytes) const;
    [[nodiscard]] bool has_room_now() const;
    void give_up(int error);
    void compact();
    void wait_for_room();
    void stop_waiting();

    os::EventLoop& loop_;
    int fd_;
    UniqueFd own_;
    Kind kind_ = Kind::Polled;
    bool is_terminal_ = false;
    std::string queue_;
    std::size_t head_ = 0;  ///< bytes of the queue already written
    bool waiting_ = false;
    bool was_full_ = false;
    bool closed_ = false;  ///< the reader has gone
    std::uint64_t gone_ = 0;
    std::uint64_t lost_bytes_ = 0;
    std::string loss_;
    std::function<void()> room_handler_;
};

}  // namespace ddprun
