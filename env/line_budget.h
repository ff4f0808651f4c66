#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "env/clock.h"

namespace ddprun {

/// Lines that others can make us write without end (a port scanner, a client in a loop): the first few are
/// written as they are, then one in each interval that says how many there were. Pure: no clock, no timer, no
/// output.
class LineBudget {
  public:
    struct Limits {
        int first = 10;  ///< written as they are, after a quiet interval
        Duration interval = std::chrono::seconds(10);
    };
    /// `subject`: what the lines are about, for the sums ("connections").
    explicit LineBudget(std::string subject) : LineBudget(std::move(subject), Limits()) {}
    LineBudget(std::string subject, Limits limits) : subject_(std::move(subject)), limits_(limits) {}

    /// One more line: what to write now; nullopt: it is counted.
    std::optional<std::string> take(std::string line, TimePoint now);
    /// When sum_up() has something to say, should no other line come; kNever: nothing is held back.
    [[nodiscard]] TimePoint due() const {
        return held_ == 0 ? kNever : deadline_after(began_, limits_.interval);
    }
    /// How many were held back in the interval that is over now, and the last of them; nullopt: none, or it
    /// is not over.
    std::optional<std::string> sum_up(TimePoint now);
    /// The last word: how many there were in all, and how many of them were not written; nullopt: all were.
    [[nodiscard]] std::optional<std::string> total() const;

  private:
    std::string subject_;
    Limits limits_;
    TimePoint began_{};       ///< of the interval
    int written_ = 0;         ///< as they are, in this interval
    std::uint64_t held_ = 0;  ///< in this interval
    std::string last_;
    std::uint64_t all_ = 0;
    std::uint64_t left_out_ = 0;  ///< held back and not repeated as the last of an interval
};

}  // namespace ddprun
