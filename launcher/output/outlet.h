#pragma once

#include <cstdint>
#include <deque>
#include <string>
#include <string_view>
#include <utility>

#include "env/os/event_loop.h"
#include "launcher/job_spec.h"
#include "launcher/output/console.h"
#include "launcher/output/lines.h"
#include "launcher/output/stream_route.h"

namespace ddprun {

/// What stands before this rank's lines now.
std::string render_prefix(const PrefixTemplate& prefix, const StreamOwner& owner);

/// One console with what stands before its lines, and ddprun's own lines among them.
class Outlet {
  public:
    /// Borrows `fd` for its whole life.
    Outlet(os::EventLoop& loop, int fd, OutputSpec::Color color);

    [[nodiscard]] Console& console() { return console_; }
    [[nodiscard]] const Console& console() const { return console_; }
    void set_prefix(PrefixTemplate prefix) { prefix_ = std::move(prefix); }
    /// It names the time: it is another one for each block.
    [[nodiscard]] bool has_changing_prefix() const { return prefix_.names_time(); }
    /// In the rank's colour, where this console has colours.
    [[nodiscard]] std::string prefix_of(const StreamOwner& owner) const;

    /// Queues a block of whole lines as it is, or each with this before it.
    void show(std::string_view block) { console_.queue().append(block); }
    void show(std::string_view prefix, std::string_view block);
    /// Queues ddprun's own lines; false: too many of these wait already, and they are dropped.
    bool say(std::string_view lines);

    /// The first cause for which the place lost lines, told once; "" none, or it was told.
    std::string news_of_loss();

  private:
    Console console_;
    PrefixTemplate prefix_{""};
    bool is_colored_;
    /// Our own lines that wait: where in the stream of all bytes they end, and their size.
    std::deque<std::pair<std::uint64_t, std::size_t>> own_;
    std::size_t own_bytes_ = 0;
    bool has_told_loss_ = false;
};

}  // namespace ddprun
