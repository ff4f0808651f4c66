#include "env/nodes/pmix_source.h"

#include <fmt/core.h>

#ifdef DDPRUN_HAVE_PMIX

#include <dlfcn.h>
#include <pmix.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <future>
#include <limits>
#include <thread>

namespace ddprun {

namespace {

constexpr Duration kPmixFarewell = std::chrono::seconds(5);

/// The few functions we need. Macros of pmix.h that allocate or load values call others: not used here.
struct Library {
    decltype(&::PMIx_Init) init = nullptr;
    decltype(&::PMIx_Put) put = nullptr;
    decltype(&::PMIx_Commit) commit = nullptr;
    decltype(&::PMIx_Fence) fence = nullptr;
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
    const bool whole = find(handle, "PMIx_Init", library.init) && find(handle, "PMIx_Put", library.put) &&
                       find(handle, "PMIx_Commit", library.commit) && find(handle, "PMIx_Fence", library.fence) &&
                       find(handle, "PMIx_Get", library.get) &&
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

Error pmix_failure(const Library& library, const char* attempt, pmix_status_t status) {
    const bool absent = status == PMIX_ERR_UNREACH || status == PMIX_ERR_INVALID_NAMESPACE;
    if (absent) return {Errc::NotFound, fmt::format("{}: no PMIx server answers", attempt), 0};
    if (status == PMIX_ERR_TIMEOUT) {
        return {Errc::Timeout, fmt::format("{}: not all processes of the launcher came in time", attempt), 0};
    }
    return {Errc::Protocol, fmt::format("{}: {}", attempt, library.error_string(status)), 0};
}

/// Its own time-outs have whole seconds, and a server may hang in a call that has none: every call is made by a thread
/// of its own, which is left behind with what it uses when it does not come back.
template <class T>
std::optional<T> answer_by(TimePoint deadline, std::function<T()> call) {
    std::promise<T> promise;
    std::future<T> answer = promise.get_future();
    std::thread([answering = std::move(promise), calling = std::move(call)]() mutable { answering.set_value(calling()); }).detach();
    const Duration left = std::max(Duration::zero(), deadline - MonotonicClock::now());
    if (answer.wait_for(std::min<Duration>(left, std::chrono::hours(24))) != std::future_status::ready) return std::nullopt;
    return answer.get();
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

    Error failure(const char* attempt, pmix_status_t status) const { return pmix_failure(library_, attempt, status); }

    Library library_;
    pmix_info_t info_;
    pmix_proc_t self_{};
};

pmix_value_t text_value(std::string& text) {
    pmix_value_t value{};
    value.type = PMIX_STRING;
    value.data.string = text.data();
    return value;
}

class PmixExchange final : public Exchange {
  public:
    PmixExchange(const Library& library, TimePoint deadline) : library_(library), deadline_(deadline) {}

    ~PmixExchange() override {
        if (!is_begun_ || is_stuck_) return;
        deadline_ = deadline_after(MonotonicClock::now(), kPmixFarewell);
        static_cast<void>(call("PMIx_Finalize", [library = library_] { return library.finalize(nullptr, 0); }));
    }

    Status begin(int rank) {
        struct Begun {
            pmix_status_t status;
            pmix_proc_t self;
        };
        const std::function<Begun()> begin = [library = library_, info = timeout_info(left())]() mutable {
            Begun begun{};
            begun.status = library.init(&begun.self, &info, 1);
            return begun;
        };
        const std::optional<Begun> begun = answer_by(deadline_, begin);
        if (!begun) return late("PMIx_Init");
        if (begun->status != PMIX_SUCCESS) return pmix_failure(library_, "PMIx_Init", begun->status);
        is_begun_ = true;
        self_ = begun->self;
        if (static_cast<int>(self_.rank) == rank) return {};
        return Error{Errc::Mismatch, fmt::format("the server says rank {}, the launcher's variables say {}", self_.rank, rank), 0};
    }

    Status put(std::string_view key, std::string_view value) override {
        if (const Status checked = check_exchange_word(key, kMaxExchangeKey); !checked) return checked;
        if (const Status checked = check_exchange_word(value, kMaxExchangeValue); !checked) return checked;
        return call("PMIx_Put", [library = library_, key = full_key(key), text = std::string(value)]() mutable {
            pmix_value_t said = text_value(text);
            return library.put(PMIX_GLOBAL, key.c_str(), &said);
        });
    }

    Status fence() override {
        if (const Status committed = call("PMIx_Commit", [library = library_] { return library.commit(); }); !committed) return committed;
        // Without the data Slurm's fence is no barrier across hosts, and Get finds nothing.
        return call("PMIx_Fence", [library = library_, timeout = timeout_info(left())] {
            pmix_info_t info[2] = {collect_info(), timeout};
            return library.fence(nullptr, 0, info, 2);
        });
    }

    Result<std::string> get(int rank, std::string_view key) override {
        struct Told {
            pmix_status_t status;
            std::string text;
        };
        pmix_proc_t whose = self_;
        whose.rank = static_cast<pmix_rank_t>(rank);
        const std::function<Told()> ask = [library = library_, whose, name = full_key(key), info = timeout_info(left())] {
            pmix_value_t* value = nullptr;
            Told told{library.get(&whose, name.c_str(), &info, 1, &value), {}};
            if (value == nullptr) return told;
            if (value->type == PMIX_STRING && value->data.string != nullptr) {
                told.text = value->data.string;
                std::free(value->data.string);
            }
            std::free(value);
            return told;
        };
        const std::optional<Told> told = answer_by(deadline_, ask);
        if (!told) return late("PMIx_Get");
        if (told->status == PMIX_SUCCESS && !told->text.empty()) return told->text;
        if (told->status != PMIX_SUCCESS && told->status != PMIX_ERR_NOT_FOUND) return pmix_failure(library_, "PMIx_Get", told->status);
        return Error{Errc::NotFound, fmt::format("PMIx: rank {} has said no '{}'", rank, key), 0};
    }

  private:
    static std::string full_key(std::string_view key) { return fmt::format("ddprun.{}", key); }

    static pmix_info_t collect_info() {
        pmix_info_t info{};
        std::strncpy(info.key, PMIX_COLLECT_DATA, sizeof info.key - 1);
        info.value.type = PMIX_BOOL;
        info.value.data.flag = true;
        return info;
    }

    [[nodiscard]] Duration left() const { return std::max(Duration::zero(), deadline_ - MonotonicClock::now()); }

    Error late(const char* attempt) {
        is_stuck_ = true;
        return {Errc::Timeout, fmt::format("{}: no answer in time; did all processes of the launcher come so far?", attempt), 0};
    }

    Status call(const char* attempt, std::function<pmix_status_t()> ask) {
        if (is_stuck_) return Error{Errc::Closed, "PMIx: the conversation has failed before", 0};
        const std::optional<pmix_status_t> status = answer_by(deadline_, std::move(ask));
        if (!status) return late(attempt);
        if (*status == PMIX_SUCCESS) return {};
        return pmix_failure(library_, attempt, *status);
    }

    Library library_;
    TimePoint deadline_;
    pmix_proc_t self_{};
    bool is_begun_ = false;
    bool is_stuck_ = false;
};

}  // namespace

bool built_with_pmix() { return true; }

Result<Placement> ask_pmix(Duration timeout) {
    const Result<Library> library = load_library();
    if (!library) return library.error();
    const std::function<Result<Placement>()> hold = [loaded = *library, timeout] { return Conversation(loaded, timeout).hold(); };
    std::optional<Result<Placement>> told = answer_by(deadline_after(MonotonicClock::now(), timeout), hold);
    if (!told) return Error{Errc::Timeout, "the PMIx server did not answer in time", 0};
    return *std::move(told);
}

Result<std::unique_ptr<Exchange>> open_pmix_exchange(int rank, TimePoint deadline) {
    const Result<Library> library = load_library();
    if (!library) return library.error();
    auto exchange = std::make_unique<PmixExchange>(*library, deadline);
    if (const Status begun = exchange->begin(rank); !begun) return begun.error().with("PMIx");
    return std::unique_ptr<Exchange>(std::move(exchange));
}

}  // namespace ddprun

#else

namespace ddprun {

bool built_with_pmix() { return false; }

Result<Placement> ask_pmix(Duration) {
    return Error{Errc::NotFound, "this build has no PMIx (meson option pmix)", 0};
}

Result<std::unique_ptr<Exchange>> open_pmix_exchange(int, TimePoint) {
    return Error{Errc::NotFound, "this build has no PMIx (meson option pmix)", 0};
}

}  // namespace ddprun

#endif

namespace ddprun {

Status fill_from_pmix(Placement& placement, Duration timeout) {
    if (placement.size && placement.local_rank && placement.local_size && !placement.job.empty()) return {};
    const Result<Placement> told = ask_pmix(timeout);
    if (!told) {
        return Error{told.error().code,
                     fmt::format("{}, but its PMIx server cannot be asked for the rest: {}; if the variables are left over, set "
                                 "DDPRUN_LAUNCHER=none",
                                 describe(placement), told.error().what),
                     0};
    }
    if (told->rank != placement.rank) {
        return Error{Errc::Mismatch, describe(placement) + " but its PMIx server says " + describe(*told), 0};
    }
    const LauncherFamily family = placement.family;
    placement = *told;
    placement.family = family;
    return {};
}

}  // namespace ddprun
