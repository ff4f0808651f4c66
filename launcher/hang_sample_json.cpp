#include <nlohmann/json.hpp>

#include "launcher/hang_sample.h"

namespace ddprun {
namespace {

using Json = nlohmann::ordered_json;

/// Positions in a rank's array: names would be most of the text.
enum Field : std::uint8_t { Rank, Alive, Stopped, Cpu, Io, Progress, Joined, Started, Finished, Operation, Bytes, kFields };

Json json_of(const HangSample& sample) {
    return Json::array({sample.rank, sample.alive, sample.stopped, sample.cpu.count(), sample.io_bytes, sample.progress_ns, sample.joined,
                        sample.started_seq, sample.finished_seq, static_cast<std::uint32_t>(sample.operation), sample.bytes});
}

std::optional<HangSample> sample_from(const Json& json) {
    if (!json.is_array() || json.size() < kFields) return std::nullopt;
    for (std::size_t i = 0; i < kFields; ++i) {
        const bool is_flag = i == Alive || i == Stopped || i == Joined;
        if (is_flag ? !json[i].is_boolean() : !json[i].is_number_integer()) return std::nullopt;
    }
    HangSample sample;
    sample.rank = json[Rank].get<int>();
    sample.alive = json[Alive].get<bool>();
    sample.stopped = json[Stopped].get<bool>();
    sample.cpu = Duration(json[Cpu].get<Duration::rep>());
    sample.io_bytes = json[Io].get<std::uint64_t>();
    sample.progress_ns = json[Progress].get<std::int64_t>();
    sample.joined = json[Joined].get<bool>();
    sample.started_seq = json[Started].get<std::uint64_t>();
    sample.finished_seq = json[Finished].get<std::uint64_t>();
    sample.operation = static_cast<SegmentOp>(json[Operation].get<std::uint32_t>());
    sample.bytes = json[Bytes].get<std::uint64_t>();
    return sample;
}

}  // namespace

std::string to_json(const NodeLook& look) {
    Json json = {{"ok", true}, {"generation", look.generation}, {"is_running", look.is_running}};
    if (!look.ranks.empty()) json["host"] = look.ranks.front().host;
    json["ranks"] = Json::array();
    for (const HangSample& sample : look.ranks) json["ranks"].push_back(json_of(sample));
    return json.dump(-1, ' ', false, Json::error_handler_t::replace) + '\n';
}

Result<NodeLook> node_look_from_json(std::string_view line) {
    const Error malformed{Errc::Protocol, "its look at the workers makes no sense", 0};
    const Json json = Json::parse(line, nullptr, false);
    if (!json.is_object()) return malformed;
    const auto generation = json.find("generation"), is_running = json.find("is_running"), ranks = json.find("ranks"), host = json.find("host");
    if (generation == json.end() || !generation->is_number_unsigned() || is_running == json.end() || !is_running->is_boolean()) return malformed;
    if (ranks == json.end() || !ranks->is_array()) return malformed;
    NodeLook look{generation->get<std::uint64_t>(), is_running->get<bool>(), {}};
    for (const Json& rank : *ranks) {
        std::optional<HangSample> sample = sample_from(rank);
        if (!sample) return malformed;
        if (host != json.end() && host->is_string()) sample->host = host->get<std::string>();
        look.ranks.push_back(*std::move(sample));
    }
    return look;
}

}  // namespace ddprun
