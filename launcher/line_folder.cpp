#include "launcher/line_folder.h"

#include <algorithm>
#include <functional>

namespace ddprun {

void LineFolder::offer(int rank, std::string_view line, TimePoint now) {
    const std::size_t hash = std::hash<std::string_view>{}(line);
    std::uint64_t& next = next_of_rank_[rank];
    // A rank joins only behind the last line it joined: its own order is kept.
    for (std::uint64_t number = std::max(next, first_); number < first_ + held_.size(); ++number) {
        Held& held = held_[number - first_];
        if (held.hash != hash || held.line.text != line) continue;
        held.line.ranks.push_back(rank);
        next = number + 1;
        return;
    }
    held_.push_back({{{rank}, std::string(line)}, hash, now});
    next = first_ + held_.size();
}

FoldedLine LineFolder::pop() {
    FoldedLine line = std::move(held_.front().line);
    held_.pop_front();
    ++first_;
    std::sort(line.ranks.begin(), line.ranks.end());
    return line;
}

std::vector<FoldedLine> LineFolder::due(TimePoint now) {
    std::vector<FoldedLine> lines;
    while (!held_.empty()) {
        const Held& front = held_.front();
        const bool complete = world_ != 0 && front.line.ranks.size() >= world_;
        if (!complete && held_.size() <= kMaxHeld && now < deadline_after(front.since, window_)) break;
        lines.push_back(pop());
    }
    return lines;
}

std::vector<FoldedLine> LineFolder::all() {
    std::vector<FoldedLine> lines;
    while (!held_.empty()) lines.push_back(pop());
    return lines;
}

TimePoint LineFolder::next_due() const {
    return held_.empty() ? kNever : deadline_after(held_.front().since, window_);
}

}  // namespace ddprun
