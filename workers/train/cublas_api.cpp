#include "cublas_api.h"

#include <fmt/core.h>

#include <vector>

#include "ddp/types.h"
#include "env/text.h"

namespace train::cublas {

using ddprun::Errc;
using ddprun::Result;

Result<Api> api_from(const ddp::SharedLibrary& library) {
    Api api{};
    api.library = library.name;
    std::vector<std::string> missing;
    const auto require = [&](const char* name, auto& slot) {
        if (!ddp::take(library.resolve, name, slot)) missing.emplace_back(name);
    };
    require("cublasCreate_v2", api.create);
    require("cublasDestroy_v2", api.destroy);
    require("cublasGetVersion_v2", api.get_version);
    require("cublasSetStream_v2", api.set_stream);
    require("cublasSetWorkspace_v2", api.set_workspace);
    require("cublasSetMathMode", api.set_math_mode);
    require("cublasGemmEx", api.gemm);
    require("cublasGetStatusString", api.get_status_string);
    if (missing.empty()) return api;
    return ddprun::Error{Errc::Mismatch, fmt::format("{} lacks {}: cuBLAS 12 or newer is needed",
                                                     library.name, ddprun::join(missing, ", "))};
}

Result<Api> load_api() {
    const Result<ddp::SharedLibrary> library =
        ddp::open_library(ddp::library_names("DDP_CUBLAS_LIBRARY", {"libcublas.so.13", "libcublas.so.12"}));
    if (!library) return library.error().with("loading cuBLAS (DDP_CUBLAS_LIBRARY names another file)");
    return api_from(*library);
}

void Api::check(Code code, const std::string& attempt) const {
    if (code == Code::Success) return;
    throw ddp::Error(
        fmt::format("{}: {} (cuBLAS error {})", attempt, get_status_string(code), static_cast<int>(code)));
}

}  // namespace train::cublas
