#include "launcher/head/restart_policy.h"

#include <fmt/core.h>
#include <sysexits.h>

#include <algorithm>
#include <cmath>

#include "env/text.h"
#include "launcher/spec/exit_codes.h"

namespace ddprun {
namespace {

/// The number of restarts that count against the budget now.
int spent(const RestartSpec& spec, const RestartHistory& history, TimePoint now) {
    if (!spec.window) return static_cast<int>(history.restarts.size());
    return static_cast<int>(std::count_if(history.restarts.begin(), history.restarts.end(),
                                          [&](TimePoint at) { return now - at < *spec.window; }));
}

/// " within 1 h", or "".
std::string within(const RestartSpec& spec) {
    return spec.window ? " within " + format_duration(*spec.window) : "";
}

std::string used_up(const RestartSpec& spec) {
    if (spec.max_restarts == 1) return fmt::format("the one restart{} is used up", within(spec));
    return fmt::format("all {} restarts{} are used up", spec.max_restarts, within(spec));
}

/// The back-off: doubled for every restart in a row, at most backoff_max, then spread over its upper half.
Duration backoff(const RestartSpec& spec, int restarts_in_a_row, double random) {
    if (spec.backoff <= Duration::zero() || restarts_in_a_row == 0) return Duration::zero();
    const double doubled = static_cast<double>(spec.backoff.count()) * std::pow(2.0, restarts_in_a_row - 1);
    const double capped = std::min(doubled, static_cast<double>(spec.backoff_max.count()));
    return Duration(static_cast<Duration::rep>(capped * (0.5 + 0.5 * random)));
}

}  // namespace

bool stopped_early(const FailureFacts& failure) {
    return !failure.never_ran && !failure.signaled && failure.status == static_cast<int>(ExitCode::TryAgain);
}

std::string permanent_failure(const FailureFacts& failure) {
    if (failure.never_ran && !failure.ran_before)
        return "the program could not be started: a restart cannot help";
    if (failure.signaled) return {};
    switch (failure.status) {
        case EX_USAGE: return "exit code 64 means wrong usage: a restart cannot help";
        case EX_DATAERR: return "exit code 65 means wrong data: a restart cannot help";
        case EX_NOINPUT: return "exit code 66 means a missing input: a restart cannot help";
        case EX_CONFIG: return "exit code 78 means a wrong configuration: a restart cannot help";
        case static_cast<int>(ExitCode::DoNotRequeue): return "exit code 93 asks for no restart";
        case static_cast<int>(ExitCode::NotExecutable):
            return "exit code 126 means not executable: a restart cannot help";
        case static_cast<int>(ExitCode::NotFound):
            return "exit code 127 means not found: a restart cannot help";
        default: return {};
    }
}

RestartDecision decide_restart(const RestartSpec& spec, const RestartHistory& history,
                               const FailureFacts& failure, TimePoint now, double random, TimePoint time_up) {
    if (const std::string why = permanent_failure(failure); !why.empty()) return {false, now, why};
    if (spec.max_restarts == 0) return {false, now, "no restarts were asked for (--max-restarts)"};
    const int used = spent(spec, history, now);
    if (used >= spec.max_restarts) return {false, now, used_up(spec)};
    if (history.without_progress >= kStuckGenerations) {
        return {false, now,
                fmt::format("{} generations in a row made no progress", history.without_progress)};
    }
    const Duration wait = backoff(spec, static_cast<int>(history.restarts.size()), random);
    const TimePoint at = deadline_after(now, wait);
    if (time_up != kNever && time_up - at < kProgressAge) {
        const Duration left =
            std::max(Duration::zero(), Duration(std::chrono::round<std::chrono::seconds>(time_up - now)));
        return {false, now,
                fmt::format("no restart: it would get nowhere in the {} that the walltime leaves",
                            format_duration(left)),
                true};
    }
    std::string why = fmt::format("restart {} of {}{}", used + 1, spec.max_restarts, within(spec));
    if (wait > Duration::zero()) why += " in " + format_duration(wait);
    return {true, at, std::move(why)};
}

}  // namespace ddprun
