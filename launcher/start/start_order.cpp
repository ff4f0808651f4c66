#include "launcher/start/start_order.h"

#include <fmt/core.h>
#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <optional>
#include <set>

#include "env/describe.h"
#include "env/hmac.h"
#include "env/io/file.h"
#include "env/nodes/allocation.h"
#include "env/nodes/launcher_env.h"
#include "env/text.h"

namespace ddprun {
namespace {

/// The bytes of a file that identify it: a linker writes a program's build id near its beginning.
constexpr std::size_t kIdentityBytes = 1 << 20;

Result<std::string> beginning_of(const std::string& path) {
    const Result<UniqueFd> file = open_regular_file(path);
    if (!file) return file.error();
    std::string bytes(kIdentityBytes, '\0');
    std::size_t have = 0;
    while (have < bytes.size()) {
        const ssize_t n = ::read(file->get(), bytes.data() + have, bytes.size() - have);
        if (n < 0) return Error::system("read " + path);
        if (n == 0) break;
        have += static_cast<std::size_t>(n);
    }
    bytes.resize(have);
    return bytes;
}

std::string_view name_in(std::string_view variable) { return variable.substr(0, variable.find('=')); }

/// True for a variable that each host, or each process, has of its own.
bool is_of_host(std::string_view name) {
    if (is_rank_variable(name)) return true;
    for (const std::string_view own : {"HOSTNAME",
                                       "HOST",
                                       "TMPDIR",
                                       "TEMP",
                                       "TMP",
                                       "DISPLAY",
                                       "PBS_NODENUM",
                                       "PBS_TASKNUM",
                                       "PBS_MOMPORT",
                                       "PBS_VNODENUM",
                                       "PBS_JOBDIR",
                                       "SLURM_NODEID",
                                       "SLURMD_NODENAME",
                                       "SLURM_TOPOLOGY_ADDR",
                                       "SLURM_CPUS_ON_NODE",
                                       "SLURM_GPUS_ON_NODE",
                                       "SLURM_CPU_BIND",
                                       "SLURM_CPU_BIND_LIST",
                                       "DBUS_SESSION_BUS_ADDRESS",
                                       "WINDOWID",
                                       "TERM_SESSION_ID",
                                       "SHLVL",
                                       "_",
                                       "CUDA_VISIBLE_DEVICES",
                                       "GPU_DEVICE_ORDINAL",
                                       "ROCR_VISIBLE_DEVICES",
                                       "NVIDIA_VISIBLE_DEVICES"}) {
        if (name == own) return true;
    }
    // An MPI's other variables also belong to the host where it was started.
    for (const std::string_view beginning :
         {"SSH_", "XDG_SESSION_", "XDG_RUNTIME_", "SLURM_STEP_", "SLURM_SRUN_", "PMIX_", "OMPI_", "HYDRA_"}) {
        if (name.starts_with(beginning)) return true;
    }
    return false;
}

bool is_plain_gpu_list(std::string_view variable) {
    const std::string_view value = variable.substr(variable.find('=') + 1);
    return variable.starts_with("CUDA_VISIBLE_DEVICES=") && !value.empty() &&
           value.find_first_not_of("0123456789,") == value.npos;
}

}  // namespace

Result<FileIdentity> identify_file(const std::string& path) {
    struct stat status {};
    if (::stat(path.c_str(), &status) != 0) return Error::system(path);
    const Result<std::string> bytes = beginning_of(path);
    if (!bytes) return bytes.error();
    const std::array<std::string_view, 1> pieces = {*bytes};
    const std::string digest = to_hex(sha256(pieces)).substr(0, 16);
    return FileIdentity{path, static_cast<std::uint64_t>(status.st_size), "sha256 " + digest};
}

std::string describe(const FileIdentity& file) {
    return fmt::format("{} ({} bytes, {})", file.path, file.bytes, file.id);
}

static void describe(Visitor& v, FileIdentity& file) {
    v("path", file.path);
    v("bytes", file.bytes);
    v("id", file.id);
}

/// `arguments` and `variables` are their numbers: they may be any bytes, which JSON's text cannot hold, and
/// follow it, each behind a zero byte.
static void describe(Visitor& v, StartOrder& order, std::size_t& arguments, std::size_t& variables) {
    v("directory", order.directory);
    v("head", order.head);
    v("head_is_apart", order.head_is_apart);
    v("hosts", order.hosts);
    v("slots", order.slots);
    v("run_id", order.run_id);
    v("sends_output", order.sends_output);
    v("ddprun", order.ddprun);
    v("environment_is_whole", order.environment_is_whole);
    v("program", order.program);
    v("arguments", arguments);
    v("environment", variables);
}

std::string encode(StartOrder order) {
    JsonWriter json;
    std::size_t arguments = order.arguments.size(), variables = order.environment.size();
    describe(json, order, arguments, variables);
    std::string text = std::move(json).text();
    for (const std::vector<std::string>* list : {&order.arguments, &order.environment}) {
        for (const std::string& one : *list) text.append(1, '\0').append(one);
    }
    return text;
}

Result<StartOrder> decode_start_order(std::string_view text) {
    const std::vector<std::string_view> pieces = split(text, '\0');
    JsonReader json(pieces.front(), Strictness::Tolerant);
    StartOrder order;
    std::size_t arguments = 0, variables = 0;
    describe(json, order, arguments, variables);
    if (!json.end() || arguments > pieces.size() - 1 || variables != pieces.size() - 1 - arguments)
        return Error::protocol("the order of the head makes no sense (another version of ddprun?)");
    order.slots.resize(order.hosts.size());
    for (std::size_t i = 1; i < pieces.size(); ++i)
        (i <= arguments ? order.arguments : order.environment).emplace_back(pieces[i]);
    return order;
}

Result<std::string> seal_order(const StartOrder& order, std::string_view token) {
    return seal(token, encode(order));
}

Result<StartOrder> unseal_order(std::string_view sealed, std::string_view token) {
    const Result<std::string> text = unseal(token, sealed);
    if (!text) return text.error().with("the head's order is refused");
    return decode_start_order(*text);
}

std::string failure_key(int node) { return fmt::format("start/failed/{}", node); }

bool is_never_sent(std::string_view variable) {
    return variable == "PBS_JOBCOOKIE" || variable == "SLURM_JWT" || variable == "DDPRUN_TOKEN";
}

std::vector<std::string> environment_to_send(
    const std::vector<std::string>& of_head, const std::vector<std::string>& asked,
    const std::function<bool(std::string_view variable)>& is_carried) {
    std::vector<std::string> sent;
    for (const std::string& variable : of_head) {
        const std::string_view name = name_in(variable);
        const bool is_asked = std::find(asked.begin(), asked.end(), name) != asked.end();
        const bool is_of_job = !is_of_host(name) || is_plain_gpu_list(variable);
        if (!is_never_sent(name) && (is_asked || (is_of_job && !is_carried(name)))) sent.push_back(variable);
    }
    return sent;
}

std::vector<std::string> environment_here(const std::vector<std::string>& sent,
                                          const std::vector<std::string>& own, bool own_is_kept) {
    std::set<std::string_view> names;
    for (const std::string& variable : sent) names.insert(name_in(variable));
    std::vector<std::string> result;
    bool has_gpus = false;
    for (const std::string& variable : own) {
        const std::string_view name = name_in(variable);
        const bool is_gpus = name == "CUDA_VISIBLE_DEVICES";
        has_gpus = has_gpus || is_gpus;
        const bool is_replaced = names.contains(name) && !is_gpus;
        if (!is_replaced && (own_is_kept || is_of_host(name) || is_never_sent(name)))
            result.push_back(variable);
    }
    for (const std::string& variable : sent) {
        if (!has_gpus || name_in(variable) != "CUDA_VISIBLE_DEVICES") result.push_back(variable);
    }
    return result;
}

int node_of_host(const std::vector<std::string>& hosts, std::string_view name) {
    const auto found = std::find_if(hosts.begin(), hosts.end(),
                                    [&](const std::string& host) { return is_same_host(host, name); });
    return found == hosts.end() ? -1 : static_cast<int>(found - hosts.begin());
}

std::string difference(std::string_view what, const FileIdentity& heads, const FileIdentity& ours,
                       std::string_view head_host) {
    if (heads.bytes == ours.bytes && heads.id == ours.id) return "";
    return fmt::format("{} differs: {}; on {} {}", what, describe(ours), head_host, describe(heads));
}

}  // namespace ddprun
