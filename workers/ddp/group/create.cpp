#include "ddp/group/create.h"

#include <fmt/core.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <utility>

#include "ddp/group/backend_choice.h"
#include "ddp/mpi/group.h"
#include "ddp/nccl/join.h"
#include "ddp/net/across_nodes.h"
#include "ddp/net/node_rendezvous.h"
#include "ddp/shm/cpu_backend.h"
#include "ddp/shm/segment.h"
#include "ddp/trace/trace.h"
#include "ddp/worker/call.h"
#include "ddp/worker/job_store.h"
#include "env/print.h"
#include "env/text.h"

namespace ddp {

namespace {

using ddprun::MonotonicClock;
using ddprun::WorkerEnv;

constexpr const char* kMultiRankVariable = "NCCL_MULTI_RANK_GPU_ENABLE";

std::string visible_devices() {
    const char* visible = std::getenv("CUDA_VISIBLE_DEVICES");
    return visible == nullptr ? "" : fmt::format(" (CUDA_VISIBLE_DEVICES={})", visible);
}

/// Numbers the groups of one kind in each generation, equally on all ranks: every rank is one process and
/// makes its groups in the same order. A group counts only once it exists, so that ranks agree on the number
/// when they try again after one of them failed.
class GroupNumbers {
  public:
    int next(std::uint64_t generation) {
        const std::lock_guard lock(mutex_);
        if (std::exchange(generation_, generation) != generation) made_ = 0;
        return made_;
    }
    void count() {
        const std::lock_guard lock(mutex_);
        ++made_;
    }

  private:
    std::mutex mutex_;
    std::uint64_t generation_ = 0;
    int made_ = 0;
};

struct ThisNode {
    const WorkerEnv& env;
    const ProcessGroupOptions& options;
    std::shared_ptr<const nccl::Api> nccl = {};  ///< null when it was not found
    std::string nccl_problem = {};
    int device = 0;
    std::shared_ptr<SegmentMap> segment = {};
    /// All ranks of this node, which exchange their views before they have a group; null for one rank.
    std::shared_ptr<cpu::Node> ranks = {};
    std::vector<DeviceView> views = {};
};

bool covers_world(const WorkerEnv& env) { return env.local_world_size == env.world_size; }

void load_nccl(ThisNode& node) {
    ddprun::Result<nccl::Api> nccl = nccl::load_api();
    if (!nccl) node.nccl_problem = nccl.error().what;
    else node.nccl = std::make_shared<const nccl::Api>(*std::move(nccl));
}

DeviceView view_of(const ThisNode& node) {
    char address[32] = {};
    cuda::check(cudaDeviceGetPCIBusId(address, sizeof address, node.device),
                "asking for the device's PCI address");
    DeviceView view{.rank = node.env.rank,
                    .device = address,
                    .nccl_version = node.nccl ? node.nccl->version : 0,
                    .nccl_problem = node.nccl_problem,
                    .multi_rank = std::nullopt};
    if (const char* set = std::getenv(kMultiRankVariable)) view.multi_rank = std::strcmp(set, "0") != 0;
    return view;
}

/// Exchanges the views. Ranks of several nodes cannot rendezvous without a launcher's segment; require_store
/// throws then.
void exchange_views(ThisNode& node) {
    const WorkerEnv& env = node.env;
    const auto deadline = ddprun::deadline_after(MonotonicClock::now(), node.options.timeout);
    const DeviceView own = view_of(node);
    if (env.segment_fd < 0 && !covers_world(env)) nccl::require_store(env);
    node.segment = open_segment(env, deadline);
    if (env.local_world_size == 1) {
        node.views = {own};
        return;
    }
    node.ranks =
        std::make_shared<cpu::Node>(node.segment, env, node.options.timeout, cpu::Arena::Lines::Private);
    for (const std::string& message : node.ranks->all_gather_bytes(encode(own)))
        node.views.push_back(decode_view(message));
}

std::unique_ptr<ProcessGroup> make_nccl(const ThisNode& node, const BackendChoice& choice) {
    static GroupNumbers numbers;
    const WorkerEnv& env = node.env;
    if (choice.enable_multi_rank) ::setenv(kMultiRankVariable, "1", 0);  // read when NCCL starts
    NcclParts parts{
        .nccl = node.nccl, .segment = node.segment, .device = node.device, .bootstrap = {}, .gather = {}};
    parts.communicator = numbers.next(env.generation);
    const auto deadline = ddprun::deadline_after(MonotonicClock::now(), node.options.timeout);
    const bool meets_here = env.store.empty() && covers_world(env);
    if (env.world_size > 1 && meets_here) {
        parts.gather = [ranks = node.ranks](std::string_view mine) { return ranks->all_gather_bytes(mine); };
    } else if (env.world_size > 1) {
        parts.bootstrap = nccl::id_store(env, deadline);
    }
    auto group = make_nccl_group(std::move(parts), env, node.options);
    numbers.count();
    return group;
}

/// The NCCL variables that choose the network, as far as they are set.
std::string network_settings() {
    std::string text;
    for (const char* name :
         {"NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", "NCCL_IB_DISABLE", "NCCL_NET", "NCCL_NET_PLUGIN",
          "NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_CROSS_NIC", "NCCL_NET_GDR_LEVEL"}) {
        if (const char* value = std::getenv(name)) text += fmt::format("; {}={}", name, value);
    }
    return text;
}

void announce(const ThisNode& node, const ProcessGroup& group, const std::string& choice) {
    static std::atomic<bool> printed{false};
    if (node.env.rank != 0 || printed.exchange(true)) return;
    std::vector<std::string> devices;
    for (const DeviceView& view : node.views)
        devices.push_back(fmt::format("rank {} {}", view.rank, view.device));
    ddprun::print(stderr, "ddp: backend {}: {}; GPUs of this node: {}{}\n", choice, group.describe(),
                  ddprun::join(devices, ", "), network_settings());
}

struct MadeGroup {
    std::unique_ptr<ProcessGroup> group;
    std::string choice;  ///< "nccl (auto: buffers are on a CUDA device)"
};

/// Makes a group over device memory. The ranks of a node first exchange their devices, so that all choose the
/// same backend. Rank 0 prints the choice once per process on standard error.
MadeGroup create_on_devices(const WorkerEnv& env, const ProcessGroupOptions& options) {
    ThisNode node{.env = env, .options = options};
    load_nccl(node);
    // Backend nccl needs a device per rank, or an NCCL that can share devices.
    const bool strict = options.backend == "nccl" && (!node.nccl || node.nccl->version < kMultiRankVersion);
    node.device = choose_device(env, options.device, strict ? Sharing::Never : Sharing::Allowed);
    if (strict && !node.nccl_problem.empty()) {
        throw InvalidInput(fmt::format("backend nccl: {}", node.nccl_problem));
    }
    exchange_views(node);
    const BackendChoice choice = choose_backend({.requested = options.backend,
                                                 .device = {Device::Kind::Cuda, node.device},
                                                 .node = node.views,
                                                 .one_node = covers_world(env)});
    MadeGroup made{nullptr, fmt::format("{} ({})", name_of(choice.backend), choice.why)};
    if (choice.backend == Backend::Nccl) {
        made.group = make_nccl(node, choice);
    } else {
        made.group = make_staged_group({.segment = node.segment, .device = node.device}, env, options);
    }
    announce(node, *made.group, made.choice);
    return made;
}

/// Ranks of several nodes rendezvous through the job's store.
void require_store(const WorkerEnv& env) {
    if (has_job_store(env)) return;
    throw InvalidInput(fmt::format(
        "rank {}: {} of the world's {} ranks are on this node; those of several find each other through the job's "
        "store, and there is none: start the program with ddprun, mpiexec or srun, or all ranks on one node",
        env.rank, env.local_world_size, env.world_size));
}

/// Connects to the job's store, as long as the generation lives: its head may be what was lost.
BootstrapStore store_of(const WorkerEnv& env, const SegmentMap& segment, ddprun::TimePoint deadline) {
    for (std::chrono::seconds slice{1};; slice *= 2) {
        throw_if_lost(segment.header(), fmt::format("rank {}: joining", env.rank));
        const auto until = std::min(deadline, ddprun::deadline_after(MonotonicClock::now(), slice));
        try {
            return job_bootstrap_store(env, until, "joining the other nodes");
        } catch (const TimeoutError&) {
            if (until == deadline) throw;
        }
    }
}

std::unique_ptr<ProcessGroup> create_on_host(const WorkerEnv& env, const ProcessGroupOptions& options) {
    // With a launcher's segment, ranks that disagree about the world learn of each other; check that first.
    const bool several = !covers_world(env);
    if (several && env.segment_fd < 0) require_store(env);
    const auto deadline = ddprun::deadline_after(ddprun::MonotonicClock::now(), options.timeout);
    auto segment = open_segment(env, deadline);
    if (!several || segment->header().local_world_size == segment->header().world_size)
        return cpu::make_group(std::move(segment), env, options);
    require_store(env);
    static GroupNumbers numbers;
    const net::Parts parts{
        .bootstrap = store_of(env, *segment, deadline),
        .group = numbers.next(env.generation),
        .open_link = [address = net::own_address(env, deadline)] { return net::open_fabric_link(address); }};
    auto joined = std::make_unique<net::AcrossNodes>(std::move(segment), env, options.timeout, parts);
    numbers.count();
    return cpu::make_group(std::move(joined), env, options);
}

}  // namespace

int choose_device(const WorkerEnv& env, const Device& wanted, Sharing sharing) {
    int count = 0;
    const cudaError_t code = cudaGetDeviceCount(&count);
    if (!cuda::succeeded(code)) {
        throw InvalidInput(fmt::format("rank {}: counting CUDA devices: {}", env.rank, cuda::explain(code)));
    }
    int device = wanted.index >= 0 ? wanted.index : env.local_rank;
    if (wanted.index < 0 && sharing == Sharing::Allowed && count > 0) device %= count;
    if (device >= count) {
        throw InvalidInput(fmt::format(
            "rank {}: local rank {} needs CUDA device {}, {} visible{}: start at most {} workers here",
            env.rank, env.local_rank, device,
            count == 1 ? "1 device is" : fmt::format("{} devices are", count), visible_devices(), count));
    }
    cuda::check(cudaSetDevice(device), "choosing the CUDA device");
    return device;
}

std::unique_ptr<ProcessGroup> ProcessGroup::create(const Context& context, ProcessGroupOptions options) {
    if (options.timeout <= options.timeout.zero())
        throw InvalidInput(fmt::format("rank {}: a time-out of {} ns; it must be positive", context.rank(),
                                       options.timeout.count()));
    trace::enter(context.env());
    // A program on host memory does not load the libraries.
    if (is_for_devices(options.backend, options.device)) {
        MadeGroup made = create_on_devices(context.env(), options);
        made.group->choice_ = std::move(made.choice);
        return std::move(made.group);
    }
    const BackendChoice choice = choose_backend({.requested = options.backend, .device = options.device});
    std::unique_ptr<ProcessGroup> group = choice.backend == Backend::Mpi
                                              ? mpi::make_group(context, options)
                                              : create_on_host(context.env(), options);
    group->choice_ = fmt::format("{} ({})", name_of(choice.backend), choice.why);
    return group;
}

}  // namespace ddp
