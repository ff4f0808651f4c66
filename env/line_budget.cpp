#include "env/line_budget.h"

#include <fmt/core.h>

#include <utility>

#include "env/text.h"

namespace ddprun {

std::optional<std::string> LineBudget::take(std::string line, TimePoint now) {
    std::optional<std::string> sum = sum_up(now);
    ++all_;
    if (now >= deadline_after(began_, limits_.interval)) {
        began_ = now;
        written_ = 0;
    }
    if (written_ < limits_.first) {
        ++written_;
        return line;
    }
    ++held_;
    ++left_out_;
    last_ = std::move(line);
    return sum;
}

std::optional<std::string> LineBudget::sum_up(TimePoint now) {
    if (held_ == 0 || now < due()) return std::nullopt;
    const std::string text = held_ == 1 ? std::move(last_)
                                        : fmt::format("{}: {} more lines like this one in {}: {}", subject_,
                                                      held_, format_duration(limits_.interval), last_);
    --left_out_;
    held_ = 0;
    last_.clear();
    // No line is written unchanged again before an interval without lines.
    began_ = now;
    written_ = limits_.first;
    return text;
}

std::optional<std::string> LineBudget::total() const {
    if (left_out_ == 0) return std::nullopt;
    return fmt::format("{}: {} lines in all, {} of them not shown", subject_, all_, left_out_);
}

}  // namespace ddprun
