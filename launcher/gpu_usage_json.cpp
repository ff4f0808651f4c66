#include <nlohmann/json.hpp>

#include "launcher/gpu_usage.h"

namespace ddprun {
namespace {

using Json = nlohmann::ordered_json;

template <class T>
void take(const Json& json, const char* key, T& into) {
    const auto found = json.find(key);
    if (found != json.end() && found->is_number_integer()) into = found->get<T>();
}

GpuUsage gpu_from(const Json& json) {
    GpuUsage gpu;
    take(json, "index", gpu.index);
    take(json, "busy_percent", gpu.busy_percent);
    take(json, "used_bytes", gpu.used_bytes);
    take(json, "total_bytes", gpu.total_bytes);
    if (const auto uuid = json.find("uuid"); uuid != json.end() && uuid->is_string()) gpu.uuid = uuid->get<std::string>();
    const auto processes = json.find("processes");
    if (processes == json.end() || !processes->is_array()) return gpu;
    for (const Json& one : *processes) {
        GpuProcessUsage process;
        take(one, "pid", process.pid);
        take(one, "used_bytes", process.used_bytes);
        gpu.processes.push_back(process);
    }
    return gpu;
}

}  // namespace

std::string to_json(const std::vector<GpuUsage>& gpus) {
    Json json = {{"ok", true}, {"gpus", Json::array()}};
    for (const GpuUsage& gpu : gpus) {
        Json one = {{"index", gpu.index}, {"uuid", gpu.uuid}, {"busy_percent", gpu.busy_percent}, {"used_bytes", gpu.used_bytes},
                    {"total_bytes", gpu.total_bytes}, {"processes", Json::array()}};
        for (const GpuProcessUsage& process : gpu.processes) one["processes"].push_back({{"pid", process.pid}, {"used_bytes", process.used_bytes}});
        json["gpus"].push_back(std::move(one));
    }
    return json.dump(-1, ' ', false, Json::error_handler_t::replace) + '\n';
}

Result<std::vector<GpuUsage>> gpu_usage_from_json(std::string_view line) {
    const Json json = Json::parse(line, nullptr, false);
    const auto gpus = json.is_object() ? json.find("gpus") : json.end();
    if (!json.is_object() || gpus == json.end() || !gpus->is_array()) return Error{Errc::Protocol, "no list of GPUs", 0};
    std::vector<GpuUsage> found;
    for (const Json& gpu : *gpus) {
        if (gpu.is_object()) found.push_back(gpu_from(gpu));
    }
    return found;
}

}  // namespace ddprun
