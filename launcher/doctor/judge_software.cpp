#include <fmt/core.h>

#include <algorithm>

#include "launcher/doctor/judge.h"
#include "launcher/gpu/gpu_health.h"

namespace ddprun::doctor {
namespace {

using Rows = std::vector<Finding>;

constexpr int kOldestNccl = 21400;  // what libddp needs

void add_software(Rows& rows, Severity severity, std::string subject, std::string what, std::string remedy = "") {
    rows.push_back({severity, "Libraries", std::move(subject), std::move(what), std::move(remedy)});
}

bool has_gpus(const NvidiaFacts& nvidia) { return !nvidia.gpus.empty(); }

/// A missing library matters only where there are GPUs.
void judge_absence(const char* subject, const char* variable, const LibraryFacts& library,
                   const NvidiaFacts& nvidia, Rows& rows) {
    const Severity severity = has_gpus(nvidia) ? Severity::Warning : Severity::Note;
    if (library.other.empty())
        return add_software(rows, severity, subject, fmt::format("cannot be loaded: {}", library.problem),
                   fmt::format("install it, add its folder to LD_LIBRARY_PATH, or set {}=FILE", variable));
    add_software(rows, severity, subject,
        fmt::format("is not found by the loader; there is a copy in PyTorch's packages"),
        fmt::format("{}={}", variable, library.other));
}

void judge_cuda(const LibraryFacts& cuda, const NvidiaFacts& nvidia, Rows& rows) {
    if (cuda.path.empty()) {
        return add_software(rows, Severity::Note, "CUDA runtime",
                            fmt::format("cannot be loaded: {}; libddp and PyTorch carry their own", cuda.problem));
    }
    const std::string text = fmt::format("{} ({})", cuda_version_text(cuda.version), cuda.path);
    const int driver = nvidia.cuda_version;
    // Within one major release an older driver runs newer toolkits (minor version compatibility).
    if (driver != 0 && cuda.version / 1000 > driver / 1000) {
        return add_software(rows, Severity::Error, "CUDA runtime",
                   fmt::format("{} is too new for the driver, which runs CUDA up to {}", text,
                               cuda_version_text(driver)),
                   fmt::format("update the driver, or load its compatibility package (cuda-compat-{}-{})",
                               cuda.version / 1000, cuda.version % 1000 / 10));
    }
    if (driver != 0 && cuda.version > driver)
        return add_software(
            rows, Severity::Note, "CUDA runtime",
            fmt::format("{} is newer than the driver's {}: PTX cannot be compiled at run time", text,
                        cuda_version_text(driver)),
            "update the driver if a program says that its PTX was compiled with an unsupported toolchain");
    add_software(rows, Severity::Ok, "CUDA runtime", text);
}

std::string nccl_version_text(int version) {
    // 2704 before 2.9, 20900 since.
    if (version < 10000) return fmt::format("{}.{}.{}", version / 1000, version % 1000 / 100, version % 100);
    return fmt::format("{}.{}.{}", version / 10000, version % 10000 / 100, version % 100);
}

void judge_nccl(const LibraryFacts& nccl, const NvidiaFacts& nvidia, Rows& rows) {
    if (nccl.path.empty()) return judge_absence("NCCL", "DDP_NCCL_LIBRARY", nccl, nvidia, rows);
    const std::string text = fmt::format("{} ({})", nccl_version_text(nccl.version), nccl.path);
    if (nccl.version < kOldestNccl)
        return add_software(rows, Severity::Error, "NCCL",
                   fmt::format("{} is older than 2.14, the oldest that libddp works with", text),
                   "set DDP_NCCL_LIBRARY to a newer one");
    add_software(rows, Severity::Ok, "NCCL", text);
}

/// Variables that people set to find an error, forget, and pay for.
void judge_variables(const SoftwareFacts& software, Rows& rows) {
    struct Trap {
        const char* name;
        const char* value;  ///< "" any
        const char* why;
    };
    constexpr Trap kTraps[] = {
        {"CUDA_LAUNCH_BLOCKING", "1", "every kernel waits for the one before it: for debugging only"},
        {"NCCL_P2P_DISABLE", "1", "GPUs exchange data through the host: many times slower"},
        {"NCCL_SHM_DISABLE", "1", "ranks of one node talk over the network"},
        {"NCCL_IB_DISABLE", "1", "InfiniBand is not used"},
        {"NCCL_NET_GDR_LEVEL", "0", "GPUDirect RDMA is not used"},
        {"NCCL_DEBUG", "TRACE", "every NCCL call is logged: slow"},
        {"NCCL_ALGO", "", "NCCL may not choose its algorithm"},
        {"NCCL_PROTO", "", "NCCL may not choose its protocol"},
    };
    for (const auto& [name, value] : software.variables) {
        const auto trap =
            std::find_if(std::begin(kTraps), std::end(kTraps), [&n = name, &v = value](const Trap& one) {
                return n == one.name && (one.value[0] == '\0' || v == one.value);
            });
        if (trap == std::end(kTraps)) add_software(rows, Severity::Ok, "variable", fmt::format("{}={}", name, value));
        else
            add_software(rows, Severity::Warning, "variable", fmt::format("{}={}: {}", name, value, trap->why),
                fmt::format("unset {}", name));
    }
}

}  // namespace

std::vector<Finding> judge_software(const SoftwareFacts& software, const NvidiaFacts& nvidia) {
    Rows rows;
    judge_cuda(software.cuda_runtime, nvidia, rows);
    judge_nccl(software.nccl, nvidia, rows);
    judge_variables(software, rows);
    return rows;
}

}  // namespace ddprun::doctor
