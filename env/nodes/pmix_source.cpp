#include "env/nodes/pmix_source.h"

#ifdef DDPRUN_HAVE_PMIX

#include <dlfcn.h>
#include <fmt/core.h>
#include <pmix.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <future>
#include <limits>
#include <thread>

namespace ddprun {

namespace {

/// The few functions we need. Macros of pmix.h that allocate or load values call others: not used here.
struct Library {
    decltype(&::PMIx_Init) init = nullptr;
    decltype(&::PMIx_Get) get = nullptr;
    decltype(&::PMIx_Finalize) finalize = nullptr;
    decltype(&::PMIx_Error_string) error_string = nullptr;
};

template <class Function>
bool find(void* library, const char* name, Function& function) {
    function = reinterpret_cast<Function>(::dlsym(library, name));
    return function != nullptr;
}

Result<Library> load_library() {
    // Never closed: it runs threads of its own.
    void* const handle = ::dlopen("libpmix.so.2", RTLD_NOW | RTLD_LOCAL);
    if (handle == nullptr) return Error{Errc::NotFound, ::dlerror(), 0};
    Library library;
    const bool whole = find(handle, "PMIx_Init", library.init) && find(handle, "PMIx_Get", library.get) &&
                       find(handle, "PMIx_Finalize", library.finalize) &&
                       find(handle, "PMIx_Error_string", library.error_string);
    if (!whole) return Error{Errc::NotFound, "libpmix.so.2 lacks functions of PMIx 4", 0};
    return library;
}

pmix_info_t timeout_info(Duration timeout) {
    pmix_info_t info{};
    std::strncpy(info.key, PMIX_TIMEOUT, sizeof info.key - 1);
    info.value.type = PMIX_INT;
    const auto seconds = std::chrono::ceil<std::chrono::seconds>(timeout).count();
    info.value.data.integer = static_cast<int>(std::clamp<std::int64_t>(seconds, 1, 3600));
    return info;
}

/// Servers differ in the integer types they use for one key.
std::optional<std::int64_t> integer_in(const pmix_value_t& value) {
    switch (value.type) {
        case PMIX_UINT16:
            return value.data.uint16;
        case PMIX_UINT32:
            return value.data.uint32;
        case PMIX_UINT64:
            return static_cast<std::int64_t>(value.data.uint64);
        case PMIX_UINT:
            return value.data.uint;
        case PMIX_INT:
            return value.data.integer;
        case PMIX_INT16:
            return value.data.int16;
        case PMIX_INT32:
            return value.data.int32;
        case PMIX_INT64:
            return value.data.int64;
        case PMIX_SIZE:
            return static_cast<std::int64_t>(value.data.size);
        case PMIX_PROC_RANK:
            return value.data.rank;
        default:
            return std::nullopt;
    }
}

/// One conversation with the server: from Init to Finalize. A process that ends between the two is taken for
/// a failure of the whole job.
class Conversation {
  public:
    Conversation(const Library& library, Duration timeout)
        : library_(library), info_(timeout_info(timeout)) {}

    Result<Placement> hold() {
        const pmix_status_t begun = library_.init(&self_, &info_, 1);
        if (begun != PMIX_SUCCESS) return failure("PMIx_Init", begun);
        Placement says = ask();
        library_.finalize(nullptr, 0);
        return says;
    }

  private:
    Placement ask() {
        pmix_proc_t job = self_;
        job.rank = PMIX_RANK_WILDCARD;  // facts about the job, not about one process
        Placement says;
        says.family = LauncherFamily::Pmix;
        says.job = self_.nspace;
        says.rank = static_cast<int>(self_.rank);
        says.size = get(job, PMIX_JOB_SIZE);
        says.local_size = get(job, PMIX_LOCAL_SIZE);
        says.local_rank = get(self_, PMIX_LOCAL_RANK);
        says.nodes = get(job, PMIX_NUM_NODES);
        says.node_rank = get(self_, PMIX_NODEID);
        // The allocation's number, which need not be the job's.
        if (says.node_rank && says.nodes && *says.node_rank >= *says.nodes) says.node_rank.reset();
        return says;
    }

    std::optional<int> get(const pmix_proc_t& whose, const char* key) {
        pmix_value_t* value = nullptr;
        if (library_.get(&whose, key, &info_, 1, &value) != PMIX_SUCCESS || value == nullptr)
            return std::nullopt;
        const std::optional<std::int64_t> number = integer_in(*value);
        std::free(value);
        if (!number || *number < 0 || *number > std::numeric_limits<int>::max()) return std::nullopt;
        return static_cast<int>(*number);
    }

    Error failure(const char* attempt, pmix_status_t status) const {
        const bool absent = status == PMIX_ERR_UNREACH || status == PMIX_ERR_INVALID_NAMESPACE;
        const char* const why = absent ? "no PMIx server answers" : library_.error_string(status);
        return {absent ? Errc::NotFound : Errc::Protocol, fmt::format("{}: {}", attempt, why), 0};
    }

    Library library_;
    pmix_info_t info_;
    pmix_proc_t self_{};
};

}  // namespace

bool built_with_pmix() { return true; }

Result<Placement> ask_pmix(Duration timeout) {
    const Result<Library> library = load_library();
    if (!library) return library.error();
    // Its own time-outs have whole seconds, and a server may hang in a call that has none.
    std::promise<Result<Placement>> promise;
    std::future<Result<Placement>> answer = promise.get_future();
    std::thread([answering = std::move(promise), loaded = *library, timeout]() mutable {
        answering.set_value(Conversation(loaded, timeout).hold());
    }).detach();
    if (answer.wait_for(timeout) != std::future_status::ready) {
        return Error{Errc::Timeout, "the PMIx server did not answer in time", 0};
    }
    return answer.get();
}

}  // namespace ddprun

#else

namespace ddprun {

bool built_with_pmix() { return false; }

Result<Placement> ask_pmix(Duration) {
    return Error{Errc::NotFound, "this build has no PMIx (meson option pmix)", 0};
}

}  // namespace ddprun

#endif
