#include "ddp/process_group.h"

#include <fcntl.h>
#include <fmt/core.h>

#include <atomic>
#include <cerrno>
#include <cstring>

#include "ddp/backend_choice.h"
#include "ddp/cpu_group.h"
#include "ddp/nccl_backend.h"
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

std::unique_ptr<ProcessGroup> create_cpu(const WorkerEnv& env, const ProcessGroupOptions& options) {
    // With a launcher's segment, ranks that disagree about the world hear of each other; check that first.
    if (env.segment_fd < 0) require_one_node(env);
    const auto deadline = ddprun::deadline_after(ddprun::MonotonicClock::now(), options.timeout);
    auto segment = std::make_shared<SegmentMap>(segment_for(env, deadline));
    if (segment->header().local_world_size != segment->header().world_size) require_one_node(env);
    if (env.segment_fd >= 0 && env.lifeline_fd >= 0) {
        answer_stack_requests(segment, static_cast<std::uint32_t>(env.local_rank), env.lifeline_fd);
    }
    return make_cpu_group(std::move(segment), env, options);
}

/// The libraries that were found, or why there is no NCCL here.
struct NcclSearch {
    NcclParts parts;
    std::string problem;
};
NcclSearch look_for_nccl() {
    ddprun::Result<cuda::Api> cuda = cuda::load_api();
    if (!cuda) return {.parts = {}, .problem = cuda.error().what};
    ddprun::Result<nccl::Api> nccl = nccl::load_api();
    if (!nccl) return {.parts = {}, .problem = nccl.error().what};
    NcclSearch found;
    found.parts.cuda = std::make_shared<const cuda::Api>(*std::move(cuda));
    found.parts.nccl = std::make_shared<const nccl::Api>(*std::move(nccl));
    return found;
}

std::unique_ptr<ProcessGroup> create_nccl(NcclParts parts, const WorkerEnv& env,
                                          const ProcessGroupOptions& options) {
    // Every rank of a world makes its groups in the same order, and is one process.
    static std::atomic<int> groups_made{0};
    parts.communicator = groups_made++;
    const auto deadline = ddprun::deadline_after(ddprun::MonotonicClock::now(), options.timeout);
    if (env.world_size > 1) parts.board = nccl::store_board(env, deadline);
    parts.segment = std::make_shared<SegmentMap>(segment_for(env, deadline));
    return make_nccl_group(std::move(parts), env, options);
}

}  // namespace

std::unique_ptr<ProcessGroup> ProcessGroup::create(const Context& context, ProcessGroupOptions options) {
    // A program on host memory does not even look for the libraries.
    const bool may_use_nccl = options.backend == "nccl" || options.device.kind == Device::Kind::Cuda;
    NcclSearch found;
    if (may_use_nccl && options.backend != "cpu") found = look_for_nccl();
    const BackendChoice choice = choose_backend(options.backend, options.device, found.problem);
    std::unique_ptr<ProcessGroup> group = choice.backend == Backend::Nccl
                                              ? create_nccl(std::move(found.parts), context.env(), options)
                                              : create_cpu(context.env(), options);
    group->choice_ = fmt::format("{} ({})", choice.backend == Backend::Nccl ? "nccl" : "cpu", choice.why);
    return group;
}

}  // namespace ddp
