#include "launcher/hang/hang_detector.h"

#include <fmt/core.h>

#include <algorithm>

#include "env/kept.h"
#include "env/text.h"

namespace ddprun {
namespace {

constexpr Duration kShortestInterval = std::chrono::seconds(1);
constexpr double kBusyShare = 0.01;  ///< of one core; waiting in slices uses less

bool inside(const HangSample& sample) { return sample.started_seq > sample.finished_seq; }

std::string collective(const HangSample& sample) {
    std::string text = fmt::format("{} #{}", segment_op_name(sample.operation), sample.started_seq);
    if (sample.bytes > 0) text += fmt::format(" ({})", format_bytes(sample.bytes));
    return text;
}

/// "rank 3", "rank 3 on node02".
std::string name(const HangSample& sample) {
    return sample.host.empty() ? fmt::format("rank {}", sample.rank)
                               : fmt::format("rank {} on {}", sample.rank, sample.host);
}

/// "rank 3", "ranks 0-2, 5".
std::string ranks_text(const std::vector<int>& ranks) {
    return fmt::format("rank{} {}", ranks.size() == 1 ? "" : "s", format_ranges(ranks));
}

}  // namespace

Duration HangDetector::interval() const { return std::max(timeout_ / 4, kShortestInterval); }

void HangDetector::reset() { watches_.clear(); }

void HangDetector::begin(const std::vector<HangSample>& samples, TimePoint now) {
    watches_.clear();
    for (const HangSample& sample : samples) watches_.push_back({sample, now, now, now, now, sample.cpu});
}

std::optional<HangVerdict> HangDetector::feed(const std::vector<HangSample>& samples, TimePoint now) {
    const bool overslept = now - last_feed_ > 2 * interval();
    last_feed_ = now;
    if (overslept || watches_.size() != samples.size()) {
        begin(samples, now);
        return std::nullopt;
    }
    for (std::size_t i = 0; i < samples.size(); ++i) update(watches_[i], samples[i], now);
    const auto is_awaited = [](const HangSample& sample) {
        return sample.awaited && sample.alive && !sample.stopped;
    };
    if (std::any_of(samples.begin(), samples.end(), is_awaited)) {
        for (Watch& watch : watches_) watch.collective_since = watch.heartbeat_since = watch.idle_since = now;
        return stopped_rank(now);
    }
    if (auto verdict = stuck_collective(now)) return with_stopped_ranks(*std::move(verdict));
    if (auto verdict = stopped_rank(now)) return verdict;
    if (auto verdict = lost_heartbeat(now)) return with_stopped_ranks(*std::move(verdict));
    return all_idle(now);
}

/// Names the stopped ranks where the verdict does not speak of any: nothing tells more.
HangVerdict HangDetector::with_stopped_ranks(HangVerdict verdict) const {
    std::vector<int> stopped;
    for (const Watch& watch : watches_) {
        if (watch.last.alive && watch.last.stopped) stopped.push_back(watch.last.rank);
    }
    if (!stopped.empty() && verdict.what.find("stopped") == std::string::npos)
        verdict.what += fmt::format("; {} {} stopped, by SIGSTOP or a debugger", ranks_text(stopped),
                                    stopped.size() == 1 ? "is" : "are");
    return verdict;
}

void HangDetector::update(Watch& watch, const HangSample& sample, TimePoint now) const {
    const HangSample& last = watch.last;
    const bool same_call = sample.started_seq == last.started_seq && sample.finished_seq == last.finished_seq;
    if (!same_call) watch.collective_since = watch.heartbeat_since = now;
    if (!sample.stopped || !last.stopped) watch.stopped_since = now;
    if (sample.progress_ns != last.progress_ns) watch.heartbeat_since = now;
    // Compare since the rank became idle, not since the last sample: a tick of the kernel's clock is long.
    // CPU time falls when a descendant ends; that counts as a change, too.
    const double idle_seconds = in_seconds(now - watch.idle_since);
    const double used = in_seconds(sample.cpu - watch.idle_cpu);
    const bool busy = used < 0 || used > std::max(kBusyShare * idle_seconds, 0.02);
    if (busy || sample.io_bytes != last.io_bytes || sample.alive != last.alive) {
        watch.idle_since = now;
        watch.idle_cpu = sample.cpu;
    }
    watch.last = sample;
}

std::string HangDetector::doing(const Watch& watch, TimePoint now) const {
    if (!watch.last.alive) return "it has ended";
    if (watch.last.stopped) return "it is stopped, by SIGSTOP or a debugger";
    return computes(watch, now) ? "it is busy with something else" : "it does nothing";
}

bool HangDetector::computes(const Watch& watch, TimePoint now) const {
    return watch.last.alive && !watch.last.stopped && now - watch.idle_since < timeout_;
}

/// `since`: others have waited for this rank since then.
bool HangDetector::is_overdue(const Watch& watch, TimePoint since, TimePoint now) const {
    const Duration limit = kSlowestUnits * watch.last.slowest_unit;
    return !computes(watch, now) || (limit > Duration::zero() && now - since >= limit);
}

/// The verdict on ranks of which none is missing: only a stopped one (null: there is none) is to blame.
HangVerdict HangDetector::blame(const Watch* stopped, std::string what) {
    if (stopped == nullptr) return {-1, std::move(what)};
    return {stopped->last.rank,
            fmt::format("{}; {} is stopped, by SIGSTOP or a debugger", what, name(stopped->last)), true};
}

std::optional<HangVerdict> HangDetector::stuck_collective(TimePoint now) const {
    const Watch* waiting = nullptr;
    for (const Watch& watch : watches_) {
        const bool stuck = watch.last.alive && watch.last.joined && inside(watch.last) &&
                           now - watch.collective_since >= timeout_;
        if (stuck && (waiting == nullptr || watch.last.started_seq > waiting->last.started_seq))
            waiting = &watch;
    }
    if (waiting == nullptr) return std::nullopt;
    const std::uint64_t seq = waiting->last.started_seq;
    std::vector<int> in_it, missing;
    std::vector<std::string> clauses;
    const Watch *stopped = nullptr, *culprit = nullptr;
    for (const Watch& watch : watches_) {
        const HangSample& sample = watch.last;
        if (sample.joined && sample.started_seq > seq) return std::nullopt;  // it went on meanwhile
        if (sample.joined && sample.started_seq == seq) {
            in_it.push_back(sample.rank);
            if (sample.stopped) stopped = &watch;
            continue;
        }
        missing.push_back(sample.rank);
        if (culprit == nullptr || (computes(*culprit, now) && !computes(watch, now))) culprit = &watch;
        if (inside(sample)) clauses.push_back(fmt::format("{} is in {}", name(sample), collective(sample)));
        else
            clauses.push_back(fmt::format("{} has not called {} ({})", name(sample),
                                          collective(waiting->last), doing(watch, now)));
    }
    const std::string span = format_duration(now - waiting->collective_since);
    if (missing.empty()) {
        return blame(stopped,
                     fmt::format("all ranks have been in {} for {}", collective(waiting->last), span));
    }
    constexpr std::size_t kMostClauses = 8;
    if (clauses.size() > kMostClauses)
        clauses = {fmt::format("{} have not called {}", ranks_text(missing), collective(waiting->last))};
    return HangVerdict{culprit->last.rank,
                       fmt::format("{}; {} wait{} for it since {}", join(clauses, "; "), ranks_text(in_it),
                                   in_it.size() == 1 ? "s" : "", span),
                       is_overdue(*culprit, waiting->collective_since, now)};
}

std::optional<HangVerdict> HangDetector::stopped_rank(TimePoint now) const {
    for (const Watch& watch : watches_) {
        if (!watch.last.alive || !watch.last.stopped || now - watch.stopped_since < timeout_) continue;
        return HangVerdict{watch.last.rank,
                           fmt::format("{} has been stopped, by SIGSTOP or a debugger, for {}",
                                       name(watch.last), format_duration(now - watch.stopped_since)),
                           true};
    }
    return std::nullopt;
}

std::optional<HangVerdict> HangDetector::lost_heartbeat(TimePoint now) const {
    const Watch *longest = nullptr, *behind = nullptr;
    std::uint64_t last_step = 0;
    std::vector<int> silent, never;
    for (const Watch& watch : watches_) {
        if (!watch.last.alive) continue;
        if (watch.last.progress_ns == 0) never.push_back(watch.last.rank);
        if (watch.last.progress_ns == 0 || now - watch.heartbeat_since < timeout_) continue;
        silent.push_back(watch.last.rank);
        if (longest == nullptr || watch.heartbeat_since < longest->heartbeat_since) longest = &watch;
        if (behind == nullptr || watch.last.step < behind->last.step) behind = &watch;
        last_step = std::max(last_step, watch.last.step);
    }
    if (longest == nullptr) return std::nullopt;
    std::string what =
        fmt::format("{} ha{} reported no progress for {}", ranks_text(silent),
                    silent.size() == 1 ? "s" : "ve", format_duration(now - longest->heartbeat_since));
    // Ranks that wait for another one have done a step more.
    const bool is_behind = behind->last.step < last_step;
    if (is_behind)
        what +=
            fmt::format("; {} is behind, at step {} of {}", name(behind->last), behind->last.step, last_step);
    const Watch& culprit = is_behind ? *behind : *longest;
    what += fmt::format(" ({})", doing(culprit, now));
    if (!never.empty())
        what +=
            fmt::format("; {} ha{} never reported any", ranks_text(never), never.size() == 1 ? "s" : "ve");
    return HangVerdict{culprit.last.rank, std::move(what),
                       is_behind && is_overdue(culprit, culprit.heartbeat_since, now)};
}

std::optional<HangVerdict> HangDetector::all_idle(TimePoint now) const {
    TimePoint since{};
    bool any = false;
    const Watch* stopped = nullptr;
    for (const Watch& watch : watches_) {
        if (!watch.last.alive) continue;
        any = true;
        if (now - watch.idle_since < timeout_) return std::nullopt;
        since = std::max(since, watch.idle_since);
        if (watch.last.stopped && stopped == nullptr) stopped = &watch;
    }
    if (!any) return std::nullopt;
    return blame(stopped, fmt::format("no rank has used processor time, read or written anything for {}",
                                      format_duration(now - since)));
}

}  // namespace ddprun
