#include "ddp/process_group.h"

#include <fcntl.h>
#include <fmt/core.h>

#include <cerrno>
#include <cstring>

#include "ddp/cpu_group.h"
#include "ddp/segment_share.h"
#include "ddp/stack_answer.h"

namespace ddp {

namespace {

using ddprun::UniqueFd;
using ddprun::WorkerEnv;

// The variable stays set, and the program may make a second group: ours is a duplicate. The program's own
// children have no use for the original.
UniqueFd inherited_segment(int fd) {
    UniqueFd own(::fcntl(fd, F_DUPFD_CLOEXEC, 3));
    if (!own) throw InvalidInput(fmt::format("DDPRUN_SEGMENT_FD={}: {}", fd, std::strerror(errno)));
    ::fcntl(fd, F_SETFD, FD_CLOEXEC);
    return own;
}

UniqueFd segment_for(const WorkerEnv& env, ddprun::TimePoint deadline) {
    if (env.segment_fd >= 0) return inherited_segment(env.segment_fd);
    if (env.world_size == 1) return make_segment({.generation = env.generation});
    return share_segment(env, deadline);
}

void require_one_node(const WorkerEnv& env) {
    if (env.local_world_size == env.world_size) return;
    throw InvalidInput(
        fmt::format("rank {}: {} of the world's {} ranks are on this node; the cpu backend covers one "
                    "node: start all ranks on one",
                    env.rank, env.local_world_size, env.world_size));
}

}  // namespace

std::unique_ptr<ProcessGroup> ProcessGroup::create(const Context& context, ProcessGroupOptions options) {
    if (options.backend != "auto" && options.backend != "cpu") {
        throw InvalidInput(fmt::format("no backend '{}'; this build has: auto, cpu", options.backend));
    }
    const WorkerEnv& env = context.env();
    // With a launcher's segment, ranks that disagree about the world hear of each other; check that first.
    if (env.segment_fd < 0) require_one_node(env);
    const auto deadline = ddprun::deadline_after(ddprun::MonotonicClock::now(), options.timeout);
    auto segment = std::make_shared<SegmentMap>(segment_for(env, deadline));
    if (segment->header().local_world_size != segment->header().world_size) require_one_node(env);
    if (env.segment_fd >= 0) answer_stack_requests(segment, static_cast<std::uint32_t>(env.local_rank));
    return make_cpu_group(std::move(segment), env, options);
}

}  // namespace ddp
