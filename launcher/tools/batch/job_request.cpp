#include "launcher/tools/batch/batch.h"

#include <fmt/core.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <filesystem>

#include "env/text.h"
#include "launcher/plan/program.h"
#include "pbs/directives.h"

namespace ddprun {
namespace {

constexpr std::size_t kMostNameBytes = 230;  ///< PBS's limit is 236; older ones had 15

Error wrong_value(std::string_view option, std::string_view value, std::string_view why) {
    return {Errc::InvalidArgument, fmt::format("--{}: '{}' {}", option, excerpt(value), why), 0};
}

bool is_line(std::string_view text) {
    return std::none_of(text.begin(), text.end(),
                        [](char c) { return std::iscntrl(static_cast<unsigned char>(c)) != 0 && c != '\t'; });
}

/// The job's name for a program: "train" for "./build/train.py".
std::string job_name_of(const std::string& program) {
    std::string name = std::filesystem::path(program).stem().string();
    const auto is_plain = [](char c) {
        return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_' || c == '-' || c == '.';
    };
    std::replace_if(
        name.begin(), name.end(), [&](char c) { return !is_plain(c); }, '_');
    if (name.empty() || std::isalpha(static_cast<unsigned char>(name.front())) == 0) name.insert(0, "job_");
    return name.substr(0, kMostNameBytes);
}

Status check_words(const JobRequest& request) {
    const std::pair<std::string_view, const std::string*> words[] = {
        {"name", &request.name},       {"memory", &request.memory},           {"queue", &request.queue},
        {"account", &request.account}, {"filesystems", &request.filesystems}, {"output", &request.output}};
    for (const auto& [option, value] : words) {
        if (!is_directive_word(*value))
            return wrong_value(option, *value,
                               "cannot stand in a directive: it has a blank, a quote, or what is not ASCII");
    }
    if (request.name.size() > kMostNameBytes) return wrong_value("name", request.name, "is too long");
    return {};
}

Status check_lines(const JobRequest& request) {
    for (const std::string& one : request.modules) {
        if (one.empty() || !is_directive_word(one)) return wrong_value("module", one, "is no module's name");
    }
    for (const std::string& one : request.setup) {
        if (!is_line(one)) return wrong_value("setup", one, "is more than one line");
    }
    for (const std::string& one : request.directives) {
        if (!is_line(one)) return wrong_value("directive", one, "is more than one line");
    }
    for (const auto& [name, value] : request.environment) {
        if (!is_variable_name(name)) return wrong_value("env", name, "is no name of a variable");
    }
    return {};
}

const std::string& or_else(const std::string& said, const std::string& otherwise) {
    return said.empty() ? otherwise : said;
}
int cpus_of(const JobRequest& request) { return request.cpus_per_node.value_or(request.site.cpus_per_node); }
int gpus_of(const JobRequest& request) { return request.gpus_per_node.value_or(request.site.gpus_per_node); }

std::vector<std::string> pbs_lines(const JobRequest& request) {
    const SiteProfile& site = request.site;
    pbs::Directives directives;
    directives.name = request.name;
    directives.account = request.account;
    directives.queue = or_else(request.queue, site.queue);
    directives.walltime = request.walltime == Duration::zero() ? "" : walltime_text(request.walltime);
    directives.nodes = request.nodes;
    directives.cpus = cpus_of(request);
    directives.gpus = gpus_of(request);
    directives.memory = or_else(request.memory, site.memory);
    directives.select = site.select;
    // PBS puts two chunks on one host if they fit, unless place=scatter.
    directives.place = request.nodes > 1 ? or_else(site.place, "scatter") : site.place;
    directives.filesystems = or_else(request.filesystems, site.filesystems);
    directives.keep = site.keep;
    directives.output = request.output;
    if (request.requeue) directives.rerunnable = wants_requeue(request);
    directives.more = site.directives;
    directives.more.insert(directives.more.end(), request.directives.begin(), request.directives.end());
    return pbs::render_directives(directives);
}

std::vector<std::string> slurm_lines(const JobRequest& request) {
    const SiteProfile& site = request.site;
    std::vector<std::string> lines;
    const auto add = [&](std::string_view option, const std::string& value) {
        if (!value.empty()) lines.push_back(fmt::format("#SBATCH {}={}", option, value));
    };
    const auto number = [](int count) { return count > 0 ? fmt::format("{}", count) : std::string(); };
    add("--job-name", request.name);
    add("--account", request.account);
    add("--partition", or_else(request.queue, site.queue));
    add("--nodes", number(request.nodes));
    add("--ntasks-per-node", "1");
    add("--cpus-per-task", number(cpus_of(request)));
    const std::string gpus = number(gpus_of(request));
    add("--gpus-per-node", gpus.empty() || site.gpu_type.empty() ? gpus : site.gpu_type + ":" + gpus);
    add("--mem", or_else(request.memory, site.memory));
    add("--time", request.walltime == Duration::zero() ? "" : walltime_text(request.walltime));
    add("--output", or_else(request.output, request.name + "-%j.log"));
    if (request.requeue)
        lines.emplace_back(wants_requeue(request) ? "#SBATCH --requeue" : "#SBATCH --no-requeue");
    // The next run appends to the last run's file.
    if (wants_requeue(request)) add("--open-mode", "append");
    // Without --no-kill, Slurm ends the whole job when it believes that a node is down.
    if (request.is_elastic) lines.emplace_back("#SBATCH --no-kill");
    for (const std::vector<std::string>* more : {&site.directives, &request.directives}) {
        for (const std::string& one : *more) lines.push_back("#SBATCH " + one);
    }
    return lines;
}

std::vector<std::string> body_lines(const JobRequest& request) {
    std::vector<std::string> lines = request.site.setup;
    std::vector<std::string> modules = request.site.modules;
    for (const std::string& one : request.modules) {
        if (std::find(modules.begin(), modules.end(), one) == modules.end()) modules.push_back(one);
    }
    std::string load = "module load";
    for (const std::string& one : modules) load += " " + shell_quoted(one);
    if (!modules.empty()) lines.push_back(load + " || exit 1");
    for (const auto* variables : {&request.site.environment, &request.environment}) {
        for (const auto& [name, value] : *variables)
            lines.push_back(fmt::format("export {}={}", name, shell_quoted(value)));
    }
    lines.insert(lines.end(), request.setup.begin(), request.setup.end());
    if (!request.path.empty())
        lines.push_back(fmt::format("export PATH={}:$PATH", shell_quoted(request.path)));
    return lines;
}

std::string ddprun_line(Scheduler scheduler, const JobRequest& request) {
    std::vector<std::string> words{"exec", "ddprun"};
    const int gpus = gpus_of(request);
    if (!request.counts_workers && gpus > 0) words.push_back(fmt::format("--nproc-per-node={}", gpus));
    if (wants_requeue(request)) {
        words.emplace_back(*request.requeue == RequeueSpec::Mode::Self ? "--requeue=self" : "--requeue=auto");
        if (scheduler == Scheduler::Pbs) words.push_back("--requeue-script=" + request.script);
    }
    words.insert(words.end(), request.ddprun.begin(), request.ddprun.end());
    return join(words, " ", shell_quoted);
}

}  // namespace

Status settle(JobRequest& request) {
    if (request.name.empty()) request.name = job_name_of(request.program.name);
    if (const Status words = check_words(request); !words) return words;
    return check_lines(request);
}

std::string remark_on_cpus(Scheduler scheduler, const JobRequest& request) {
    const SiteProfile& site = request.site;
    const bool has_workers = request.workers.kind != WorkerCount::Kind::Number || request.workers.number > 1;
    if (cpus_of(request) > 0 || (gpus_of(request) == 0 && !has_workers)) return "";
    // The site's select and the user's own directives may ask for CPUs.
    const auto asks = [](const std::string& line) {
        return line.find("cpus") != std::string::npos || line.find("excl") != std::string::npos;
    };
    const bool is_asked_for = !site.select.empty() || std::ranges::any_of(site.directives, asks) ||
                              std::ranges::any_of(request.directives, asks);
    if (is_asked_for) return "";
    return fmt::format(
        "no --cpus-per-node: most clusters then give a job one core of each node{}; a site file can have the "
        "number (cpus_per_node)",
        scheduler == Scheduler::Slurm ? ", and one core's memory" : "");
}

Status check_program(const JobRequest& request) {
    if (!request.setup.empty() || !request.site.setup.empty()) return {};
    const std::string& name = request.program.name;
    const bool is_path = name.find('/') != std::string::npos || name.ends_with(".py");
    const bool may_be_of_a_module = !request.modules.empty() || !request.site.modules.empty();
    if (may_be_of_a_module && !is_path) return {};
    const Result<ResolvedProgram> program = resolve_program(request.program, program_search());
    // A module may bring the Python that runs a script.
    const bool is_of_module = may_be_of_a_module && !program && ::access(name.c_str(), R_OK) == 0;
    return program || is_of_module ? Status() : Status(program.error());
}

std::string walltime_text(Duration walltime) {
    const auto seconds = std::chrono::ceil<std::chrono::seconds>(walltime).count();
    return fmt::format("{:02}:{:02}:{:02}", seconds / 3600, seconds / 60 % 60, seconds % 60);
}

std::string render_job_script(Scheduler scheduler, const JobRequest& request) {
    const bool is_pbs = scheduler == Scheduler::Pbs;
    std::string text = "#!/bin/bash -l\n";
    for (const std::string& line : is_pbs ? pbs_lines(request) : slurm_lines(request)) text += line + '\n';
    text += fmt::format("# Written by ddprun {} script.\n\n", subcommand_of(scheduler));
    text += fmt::format("cd \"${}\" || exit 1\n", is_pbs ? "PBS_O_WORKDIR" : "SLURM_SUBMIT_DIR");
    for (const std::string& line : body_lines(request)) text += line + '\n';
    return text + ddprun_line(scheduler, request) + '\n';
}

}  // namespace ddprun
