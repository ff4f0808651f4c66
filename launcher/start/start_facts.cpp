#include "launcher/start/start_facts.h"

#include "env/io/file.h"
#include "env/io/socket.h"
#include "env/nodes/batch_job.h"
#include "launcher/supervise/head.h"

namespace ddprun {
namespace {

constexpr std::size_t kMostListBytes = 16 << 20;

bool is_in_path(std::string_view program) { return !find_executable(program, scheduler_search_path(process_environment)).empty(); }

bool is_address_of_here(const std::string& name) {
    const std::string host = name.substr(name.find('@') == name.npos ? 0 : name.find('@') + 1);
    return is_this_host(host, look_at_host(Endpoint{host, 0}));
}

}  // namespace

Result<StartFacts> look_for_hosts(const StartSpec& asked) {
    const AllocationQuery query{process_environment, [](const std::string& path) { return read_regular_file(path, kMostListBytes); }, asked.hosts, asked.hostfile};
    Result<std::optional<Allocation>> allocation = find_allocation(query);
    if (!allocation) return allocation.error();
    return StartFacts{*std::move(allocation), host_name(), is_address_of_here, is_in_path};
}

}  // namespace ddprun
