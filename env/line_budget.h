#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "env/clock.h"

namespace ddprun {

/// Limits lines that others can cause without end (a port scanner, a client in a loop): the first few are
/// written, then one sum per interval. Pure: no clock, no timer, no output.
class LineBudget {
  public:
    struct Limits {
        int first = 10;  ///< lines written unchanged after a quiet interval
        Duration interval = std::chrono::seconds(10);
    };
    /// `subject` is the lines' subject in the sums ("connections").
    explicit LineBudget(std::string subject) : LineBudget(std::move(subject), Limits()) {}
    LineBudget(std::string subject, Limits limits) : subject_(std::move(subject)), limits_(limits) {}

    /// Takes one more line. Returns the text to write now; nullopt: the line is only counted.
    std::optional<std::string> take(std::string line, TimePoint now);
    /// The time to call sum_up() if no other line arrives; kNever: no line is held back.
    [[nodiscard]] TimePoint due() const {
        return held_ == 0 ? kNever : deadline_after(began_, limits_.interval);
    }
    /// A line with the number of lines held back in the interval that is over now, and the last of them;
    /// nullopt: none, or the interval is not over.
    std::optional<std::string> sum_up(TimePoint now);
    /// A line with the number of all lines, and of those that were not written; nullopt: all were written.
    [[nodiscard]] std::optional<std::string> total() const;

  private:
    std::string subject_;
    Limits limits_;
    TimePoint began_{};       ///< begin of the interval
    int written_ = 0;         ///< unchanged, in this interval
    std::uint64_t held_ = 0;  ///< held back in this interval
    std::string last_;
    std::uint64_t all_ = 0;
    std::uint64_t left_out_ = 0;  ///< held back and not repeated as the last of an interval
};

}  // namespace ddprun
