#pragma once

#include <cstdint>
#include <deque>
#include <string>
#include <string_view>
#include <utility>

#include "env/os/event_loop.h"
#include "launcher/output/console.h"
#include "launcher/output/lines.h"
#include "launcher/output/stream_route.h"
#include "launcher/spec/job_spec.h"

namespace ddprun {

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
