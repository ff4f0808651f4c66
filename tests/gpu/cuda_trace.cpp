// cuda-trace.so: writes down every call of the CUDA driver and runtime that a process makes, whoever makes
// it: libddp, cuBLAS, NCCL. Nothing is linked against it; the driver loads it:
//
//   CUDA_INJECTION64_PATH=.../cuda-trace.so CUDA_TRACE_FILE=trace.txt PROGRAM
//
// CUDA_TRACE_CUPTI names the CUPTI library where the loader does not find it. What goes wrong is one line on
// standard error, and the program runs on without a trace. The format: tests/support/trace_log.h.
#include <dlfcn.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "tests/gpu/cupti_api.h"
#include "tests/support/trace_log.h"

namespace {

using ddprun::test::TraceLog;

std::string variable(const char* name, const char* otherwise) {
    const char* const value = std::getenv(name);
    return value != nullptr && *value != '\0' ? value : otherwise;
}

std::vector<std::string> library_names() {
    if (const std::string named = variable("CUDA_TRACE_CUPTI", ""); !named.empty()) return {named};
    const std::string toolkit = variable("CUDA_HOME", "/usr/local/cuda");
    std::vector<std::string> names;
    for (const std::string& folder : {std::string(), toolkit + "/lib64/", toolkit + "/extras/CUPTI/lib64/"}) {
        for (const char* file : {"libcupti.so.13", "libcupti.so.12"}) names.push_back(folder + file);
    }
    return names;
}

/// The first that can be opened, or null with the loader's reason for the first in `why`.
void* open_library(std::string& why) {
    for (const std::string& name : library_names()) {
        if (void* const library = ::dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL)) return library;
        if (const char* const reason = ::dlerror(); why.empty() && reason != nullptr) why = reason;
    }
    return nullptr;
}

template <class Function>
bool take(void* library, const char* name, Function*& slot, std::string& why) {
    slot = reinterpret_cast<Function*>(::dlsym(library, name));
    if (slot == nullptr) why = std::string("CUPTI lacks ") + name;
    return slot != nullptr;
}

/// The starts of this thread's open calls, the innermost last. Calls that began before the subscription are
/// missing.
struct Begun {
    std::array<std::uint64_t, 16> starts;
    std::size_t depth = 0;
};
thread_local Begun begun;

void note(TraceLog& log, const cupti::CallbackData& call, const char* kernel) {
    if (call.site == cupti::Site::Enter) {
        if (begun.depth < begun.starts.size()) begun.starts[begun.depth] = TraceLog::now();
        ++begun.depth;
        return;
    }
    if (begun.depth == 0) return;
    --begun.depth;
    if (begun.depth < begun.starts.size())
        log.add(static_cast<int>(begun.depth), begun.starts[begun.depth], call.function_name, kernel);
}

/// The symbol is valid for launches only.
bool is_launch(const char* function) {
    return std::string_view(function).find("Launch") != std::string_view::npos &&
           std::string_view(function).find("Kernel") != std::string_view::npos;
}

void on_callback(void* user, cupti::Domain domain, std::uint32_t id, const void* data) {
    TraceLog& log = *static_cast<TraceLog*>(user);
    if (domain == cupti::Domain::Synchronize) {
        const bool of_stream = id == cupti::kStreamSynchronized;
        return log.add(static_cast<int>(begun.depth), TraceLog::now(),
                       of_stream ? "synchronized:stream" : "synchronized:context", "");
    }
    const auto& call = *static_cast<const cupti::CallbackData*>(data);
    const char* const kernel = is_launch(call.function_name) ? call.symbol_name : nullptr;
    note(log, call, kernel != nullptr ? kernel : "");
}

/// "" or what went wrong.
std::string listen(const std::string& file) {
    std::string why;
    void* const library = open_library(why);
    if (library == nullptr) return "loading CUPTI (CUDA_TRACE_CUPTI names another file): " + why;
    cupti::Api api{};
    if (!take(library, "cuptiSubscribe", api.subscribe, why) ||
        !take(library, "cuptiEnableDomain", api.enable_domain, why) ||
        !take(library, "cuptiGetResultString", api.get_result_string, why))
        return why;
    const auto explain = [&](const char* attempt, cupti::Code code) {
        const char* text = "";
        api.get_result_string(code, &text);
        return std::string(attempt) + ": " + text + " (CUPTI error " +
               std::to_string(static_cast<int>(code)) + ")";
    };
    cupti::Subscriber subscriber = nullptr;
    auto* const log = new TraceLog(file);
    if (const cupti::Code code = api.subscribe(&subscriber, on_callback, log); code != cupti::Code::Success)
        return explain("cuptiSubscribe", code);
    for (const auto domain : {cupti::Domain::Driver, cupti::Domain::Runtime, cupti::Domain::Synchronize}) {
        if (const cupti::Code code = api.enable_domain(1, subscriber, domain); code != cupti::Code::Success)
            return explain("cuptiEnableDomain", code);
    }
    return "";
}

}  // namespace

/// Called by the driver when it is initialised.
extern "C" __attribute__((visibility("default"))) int InitializeInjection();

int InitializeInjection() {
    const std::string file = variable("CUDA_TRACE_FILE", "");
    const std::string problem = file.empty() ? "CUDA_TRACE_FILE is not set" : listen(file);
    if (!problem.empty()) std::fprintf(stderr, "cuda-trace: %s; not tracing\n", problem.c_str());
    return 1;
}
