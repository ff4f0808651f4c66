#include "launcher/output/outlet.h"

#include <fmt/core.h>
#include <time.h>

#include <utility>

namespace ddprun {
namespace {

/// Bytes of our own lines that may wait for the console; further lines are dropped, because we cannot pause.
constexpr std::size_t kMaxOwn = 1 << 20;

/// The local time of day: "14:03:59.123".
std::string time_of_day() {
    timespec now{};
    ::clock_gettime(CLOCK_REALTIME, &now);
    tm local{};
    ::localtime_r(&now.tv_sec, &local);
    return fmt::format("{:02}:{:02}:{:02}.{:03}", local.tm_hour, local.tm_min, local.tm_sec,
                       now.tv_nsec / 1'000'000);
}

std::string time_for(const PrefixTemplate& prefix) { return prefix.names_time() ? time_of_day() : ""; }

}  // namespace

std::string render_prefix(const PrefixTemplate& prefix, const StreamOwner& owner) {
    return prefix.render({fmt::format("{}", owner.rank), fmt::format("{}", owner.local_rank), owner.role,
                          owner.host, time_for(prefix)});
}

Outlet::Outlet(os::EventLoop& loop, int fd, OutputSpec::Color color) : console_(loop, fd) {
    using Color = OutputSpec::Color;
    is_colored_ = color == Color::Always || (color == Color::Auto && console_.is_terminal());
}

std::string Outlet::prefix_of(const StreamOwner& owner) const {
    const std::string prefix = render_prefix(prefix_, owner);
    return is_colored_ && !prefix.empty() ? colored_prefix(prefix, owner.rank) : prefix;
}

void Outlet::show(std::string_view prefix, std::string_view block) {
    std::string& queue = console_.queue();
    for_each_line(block, [&](std::string_view line) {
        queue.append(prefix);
        queue.append(line);
    });
}

bool Outlet::say(std::string_view lines) {
    for (; !own_.empty() && own_.front().first <= console_.gone(); own_.pop_front())
        own_bytes_ -= own_.front().second;
    if (own_bytes_ + lines.size() > kMaxOwn) return false;
    console_.queue().append(lines);
    own_bytes_ += lines.size();
    own_.emplace_back(console_.gone() + console_.pending(), lines.size());
    return true;
}

std::string Outlet::take_new_loss() {
    if (console_.lost_bytes() == 0 || std::exchange(has_reported_loss_, true)) return "";
    return console_.loss();
}

}  // namespace ddprun
