#include "launcher/tools/trace/trace.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <limits>
#include <map>
#include <optional>
#include <set>

#include "env/text.h"
#include "launcher/talk/event_file.h"

namespace ddprun {
namespace {

constexpr std::size_t kLauncherProcess = 1'000'000;  // above the numbers of ranks
constexpr std::size_t kTracksOfProcess = 10'000, kLanesOfTrack = 100;

/// The collectives that no rank leaves before all ranks have entered.
bool waits_for_all(const TraceSpan& span) {
    static const std::set<std::string_view> names = {"all_reduce", "all_gather", "reduce_scatter",
                                                     "all_to_all", "barrier"};
    return span.kind == TraceKind::Collective && span.group > 0 && names.contains(span.name);
}

std::uint64_t key_of(const TraceSpan& span) {
    return std::hash<std::string>()(
        fmt::format("{} {} {} {} {}", span.world, span.group, span.seq, span.bytes, span.name));
}

/// The clocks of a job; the first is the reference.
class Clocks {
  public:
    explicit Clocks(const TraceFiles& files) {
        // The reference is the clock of the lowest rank.
        std::vector<const TracedProcess*> in_order;
        for (const TracedProcess& one : files.processes) in_order.push_back(&one);
        std::ranges::stable_sort(in_order, {}, [](const TracedProcess* one) {
            return one->spans.empty() ? std::numeric_limits<std::uint32_t>::max() : one->spans.front().rank;
        });
        for (const TracedProcess* one : in_order) add(one->clock, one->host);
        for (const TracedLauncher& launcher : files.launchers) {
            for (const TracedEvent& event : launcher.events) add(event.clock, launcher.host);
        }
        std::vector<std::size_t> clock_of;
        for (const TracedProcess& one : files.processes) clock_of.push_back(number_.at(one.clock.id));
        offsets_ = align(meetings_of(files, clock_of), guesses_);
    }
    [[nodiscard]] std::int64_t to_reference(const TraceClock& clock, std::int64_t ns) const {
        return offsets_[number_.at(clock.id)].to_reference(ns);
    }
    /// Nanoseconds from 1970 to the zero of the reference.
    [[nodiscard]] std::int64_t zero() const { return zero_; }
    [[nodiscard]] std::vector<std::string> remarks() const {
        std::vector<std::string> lines;
        for (std::size_t clock = 1; clock < offsets_.size(); ++clock) {
            const ClockOffset& one = offsets_[clock];
            lines.push_back(
                one.uncertainty_ns < 0
                    ? fmt::format("clock of {}: set by the hosts' dates, because no collective of all ranks "
                                  "joins it with {}",
                                  hosts_[clock], hosts_[0])
                    : fmt::format("clock of {}: {:.6f} s ahead of {}, within {:.0f} us, by {} collectives",
                                  hosts_[clock], static_cast<double>(one.points.front().offset_ns) / 1e9,
                                  hosts_[0], static_cast<double>(one.uncertainty_ns) / 1e3, one.collectives));
        }
        return lines;
    }

  private:
    void add(const TraceClock& clock, const std::string& host) {
        if (!number_.emplace(clock.id, number_.size()).second) return;
        if (hosts_.empty()) zero_ = clock.wall_ns;
        hosts_.push_back(host);
        guesses_.push_back(zero_ - clock.wall_ns);
    }

    std::map<std::string, std::size_t> number_;
    std::vector<std::string> hosts_;
    std::vector<std::int64_t> guesses_;
    std::int64_t zero_ = 0;
    std::vector<ClockOffset> offsets_;
};

/// A span on the job's time line.
struct Piece {
    std::string name;
    std::int64_t begin, end;
    std::int64_t waiting = 0;
    std::string args;  ///< members of a JSON object
};

/// Divides pieces that overlap without lying one inside the other: a viewer cannot show these on one track.
std::vector<std::vector<Piece>> lanes_of(std::vector<Piece> pieces) {
    std::ranges::stable_sort(pieces, [](const Piece& one, const Piece& other) {
        return one.begin != other.begin ? one.begin < other.begin : one.end > other.end;
    });
    std::vector<std::vector<Piece>> lanes;
    std::vector<std::vector<std::int64_t>> open;  ///< ends of the pieces around the next one, by lane
    for (Piece& piece : pieces) {
        std::size_t lane = 0;
        for (; lane < lanes.size(); ++lane) {
            while (!open[lane].empty() && open[lane].back() <= piece.begin) open[lane].pop_back();
            if (open[lane].empty() || open[lane].back() >= piece.end) break;
        }
        if (lane == lanes.size()) lanes.emplace_back(), open.emplace_back();
        open[lane].push_back(piece.end);
        lanes[lane].push_back(std::move(piece));
    }
    return lanes;
}

std::string as_json_text(std::string_view text) {
    std::string out;
    append_json_text(out, text);
    return out;
}

/// The tracks of one process of the time line, by their order and name.
using Tracks = std::map<std::pair<std::size_t, std::string>, std::vector<Piece>>;

/// The list of trace events.
class Events {
  public:
    explicit Events(std::int64_t zero) : zero_(zero) {}

    void process(std::size_t number, const std::string& name, int order, const Tracks& tracks) {
        metadata("process_name", number, 0, "name", as_json_text(name));
        metadata("process_sort_index", number, 0, "sort_index", std::to_string(order));
        std::size_t index = 0;
        for (const auto& [track, pieces] : tracks) {
            const std::size_t first = number * kTracksOfProcess + ++index * kLanesOfTrack;
            const auto lanes = lanes_of(pieces);
            for (std::size_t lane = 0; lane < lanes.size(); ++lane) {
                const std::size_t thread = first + std::min(lane, kLanesOfTrack - 1);
                metadata("thread_name", number, thread, "name", as_json_text(track.second));
                metadata("thread_sort_index", number, thread, "sort_index",
                         std::to_string(index * kLanesOfTrack + lane));
                for (const Piece& piece : lanes[lane]) add(piece, number, thread);
            }
        }
    }
    void instant(std::size_t process, const std::string& name, std::int64_t at, const std::string& args) {
        event(fmt::format(
            R"({{"ph":"i","s":"p","name":{},"cat":"ddprun","pid":{},"tid":{},"ts":{},"args":{}}})",
            as_json_text(name), process, process * kTracksOfProcess, micros(at - zero_), args));
    }
    [[nodiscard]] const std::string& text() const { return text_; }

  private:
    void event(const std::string& json) { text_ += (text_.empty() ? "\n" : ",\n") + json; }
    static std::string micros(std::int64_t ns) { return fmt::format("{}.{:03}", ns / 1000, ns % 1000); }
    void metadata(const char* what, std::size_t process, std::size_t thread, const char* key,
                  const std::string& value) {
        event(fmt::format(R"({{"ph":"M","name":"{}","pid":{},"tid":{},"args":{{"{}":{}}}}})", what, process,
                          thread, key, value));
    }
    void add(const Piece& piece, std::size_t process, std::size_t thread) {
        const auto write = [&](const std::string& name, std::int64_t duration, const std::string& args) {
            event(fmt::format(
                R"({{"ph":"X","name":{},"cat":"ddp","pid":{},"tid":{},"ts":{},"dur":{},"args":{{{}}}}})",
                as_json_text(name), process, thread, micros(piece.begin - zero_), micros(duration), args));
        };
        write(piece.name, piece.end - piece.begin, piece.args);
        if (piece.waiting > 0) write("wait", std::min(piece.waiting, piece.end - piece.begin), "");
    }

    const std::int64_t zero_;
    std::string text_;
};

std::pair<std::size_t, std::string> track_of(const TraceSpan& span, std::uint32_t pid) {
    switch (span.kind) {
        case TraceKind::None: break;
        case TraceKind::Step: return {1, "steps"};
        case TraceKind::Span:
            if (span.thread == pid) return {2, "spans"};
            return {3, fmt::format("spans of thread {}", span.thread)};
        case TraceKind::Collective: return {4, "collectives"};
        case TraceKind::Loader: return {5, "loader"};
        case TraceKind::Checkpoint: return {6, "checkpoints"};
        case TraceKind::Recovery: return {7, "recovery"};
    }
    return {8, "others"};
}

/// A rank on the time line, over all its processes and generations.
struct RankTracks {
    std::set<std::string> hosts;
    Tracks tracks;
};

class Merge {
  public:
    explicit Merge(const TraceFiles& files) : files_(files), clocks_(files) {
        for (const TracedProcess& process : files.processes) {
            find_last_ranks(process);
            for (const TraceSpan& span : process.spans) {
                zero_ = std::min(zero_, clocks_.to_reference(process.clock, span.begin_ns));
                std::int64_t& latest = latest_[span.world];
                latest = std::max(latest,
                                  clocks_.to_reference(process.clock, std::max(span.begin_ns, span.end_ns)));
            }
        }
        for (const TracedLauncher& launcher : files.launchers) {
            for (const TracedEvent& event : launcher.events) {
                const std::int64_t at = clocks_.to_reference(event.clock, event.at_ns);
                zero_ = std::min(zero_, at);
                if (const Result<std::uint32_t> pid = as<unsigned>(event.line, "pid");
                    pid && text_of(event.line, "event") == "worker_exited")
                    exits_[{text_of(event.line, "on"), *pid}].insert(at);
            }
        }
    }

    MergedTrace result() {
        for (const TracedProcess& process : files_.processes) add(process);
        Events events(zero_);
        for (const auto& [rank, one] : ranks_)
            events.process(rank + 1,
                           fmt::format("rank {} ({})", rank,
                                       join(one.hosts, ", ", [](const std::string& host) { return host; })),
                           static_cast<int>(rank), one.tracks);
        for (std::size_t i = 0; i < files_.launchers.size(); ++i)
            add(events, files_.launchers[i], kLauncherProcess + i);
        MergedTrace merged{.json = {}, .remarks = clocks_.remarks()};
        for (const TracedProcess& one : files_.processes) {
            if (one.lost > 0 && !one.spans.empty())
                merged.remarks.push_back(
                    fmt::format("rank {} (pid {} on {}): the first {} spans are lost, later ones took "
                                "their place",
                                one.spans.front().rank, one.pid, one.host, one.lost));
        }
        merged.json = fmt::format(
            R"({{"displayTimeUnit":"ms","otherData":{{"began":"{}","remarks":{}}},"traceEvents":[{}
]}})",
            format_utc(static_cast<double>(zero_ + clocks_.zero()) / 1e9),
            to_text(json_list(merged.remarks, [](const std::string& line) { return Json(line); })),
            events.text());
        merged.json += '\n';
        return merged;
    }

  private:
    void find_last_ranks(const TracedProcess& process) {
        for (const TraceSpan& span : process.spans) {
            if (!waits_for_all(span)) continue;
            const std::pair entered{clocks_.to_reference(process.clock, span.begin_ns), span.rank};
            auto& last = last_[key_of(span)];
            last = std::max(last, entered);
        }
    }

    void add(const TracedProcess& process) {
        std::map<std::pair<std::uint32_t, std::uint32_t>, Piece> lives;
        for (const TraceSpan& span : process.spans) {
            Piece piece = piece_of(process, span);
            const auto [life, is_new] = lives.try_emplace(
                std::pair{span.rank, span.generation},
                Piece{fmt::format("generation {}", span.generation), piece.begin, piece.end, 0,
                      fmt::format(R"("pid":{},"host":{})", process.pid, as_json_text(process.host))});
            life->second.end = std::max(life->second.end, piece.end);
            ranks_[span.rank].hosts.insert(process.host);
            ranks_[span.rank].tracks[track_of(span, process.pid)].push_back(std::move(piece));
        }
        for (auto& [place, life] : lives)
            ranks_[place.first].tracks[{0, "process"}].push_back(std::move(life));
    }

    /// The end of a span that had not ended: the end of its process, or of its generation, as far as known.
    [[nodiscard]] std::int64_t end_of_open(const TracedProcess& process, const TraceSpan& span) const {
        const std::int64_t latest = latest_.at(span.world);
        const auto exits = exits_.find({process.host, process.pid});
        if (exits == exits_.end() || span.world != process.spans.back().world) return latest;
        const auto exit = exits->second.lower_bound(clocks_.to_reference(process.clock, span.begin_ns));
        return exit == exits->second.end() ? latest : *exit;
    }

    Piece piece_of(const TracedProcess& process, const TraceSpan& span) const {
        const std::int64_t begin = clocks_.to_reference(process.clock, span.begin_ns);
        const std::int64_t end =
            span.end_ns == 0 ? end_of_open(process, span) : clocks_.to_reference(process.clock, span.end_ns);
        Piece piece{span.name, begin, std::max(begin, end), span.waiting_ns,
                    fmt::format(R"("generation":{})", span.generation)};
        if (span.end_ns == 0) piece.args += R"(,"unfinished":true)";
        if (span.kind == TraceKind::Step) piece.args += fmt::format(R"(,"step":{})", span.seq);
        if (span.kind != TraceKind::Collective) return piece;
        piece.args += fmt::format(R"(,"seq":{},"bytes":{},"waiting_us":{:.3f})", span.seq, span.bytes,
                                  static_cast<double>(span.waiting_ns) / 1e3);
        if (const auto last = last_.find(key_of(span)); waits_for_all(span) && last != last_.end())
            piece.args += fmt::format(R"(,"last_rank":{})", last->second.second);
        return piece;
    }

    /// Each event of a ddprun as a moment, and its generations as spans.
    void add(Events& events, const TracedLauncher& launcher, std::size_t number) const {
        Tracks tracks;
        std::vector<Piece>& generations = tracks[{0, "generations"}];
        bool runs = false;
        for (const TracedEvent& event : launcher.events) {
            const std::int64_t at = clocks_.to_reference(event.clock, event.at_ns);
            const std::string name = text_of(event.line, "event");
            events.instant(number, name, at, to_text(event.line));
            if (runs) generations.back().end = at;
            if (name == "generation_ended" || name == "finished") runs = false;
            if (name != "generation_started") continue;
            runs = true;
            generations.push_back(
                {fmt::format("generation {}", as<std::int64_t>(event.line, "generation").value_or(0)), at, at,
                 0, ""});
        }
        events.process(number, fmt::format("ddprun ({})", launcher.host), -1, tracks);
    }

    const TraceFiles& files_;
    Clocks clocks_;
    std::int64_t zero_ = std::numeric_limits<std::int64_t>::max();
    std::map<std::uint64_t, std::int64_t> latest_;  ///< the last sign of each generation
    /// Ends of processes, by host and process id.
    std::map<std::pair<std::string, std::uint32_t>, std::set<std::int64_t>> exits_;
    /// The rank that came last to a collective, and when.
    std::map<std::uint64_t, std::pair<std::int64_t, std::uint32_t>> last_;
    std::map<std::uint32_t, RankTracks> ranks_;
};

}  // namespace

std::vector<Meeting> meetings_of(const TraceFiles& files, const std::vector<std::size_t>& clock_of) {
    std::vector<Meeting> meetings;
    if (std::ranges::all_of(clock_of, [](std::size_t clock) { return clock == 0; })) return meetings;
    // Two jobs of one directory may have collectives with equal keys.
    std::set<std::pair<std::uint64_t, std::uint32_t>> seen;
    std::set<std::uint64_t> ambiguous;
    for (std::size_t i = 0; i < files.processes.size(); ++i) {
        for (const TraceSpan& span : files.processes[i].spans) {
            if (!waits_for_all(span) || span.end_ns == 0) continue;
            const std::uint64_t key = key_of(span);
            if (!seen.emplace(key, span.rank).second) ambiguous.insert(key);
            meetings.push_back({key, clock_of[i], span.begin_ns, span.end_ns});
        }
    }
    std::erase_if(meetings, [&](const Meeting& one) { return ambiguous.contains(one.collective); });
    return meetings;
}

MergedTrace merge_trace(const TraceFiles& files) { return Merge(files).result(); }

}  // namespace ddprun
