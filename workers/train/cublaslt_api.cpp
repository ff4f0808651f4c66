#include "cublaslt_api.h"

#include <fmt/core.h>

#include <vector>

#include "ddp/types.h"
#include "env/text.h"

namespace train::lt {

using ddprun::Errc;
using ddprun::Result;

Result<Api> api_from(const ddp::SharedLibrary& library) {
    Api api{};
    api.library = library.name;
    std::vector<std::string> missing;
    const auto require = [&](const char* name, auto& slot) {
        if (!ddp::take(library.resolve, name, slot)) missing.emplace_back(name);
    };
    require("cublasLtGetVersion", api.get_version);
    require("cublasLtCreate", api.create);
    require("cublasLtDestroy", api.destroy);
    require("cublasLtMatmulDescCreate", api.matmul_desc_create);
    require("cublasLtMatmulDescDestroy", api.matmul_desc_destroy);
    require("cublasLtMatmulDescSetAttribute", api.matmul_desc_set);
    require("cublasLtMatrixLayoutCreate", api.layout_create);
    require("cublasLtMatrixLayoutDestroy", api.layout_destroy);
    require("cublasLtMatmulPreferenceCreate", api.preference_create);
    require("cublasLtMatmulPreferenceDestroy", api.preference_destroy);
    require("cublasLtMatmulPreferenceSetAttribute", api.preference_set);
    require("cublasLtMatmulAlgoGetHeuristic", api.get_heuristic);
    require("cublasLtMatmul", api.matmul);
    require("cublasLtGetStatusString", api.get_status_string);
    if (missing.empty()) return api;
    return ddprun::Error{Errc::Mismatch, fmt::format("{} lacks {}: cuBLASLt 12 or newer is needed",
                                                     library.name, ddprun::join(missing, ", "))};
}

Result<Api> load_api() {
    const Result<ddp::SharedLibrary> library = ddp::open_library(
        ddp::library_names("DDP_CUBLASLT_LIBRARY", {"libcublasLt.so.13", "libcublasLt.so.12"}));
    if (!library) return library.error().with("loading cuBLASLt (DDP_CUBLASLT_LIBRARY names another file)");
    return api_from(*library);
}

void Api::check(Code code, const std::string& attempt) const {
    if (code == Code::Success) return;
    throw ddp::Error(
        fmt::format("{}: {} (cuBLAS error {})", attempt, get_status_string(code), static_cast<int>(code)));
}

std::string Api::version() const {
    // 120905 and 130100 both: two digits for each of the last two numbers.
    const std::size_t number = get_version();
    return fmt::format("{}.{}.{}", number / 10000, number / 100 % 100, number % 100);
}

}  // namespace train::lt
