#include "launcher/node/pmix/server.h"

#include <fmt/core.h>

#include <array>

#include "env/io/file.h"
#include "env/nodes/pmix_source.h"
#include "env/worker_env.h"
#include "launcher/node/pmix/library.h"

#ifdef DDPRUN_HAVE_PMIX

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <numeric>
#include <optional>
#include <set>
#include <utility>

#include "env/io/library.h"
#include "env/text.h"
#include "env/unique_fd.h"
#include "launcher/guard/job_directory.h"
#include "launcher/node/pmix/job_facts.h"
#include "rendezvous/wire/protocol_limits.h"

namespace ddprun {
namespace {

// The pure part (job_facts.h) spells the keys itself.
static_assert(pmix_key::kJobId == PMIX_JOBID && pmix_key::kJobSize == PMIX_JOB_SIZE &&
              pmix_key::kUniverseSize == PMIX_UNIV_SIZE);
static_assert(pmix_key::kMaxProcs == PMIX_MAX_PROCS && pmix_key::kJobApps == PMIX_JOB_NUM_APPS &&
              pmix_key::kNodes == PMIX_NUM_NODES);
static_assert(pmix_key::kNodeMap == PMIX_NODE_MAP && pmix_key::kProcMap == PMIX_PROC_MAP &&
              pmix_key::kNodeSize == PMIX_NODE_SIZE);
static_assert(pmix_key::kLocalSize == PMIX_LOCAL_SIZE && pmix_key::kLocalPeers == PMIX_LOCAL_PEERS &&
              pmix_key::kLocalLeader == PMIX_LOCALLDR);
static_assert(pmix_key::kTopDirectory == PMIX_TMPDIR && pmix_key::kJobDirectory == PMIX_NSDIR &&
              pmix_key::kCleansDirectories == PMIX_TDIR_RMCLEAN);
static_assert(pmix_key::kRank == PMIX_RANK && pmix_key::kGlobalRank == PMIX_GLOBAL_RANK &&
              pmix_key::kLocalRank == PMIX_LOCAL_RANK);
static_assert(pmix_key::kNodeRank == PMIX_NODE_RANK && pmix_key::kNodeId == PMIX_NODEID &&
              pmix_key::kHostName == PMIX_HOSTNAME);
static_assert(pmix_key::kAppNumber == PMIX_APPNUM && pmix_key::kReincarnation == PMIX_REINCARNATION);

/// Answers a call. libpmix does not copy the bytes; it calls back when it no longer needs them.
void answer_call(const OpenCall& call, pmix_status_t status, const rdzv::Blob& data) {
    if (data.size() == 0) return call.answer(status, nullptr, 0, call.cookie, nullptr, nullptr);
    auto* const held = new rdzv::Blob(data);
    call.answer(
        status, held->view().data(), held->size(), call.cookie,
        [](void* blob) { delete static_cast<rdzv::Blob*>(blob); }, held);
}

// ---- values as libpmix takes them; it copies them before a call returns

/// The result points into `fact`.
pmix_info_t info_of(const PmixFact& fact) {
    const auto& [key, value] = fact;
    pmix_info_t info{};
    key.copy(info.key, sizeof info.key - 1);
    const auto set = [&info](pmix_data_type_t type) -> decltype(info.value.data)& {
        info.value.type = type;
        return info.value.data;
    };
    if (const auto* number = std::get_if<std::uint32_t>(&value)) set(PMIX_UINT32).uint32 = *number;
    else if (const auto* small = std::get_if<std::uint16_t>(&value)) set(PMIX_UINT16).uint16 = *small;
    else if (const auto* rank = std::get_if<PmixRank>(&value)) set(PMIX_PROC_RANK).rank = rank->rank;
    else if (const auto* text = std::get_if<std::string>(&value))
        set(PMIX_STRING).string = const_cast<char*>(text->c_str());
    else set(PMIX_BOOL).flag = std::get<bool>(value);
    return info;
}

std::vector<pmix_info_t> infos_of(const std::vector<PmixFact>& facts) {
    std::vector<pmix_info_t> infos;
    for (const PmixFact& fact : facts) infos.push_back(info_of(fact));
    return infos;
}

pmix_proc_t proc_of(const std::string& name_space, int rank) {
    pmix_proc_t proc{};
    name_space.copy(proc.nspace, sizeof proc.nspace - 1);
    proc.rank = static_cast<pmix_rank_t>(rank);
    return proc;
}

class LibPmixServer final : public PmixServer {
  public:
    LibPmixServer(const PmixLibrary& library, Parts parts) : library_(library), parts_(std::move(parts)) {}
    ~LibPmixServer() override;
    LibPmixServer(const LibPmixServer&) = delete;
    LibPmixServer& operator=(const LibPmixServer&) = delete;

    Status listen();
    Status begin(const rdzv::StartGeneration& order) override;
    [[nodiscard]] std::vector<std::string> environment(int local_rank) const override;
    void end_waiting(const std::string& why) override;
    void end_generation() override;
    void explain(rdzv::WorkerExited& report) override;

    void handle(const rdzv::World& world) override { world_ = world; }
    void handle(const rdzv::FenceOver& over) override;
    void handle(const rdzv::ModexRequest& request) override;
    void handle(const rdzv::ModexReply& reply) override;

  private:
    struct Abort {
        int status;
        std::string text;
    };
    struct Client {
        bool connected = false;
        bool finalized = false;
        std::optional<Abort> abort;
    };

    void handle_upcalls();
    void handle(const ClientConnected& said);
    void handle(const ClientFinalized& said);
    void handle(const ClientAborted& said);
    void handle(const FenceCalled& fence);
    void handle(const ModexCalled& modex);
    void handle(const ModexFound& found);

    Status register_job(const PmixJob& job);
    [[nodiscard]] std::string files_of(std::uint64_t generation) const {
        return fmt::format("{}/{}", parts_.directory, generation);
    }
    [[nodiscard]] Client* client(const std::string& name_space, std::uint32_t rank);
    [[nodiscard]] std::vector<int> all_of(const std::vector<std::uint32_t>& ranks) const;
    [[nodiscard]] bool all_are_here(const std::vector<int>& ranks) const;
    [[nodiscard]] Error refused(const char* attempt, pmix_status_t status) const {
        return {Errc::System, fmt::format("{}: {}", attempt, library_.error_string(status)), 0};
    }

    PmixLibrary library_;
    Parts parts_;
    UniqueFd wake_;
    bool listens_ = false;
    rdzv::World world_;
    rdzv::StartGeneration order_;
    std::string name_space_;                     ///< "" between generations
    bool is_over_ = true;                        ///< end_waiting() has been called
    std::vector<Client> clients_;                ///< by local rank
    std::map<std::string, OpenCall> fences_;     ///< sent to the controller, by their ranks
    std::map<std::uint64_t, OpenCall> modexes_;  ///< sent to the controller, by our number
    std::set<std::uint64_t> asked_;              ///< the controller's requests of this generation, by number
    std::uint64_t next_number_ = 1;
};

// ---- the server

Status LibPmixServer::listen() {
    wake_.reset(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    if (!wake_) return Error::system("eventfd");
    // Keep values in our own memory, unless the user sets another way: files would be left by a kill.
    ::setenv("PMIX_MCA_gds", "hash", 0);
    Upcalls::instance().wake_by(wake_.get());
    const std::vector<PmixFact> facts = {{PMIX_SERVER_TMPDIR, parts_.directory},
                                         {PMIX_SYSTEM_TMPDIR, parts_.directory},
                                         {PMIX_SERVER_NSPACE, "ddprun." + parts_.id + ".server"},
                                         {PMIX_HOSTNAME, parts_.host},
                                         {PMIX_SERVER_TOOL_SUPPORT, false}};
    std::vector<pmix_info_t> infos = infos_of(facts);
    const KeptSignals kept;  // PMIx loads components that change signal handlers
    const pmix_status_t begun = library_.init(module_of_upcalls(), infos.data(), infos.size());
    if (begun != PMIX_SUCCESS) return refused("PMIx_server_init", begun);
    listens_ = true;
    return parts_.loop.watch(wake_.get(), EPOLLIN, [this](std::uint32_t) { handle_upcalls(); });
}

LibPmixServer::~LibPmixServer() {
    if (listens_) {
        end_waiting("the job is over");
        end_generation();
        library_.finalize();
        parts_.loop.unwatch(wake_.get());
    }
    Upcalls::instance().wake_by(-1);
}

Status LibPmixServer::begin(const rdzv::StartGeneration& order) {
    end_waiting("its generation is over");
    end_generation();
    if (world_.generation != order.generation)
        return Error{Errc::Protocol, "the head has sent no list of nodes: does it serve PMIx?", 0};
    const Result<std::vector<PmixNode>> nodes = decode_nodes(world_.nodes.view());
    if (!nodes) return nodes.error();
    const Result<PmixJob> job = describe_job(order, *nodes, world_.job, files_of(order.generation));
    if (!job) return job.error();
    if (::mkdir(files_of(order.generation).c_str(), 0700) != 0)
        return Error::system("mkdir " + files_of(order.generation));
    order_ = order;
    clients_.assign(static_cast<std::size_t>(order.local_world_size), {});
    is_over_ = false;
    return register_job(*job);
}

Status LibPmixServer::register_job(const PmixJob& job) {
    std::vector<std::vector<pmix_info_t>> ranks;
    std::vector<pmix_data_array_t> arrays;
    for (const std::vector<PmixFact>& facts : job.ranks) ranks.push_back(infos_of(facts));
    for (std::vector<pmix_info_t>& rank : ranks) arrays.push_back({PMIX_INFO, rank.size(), rank.data()});
    std::vector<pmix_info_t> infos = infos_of(job.facts);
    for (pmix_data_array_t& array : arrays) {
        pmix_info_t info{};
        std::strncpy(info.key, PMIX_PROC_DATA, sizeof info.key - 1);
        info.value.type = PMIX_DATA_ARRAY;
        info.value.data.darray = &array;
        infos.push_back(info);
    }
    // Without a callback these calls wait for libpmix's thread, some 100 us.
    const auto done = [](pmix_status_t status) {
        return status == PMIX_SUCCESS || status == PMIX_OPERATION_SUCCEEDED;
    };
    const pmix_proc_t whole = proc_of(job.name_space, 0);
    const pmix_status_t known = library_.register_nspace(whole.nspace, order_.local_world_size, infos.data(),
                                                         infos.size(), nullptr, nullptr);
    if (!done(known)) return refused("PMIx_server_register_nspace", known);
    name_space_ = job.name_space;
    for (int local = 0; local < order_.local_world_size; ++local) {
        const pmix_proc_t proc = proc_of(name_space_, order_.first_rank + local);
        const pmix_status_t expected =
            library_.register_client(&proc, ::geteuid(), ::getegid(), nullptr, nullptr, nullptr);
        if (!done(expected)) return refused("PMIx_server_register_client", expected);
    }
    return {};
}

std::vector<std::string> LibPmixServer::environment(int local_rank) const {
    const pmix_proc_t proc = proc_of(name_space_, order_.first_rank + local_rank);
    char** variables = nullptr;
    (void)library_.setup_fork(&proc, &variables);
    std::vector<std::string> result;
    for (char** variable = variables; variable != nullptr && *variable != nullptr; ++variable) {
        result.emplace_back(*variable);
        std::free(*variable);
    }
    std::free(variables);
    // Open MPI's shared memory has names: put it where we or the warden remove it.
    for (const char* parameter : {"btl_vader_backing_directory", "osc_sm_backing_directory"}) {
        result.push_back(fmt::format("OMPI_MCA_{}={}", parameter, files_of(order_.generation)));
    }
    // Open MPI 4 runs as a single process unless it knows the launcher. Of the launchers with a PMIx server
    // only, it knows IBM's JSM by this variable alone (Slurm's plugin looks for the allocation, too).
    result.emplace_back("JSM_JSRUN_PORT=0");
    result.emplace_back("OMPI_MCA_pmix=^s1,s2,cray,isolated");
    return result;
}

void LibPmixServer::end_waiting(const std::string& why) {
    handle_upcalls();
    is_over_ = true;
    if (!fences_.empty() || !modexes_.empty())
        parts_.log.debug("PMIx: {} fences and {} requests of workers end: {}", fences_.size(),
                         modexes_.size(), why);
    for (const auto& [ranks, call] : std::exchange(fences_, {}))
        answer_call(call, PMIX_ERR_LOST_CONNECTION, {});
    for (const auto& [number, call] : std::exchange(modexes_, {})) answer_call(call, PMIX_ERR_NOT_FOUND, {});
}

void LibPmixServer::end_generation() {
    if (name_space_.empty()) return;
    const pmix_proc_t whole = proc_of(name_space_, 0);
    library_.deregister_nspace(whole.nspace, nullptr, nullptr);
    name_space_.clear();
    asked_.clear();
    remove_job_directory(files_of(order_.generation));  // files that killed workers have left
}

// ---- calls of workers

void LibPmixServer::handle_upcalls() {
    std::uint64_t ignored = 0;
    (void)!::read(wake_.get(), &ignored, sizeof ignored);
    for (const Upcall& upcall : Upcalls::instance().take()) {
        std::visit([this](const auto& one) { handle(one); }, upcall);
    }
}

LibPmixServer::Client* LibPmixServer::client(const std::string& name_space, std::uint32_t rank) {
    const auto local = static_cast<std::int64_t>(rank) - order_.first_rank;
    if (name_space != name_space_ || local < 0 || local >= static_cast<std::int64_t>(clients_.size()))
        return nullptr;
    return &clients_[static_cast<std::size_t>(local)];
}

void LibPmixServer::handle(const ClientConnected& said) {
    Client* const known = client(said.name_space, said.rank);
    if (known == nullptr) return;
    known->connected = true;
    known->finalized = false;
}

void LibPmixServer::handle(const ClientFinalized& said) {
    if (Client* const known = client(said.name_space, said.rank)) known->finalized = true;
}

void LibPmixServer::handle(const ClientAborted& said) {
    Client* const known = client(said.name_space, said.rank);
    if (known == nullptr) return;
    known->abort = Abort{said.status, said.text};
    parts_.aborted(static_cast<int>(said.rank) - order_.first_rank);
}

/// The ranks in ascending order, each once.
std::vector<int> LibPmixServer::all_of(const std::vector<std::uint32_t>& ranks) const {
    std::vector<int> all;
    for (const std::uint32_t rank : ranks) {
        if (rank == PMIX_RANK_WILDCARD) {
            all.resize(static_cast<std::size_t>(order_.world_size));
            std::iota(all.begin(), all.end(), 0);
            return all;
        }
        if (rank < static_cast<std::uint32_t>(order_.world_size)) all.push_back(static_cast<int>(rank));
    }
    std::sort(all.begin(), all.end());
    all.erase(std::unique(all.begin(), all.end()), all.end());
    return all;
}

bool LibPmixServer::all_are_here(const std::vector<int>& ranks) const {
    return ranks.front() >= order_.first_rank && ranks.back() < order_.first_rank + order_.local_world_size;
}

void LibPmixServer::handle(const FenceCalled& fence) {
    if (is_over_ || fence.name_space != name_space_)
        return answer_call(fence.call, PMIX_ERR_LOST_CONNECTION, {});
    // One of our workers died inside the fence; at other nodes it ends when the head hears of that.
    if (!fence.is_whole) return answer_call(fence.call, PMIX_ERR_LOST_CONNECTION, {});
    const std::vector<int> ranks = all_of(fence.ranks);
    if (ranks.empty()) return answer_call(fence.call, PMIX_ERR_BAD_PARAM, {});
    if (all_are_here(ranks)) return answer_call(fence.call, PMIX_SUCCESS, fence.data);
    std::string name = format_ranges(ranks);
    if (!fences_.emplace(name, fence.call).second) return answer_call(fence.call, PMIX_ERR_NOT_SUPPORTED, {});
    if (parts_.send(rdzv::FenceEntered{order_.generation, name, fence.data})) return;
    // The loss of the connection may already have ended the fence.
    if (fences_.erase(name) > 0) answer_call(fence.call, PMIX_ERR_LOST_CONNECTION, {});
}

void LibPmixServer::handle(const rdzv::FenceOver& over) {
    const auto found = over.generation == order_.generation ? fences_.find(over.ranks) : fences_.end();
    if (found == fences_.end()) return;
    const OpenCall call = found->second;
    fences_.erase(found);
    if (!over.failure.empty())
        parts_.log.debug("PMIx: the fence of ranks {} fails: {}", over.ranks, over.failure);
    answer_call(call, over.failure.empty() ? PMIX_SUCCESS : PMIX_ERR_LOST_CONNECTION, over.data);
}

void LibPmixServer::handle(const ModexCalled& modex) {
    if (is_over_ || modex.name_space != name_space_) return answer_call(modex.call, PMIX_ERR_NOT_FOUND, {});
    const std::uint64_t number = next_number_++;
    modexes_.emplace(number, modex.call);
    if (parts_.send(rdzv::ModexRequest{order_.generation, number, static_cast<int>(modex.rank)})) return;
    if (modexes_.erase(number) > 0) answer_call(modex.call, PMIX_ERR_NOT_FOUND, {});
}

void LibPmixServer::handle(const rdzv::ModexReply& reply) {
    const auto found = reply.generation == order_.generation ? modexes_.find(reply.number) : modexes_.end();
    if (found == modexes_.end()) return;
    const OpenCall call = found->second;
    modexes_.erase(found);
    answer_call(call, reply.found ? PMIX_SUCCESS : PMIX_ERR_NOT_FOUND, reply.data);
}

// ---- requests of other nodes

void LibPmixServer::handle(const rdzv::ModexRequest& request) {
    const auto refuse = [&] {
        (void)parts_.send(rdzv::ModexReply{request.generation, request.number, false, {}});
    };
    if (is_over_ || request.generation != order_.generation || !asked_.insert(request.number).second)
        return refuse();
    const pmix_proc_t proc = proc_of(name_space_, request.rank);
    // libpmix calls this when the rank has put its values, perhaps never; the cookie is the request's number.
    const auto found = [](pmix_status_t status, char* data, std::size_t size, void* cookie) {
        const bool is_there = status == PMIX_SUCCESS && size <= rdzv::kFencePartBytes;
        Upcalls::instance().post(
            ModexFound{reinterpret_cast<std::uintptr_t>(cookie), is_there,
                       rdzv::Blob(is_there && data != nullptr ? std::string(data, size) : "")});
    };
    if (library_.dmodex_request(&proc, found,
                                reinterpret_cast<void*>(static_cast<std::uintptr_t>(request.number))) ==
        PMIX_SUCCESS)
        return;
    if (asked_.erase(request.number) > 0) refuse();
}

void LibPmixServer::handle(const ModexFound& found) {
    if (asked_.erase(found.number) > 0)
        (void)parts_.send(rdzv::ModexReply{order_.generation, found.number, found.found, found.data});
}

// ---- ends

void LibPmixServer::explain(rdzv::WorkerExited& report) {
    handle_upcalls();  // the worker's calls before its end
    // The report's local rank is the outer launcher's where that starts each rank.
    const int index = report.rank - order_.first_rank;
    if (report.generation != order_.generation || index < 0 || index >= static_cast<int>(clients_.size()))
        return;
    const Client& ended = clients_[static_cast<std::size_t>(index)];
    if (ended.abort) {
        report.meaning = fmt::format("it called MPI_Abort with {}", ended.abort->status);
        // Leave out "N/A", which Open MPI and PMIx write for a program without a message.
        if (const std::string& text = ended.abort->text; !text.empty() && text != "N/A")
            report.meaning += fmt::format(": {}", excerpt(text, 1000));
        report.signaled = false;
        report.status = (ended.abort->status & 0xff) == 0 ? 1 : ended.abort->status & 0xff;
    } else if (!report.failed() && !report.by_us && !is_over_ && ended.connected && !ended.finalized) {
        report.status = 1;
        report.meaning = "it ended with exit code 0 but without MPI_Finalize, and the others may wait for it";
    }
}

}  // namespace

Status PmixServer::check(const std::string& library) {
    const Result<PmixLibrary> loaded = load_pmix(library);
    return loaded ? Status() : Status(loaded.error());
}

Result<std::unique_ptr<PmixServer>> PmixServer::start(const std::string& library, Parts parts) {
    const Result<PmixLibrary> loaded = load_pmix(library);
    if (!loaded) return loaded.error();
    auto server = std::make_unique<LibPmixServer>(*loaded, std::move(parts));
    if (const Status listening = server->listen(); !listening) return listening.error();
    return std::unique_ptr<PmixServer>(std::move(server));
}

}  // namespace ddprun

#else

namespace ddprun {

Status PmixServer::check(const std::string&) { return Error{Errc::NotFound, std::string(kNoPmix), 0}; }

Result<std::unique_ptr<PmixServer>> PmixServer::start(const std::string& library, Parts) {
    return check(library).error();
}

}  // namespace ddprun

#endif

namespace ddprun {

Result<std::unique_ptr<PmixServer>> serve_pmix(const PmixWish& wish, PmixUse use, PmixServer::Parts parts) {
    if (!wish.wanted) return std::unique_ptr<PmixServer>();
    os::Log& log = parts.log;
    Result<std::unique_ptr<PmixServer>> server =
        PmixServer::start(process_environment("DDPRUN_PMIX_LIBRARY").value_or(""), std::move(parts));
    if (server) {
        log.debug("PMIx server of the workers: {}", wish.why);
        return server;
    }
    if (use == PmixUse::On) return server.error().with("--pmix on");
    log.warning(
        "{}, but there is no PMIx server for it ({}): its ranks would not find each other; {}, or say "
        "--pmix off",
        wish.why, server.error().what,
        built_with_pmix() ? "install libpmix" : "install libpmix-dev and build ddprun again");
    return std::unique_ptr<PmixServer>();
}

void look_for_mpi(os::EventLoop& loop, os::Log& log, std::function<pid_t()> worker, std::size_t nth) {
    constexpr std::array<std::chrono::seconds, 3> kLooks = {std::chrono::seconds(1), std::chrono::seconds(5),
                                                            std::chrono::seconds(30)};
    constexpr std::size_t kMaxMaps = std::size_t{16} << 20;
    if (nth == kLooks.size()) return;
    loop.call_after(kLooks[nth], [&loop, &log, worker = std::move(worker), nth] {
        const pid_t pid = worker();
        if (pid == 0) return;
        const Result<std::string> maps = read_file(fmt::format("/proc/{}/maps", pid), kMaxMaps);
        const std::string line = maps ? explain_loaded_mpi(*maps) : "";
        if (line.empty()) return look_for_mpi(loop, log, worker, nth + 1);
        log.warning("{}", line);
    });
}

}  // namespace ddprun
