#include "env/nodes/batch_job.h"

#include <fmt/core.h>

#include <algorithm>
#include <cctype>
#include <set>
#include <string_view>

#include "env/text.h"

namespace ddprun {
namespace {

std::string value_of(const EnvironmentLookup& env, std::string_view name) { return env(name).value_or(""); }

BatchJob slurm_job(const EnvironmentLookup& env, std::string id) {
    // Use ARRAY_TASK: each element also has a job number, but the last one's is the array's and names all
    // elements.
    const std::string array = value_of(env, "SLURM_ARRAY_JOB_ID"),
                      element = value_of(env, "SLURM_ARRAY_TASK_ID");
    const bool is_element = !array.empty() && !element.empty();
    if (is_element) id = array + "_" + element;
    return {.scheduler = Scheduler::Slurm,
            .id = std::move(id),
            .submitted_in = value_of(env, "SLURM_SUBMIT_DIR"),
            .is_script = value_of(env, "ENVIRONMENT") == "BATCH",
            .is_array_element = is_element};
}

BatchJob pbs_job(const EnvironmentLookup& env, std::string id) {
    const bool is_element = id.find('[') != std::string::npos;
    return {.scheduler = Scheduler::Pbs,
            .id = std::move(id),
            .submitted_in = value_of(env, "PBS_O_WORKDIR"),
            .is_script = value_of(env, "PBS_ENVIRONMENT") == "PBS_BATCH",
            .is_array_element = is_element};
}

BatchJob lsf_job(const EnvironmentLookup& env, std::string id) {
    const std::string index = value_of(env, "LSB_JOBINDEX");
    const bool is_element = !index.empty() && index != "0";
    if (is_element) id += "[" + index + "]";
    return {.scheduler = Scheduler::Lsf,
            .id = std::move(id),
            .submitted_in = value_of(env, "LS_SUBCWD"),
            .is_script = value_of(env, "LSB_INTERACTIVE").empty(),
            .is_array_element = is_element};
}

}  // namespace

std::string_view name_of(Scheduler scheduler) {
    switch (scheduler) {
        case Scheduler::Slurm: return "Slurm";
        case Scheduler::Pbs: return "PBS";
        case Scheduler::Lsf: return "LSF";
    }
    return "";
}

std::optional<BatchJob> find_batch_job(const EnvironmentLookup& env) {
    if (std::string id = value_of(env, "SLURM_JOB_ID"); !id.empty()) return slurm_job(env, std::move(id));
    if (std::string id = value_of(env, "PBS_JOBID"); !id.empty()) return pbs_job(env, std::move(id));
    if (std::string id = value_of(env, "LSB_JOBID"); !id.empty()) return lsf_job(env, std::move(id));
    return std::nullopt;
}

std::string scheduler_search_path(const EnvironmentLookup& env) {
    const std::string path = value_of(env, "PATH"),
                      submitters = value_of(env, "PBS_JOBID").empty() ? "" : value_of(env, "PBS_O_PATH");
    return path.empty() || submitters.empty() ? path + submitters : path + ":" + submitters;
}

std::vector<std::string> scheduler_environment(std::vector<std::string> environment,
                                               const EnvironmentLookup& env) {
    const std::string path = scheduler_search_path(env);
    std::erase_if(environment, [](const std::string& entry) { return entry.starts_with("PATH="); });
    if (!path.empty()) environment.push_back("PATH=" + path);
    return environment;
}

std::string file_name_of(std::string_view job_id) {
    std::string name(job_id);
    const auto is_plain = [](char c) {
        return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '.' || c == '-';
    };
    std::replace_if(
        name.begin(), name.end(), [&](char c) { return !is_plain(c); }, '_');
    return name;
}

namespace {

/// A scheduler and its variable with the path of the file of hosts. The host is the first word of a line.
struct Scheduling {
    std::string_view name, variable;
};
constexpr Scheduling kOthers[] = {{"Grid Engine", "PE_HOSTFILE"},
                                  {"Cobalt", "COBALT_NODEFILE"},
                                  {"OAR", "OAR_NODEFILE"},
                                  {"PJM", "PJM_O_NODEINF"}};

std::size_t count_hosts(std::string_view text) {
    std::set<std::string_view> hosts;
    for (const std::string_view line : split(text, '\n')) {
        const std::string_view words = trim(line);
        if (!words.empty()) hosts.insert(words.substr(0, words.find_first_of(" \t")));
    }
    return hosts.size();
}

}  // namespace

std::string remark_on_other_scheduler(
    const EnvironmentLookup& variable,
    const std::function<Result<std::string>(const std::string& path)>& read_file) {
    for (const Scheduling& other : kOthers) {
        const std::string path = variable(other.variable).value_or("");
        const std::size_t hosts = path.empty() ? 0 : count_hosts(read_file(path).value_or(""));
        if (hosts < 2) continue;
        return fmt::format(
            "{}={} names {} hosts, but ddprun does not know the jobs of {} and stays on this host: name "
            "all of "
            "them by --hosts or --hostfile, and ssh starts them",
            other.variable, excerpt(path), hosts, other.name);
    }
    return "";
}

}  // namespace ddprun
