#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <string>
#include <string_view>
#include <utility>

#include "env/clock.h"
#include "env/os/event_loop.h"
#include "env/unique_fd.h"
#include "launcher/output/kept_output.h"
#include "launcher/output/lines.h"
#include "launcher/spec/job_spec.h"

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

/// The text before this rank's lines now.
std::string render_prefix(const PrefixTemplate& prefix, const StreamOwner& owner);

/// A console, the prefix of its lines, and the queue of ddprun's own lines.
class Outlet {
  public:
    /// Borrows `fd` for its whole life.
    Outlet(os::EventLoop& loop, int fd, OutputSpec::Color color);

    [[nodiscard]] Console& console() { return console_; }
    [[nodiscard]] const Console& console() const { return console_; }
    void set_prefix(PrefixTemplate prefix) { prefix_ = std::move(prefix); }
    /// True when the prefix has the time, so that it differs from block to block.
    [[nodiscard]] bool has_changing_prefix() const { return prefix_.names_time(); }
    /// The rank's prefix, in its colour when this console has colours.
    [[nodiscard]] std::string prefix_of(const StreamOwner& owner) const;

    /// Queues a block of whole lines as it is, or with `prefix` before each line.
    void show(std::string_view block) { console_.queue().append(block); }
    void show(std::string_view prefix, std::string_view block);
    /// Queues ddprun's own lines; false: too many of them wait already, so these are dropped.
    bool say(std::string_view lines);

    /// Returns the first cause of lost lines once; "" when no line was lost, and in later calls.
    std::string take_new_loss();

  private:
    Console console_;
    PrefixTemplate prefix_{""};
    bool is_colored_;
    /// Our own waiting lines: the position in the stream of all bytes where they end, and their size.
    std::deque<std::pair<std::uint64_t, std::size_t>> own_;
    std::size_t own_bytes_ = 0;
    bool has_reported_loss_ = false;
};

}  // namespace ddprun
