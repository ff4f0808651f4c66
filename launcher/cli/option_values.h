#pragma once

#include <map>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "env/result.h"
#include "launcher/spec/job_spec.h"

/// Parsers of option values. They read nothing else; every error is InvalidArgument, begins with the value in
/// quotes and ends with what was expected, ready to follow the option's name.
namespace ddprun {

/// "4", "auto", "gpu", "cpu".
Result<WorkerCount> parse_worker_count(std::string_view text);
/// "N" or "MIN:MAX".
Result<Nodes> parse_nodes(std::string_view text);
/// "3", or "0:1,11:2" by local rank (any number of digits).
Result<StreamsMap> parse_streams(std::string_view text);
/// "3" or "3/1h".
Result<RestartSpec> parse_restarts(std::string_view text);
/// Applies "k=v,k=v" with torchrun's keys. Quotes around the whole, a key or a value come from job scripts
/// and are removed. Returns a line for each key that has no effect.
Result<std::vector<std::string>> apply_rdzv_conf(std::string_view text, RendezvousSpec& rendezvous);
/// "0,3,11".
Result<std::vector<int>> parse_rank_list(std::string_view text);
/// Pieces between commas; a double comma is a comma. Empty pieces are dropped.
std::vector<std::string> parse_filters(std::string_view text);
/// "SIGTERM,SIGINT": signals that can be handled.
Result<std::vector<int>> parse_signal_list(std::string_view text);
/// "USR1=stop,TERM=preempt".
Result<std::map<int, SignalAction>> parse_signal_actions(std::string_view text);
/// "RANK=COMMAND".
Result<std::pair<int, std::string>> parse_attach(std::string_view text);
/// Checks that "${...}" names only variables that a prefix can have.
Status check_prefix(std::string_view text);

Result<int> parse_rank(std::string_view text);
Result<int> parse_port(std::string_view text);
/// "9400" is a port of the loopback interface, "10.0.0.5:9400" another address, "*:9400" all of them (host
/// "").
Result<Endpoint> parse_metrics_address(std::string_view text);
/// A duration of at least zero.
Result<Duration> parse_span(std::string_view text);
/// Any text but "".
Result<std::string> parse_text(std::string_view text);

/// The words of an option, with what each means.
template <class Value>
using Choices = std::vector<std::pair<const char*, Value>>;
/// "'x' is not a, b or c".
Error not_one_of(std::string_view text, std::vector<std::string> words);
/// What the word means.
template <class Value>
Result<Value> parse_choice(std::string_view text, const Choices<std::type_identity_t<Value>>& choices) {
    std::vector<std::string> words;
    for (const auto& [word, meaning] : choices) {
        if (text == word) return meaning;
        words.emplace_back(word);
    }
    return not_one_of(text, std::move(words));
}

}  // namespace ddprun
