#include <nlohmann/json.hpp>

#include "launcher/report.h"

namespace ddprun {
namespace {

using Json = nlohmann::ordered_json;

double seconds(Duration span) { return std::chrono::duration<double>(span).count(); }

Json to_json(const WorkerEnd& end) {
    Json json;
    json["rank"] = end.rank;
    json["local_rank"] = end.local_rank;
    json["node"] = end.node;
    json["host"] = end.host;
    json["pid"] = end.pid;
    if (!end.exec_failure.empty()) json["exec_failure"] = end.exec_failure;
    else if (end.signaled) json["signal"] = {{"number", end.status}, {"name", signal_name(end.status)}};
    else json["exit_code"] = end.status;
    json["dumped_core"] = end.dumped_core;
    json["stopped_by_ddprun"] = end.by_us || end.stopped_failing;
    if (end.error_reported) json["seconds_from_error_report_to_end"] = seconds(end.ended - *end.error_reported);
    json["seconds_after_start"] = seconds(end.after_start);
    json["order"] = end.order;
    if (!end.meaning.empty()) json["meaning"] = end.meaning;
    if (!end.last_collective.empty()) json["last_collective"] = end.last_collective;
    if (!end.last_stderr.empty()) json["last_stderr"] = end.last_stderr;
    if (!end.error_file.empty()) json["error_report"] = end.error_file;
    return json;
}

}  // namespace

std::string render_report_json(const JobEnd& end) {
    Json json;
    json["version"] = 1;
    json["run_id"] = end.run_id;
    json["program"] = end.program;
    json["exit_code"] = exit_code(end);
    const WorkerEnd* cause = root_cause(end.workers);
    json["first_cause"] = nullptr;
    if (cause != nullptr) {
        json["first_cause"] = to_json(*cause);
        json["first_cause"]["meaning"] = cause->meaning.empty() ? explain_end(*cause) : cause->meaning;
    }
    json["failure"] = end.failure;
    json["generation"] = end.generation;
    json["restarts_used"] = end.restarts_used;
    json["max_restarts"] = end.max_restarts;
    json["world_size"] = end.world_size;
    json["seconds"] = seconds(end.wall);
    json["preempted"] = end.preempted;
    json["hung"] = end.hung;
    json["stopped_by_signal"] = nullptr;
    if (end.stopped_by_signal) json["stopped_by_signal"] = signal_name(*end.stopped_by_signal);
    json["workers"] = Json::array();
    for (const WorkerEnd& worker : end.workers) json["workers"].push_back(to_json(worker));
    json["notes"] = end.notes;
    json["lost_output"] = {{"bytes", end.loss.bytes}, {"why", end.loss.why}};
    json["log_directory"] = end.log_directory;
    // A worker may write anything, also what is no UTF-8.
    return json.dump(2, ' ', false, Json::error_handler_t::replace) + '\n';
}

}  // namespace ddprun
