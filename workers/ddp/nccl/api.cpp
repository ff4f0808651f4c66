#include "ddp/nccl/api.h"

#include <fmt/core.h>

#include "env/text.h"

namespace ddp::nccl {

using ddprun::Errc;
using ddprun::Result;

namespace {

/// Returns the names of missing required entry points.
std::vector<std::string> fill(const Resolve& resolve, Api& api) {
    std::vector<std::string> missing;
#define TAKE(ours, theirs) take(resolve, #theirs, api.ours);
#define REQUIRE(ours, theirs) \
    if (!take(resolve, #theirs, api.ours)) missing.emplace_back(#theirs);
    DDP_NCCL_REQUIRED(REQUIRE)
    DDP_NCCL_OPTIONAL(TAKE)
    // Without the function that frees it, do not allocate.
    if (api.mem_free == nullptr) api.mem_alloc = nullptr;
    if (api.comm_deregister == nullptr) api.comm_register = nullptr;
    if (api.comm_window_deregister == nullptr) api.comm_window_register = nullptr;
    return missing;
}

std::string version_text(int version) {
    // Up to 2.8 a version was X*1000 + Y*100 + Z.
    const int major = version < 10000 ? version / 1000 : version / 10000;
    const int minor = version < 10000 ? version % 1000 / 100 : version % 10000 / 100;
    return fmt::format("{}.{}.{}", major, minor, version % 100);
}

}  // namespace

std::string name_of(Code code) {
    switch (code) {
        case Code::Success: return "ncclSuccess";
        case Code::UnhandledCudaError: return "ncclUnhandledCudaError";
        case Code::SystemError: return "ncclSystemError";
        case Code::InternalError: return "ncclInternalError";
        case Code::InvalidArgument: return "ncclInvalidArgument";
        case Code::InvalidUsage: return "ncclInvalidUsage";
        case Code::RemoteError: return "ncclRemoteError";
        case Code::InProgress: return "ncclInProgress";
    }
    return fmt::format("ncclResult {}", static_cast<int>(code));
}

Type type_of(DType type) {
    switch (type) {
        case DType::F32: return Type::Float32;
        case DType::F64: return Type::Float64;
        case DType::I32: return Type::Int32;
        case DType::I64: return Type::Int64;
        case DType::BF16: return Type::BFloat16;
        case DType::F16: return Type::Float16;
        case DType::I8: return Type::Int8;
        case DType::U8:
        case DType::Bool: return Type::UInt8;
    }
    return Type::UInt8;
}

Op op_of(ReduceOp op) {
    switch (op) {
        case ReduceOp::Sum: return Op::Sum;
        case ReduceOp::Max: return Op::Max;
        case ReduceOp::Min: return Op::Min;
        case ReduceOp::Avg: return Op::Avg;
        case ReduceOp::Product: return Op::Prod;
    }
    return Op::Sum;
}

std::string Api::describe() const { return "NCCL " + version_text(version); }

std::string Api::explain(Code code, Handle comm) const {
    const char* meaning = get_error_string(code);
    std::string text = fmt::format("{} ({})", meaning != nullptr ? meaning : "no explanation", name_of(code));
    const char* last = get_last_error != nullptr ? get_last_error(comm) : nullptr;
    if (last != nullptr && *last != '\0') text += fmt::format(": {}", last);
    return text;
}

Result<Api> api_from(const SharedLibrary& library) {
    Api api{};
    api.library = library.name;
    const std::vector<std::string> missing = fill(library.resolve, api);
    if (api.get_version != nullptr) api.get_version(&api.version);
    if (!missing.empty()) {
        const std::string version = api.version > 0 ? fmt::format(" ({})", api.describe()) : "";
        return ddprun::Error{Errc::Mismatch, fmt::format("{}{} lacks {}: NCCL 2.14 or newer is needed",
                                                         library.name, version, ddprun::join(missing, ", "))};
    }
    return api;
}

Result<Api> load_api() {
    const Result<SharedLibrary> library = open_library(library_names("DDP_NCCL_LIBRARY", {"libnccl.so.2"}));
    if (!library) {
        // Not Error::with: GCC 12 with -fsanitize=thread takes its chain of strings for a copy past the end.
        const ddprun::Error& why = library.error();
        return ddprun::Error{why.code,
                             fmt::format("loading NCCL (DDP_NCCL_LIBRARY names another file): {}", why.what),
                             why.sys};
    }
    return api_from(*library);
}

}  // namespace ddp::nccl
