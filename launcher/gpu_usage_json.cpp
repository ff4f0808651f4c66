#include "launcher/gpu_usage.h"
#include "launcher/lenient_json.h"

namespace ddprun {
namespace {

using lenient::Json, lenient::take, lenient::take_list;

GpuProcessUsage process_from(const Json& json) {
    GpuProcessUsage process;
    take(json, "pid", process.pid);
    take(json, "used_bytes", process.used_bytes);
    return process;
}

GpuUsage gpu_from(const Json& json) {
    GpuUsage gpu;
    take(json, "index", gpu.index);
    take(json, "busy_percent", gpu.busy_percent);
    take(json, "used_bytes", gpu.used_bytes);
    take(json, "total_bytes", gpu.total_bytes);
    take(json, "uuid", gpu.uuid);
    take_list(json, "processes", gpu.processes, process_from);
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
    take_list(json, "gpus", found, gpu_from);
    return found;
}

}  // namespace ddprun
