#include "env/nodes/other_schedulers.h"

#include <fmt/core.h>

#include <set>
#include <string_view>

#include "env/text.h"

namespace ddprun {
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
            "{}={} names {} hosts, but ddprun does not know the jobs of {} and stays on this host: name all of "
            "them by --hosts or --hostfile, and ssh starts them",
            other.variable, excerpt(path), hosts, other.name);
    }
    return "";
}

}  // namespace ddprun
