#include "ddp/process_group.h"

#include <fmt/core.h>

#include "ddp/backend_choice.h"
#include "ddp/cpu_group.h"
#include "ddp/device_groups.h"

namespace ddp {

namespace {

using ddprun::WorkerEnv;

void require_one_node(const WorkerEnv& env) {
    if (env.local_world_size == env.world_size) return;
    throw InvalidInput(
        fmt::format("rank {}: {} of the world's {} ranks are on this node; the cpu backend covers one "
                    "node: start all ranks on one",
                    env.rank, env.local_world_size, env.world_size));
}

std::unique_ptr<ProcessGroup> create_on_host(const WorkerEnv& env, const ProcessGroupOptions& options) {
    // With a launcher's segment, ranks that disagree about the world hear of each other; check that first.
    if (env.segment_fd < 0) require_one_node(env);
    const auto deadline = ddprun::deadline_after(ddprun::MonotonicClock::now(), options.timeout);
    auto segment = open_segment(env, deadline);
    if (segment->header().local_world_size != segment->header().world_size) require_one_node(env);
    return make_cpu_group(std::move(segment), env, options);
}

}  // namespace

Work ProcessGroup::launch_graph(const std::function<void()>& launch) {
    launch();
    return {};
}

std::unique_ptr<ProcessGroup> ProcessGroup::create(const Context& context, ProcessGroupOptions options) {
    // A program on host memory does not even look for the libraries.
    if (is_for_devices(options.backend, options.device)) {
        MadeGroup made = create_on_devices(context.env(), options);
        made.group->choice_ = std::move(made.choice);
        return std::move(made.group);
    }
    const BackendChoice choice =
        choose_backend({.requested = options.backend, .device = options.device, .node = {}});
    std::unique_ptr<ProcessGroup> group = create_on_host(context.env(), options);
    group->choice_ = fmt::format("{} ({})", name_of(choice.backend), choice.why);
    return group;
}

}  // namespace ddp
