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
#include <limits>

#include "env/io/background_call.h"
#include "env/io/library.h"

namespace ddprun {

namespace {

constexpr Duration kPmixFarewell = std::chrono::seconds(5);

/// The functions that we need. We do not use pmix.h's macros that allocate or load values: they call others.
struct Library {
    decltype(&::PMIx_Init) init = nullptr;
    decltype(&::PMIx_Put) put = nullptr;
    decltype(&::PMIx_Commit) commit = nullptr;
    decltype(&::PMIx_Fence) fence = nullptr;
    decltype(&::PMIx_Get) get = nullptr;
    decltype(&::PMIx_Finalize) finalize = nullptr;
    decltype(&::PMIx_Error_string) error_string = nullptr;
};

Result<Library> load_pmix() {
    // Never close it: it runs threads.
    void* const handle = load_library("libpmix.so.2");
    if (handle == nullptr) return Error{Errc::NotFound, ::dlerror(), 0};
    Library library;
    const bool whole = find_function(handle, "PMIx_Init", library.init) &&
                       find_function(handle, "PMIx_Put", library.put) &&
                       find_function(handle, "PMIx_Commit", library.commit) &&
                       find_function(handle, "PMIx_Fence", library.fence) &&
                       find_function(handle, "PMIx_Get", library.get) &&
                       find_function(handle, "PMIx_Finalize", library.finalize) &&
                       find_function(handle, "PMIx_Error_string", library.error_string);
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

/// The integer in a value: servers differ in the types of one key.
std::optional<std::int64_t> integer_in(const pmix_value_t& value) {
    switch (value.type) {
        case PMIX_UINT16: return value.data.uint16;
        case PMIX_UINT32: return value.data.uint32;
        case PMIX_UINT64: return static_cast<std::int64_t>(value.data.uint64);
        case PMIX_UINT: return value.data.uint;
        case PMIX_INT: return value.data.integer;
        case PMIX_INT16: return value.data.int16;
        case PMIX_INT32: return value.data.int32;
        case PMIX_INT64: return value.data.int64;
        case PMIX_SIZE: return static_cast<std::int64_t>(value.data.size);
        case PMIX_PROC_RANK: return value.data.rank;
        default: return std::nullopt;
    }
}

Error pmix_failure(const Library& library, const char* attempt, pmix_status_t status) {
    const bool absent = status == PMIX_ERR_UNREACH || status == PMIX_ERR_INVALID_NAMESPACE;
    if (absent) return {Errc::NotFound, fmt::format("{}: no PMIx server answers", attempt), 0};
    if (status == PMIX_ERR_TIMEOUT) {
        return {Errc::Timeout,
                fmt::format("{}: not all processes of the launcher reached it in time", attempt), 0};
    }
    return {Errc::Protocol, fmt::format("{}: {}", attempt, library.error_string(status)), 0};
}

Error late(const char* attempt) {
    return {Errc::Timeout,
            fmt::format("{}: no answer in time; did all processes of the launcher reach it?", attempt), 0};
}

/// A PMIx session from Init to Finalize. PMIx's timeouts have whole seconds, and a server may hang in a call
/// without one, so every call is a BackgroundCall. A process that ends without Finalize counts as a failure
/// of the whole job. PMIx counts sessions: a second one shares the open conversation with the server.
class Session {
  public:
    static Result<std::shared_ptr<Session>> begin(const Library& library, TimePoint deadline,
                                                  const pmix_info_t& timeout) {
        struct Begun {
            pmix_status_t status;
            pmix_proc_t self;
        };
        const std::function<Begun()> init = [library, info = timeout]() mutable {
            Begun begun{};
            begun.status = library.init(&begun.self, &info, 1);
            return begun;
        };
        const KeptSignals kept;  // PMIx loads components that change signal handlers
        const std::optional<Begun> begun = BackgroundCall(init).wait(deadline);
        if (!begun) return late("PMIx_Init");
        if (begun->status != PMIX_SUCCESS) return pmix_failure(library, "PMIx_Init", begun->status);
        return std::make_shared<Session>(library, begun->self);
    }
    Session(const Library& library, const pmix_proc_t& self) : library_(library), self_(self) {}
    ~Session() {
        if (is_stuck_) return;
        const std::function<pmix_status_t()> finalize = [library = library_] {
            return library.finalize(nullptr, 0);
        };
        static_cast<void>(
            BackgroundCall(finalize).wait(deadline_after(MonotonicClock::now(), kPmixFarewell)));
    }
    Session(const Session&) = delete;
    Session& operator=(const Session&) = delete;

    [[nodiscard]] const pmix_proc_t& self() const { return self_; }
    /// Call it after a call that did not return: Finalize would not return, either.
    void leave_stuck() { is_stuck_ = true; }
    [[nodiscard]] bool is_stuck() const { return is_stuck_; }

  private:
    Library library_;
    pmix_proc_t self_;
    bool is_stuck_ = false;
};

std::optional<int> ask_number(const Library& library, const pmix_proc_t& whose, const char* key,
                              const pmix_info_t& timeout) {
    pmix_value_t* value = nullptr;
    if (library.get(&whose, key, &timeout, 1, &value) != PMIX_SUCCESS || value == nullptr)
        return std::nullopt;
    const std::optional<std::int64_t> number = integer_in(*value);
    std::free(value);
    if (!number || *number < 0 || *number > std::numeric_limits<int>::max()) return std::nullopt;
    return static_cast<int>(*number);
}

/// The server's facts about a process. May block for any time.
Placement ask_place(const Library& library, const pmix_proc_t& self, const pmix_info_t& timeout) {
    pmix_proc_t job = self;
    job.rank = PMIX_RANK_WILDCARD;  // facts about the job, not about one process
    Placement placement;
    placement.family = LauncherFamily::Pmix;
    placement.job = self.nspace;
    placement.rank = static_cast<int>(self.rank);
    placement.size = ask_number(library, job, PMIX_JOB_SIZE, timeout);
    placement.local_size = ask_number(library, job, PMIX_LOCAL_SIZE, timeout);
    placement.local_rank = ask_number(library, self, PMIX_LOCAL_RANK, timeout);
    placement.nodes = ask_number(library, job, PMIX_NUM_NODES, timeout);
    placement.node_rank = ask_number(library, self, PMIX_NODEID, timeout);
    // PMIX_NODEID is the node's index in the allocation, which need not be that in the job.
    if (placement.node_rank && placement.nodes && *placement.node_rank >= *placement.nodes)
        placement.node_rank.reset();
    return placement;
}

pmix_value_t text_value(std::string& text) {
    pmix_value_t value{};
    value.type = PMIX_STRING;
    value.data.string = text.data();
    return value;
}

class PmixSource final : public Exchange {
  public:
    PmixSource(const Library& library, TimePoint deadline) : library_(library), deadline_(deadline) {}

    Status begin(int rank) {
        Result<std::shared_ptr<Session>> session = Session::begin(library_, deadline_, timeout_info(left()));
        if (!session) return session.error();
        session_ = *std::move(session);
        self_ = session_->self();
        if (static_cast<int>(self_.rank) == rank) return {};
        return Error{
            Errc::Mismatch,
            fmt::format("the server says rank {}, the launcher's variables say {}", self_.rank, rank), 0};
    }

    Status put(std::string_view key, std::string_view value) override {
        if (const Status checked = check_exchange_word(key, kMaxExchangeKey); !checked) return checked;
        if (const Status checked = check_exchange_word(value, kMaxExchangeValue); !checked) return checked;
        return call("PMIx_Put",
                    [library = library_, key = full_key(key), text = std::string(value)]() mutable {
                        pmix_value_t said = text_value(text);
                        return library.put(PMIX_GLOBAL, key.c_str(), &said);
                    });
    }

    Status fence() override {
        if (const Status committed = call("PMIx_Commit", [library = library_] { return library.commit(); });
            !committed)
            return committed;
        // Collect the data: without it Slurm's fence is no barrier across hosts, and Get finds nothing.
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
        const std::function<Told()> ask = [library = library_, whose, name = full_key(key),
                                           info = timeout_info(left())] {
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
        const std::optional<Told> told = BackgroundCall(ask).wait(deadline_);
        if (!told) return stuck("PMIx_Get");
        if (told->status == PMIX_SUCCESS && !told->text.empty()) return told->text;
        if (told->status != PMIX_SUCCESS && told->status != PMIX_ERR_NOT_FOUND)
            return pmix_failure(library_, "PMIx_Get", told->status);
        return Error{Errc::NotFound, fmt::format("PMIx: rank {} has put no '{}'", rank, key), 0};
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

    [[nodiscard]] Duration left() const {
        return std::max(Duration::zero(), deadline_ - MonotonicClock::now());
    }

    Error stuck(const char* attempt) {
        session_->leave_stuck();
        return late(attempt);
    }

    Status call(const char* attempt, std::function<pmix_status_t()> ask) {
        if (session_->is_stuck()) return Error{Errc::Closed, "PMIx: the conversation has failed before", 0};
        const std::optional<pmix_status_t> status = BackgroundCall(std::move(ask)).wait(deadline_);
        if (!status) return stuck(attempt);
        if (*status == PMIX_SUCCESS) return {};
        return pmix_failure(library_, attempt, *status);
    }

    Library library_;
    TimePoint deadline_;
    pmix_proc_t self_{};
    std::shared_ptr<Session> session_;
};

}  // namespace

bool built_with_pmix() { return true; }

Result<PmixAnswer> ask_pmix(Duration timeout) {
    const Result<Library> library = load_pmix();
    if (!library) return library.error();
    const TimePoint deadline = deadline_after(MonotonicClock::now(), timeout);
    const pmix_info_t info = timeout_info(timeout);
    Result<std::shared_ptr<Session>> session = Session::begin(*library, deadline, info);
    if (!session) return session.error();
    const std::function<Placement()> ask = [loaded = *library, self = (*session)->self(), info] {
        return ask_place(loaded, self, info);
    };
    std::optional<Placement> place = BackgroundCall(ask).wait(deadline);
    if (place) return PmixAnswer{*std::move(place), *std::move(session)};
    (*session)->leave_stuck();
    return late("PMIx_Get");
}

Result<std::unique_ptr<Exchange>> open_pmix_exchange(int rank, TimePoint deadline) {
    const Result<Library> library = load_pmix();
    if (!library) return library.error();
    auto exchange = std::make_unique<PmixSource>(*library, deadline);
    if (const Status begun = exchange->begin(rank); !begun) return begun.error().with("PMIx");
    return std::unique_ptr<Exchange>(std::move(exchange));
}

}  // namespace ddprun

#else

namespace ddprun {

bool built_with_pmix() { return false; }

Result<PmixAnswer> ask_pmix(Duration) { return Error{Errc::NotFound, std::string(kNoPmix), 0}; }

Result<std::unique_ptr<Exchange>> open_pmix_exchange(int, TimePoint) {
    return Error{Errc::NotFound, std::string(kNoPmix), 0};
}

}  // namespace ddprun

#endif

namespace ddprun {

Result<PmixSession> fill_from_pmix(Placement& placement, Duration timeout) {
    if (placement.size && placement.local_rank && placement.local_size && !placement.job.empty())
        return PmixSession{};
    Result<PmixAnswer> told = ask_pmix(timeout);
    if (!told) {
        return Error{
            told.error().code,
            fmt::format(
                "{}, but its PMIx server cannot be asked for the rest: {}; if the variables are left over, "
                "set "
                "DDPRUN_LAUNCHER=none",
                describe(placement), told.error().what),
            0};
    }
    if (told->placement.rank != placement.rank) {
        return Error{Errc::Mismatch,
                     describe(placement) + " but its PMIx server says " + describe(told->placement), 0};
    }
    const LauncherFamily family = placement.family;
    placement = told->placement;
    placement.family = family;
    return std::move(told->session);
}

}  // namespace ddprun
