#pragma once

#include <string>

#include "env/line_budget.h"
#include "env/os/event_loop.h"
#include "env/os/log.h"

namespace ddprun {

/// Writes warnings about connections. Anyone who reaches the port can cause them, so only some of many are
/// written, with a count of all. Borrows its parts for its whole life.
class ConnectionLog {
  public:
    ConnectionLog(os::EventLoop& loop, os::Log& log) : loop_(loop), log_(log) {}
    ConnectionLog(const ConnectionLog&) = delete;
    ConnectionLog& operator=(const ConnectionLog&) = delete;

    void warn(const std::string& line) {
        write(budget_.take(line, loop_.now()));
        if (sum_is_due_ || budget_.due() == kNever) return;
        sum_is_due_ = true;
        loop_.call_at(budget_.due(), [this] {
            sum_is_due_ = false;
            write(budget_.sum_up(loop_.now()));
        });
    }
    /// Writes how many warnings there were, if not all were written.
    void sum_up() { write(budget_.total()); }

  private:
    void write(const std::optional<std::string>& line) {
        if (line) log_.warning("{}", *line);
    }

    os::EventLoop& loop_;
    os::Log& log_;
    LineBudget budget_{"connections"};
    bool sum_is_due_ = false;
};

}  // namespace ddprun
