#include "ddp/testing.h"

#include <fcntl.h>
#include <fmt/core.h>
#include <poll.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <new>
#include <numeric>
#include <optional>
#include <span>
#include <thread>
#include <utility>

#include "ddp/worker/segment_map.h"
#include "env/io/socket.h"
#include "env/kept.h"
#include "env/lifeline.h"
#include "env/os/event_loop.h"
#include "env/worker_env.h"
#include "rendezvous/serve/store_service.h"

namespace ddp::testing {

namespace {

using ddprun::UniqueFd;
using Workers = RecoveringOptions::Workers;
using Program = std::function<void(const Context&)>;

[[noreturn]] void throw_system(const char* attempt) {
    throw Error(fmt::format("testing: {}: {}", attempt, std::strerror(errno)));
}

UniqueFd duplicate(int fd) { return UniqueFd(::fcntl(fd, F_DUPFD_CLOEXEC, 3)); }

UniqueFd make_kept_memory(std::uint32_t workers, std::chrono::nanoseconds limit) {
    UniqueFd fd(::memfd_create("ddp-kept", MFD_CLOEXEC));
    const std::uint64_t slots = ddprun::kept_slots_offset(workers), slot_bytes = ddprun::kKeptSlotBytes;
    if (!fd ||
        ::ftruncate(fd.get(), static_cast<off_t>(slots + workers * ddprun::kKeptSlots * slot_bytes)) != 0)
        throw_system("memfd_create");
    void* const page =
        ::mmap(nullptr, sizeof(ddprun::KeptHeader), PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0);
    if (page == MAP_FAILED) throw_system("mmap");
    auto* const header = new (page) ddprun::KeptHeader{};
    header->version = ddprun::kKeptVersion;
    header->workers = workers;
    header->wait_ns = limit.count();
    header->slots_offset = slots;
    header->slot_bytes = slot_bytes;
    header->magic.store(ddprun::kKeptMagic);
    ::munmap(page, sizeof(ddprun::KeptHeader));
    return fd;
}

constexpr const char *kJob = "job", *kToken = "the job's token";

/// A process with the job's store of one generation.
class StoreProcess {
  public:
    explicit StoreProcess(std::uint64_t generation) {
        auto listener = ddprun::listen_tcp({"127.0.0.1", 0});
        if (!listener) throw Error("testing: " + listener.error().what);
        address_ = fmt::format("tcp:127.0.0.1:{}", listener->bound.port);
        pid_ = ::fork();
        if (pid_ != 0) return;
        ::prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (auto loop = ddprun::os::EventLoop::create({})) {
            ddprun::rdzv::StoreService service({**loop, [](const auto&) {}, [](const auto&) {}}, {});
            service.begin_generation(generation);
            if (service.serve(std::move(listener->fd), {kJob, kToken}, {})) (void)(*loop)->run();
        }
        ::_exit(1);
    }
    ~StoreProcess() {
        ::kill(pid_, SIGKILL);
        ::waitpid(pid_, nullptr, 0);
    }
    StoreProcess(const StoreProcess&) = delete;
    StoreProcess& operator=(const StoreProcess&) = delete;
    [[nodiscard]] const std::string& address() const { return address_; }

  private:
    std::string address_;
    pid_t pid_;
};

/// The agents of all nodes. A worker that has gone is noticed by its end of file, so that packets to it are
/// lost without a word.
class Agent {
  public:
    Agent(int ranks, const Program& program, const RecoveringOptions& options)
        : program_(program),
          options_(options),
          spares_(options.spares),
          returning_(options.returning),
          workers_(static_cast<std::size_t>(ranks)) {
        for (const int on_node : options.nodes.empty() ? std::vector<int>{ranks} : options.nodes)
            add_node(static_cast<std::uint32_t>(on_node));
    }
    ~Agent() {
        for (Worker& worker : workers_) {
            worker.socket.reset();
            if (worker.pid > 0) ::kill(worker.pid, SIGKILL);
            (void)end(worker);
        }
    }
    Agent(const Agent&) = delete;
    Agent& operator=(const Agent&) = delete;

    int run() {
        begin_generation();
        for (std::size_t rank = 0; rank < workers_.size(); ++rank) start(rank);
        while (!all_are(&Worker::has_ended)) {
            read_some();
            if (all_are(&Worker::has_finished)) release();
            recover();
        }
        return static_cast<int>(generation_);
    }

  private:
    struct Worker {
        UniqueFd socket;             ///< the agent's end
        UniqueFd lifeline, segment;  ///< of a thread
        std::thread thread;
        pid_t pid = -1;
        std::string failure;  ///< of a thread
        std::string refusal;  ///< why it cannot recover
        bool has_finished = false, has_ended = false, has_failed = false, has_joined = false;
        bool has_lost_power = false;
    };
    struct Node {
        std::uint32_t ranks = 0, first = 0;  ///< first: its lowest rank
        UniqueFd kept, segment;
        std::unique_ptr<SegmentMap> map;
        [[nodiscard]] bool has(std::size_t rank) const { return rank >= first && rank < first + ranks; }
    };

    [[nodiscard]] std::size_t node_of(std::size_t rank) const {
        std::size_t node = 0;
        while (!nodes_[node].has(rank)) ++node;
        return node;
    }

    bool all_are(bool Worker::*claim) const {
        for (const Worker& worker : workers_) {
            if (!(worker.*claim)) return false;
        }
        return true;
    }

    void begin_generation() {
        ++generation_;
        store_.reset();
        if (nodes_.size() > 1) store_.emplace(generation_);
        std::uint32_t first = 0;
        for (Node& node : nodes_) {
            node.first = std::exchange(first, first + node.ranks);
            node.segment = make_segment({.local_world_size = node.ranks,
                                         .world_size = static_cast<std::uint32_t>(workers_.size()),
                                         .first_rank = node.first,
                                         .generation = generation_});
            node.map = std::make_unique<SegmentMap>(duplicate(node.segment.get()));
        }
        if (options_.on_generation) options_.on_generation(generation_);
    }

    ddprun::WorkerEnv environment(std::size_t rank) const {
        ddprun::WorkerEnv env = environment_of(static_cast<int>(rank), static_cast<int>(workers_.size()));
        const std::size_t node = node_of(rank);
        env.local_rank -= static_cast<int>(nodes_[node].first);
        env.local_world_size = static_cast<int>(nodes_[node].ranks);
        env.group_rank = static_cast<int>(node);
        env.group_world_size = static_cast<int>(nodes_.size());
        env.generation = generation_;
        env.run_id = kJob;
        env.token = kToken;
        if (store_) env.store = store_->address();
        return env;
    }

    void start(std::size_t rank) {
        Worker& worker = workers_[rank] = Worker{};
        int ends[2];
        if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) != 0) throw_system("socketpair");
        worker.socket.reset(ends[0]);
        worker.lifeline.reset(ends[1]);
        const Node& node = nodes_[node_of(rank)];
        worker.segment = duplicate(node.segment.get());
        ddprun::WorkerEnv env = environment(rank);
        env.lifeline_fd = worker.lifeline.get();
        env.segment_fd = worker.segment.get();
        env.kept_fd = node.kept.get();
        if (options_.workers == Workers::Threads) {
            worker.thread = std::thread([this, &worker, env] {
                worker.failure = outcome(env);
                worker.segment.reset();
                worker.lifeline.reset();
            });
            return;
        }
        worker.pid = ::fork();
        if (worker.pid == 0) {
            const std::string failure = outcome(env);
            if (!failure.empty()) ::dprintf(2, "rank %zu: %s\n", rank, failure.c_str());
            ::_exit(failure.empty() ? 0 : 1);
        }
        worker.segment.reset();
        worker.lifeline.reset();
    }

    /// The exception of the program; "" for none.
    std::string outcome(const ddprun::WorkerEnv& env) const {
        try {
            program_(Context(env));
            return "";
        } catch (const std::exception& error) {
            return *error.what() == '\0' ? "an exception" : error.what();
        }
    }

    void read_some() {
        std::vector<pollfd> entries;
        for (const Worker& worker : workers_)
            entries.push_back({.fd = worker.socket.get(), .events = POLLIN, .revents = 0});
        ::poll(entries.data(), entries.size(), -1);
        for (std::size_t rank = 0; rank < entries.size(); ++rank) {
            if (entries[rank].revents != 0) read_packet(workers_[rank]);
        }
    }

    void read_packet(Worker& worker) {
        char packet[ddprun::lifeline::kMaxPacket];
        const ssize_t n = ::recv(worker.socket.get(), packet, sizeof packet, MSG_DONTWAIT);
        if (n <= 0) {
            worker.socket.reset();
            worker.has_ended = true;
            worker.has_failed = !end(worker);
            return;
        }
        const std::string text(packet + 1, static_cast<std::size_t>(n) - 1);
        if (packet[0] == ddprun::lifeline::kFinished)
            worker.has_finished = text == std::to_string(generation_);
        if (packet[0] != ddprun::lifeline::kReady) return;
        if (text.starts_with("restart ")) worker.refusal = text.substr(8);
        worker.has_joined = (text + ' ').starts_with(fmt::format("in-place {} ", generation_));
    }

    /// Waits for the worker's end. False: it failed.
    static bool end(Worker& worker) {
        if (worker.thread.joinable()) worker.thread.join();
        if (worker.pid < 0) return worker.failure.empty();
        int status = 0;
        ::waitpid(worker.pid, &status, 0);
        worker.pid = -1;
        worker.has_lost_power = WIFSIGNALED(status) && WTERMSIG(status) == SIGPWR;
        if (WIFSIGNALED(status)) worker.failure = fmt::format("signal {}", WTERMSIG(status));
        else if (status != 0) worker.failure = fmt::format("exit code {}", WEXITSTATUS(status));
        return status == 0;
    }

    void release() {
        for (Worker& worker : workers_) {
            if (!worker.has_ended)
                ddprun::send_packet(worker.socket.get(),
                                    ddprun::lifeline::kRelease + std::to_string(generation_));
        }
        is_released_ = true;
    }

    void recover() {
        const std::vector<std::size_t> lost = end_lost_nodes();
        std::size_t failed = 0;
        for (std::size_t rank = 0; rank < workers_.size(); ++rank) {
            if (!workers_[rank].has_failed) continue;
            ++failed;
            for (const Node& node : nodes_)
                node.map->header().aborted.store(static_cast<std::uint32_t>(rank) + 1);
        }
        if (failed == 0) return;
        if (all_are(&Worker::has_joined)) failed_in_a_row_ = 0;
        failed_in_a_row_ += failed;
        if (const std::string why = refusal(); !why.empty()) give_up(why);
        if (lost.empty() && !away_.empty()) bring_back_a_node();
        for (std::size_t i = lost.size(); i > 0; --i) replace_node(lost[i - 1]);
        begin_generation();
        for (std::size_t rank = 0; rank < workers_.size(); ++rank) {
            Worker& worker = workers_[rank];
            worker.has_joined = worker.has_finished = false;
            if (worker.has_failed) start(rank);
            else send_generation(rank);
        }
    }

    /// The nodes with a rank that has lost its power; no process of theirs is left.
    std::vector<std::size_t> end_lost_nodes() {
        std::vector<std::size_t> lost;
        for (std::size_t i = 0; i < nodes_.size(); ++i) {
            const std::span ranks(&workers_[nodes_[i].first], nodes_[i].ranks);
            if (std::ranges::none_of(ranks, &Worker::has_lost_power)) continue;
            lost.push_back(i);
            for (Worker& worker : ranks) {
                if (worker.pid > 0) ::kill(worker.pid, SIGKILL);
                (void)end(worker);
                worker.has_ended = worker.has_failed = true;
                worker.has_lost_power = false;
            }
        }
        return lost;
    }

    void replace_node(std::size_t index) {
        Node& node = nodes_[index];
        node.kept = make_kept_memory(node.ranks, options_.limit);
        if (spares_-- > 0) return;
        if (returning_-- > 0) away_.push_back(node.ranks);
        const auto begin = workers_.begin() + node.first;
        workers_.erase(begin, begin + node.ranks);
        nodes_.erase(nodes_.begin() + static_cast<std::ptrdiff_t>(index));
    }

    void add_node(std::uint32_t ranks) {
        Node& node = nodes_.emplace_back();
        node.ranks = ranks;
        node.kept = make_kept_memory(ranks, options_.limit);
    }

    void bring_back_a_node() {
        add_node(away_.back());
        workers_.resize(workers_.size() + away_.back());
        away_.pop_back();
        for (std::size_t i = workers_.size() - nodes_.back().ranks; i < workers_.size(); ++i)
            workers_[i].has_failed = true;  // so that it is started
    }

    [[nodiscard]] std::string refusal() const {
        if (is_released_) return "a rank failed after the end of the run";
        for (const Worker& worker : workers_) {
            if (!worker.refusal.empty()) return worker.refusal;
            if (worker.has_ended && !worker.has_failed) return "a rank has ended";
        }
        if (2 * failed_in_a_row_ > workers_.size()) return "more than half of the ranks failed";
        if (static_cast<int>(generation_) >= options_.most_generations) return "too many generations";
        return "";
    }

    [[noreturn]] void give_up(const std::string& why) {
        std::string failures;
        for (std::size_t rank = 0; rank < workers_.size(); ++rank) {
            Worker& worker = workers_[rank];
            if (!worker.has_ended)
                ddprun::send_packet(worker.socket.get(), {&ddprun::lifeline::kGeneration, 1});
            if (!worker.has_ended) (void)end(worker);
            if (!worker.failure.empty()) failures += fmt::format("; rank {}: {}", rank, worker.failure);
        }
        throw Error(why + failures);
    }

    void send_generation(std::size_t rank) const {
        std::string packet(1, ddprun::lifeline::kGeneration);
        for (const auto& [name, value] : ddprun::to_environment(environment(rank)))
            packet += name + "=" + value + "\n";
        ddprun::send_packet(workers_[rank].socket.get(), packet, nodes_[node_of(rank)].segment.get());
    }

    const Program& program_;
    const RecoveringOptions& options_;
    int spares_, returning_;
    std::vector<std::uint32_t> away_;  ///< ranks of lost nodes that come back
    std::vector<Node> nodes_;
    std::vector<Worker> workers_;  ///< by rank
    std::uint64_t generation_ = 0;
    std::optional<StoreProcess> store_;  ///< of several nodes
    std::size_t failed_in_a_row_ = 0;
    bool is_released_ = false;
};

}  // namespace

int run_recovering(int ranks, const std::function<void(const Context&)>& program,
                   const RecoveringOptions& options) {
    if (ranks < 1) throw InvalidInput(fmt::format("testing: a world of {} ranks", ranks));
    const auto& nodes = options.nodes;
    if (!nodes.empty() &&
        (options.workers != Workers::Processes || std::accumulate(nodes.begin(), nodes.end(), 0) != ranks))
        throw InvalidInput("testing: several nodes are for processes, and have as many ranks as the world");
    return Agent(ranks, program, options).run();
}

}  // namespace ddp::testing
