#include "ddp/group/backend_choice.h"

#include <fmt/core.h>

#include <algorithm>
#include <map>

#include "env/text.h"

namespace ddp {

namespace {

int oldest_nccl(const std::vector<DeviceView>& node) {
    int version = kMultiRankVersion;
    for (const DeviceView& view : node) version = std::min(version, view.nccl_version);
    return version;
}

/// The reason why NCCL refuses ranks that share a device; "" when it accepts them.
std::string why_not_shared(const std::vector<DeviceView>& node) {
    for (const DeviceView& view : node) {
        if (view.multi_rank == false) return "NCCL_MULTI_RANK_GPU_ENABLE=0 forbids NCCL that";
    }
    const int version = oldest_nccl(node);
    if (version >= kMultiRankVersion) return "";
    return fmt::format("NCCL {}.{}.{} takes one rank per GPU (2.30 and newer take more)", version / 10000,
                       version / 100 % 100, version % 100);
}

std::string nccl_problem(const std::vector<DeviceView>& node) {
    for (const DeviceView& view : node) {
        if (!view.nccl_problem.empty()) return view.nccl_problem;
    }
    return "";
}

BackendChoice nccl_for_shared(const BackendQuestion& question, std::string why) {
    const bool all_set = std::all_of(question.node.begin(), question.node.end(),
                                     [](const DeviceView& view) { return view.multi_rank.has_value(); });
    return {Backend::Nccl, std::move(why), !all_set};
}

[[noreturn]] void refuse(const std::string& requested, const std::string& why) {
    throw InvalidInput(fmt::format("backend {}: {}", requested, why));
}

BackendChoice choose_nccl(const BackendQuestion& question) {
    if (const std::string problem = nccl_problem(question.node); !problem.empty()) refuse("nccl", problem);
    const std::string shared = shared_device(question.node);
    if (shared.empty()) return {Backend::Nccl, "asked for"};
    const std::string why_not = why_not_shared(question.node);
    if (why_not.empty()) return nccl_for_shared(question, fmt::format("asked for; {}", shared));
    refuse("nccl", fmt::format("{}, and {}: take backend staged, or fewer ranks", shared, why_not));
}

BackendChoice choose_staged(const BackendQuestion& question) {
    if (question.one_node) return {Backend::Staged, "asked for"};
    refuse("staged", "it covers one node: start all ranks on one, or take backend nccl with a GPU per rank");
}

BackendChoice choose_for_devices(const BackendQuestion& question) {
    const std::string problem = nccl_problem(question.node), shared = shared_device(question.node);
    if (shared.empty()) {
        if (!problem.empty()) refuse("auto", problem);
        return {Backend::Nccl, "auto: buffers are on a CUDA device"};
    }
    const std::string why_not = problem.empty() ? why_not_shared(question.node) : "there is no NCCL here";
    if (why_not.empty())
        return nccl_for_shared(question, fmt::format("auto: {}, which this NCCL takes", shared));
    if (question.one_node) return {Backend::Staged, fmt::format("auto: {}, and {}", shared, why_not)};
    refuse("auto", fmt::format("{}, and {}; the staged backend covers one node: start fewer ranks per node",
                               shared, why_not));
}

}  // namespace

const char* name_of(Backend backend) {
    switch (backend) {
        case Backend::Cpu: return "cpu";
        case Backend::Nccl: return "nccl";
        case Backend::Staged: return "staged";
        case Backend::Mpi: return "mpi";
    }
    return "unknown backend";
}

std::string encode(const DeviceView& view) {
    const char* const multi_rank = !view.multi_rank ? "" : *view.multi_rank ? "1" : "0";
    return fmt::format("{}\n{}\n{}\n{}\n{}", view.rank, view.device, view.nccl_version, multi_rank,
                       view.nccl_problem);
}

DeviceView decode_view(const std::string& message) {
    std::vector<std::string> fields;
    std::size_t at = 0;
    for (int field = 0; field < 4; ++field) {
        const std::size_t end = message.find('\n', at);
        if (end == std::string::npos)
            throw MismatchError("choosing a backend: ranks run different builds of libddp");
        fields.push_back(message.substr(at, end - at));
        at = end + 1;
    }
    const auto number = [](const std::string& text) {
        const ddprun::Result<std::int64_t> value = ddprun::parse_int(text);
        return value ? static_cast<int>(*value) : 0;
    };
    DeviceView view{.rank = number(fields[0]),
                    .device = fields[1],
                    .nccl_version = number(fields[2]),
                    .nccl_problem = message.substr(at),
                    .multi_rank = std::nullopt};
    if (!fields[3].empty()) view.multi_rank = fields[3] == "1";
    return view;
}

std::string shared_device(const std::vector<DeviceView>& views) {
    std::map<std::string, std::vector<int>> ranks_of;
    for (const DeviceView& view : views) ranks_of[view.device].push_back(view.rank);
    for (const auto& [device, ranks] : ranks_of) {
        if (ranks.size() > 1)
            return fmt::format("ranks {} share GPU {}", ddprun::format_ranges(ranks), device);
    }
    return "";
}

bool is_for_devices(const std::string& requested, const Device& device) {
    const bool on_gpu = device.kind == Device::Kind::Cuda;
    if (requested == "nccl" || requested == "staged") return true;
    if (requested == "auto") return on_gpu;
    if (requested != "cpu" && requested != "mpi") {
        throw InvalidInput(
            fmt::format("no backend '{}'; this build has: auto, nccl, staged, cpu, mpi", requested));
    }
    if (!on_gpu) return false;
    refuse(requested, fmt::format("it takes host memory, the buffers lie on CUDA device {}", device.index));
}

BackendChoice choose_backend(const BackendQuestion& question) {
    if (!is_for_devices(question.requested, question.device)) {
        if (question.requested == "mpi") return {Backend::Mpi, "asked for"};
        return {Backend::Cpu, question.requested == "cpu" ? "asked for" : "auto: buffers are in host memory"};
    }
    if (question.requested == "nccl") return choose_nccl(question);
    if (question.requested == "staged") return choose_staged(question);
    return choose_for_devices(question);
}

}  // namespace ddp
