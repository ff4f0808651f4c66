#include "launcher/cli/option_values.h"

#include <signal.h>

#include <algorithm>
#include <array>
#include <utility>

#include <fmt/core.h>

#include "env/text.h"
#include "launcher/output/lines.h"
#include "launcher/spec/signals.h"

namespace ddprun {
namespace {

constexpr int kMaxWorkersPerNode = 16384;
constexpr int kMaxNodes = 1 << 20;
constexpr int kMaxRank = 1 << 24;
constexpr int kMaxRestarts = 1'000'000;

// ---- the keys of --rdzv-conf

Status set_seconds(std::string_view value, Duration& place) {
    const Result<Duration> span = parse_span(value);
    if (!span) return Error::invalid(fmt::format("'{}' is not a time in seconds", excerpt(value)));
    place = *span;
    return {};
}

Status set_interval(std::string_view value, RendezvousSpec& rendezvous) {
    const Result<Duration> span = parse_span(value);
    if (!span || *span < std::chrono::milliseconds(10))
        return Error::invalid(fmt::format("'{}' is not a time of at least 10 ms", excerpt(value)));
    rendezvous.keep_alive_interval = *span;
    return {};
}

Status set_attempts(std::string_view value, RendezvousSpec& rendezvous) {
    const Result<std::int64_t> count = parse_int_between(value, 1, 1000);
    if (!count) return Error::invalid(fmt::format("'{}' is not a count from 1 to 1000", excerpt(value)));
    rendezvous.keep_alive_attempts = static_cast<int>(*count);
    return {};
}

Status set_is_host(std::string_view value, RendezvousSpec& rendezvous) {
    const Result<bool> is_host = parse_bool(value);
    if (!is_host) return Error::invalid(fmt::format("'{}' is not true or false", excerpt(value)));
    rendezvous.is_host = *is_host;
    return {};
}

Status set_join_timeout(std::string_view value, RendezvousSpec& rendezvous) {
    return set_seconds(value, rendezvous.join_timeout);
}

Status set_last_call(std::string_view value, RendezvousSpec& rendezvous) {
    return set_seconds(value, rendezvous.last_call);
}

Status check_seconds(std::string_view value, RendezvousSpec&) {
    Duration unused{};
    return set_seconds(value, unused);
}

Status check_store_type(std::string_view value, RendezvousSpec&) {
    if (value == "tcp") return {};
    return Error::invalid(fmt::format("'{}' is not supported (expected tcp)", excerpt(value)));
}

Status refuse_etcd(std::string_view, RendezvousSpec&) {
    return Error::invalid("belongs to the etcd backends, which ddprun does not use");
}

struct ConfKey {
    std::string_view name;
    Status (*set)(std::string_view value, RendezvousSpec& rendezvous);
    std::string_view without_effect = "";  ///< why the key has none; "" it has one
};
constexpr ConfKey kConfKeys[] = {
    {"timeout", set_join_timeout},  // the static backend's name of the next one, which wins
    {"join_timeout", set_join_timeout},
    {"last_call_timeout", set_last_call},
    {"close_timeout", check_seconds,
     "closing takes no round trip; the job ends when its nodes have been told"},
    {"heartbeat_timeout", check_seconds,
     "a heartbeat is no store operation that could hang; see --heartbeat-timeout"},
    {"keep_alive_interval", set_interval},
    {"keep_alive_max_attempt", set_attempts},
    {"read_timeout", check_seconds, "nodes are told of changes and wait for no read; see join_timeout"},
    {"is_host", set_is_host},
    {"store_type", check_store_type},
    {"ssl_cert", refuse_etcd},
    {"ssl_cert_key", refuse_etcd},
    {"ca_cert", refuse_etcd},
    {"protocol", refuse_etcd},
};

/// A warning, not an error: torchrun passes unknown keys to its back end, which ignores them.
std::string unknown_conf_key(std::string_view key) {
    std::vector<std::string> names;
    for (const ConfKey& known : kConfKeys) names.emplace_back(known.name);
    const std::string near = nearest(key, names);
    if (!near.empty())
        return fmt::format("'{}' is not a known key (did you mean {}?), without effect", excerpt(key), near);
    names.erase(names.begin());  // it is another name of the second
    return fmt::format("'{}' is not a known key, without effect (known are {})", excerpt(key),
                       join(names, ", "));
}

/// Removes a pair of quotes that encloses the whole text, and the blanks inside and outside.
std::string_view without_quotes(std::string_view text) {
    text = trim(text);
    const bool is_quoted =
        text.size() > 1 && (text.front() == '\'' || text.front() == '"') && text.back() == text.front();
    return is_quoted ? trim(text.substr(1, text.size() - 2)) : text;
}

Result<Streams> parse_stream_bits(std::string_view text) {
    const Result<std::int64_t> bits = parse_int_between(text, 0, 3);
    if (!bits)
        return Error::invalid(
            fmt::format("'{}' is not 0 (none), 1 (stdout), 2 (stderr) or 3 (both)", excerpt(text)));
    return static_cast<Streams>(*bits);
}

Result<int> parse_small(std::string_view text, int max, std::string_view expected) {
    const Result<std::int64_t> number = parse_int_between(text, 0, max);
    if (!number) return Error::invalid(fmt::format("'{}' is not {}", excerpt(text), expected));
    return static_cast<int>(*number);
}

Result<SignalAction> parse_signal_action(std::string_view text) {
    return parse_choice<SignalAction>(text, {{"forward", SignalAction::Forward},
                                             {"stop", SignalAction::Stop},
                                             {"preempt", SignalAction::Preempt},
                                             {"ignore", SignalAction::Ignore}});
}

/// SIGCHLD tells us of a worker's end; the others cannot be caught or mean a bug of ours.
bool is_ours_to_handle(int signal) {
    constexpr std::array kNot = {SIGKILL, SIGSTOP, SIGCHLD, SIGSEGV, SIGBUS,
                                 SIGILL,  SIGFPE,  SIGABRT, SIGPIPE};
    return std::find(kNot.begin(), kNot.end(), signal) == kNot.end();
}

Result<int> parse_signal(std::string_view text) {
    const std::optional<int> signal = signal_from_name(text);
    if (!signal)
        return Error::invalid(
            fmt::format("'{}' is not a signal (expected a name such as SIGUSR1)", excerpt(text)));
    if (!is_ours_to_handle(*signal))
        return Error::invalid(fmt::format("'{}' cannot be handled by a launcher", excerpt(text)));
    return *signal;
}

}  // namespace

Result<WorkerCount> parse_worker_count(std::string_view text) {
    text = trim(text);  // as Python's int() does
    const std::string word = lower(text);
    if (word == "auto") return WorkerCount{WorkerCount::Kind::Auto, 0};
    if (word == "gpu") return WorkerCount{WorkerCount::Kind::Gpu, 0};
    if (word == "cpu") return WorkerCount{WorkerCount::Kind::Cpu, 0};
    const Result<std::int64_t> number = parse_int(text);
    if (!number)
        return Error::invalid(
            fmt::format("'{}' is not a number (expected a count, auto, gpu or cpu)", excerpt(text)));
    if (*number < 1 || *number > kMaxWorkersPerNode) {
        return Error::invalid(fmt::format("'{}' is not between 1 and {}", excerpt(text), kMaxWorkersPerNode));
    }
    return WorkerCount{WorkerCount::Kind::Number, static_cast<int>(*number)};
}

Result<Nodes> parse_nodes(std::string_view text) {
    const std::vector<std::string_view> parts = split(text, ':');
    if (parts.size() > 2) return Error::invalid(fmt::format("'{}' is not N or MIN:MAX", excerpt(text)));
    Nodes nodes;
    for (std::size_t i = 0; i < parts.size(); ++i) {
        const Result<std::int64_t> number = parse_int(trim(parts[i]));
        if (!number)
            return Error::invalid(
                fmt::format("'{}' is not a number (expected N or MIN:MAX)", excerpt(parts[i])));
        if (*number < 1 || *number > kMaxNodes) {
            return Error::invalid(fmt::format("'{}' is not a number of nodes (expected 1 to {})",
                                              excerpt(parts[i]), kMaxNodes));
        }
        (i == 0 ? nodes.min : nodes.max) = static_cast<int>(*number);
    }
    if (parts.size() == 1) nodes.max = nodes.min;
    if (nodes.min > nodes.max) {
        return Error::invalid(fmt::format("'{}': the minimum {} is above the maximum {} (expected MIN:MAX)",
                                          excerpt(text), nodes.min, nodes.max));
    }
    return nodes;
}

Result<StreamsMap> parse_streams(std::string_view text) {
    StreamsMap map;
    if (text.find(':') == std::string_view::npos) {
        const Result<Streams> bits = parse_stream_bits(text);
        if (!bits) return Error::invalid(bits.error().what + ", nor a map such as 0:1,3:2");
        map.everyone = *bits;
        return map;
    }
    for (const std::string_view entry : split(text, ',')) {
        const std::size_t colon = entry.find(':');
        if (colon == std::string_view::npos)
            return Error::invalid(fmt::format("'{}' is not LOCAL_RANK:STREAMS", excerpt(entry)));
        const Result<int> rank = parse_rank(entry.substr(0, colon));
        if (!rank) return rank.error();
        const Result<Streams> bits = parse_stream_bits(entry.substr(colon + 1));
        if (!bits) return bits.error();
        if (!map.by_local_rank.emplace(*rank, *bits).second) {
            return Error::invalid(fmt::format("'{}' names local rank {} twice", excerpt(text), *rank));
        }
    }
    return map;
}

Result<RestartSpec> parse_restarts(std::string_view text) {
    RestartSpec restart;
    const std::size_t slash = text.find('/');
    const Result<int> count =
        parse_small(text.substr(0, slash), kMaxRestarts, "a count of restarts, as in 3 or 3/1h");
    if (!count) return count.error();
    restart.max_restarts = *count;
    if (slash == std::string_view::npos) return restart;
    const std::string_view span = text.substr(slash + 1);
    const Result<Duration> window = parse_duration(span);
    if (!window || *window <= Duration::zero()) {
        return Error::invalid(
            fmt::format("'{}' is not a time span (expected for example 3/1h)", excerpt(span)));
    }
    restart.window = *window;
    return restart;
}

Result<std::vector<std::string>> apply_rdzv_conf(std::string_view text, RendezvousSpec& rendezvous) {
    std::vector<std::string> remarks;
    std::map<std::string_view, std::string_view> given;
    for (const std::string_view piece : split(without_quotes(text), ',')) {
        const std::string_view pair = without_quotes(piece);
        if (pair.empty()) continue;
        const std::size_t equals = pair.find('=');
        const std::string_view name = without_quotes(pair.substr(0, equals));
        if (equals == std::string_view::npos || name.empty())
            return Error::invalid(fmt::format("'{}' is not KEY=VALUE", excerpt(pair)));
        if (std::ranges::find(kConfKeys, name, &ConfKey::name) == std::end(kConfKeys))
            remarks.push_back(unknown_conf_key(name));
        given[name] = without_quotes(pair.substr(equals + 1));
    }
    for (const auto& [name, set, without_effect] : kConfKeys) {
        const auto found = given.find(name);
        if (found == given.end()) continue;
        if (const Status taken = set(found->second, rendezvous); !taken) return taken.error().with(name);
        if (!without_effect.empty())
            remarks.push_back(fmt::format("{}: accepted, without effect: {}", name, without_effect));
    }
    return remarks;
}

Result<std::vector<int>> parse_rank_list(std::string_view text) {
    std::vector<int> ranks;
    if (text.empty()) return ranks;
    for (const std::string_view piece : split(text, ',')) {
        const Result<int> rank = parse_rank(trim(piece));
        if (!rank) return rank.error();
        ranks.push_back(*rank);
    }
    return ranks;
}

std::vector<std::string> parse_filters(std::string_view text) {
    std::vector<std::string> filters(1);
    for (std::size_t i = 0; i < text.size(); ++i) {
        const bool comma = text[i] == ',';
        const bool doubled = comma && i + 1 < text.size() && text[i + 1] == ',';
        if (doubled) ++i;
        if (comma && !doubled) filters.emplace_back();
        else filters.back() += text[i];
    }
    std::erase(filters, "");
    return filters;
}

Result<std::vector<int>> parse_signal_list(std::string_view text) {
    std::vector<int> signals;
    for (const std::string_view name : split(text, ',')) {
        const Result<int> signal = parse_signal(trim(name));
        if (!signal) return signal.error();
        signals.push_back(*signal);
    }
    return signals;
}

Result<std::map<int, SignalAction>> parse_signal_actions(std::string_view text) {
    std::map<int, SignalAction> actions;
    for (const std::string_view piece : split(text, ',')) {
        const std::size_t equals = piece.find('=');
        if (equals == std::string_view::npos) {
            return Error::invalid(fmt::format("'{}' is not NAME=ACTION (as in USR1=stop)", excerpt(piece)));
        }
        const Result<int> signal = parse_signal(trim(piece.substr(0, equals)));
        if (!signal) return signal.error();
        const Result<SignalAction> action = parse_signal_action(trim(piece.substr(equals + 1)));
        if (!action) return action.error();
        actions[*signal] = *action;
    }
    return actions;
}

Result<std::pair<int, std::string>> parse_attach(std::string_view text) {
    const std::size_t equals = text.find('=');
    if (equals == std::string_view::npos || equals + 1 == text.size()) {
        return Error::invalid(fmt::format("'{}' is not RANK=COMMAND (as in 0=gdb)", excerpt(text)));
    }
    const Result<int> rank = parse_rank(text.substr(0, equals));
    if (!rank) return rank.error();
    return std::pair{*rank, std::string(text.substr(equals + 1))};
}

Status check_prefix(std::string_view text) {
    for (std::size_t at = text.find("${"); at != std::string_view::npos; at = text.find("${", at + 2)) {
        const std::size_t end = text.find('}', at);
        if (end == std::string_view::npos)
            return Error::invalid(fmt::format("'{}': ${{ without }}", excerpt(text)));
        const std::string_view name = text.substr(at + 2, end - at - 2);
        if (!is_prefix_variable(name))
            return Error::invalid(
                fmt::format("'${{{}}}' is not known (expected {})", excerpt(name), prefix_variables()));
    }
    return {};
}

Result<int> parse_rank(std::string_view text) {
    return parse_small(text, kMaxRank, "a rank (expected 0, 1, ...)");
}

Result<int> parse_port(std::string_view text) {
    return parse_small(text, 65535, "a port (expected 0 to 65535; 0 takes a free one)");
}

Result<Endpoint> parse_metrics_address(std::string_view text) {
    if (text.find(':') != std::string_view::npos) {
        Result<Endpoint> where = parse_endpoint(text, 0);
        if (where && where->host == "*") where->host.clear();
        return where;
    }
    const Result<int> port = parse_port(text);
    if (!port) return port.error();
    return Endpoint{"127.0.0.1", static_cast<std::uint16_t>(*port)};
}

Result<Duration> parse_span(std::string_view text) {
    const Result<Duration> span = parse_duration(text);
    if (!span && span.error().code == Errc::Limit) return Error::invalid(span.error().what);
    if (!span || *span < Duration::zero()) {
        return Error::invalid(fmt::format(
            "'{}' is not a time span (expected seconds, or for example 500ms, 2m, 1h)", excerpt(text)));
    }
    return *span;
}

Result<std::string> parse_text(std::string_view text) {
    if (text.empty()) return Error::invalid("the value is empty");
    return std::string(text);
}

Error not_one_of(std::string_view text, std::vector<std::string> words) {
    const std::string last = std::exchange(words.back(), "");
    words.pop_back();
    return Error::invalid(fmt::format("'{}' is not {} or {}", excerpt(text), join(words, ", "), last));
}

}  // namespace ddprun
