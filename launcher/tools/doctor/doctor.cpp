#include "launcher/tools/doctor/doctor.h"

#include <fmt/core.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include "env/describe.h"
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

void describe(JsonWriter& json, const Finding& finding) {
    json("section", finding.section);
    json("subject", finding.subject);
    json("severity", name_of(finding.severity));
    json("what", finding.what);
    json("remedy", finding.remedy);
}

void describe(JsonWriter& json, const GpuFacts& gpu) {
    json("index", gpu.index);
    json("name", gpu.name);
    json("uuid", gpu.uuid);
    json("bus_id", gpu.bus_id);
    json("numa_node", gpu.numa_node);
    json("lost", gpu.lost);
    json.or_null("memory_bytes", gpu.total_bytes);
    json.or_null("used_bytes", gpu.used_bytes);
    json("compute_capability", gpu.capability);
    json.or_null("ecc", gpu.ecc);
    json.or_null("uncorrected_ecc_errors", gpu.uncorrected_now);
    json.or_null("row_remap_pending", gpu.remap_pending);
    json.or_null("row_remap_failed", gpu.remap_failed);
    json.or_null("mig", gpu.mig);
    json.or_null("persistence", gpu.persistence);
    json.or_null("celsius", gpu.celsius);
    json("nvlinks", gpu.links);
    json("nvlinks_up", gpu.links_up);
    json.objects("processes", gpu.processes, [&](const GpuProcess& process) {
        json("pid", process.pid);
        json("program", process.program);
        json.or_null("used_bytes", process.used_bytes);
    });
    json.objects("xids", gpu.xids, [&](const Xid& xid) {
        json("xid", xid.number);
        json("text", xid.text);
    });
}

void describe(JsonWriter& json, const TrialFacts& trial) {
    json("ran", true);
    if (trial.state == TrialFacts::State::Failed) {
        json("exit_code", trial.exit_code);
        json("problem", trial.problem);
    } else {
        json("exit_code", 0);
        json("workers", trial.workers);
        json("backend", trial.backend);
        json("bytes", trial.bytes);
        json("rounds", trial.rounds);
        json("seconds", trial.seconds);
        json("bus_gigabytes_per_second", trial.bus_gigabytes_per_second);
        json("start_seconds", in_seconds(trial.start));
        json("why_not_gpus", trial.why_cpus);
    }
    json("command", trial.command);
}

void describe(JsonWriter& json, const HostFacts& host) {
    json("name", host.name);
    json("kernel", host.kernel);
    json("cpu", host.cpu_model);
    json("cpus", host.machine.cpus);
    json.or_null("cgroup_cpus", host.machine.quota);
    json("memory_bytes", host.memory_total);
    json("memory_available_bytes", host.memory_available);
    json.or_null("cgroup_memory_bytes", host.cgroup.memory_limit);
    json.or_null("shm_bytes", host.shm_size);
    json.or_null("memlock_bytes", host.memlock.soft);
    json.or_null("open_files", host.open_files.soft);
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
    JsonWriter json(2);
    json("version", 1);
    json("ddprun", DDPRUN_VERSION);
    json("worst", name_of(worst(findings)));
    json.objects("findings", findings, [&](const Finding& finding) { describe(json, finding); });
    json.object("host", [&] { describe(json, facts.host); });
    json.object("driver", [&] {
        json("version", facts.nvidia.driver);
        json("cuda_version", facts.nvidia.cuda_version);
        json("problem", facts.nvidia.problem);
    });
    json.objects("gpus", facts.nvidia.gpus, [&](const GpuFacts& gpu) { describe(json, gpu); });
    json.object("variables", [&] {
        for (const auto& [name, value] : facts.variables) json(name, value);
    });
    if (facts.trial.state == TrialFacts::State::NotAsked) json.null("all_reduce");
    else json.object("all_reduce", [&] { describe(json, facts.trial); });
    return std::move(json).text() + '\n';
}

int run(const Options& options) {
    const Facts facts = collect(options);
    const std::vector<Finding> findings = judge(facts);
    ddprun::print("{}",
                  options.json ? render_json(facts, findings) : render_text(findings, terminal_style()));
    return worst(findings) == Severity::Error ? kSomethingWrong : 0;
}

}  // namespace ddprun::doctor
