#include "launcher/job_status.h"
#include "launcher/lenient_json.h"

namespace ddprun {
namespace {

using lenient::Json, lenient::take, lenient::take_list;

Json json_of(const WorkerStatus& worker) {
    Json json = {{"node", worker.node},
                 {"rank", worker.rank},
                 {"local_rank", worker.local_rank},
                 {"pid", worker.pid},
                 {"state", worker.state},
                 {"seconds", worker.seconds},
                 {"cpu_seconds", worker.cpu_seconds},
                 {"rss_bytes", worker.rss_bytes},
                 {"quiet_seconds", worker.quiet_seconds}};
    if (!worker.gpus.indices.empty()) {
        json["gpus"] = worker.gpus.indices;
        json["gpus_presumed"] = worker.gpus.is_presumed;
        json["gpu_bytes"] = worker.gpus.used_bytes;
    }
    if (!worker.uses_libddp) return json;
    json["step"] = worker.step;
    json["comm_seconds"] = worker.comm_seconds;
    json["collective"] = worker.collective;
    return json;
}

Json json_of(const HostStatus& host) {
    Json json = {{"host", host.host}};
    if (!host.trouble.empty()) {
        json["trouble"] = host.trouble;
        return json;
    }
    json["pid"] = host.pid;
    json["phase"] = host.phase;
    json["log_directory"] = host.log_directory;
    if (!host.gpus.empty()) json["gpus"] = Json::parse(to_json(host.gpus))["gpus"];
    return json;
}

HostStatus host_from(const Json& json) {
    HostStatus host;
    take(json, "host", host.host);
    take(json, "pid", host.pid);
    take(json, "phase", host.phase);
    take(json, "log_directory", host.log_directory);
    take(json, "trouble", host.trouble);
    if (json.contains("gpus")) {
        if (Result<std::vector<GpuUsage>> gpus = gpu_usage_from_json(json.dump())) host.gpus = *std::move(gpus);
    }
    return host;
}

WorkerStatus worker_from(const Json& json) {
    WorkerStatus worker;
    take(json, "node", worker.node);
    take(json, "rank", worker.rank);
    take(json, "local_rank", worker.local_rank);
    take(json, "pid", worker.pid);
    take(json, "state", worker.state);
    take(json, "seconds", worker.seconds);
    take(json, "cpu_seconds", worker.cpu_seconds);
    take(json, "rss_bytes", worker.rss_bytes);
    take(json, "quiet_seconds", worker.quiet_seconds);
    if (const auto gpus = json.find("gpus"); gpus != json.end() && gpus->is_array()) {
        for (const Json& index : *gpus) {
            if (index.is_number_unsigned()) worker.gpus.indices.push_back(index.get<unsigned>());
        }
    }
    take(json, "gpus_presumed", worker.gpus.is_presumed);
    take(json, "gpu_bytes", worker.gpus.used_bytes);
    worker.uses_libddp = json.contains("step");
    take(json, "step", worker.step);
    take(json, "comm_seconds", worker.comm_seconds);
    take(json, "collective", worker.collective);
    return worker;
}

}  // namespace

std::string to_json(const JobStatus& status) {
    Json json = {{"ok", true},
                 {"job", status.job},
                 {"run_id", status.run_id},
                 {"program", status.program},
                 {"host", status.host},
                 {"pid", status.pid},
                 {"is_head", status.is_head},
                 {"phase", status.phase},
                 {"generation", status.generation},
                 {"restarts_used", status.restarts_used},
                 {"max_restarts", status.max_restarts},
                 {"world_size", status.world_size},
                 {"nodes", status.nodes},
                 {"seconds", status.seconds},
                 {"log_directory", status.log_directory},
                 {"lost_output_bytes", status.lost_output_bytes}};
    json["hosts"] = Json::array();
    for (const HostStatus& host : status.hosts) json["hosts"].push_back(json_of(host));
    json["workers"] = Json::array();
    for (const WorkerStatus& worker : status.workers) json["workers"].push_back(json_of(worker));
    return json.dump(-1, ' ', false, Json::error_handler_t::replace) + '\n';
}

Result<JobStatus> job_status_from_json(std::string_view line) {
    const Json json = Json::parse(line, nullptr, false);
    if (!json.is_object()) return Error{Errc::Protocol, "the answer is not a JSON object", 0};
    bool ok = false;
    take(json, "ok", ok);
    if (!ok) {
        std::string why = "the job gave no reason";
        take(json, "error", why);
        return Error{Errc::Refused, why, 0};
    }
    JobStatus status;
    take(json, "job", status.job);
    take(json, "run_id", status.run_id);
    take(json, "program", status.program);
    take(json, "host", status.host);
    take(json, "pid", status.pid);
    take(json, "is_head", status.is_head);
    take(json, "phase", status.phase);
    take(json, "generation", status.generation);
    take(json, "restarts_used", status.restarts_used);
    take(json, "max_restarts", status.max_restarts);
    take(json, "world_size", status.world_size);
    take(json, "nodes", status.nodes);
    take(json, "seconds", status.seconds);
    take(json, "log_directory", status.log_directory);
    take(json, "lost_output_bytes", status.lost_output_bytes);
    take_list(json, "hosts", status.hosts, host_from);
    take_list(json, "workers", status.workers, worker_from);
    // An index into the hosts; another's word is not trusted.
    for (WorkerStatus& worker : status.workers) {
        if (worker.node < 0 || worker.node >= static_cast<int>(status.hosts.size())) worker.node = 0;
    }
    return status;
}

}  // namespace ddprun
