#include "launcher/tools/doctor/doctor.h"

#include <fmt/core.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include "env/json.h"
#include "env/print.h"
#include "env/text.h"
#include "env/worker_env.h"
#include "launcher/machine/gpu/gpu_facts.h"
#include "launcher/machine/gpu/gpu_health.h"
#include "launcher/machine/gpu/nvidia.h"
#include "launcher/spec/exit_codes.h"

namespace ddprun::doctor {
namespace {

constexpr std::size_t kSeverityWidth = 9, kMostSubject = 18;

const char* color_of(Severity severity) {
    switch (severity) {
        case Severity::Ok: return "\033[32m";
        case Severity::Note: return "\033[36m";
        case Severity::Warning: return "\033[33m";
        case Severity::Error: return "\033[31;1m";
    }
    return "";
}

std::string padded(std::string_view text, std::size_t width) {
    return std::string(text) + std::string(text.size() < width ? width - text.size() : 1, ' ');
}

std::size_t subject_width(const std::vector<Finding>& findings) {
    std::size_t width = 0;
    for (const Finding& finding : findings) width = std::max(width, finding.subject.size());
    return std::min(width, kMostSubject) + 2;
}

std::string count_line(const std::vector<Finding>& findings) {
    int counts[4] = {};
    for (const Finding& finding : findings) ++counts[static_cast<std::size_t>(finding.severity)];
    const auto some = [](int n, const char* what) {
        return fmt::format("{} {}{}", n, what, n == 1 ? "" : "s");
    };
    return fmt::format("{}, {}, {}", some(counts[3], "error"), some(counts[2], "warning"),
                       some(counts[1], "note"));
}

template <class T>
Json optional(const std::optional<T>& value) {
    return value ? Json(*value) : Json();
}

Json to_json(const Finding& finding) {
    return {{"section", finding.section},
            {"subject", finding.subject},
            {"severity", name_of(finding.severity)},
            {"what", finding.what},
            {"remedy", finding.remedy}};
}

Json to_json(const GpuFacts& gpu) {
    const auto process_json = [](const GpuProcess& process) {
        return Json{
            {"pid", process.pid}, {"program", process.program}, {"used_bytes", optional(process.used_bytes)}};
    };
    const auto xid_json = [](const Xid& xid) { return Json{{"xid", xid.number}, {"text", xid.text}}; };
    return {{"index", gpu.index},
            {"name", gpu.name},
            {"uuid", gpu.uuid},
            {"bus_id", gpu.bus_id},
            {"numa_node", gpu.numa_node},
            {"lost", gpu.lost},
            {"memory_bytes", optional(gpu.total_bytes)},
            {"used_bytes", optional(gpu.used_bytes)},
            {"compute_capability", gpu.capability},
            {"ecc", optional(gpu.ecc)},
            {"uncorrected_ecc_errors", optional(gpu.uncorrected_now)},
            {"row_remap_pending", optional(gpu.remap_pending)},
            {"row_remap_failed", optional(gpu.remap_failed)},
            {"mig", optional(gpu.mig)},
            {"persistence", optional(gpu.persistence)},
            {"celsius", optional(gpu.celsius)},
            {"nvlinks", gpu.links},
            {"nvlinks_up", gpu.links_up},
            {"processes", json_list(gpu.processes, process_json)},
            {"xids", json_list(gpu.xids, xid_json)}};
}

Json to_json(const TrialFacts& trial) {
    switch (trial.state) {
        case TrialFacts::State::NotAsked: return nullptr;
        case TrialFacts::State::Failed:
            return {{"ran", true},
                    {"exit_code", trial.exit_code},
                    {"problem", trial.problem},
                    {"command", trial.command}};
        case TrialFacts::State::Done: break;
    }
    return {{"ran", true},
            {"exit_code", 0},
            {"workers", trial.workers},
            {"backend", trial.backend},
            {"bytes", trial.bytes},
            {"rounds", trial.rounds},
            {"seconds", trial.seconds},
            {"bus_gigabytes_per_second", trial.bus_gigabytes_per_second},
            {"start_seconds", in_seconds(trial.start)},
            {"why_not_gpus", trial.why_cpus},
            {"command", trial.command}};
}

Json host_json(const HostFacts& host) {
    return {{"name", host.name},
            {"kernel", host.kernel},
            {"cpu", host.cpu_model},
            {"cpus", host.machine.cpus},
            {"cgroup_cpus", optional(host.machine.quota)},
            {"memory_bytes", host.memory_total},
            {"memory_available_bytes", host.memory_available},
            {"cgroup_memory_bytes", optional(host.cgroup.memory_limit)},
            {"shm_bytes", optional(host.shm_size)},
            {"memlock_bytes", optional(host.memlock.soft)},
            {"open_files", optional(host.open_files.soft)}};
}

constexpr int kSomethingWrong = 1;

int count_visible(const Facts& facts) {
    return static_cast<int>(visible_gpus(physical_gpus(facts.nvidia), facts.visible_devices).size());
}

Facts collect(const Options& options) {
    Facts facts;
    facts.host = collect_host();
    facts.nvidia = read_nvidia_facts(NvidiaDetail::AndTopology);
    facts.visible_devices = process_environment("CUDA_VISIBLE_DEVICES");
    facts.network = detect_network();
    facts.variables = collect_variables();
    if (!options.run) return facts;
    facts.trial = run_trial(plan_trial(facts.host, facts.nvidia, count_visible(facts), options.size));
    return facts;
}

TextStyle terminal_style() {
    TextStyle style;
    winsize size{};
    if (::isatty(STDOUT_FILENO) == 0) return style;
    style.color = process_environment("NO_COLOR").value_or("").empty();
    style.width = 100;
    if (::ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col >= 60) style.width = size.ws_col;
    return style;
}

}  // namespace

const char* name_of(Severity severity) {
    switch (severity) {
        case Severity::Ok: return "ok";
        case Severity::Note: return "note";
        case Severity::Warning: return "warning";
        case Severity::Error: return "error";
    }
    return "";
}

std::string render_text(const std::vector<Finding>& findings, const TextStyle& style) {
    const std::size_t subjects = subject_width(findings), indent = 2 + kSeverityWidth + subjects;
    const auto fitted = [&](const std::string& words, std::size_t column) {
        return style.width ? wrap(printable(words), *style.width, column) : printable(words);
    };
    std::string text, section;
    for (const Finding& finding : findings) {
        if (finding.section != section) {
            if (!section.empty()) text += '\n';
            section = finding.section;
            text += section + '\n';
        }
        const std::string severity = padded(name_of(finding.severity), kSeverityWidth);
        const std::string what = fitted(finding.what, indent);
        text += fmt::format("  {}{}{}{}{}\n", style.color ? color_of(finding.severity) : "", severity,
                            style.color ? "\033[0m" : "", padded(printable(finding.subject), subjects), what);
        if (!finding.remedy.empty())
            text += std::string(indent, ' ') + "-> " + fitted(finding.remedy, indent + 3) + '\n';
    }
    return text + '\n' + count_line(findings) + '\n';
}

std::string render_json(const Facts& facts, const std::vector<Finding>& findings) {
    Json variables = Json::object();
    for (const auto& [name, value] : facts.variables) variables[name] = value;
    const Json json = {
        {"version", 1},
        {"ddprun", DDPRUN_VERSION},
        {"worst", name_of(worst(findings))},
        {"findings", json_list(findings, [](const Finding& finding) { return to_json(finding); })},
        {"host", host_json(facts.host)},
        {"driver",
         {{"version", facts.nvidia.driver},
          {"cuda_version", facts.nvidia.cuda_version},
          {"problem", facts.nvidia.problem}}},
        {"gpus", json_list(facts.nvidia.gpus, [](const GpuFacts& gpu) { return to_json(gpu); })},
        {"variables", variables},
        {"all_reduce", to_json(facts.trial)}};
    return to_text(json, 2) + '\n';
}

int run(const Options& options) {
    const Facts facts = collect(options);
    const std::vector<Finding> findings = judge(facts);
    ddprun::print("{}",
                  options.json ? render_json(facts, findings) : render_text(findings, terminal_style()));
    return worst(findings) == Severity::Error ? kSomethingWrong : 0;
}

}  // namespace ddprun::doctor
