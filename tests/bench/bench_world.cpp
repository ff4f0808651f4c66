// A job of many nodes against a real ddprun as its head: every other node is an AgentLink of this process,
// with a connection and a handshake of its own, that says what a real agent said once. So the head cannot
// tell the difference; only workers are not there. All share this machine's cores. Prints what each step
// took; asserts nothing. Then real agents with a real worker each: how long until all run, and until they run
// again when the head is killed. A row for each number of AGENTS, and the first of them once more with TLS.
// usage: bench_world DDPRUN STAMP [AGENTS...]
#include <fcntl.h>
#include <fmt/core.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "env/os/event_loop.h"
#include "env/worker_env.h"
#include "rendezvous/client/agent_link.h"
#include "rendezvous/serve/server.h"
#include "tests/support/reserved_port.h"
#include "tests/support/run_program.h"
#include "tests/support/temporary_directory.h"

namespace ddprun::test {
namespace {

constexpr const char* kToken = "0123456789abcdef0123456789abcdef";
constexpr const char* kJob = "world";
/// Nodes that are joining at the same time: real ones have a processor each and answer at once.
constexpr int kAtOnce = 256;

[[noreturn]] void give_up(const std::string& why) {
    fmt::print(stderr, "bench_world: {}\n", why);
    std::exit(1);
}

double ms_between(TimePoint from, TimePoint to) {
    return std::chrono::duration<double, std::milli>(to - from).count();
}

/// What is started on each node; the head's worker stays until it is told to stop.
std::vector<std::string> ddprun_line(const std::string& ddprun, int nodes, const std::string& port,
                                     int node_rank, bool tls = false) {
    return {ddprun,
            "-q",
            tls ? "--tls" : "--cgroup=auto",
            fmt::format("--nnodes={}", nodes),
            "--nproc-per-node=1",
            fmt::format("--node-rank={}", node_rank),
            "--max-restarts=3",
            fmt::format("--rdzv-id={}", kJob),
            "--rdzv-endpoint=127.0.0.1:" + port,
            "sleep",
            "600"};
}

/// Stands in for a controller until a real agent has introduced itself.
class Introduction final : private rdzv::ServerHandler {
  public:
    static rdzv::AgentHello of(const std::string& ddprun, int nodes, const ReservedPort& port, bool tls) {
        const auto loop = *os::EventLoop::create({});
        Introduction self(*loop);
        rdzv::ServerOptions options;
        options.credentials = {kJob, kToken};
        options.where = port.endpoint();
        const auto server = rdzv::Server::create(*loop, std::move(options), self);
        if (!server) give_up(server.error().what);
        const Program agent(ddprun_line(ddprun, nodes, port.number(), 1, tls),
                            with_environment({std::string("DDPRUN_TOKEN=") + kToken}));
        if (!loop->run()) give_up("event loop");
        return self.hello_;
    }

  private:
    explicit Introduction(os::EventLoop& loop) : loop_(loop) {}
    void on_agent_joined(rdzv::AgentId, const rdzv::AgentHello& hello) override {
        hello_ = hello;
        loop_.stop();
    }
    void on_agent_message(rdzv::AgentId, const rdzv::FromAgent&) override {}
    void on_agent_lost(rdzv::AgentId, const Error&) override {}
    void on_log(const std::string& line) override { fmt::print(stderr, "{}\n", line); }

    os::EventLoop& loop_;
    rdzv::AgentHello hello_;
};

/// All nodes but the head.
class Crowd {
  public:
    Crowd(os::EventLoop& loop, rdzv::AgentHello hello, Endpoint head, int agents,
          std::shared_ptr<const rdzv::TlsContext> tls)
        : loop_(loop), tls_(std::move(tls)) {
        nodes_.reserve(static_cast<std::size_t>(agents));
        arrive_ = [this, hello = std::move(hello), head = std::move(head), agents] {
            const int number = size();
            if (number < agents) nodes_.push_back(std::make_unique<Node>(*this, hello, head, number));
        };
        for (int i = 0; i < kAtOnce; ++i) arrive_();
        wanted_ = agents;
    }

    // When the step that is waited for was done by all.
    TimePoint joined{}, assigned{}, stopped{};
    [[nodiscard]] int size() const { return static_cast<int>(nodes_.size()); }

    void run_until(bool (Crowd::*is_done)() const, const char* what) {
        done_ = is_done;
        const auto patience = loop_.call_after(
            std::chrono::minutes(5), [what] { give_up(fmt::format("{} takes more than 5 minutes", what)); });
        if (!loop_.run()) give_up("event loop");
        loop_.cancel(patience);
    }
    [[nodiscard]] bool all_assigned() const { return assigned_ == wanted_; }
    [[nodiscard]] bool all_stopped() const { return stopped_ == size(); }
    [[nodiscard]] bool all_dismissed() const { return dismissed_ == size(); }
    void say(int node, rdzv::FromAgent message) {
        if (!nodes_[static_cast<std::size_t>(node)]->link->send(std::move(message)))
            give_up("a node has lost the head");
    }
    [[nodiscard]] std::uint64_t generation() const { return generation_; }
    void end_all() {
        assigned_ = stopped_ = 0;
        for (int i = 0; i < size(); ++i) say(i, rdzv::GenerationEnded{generation_, {}});
    }

  private:
    struct Node final : rdzv::AgentLinkHandler {
        Node(Crowd& of, rdzv::AgentHello hello, const Endpoint& head, int number) : crowd(of) {
            rdzv::AgentLinkOptions options;
            hello.host = fmt::format("sim{:05}", number);
            hello.node_rank = number + 1;
            options.controllers = {head};
            options.credentials = {kJob, kToken};
            options.name = "agent on " + hello.host;
            options.hello = std::move(hello);
            options.tls = crowd.tls_;
            link = std::make_unique<rdzv::AgentLink>(crowd.loop_, std::move(options), *this);
        }
        void on_connected() override {
            crowd.joined = MonotonicClock::now();
            crowd.loop_.post(crowd.arrive_);
        }
        void on_message(const rdzv::ToAgent& message) override { crowd.hear(message); }
        void on_lost(const Error& why) override {
            if (!crowd.is_over_) give_up(why.what);
        }
        void on_log(const std::string&) override {}
        Crowd& crowd;
        std::unique_ptr<rdzv::AgentLink> link;
    };

    void hear(const rdzv::ToAgent& message) {
        if (const auto* start = std::get_if<rdzv::StartGeneration>(&message)) {
            generation_ = start->generation;
            ++assigned_;
            assigned = MonotonicClock::now();
        } else if (std::holds_alternative<rdzv::StopGeneration>(message)) {
            ++stopped_;
            stopped = MonotonicClock::now();
        } else if (std::holds_alternative<rdzv::Shutdown>(message)) {
            ++dismissed_;
            is_over_ = true;
        }
        if ((this->*done_)()) loop_.stop();
    }

    os::EventLoop& loop_;
    std::shared_ptr<const rdzv::TlsContext> tls_;
    std::function<void()> arrive_;
    int wanted_ = 0;
    std::vector<std::unique_ptr<Node>> nodes_;
    bool (Crowd::*done_)() const = &Crowd::all_assigned;
    int assigned_ = 0, stopped_ = 0, dismissed_ = 0;
    std::uint64_t generation_ = 0;
    bool is_over_ = false;
};

long kib_of(pid_t process, const std::string& name) {
    std::ifstream status(fmt::format("/proc/{}/status", process));
    for (std::string line; std::getline(status, line);) {
        if (line.starts_with(name + ":")) return std::strtol(line.c_str() + name.size() + 1, nullptr, 10);
    }
    return 0;
}

double cpu_ms(pid_t process) {
    std::ifstream stat(fmt::format("/proc/{}/stat", process));
    std::string line;
    std::getline(stat, line);
    long user = 0, system = 0;
    std::sscanf(line.c_str() + line.rfind(')') + 2, "%*c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %ld %ld",
                &user, &system);
    return static_cast<double>(user + system) * 1000.0 / static_cast<double>(::sysconf(_SC_CLK_TCK));
}

void measure(const std::string& ddprun, int agents, std::shared_ptr<const rdzv::TlsContext> tls) {
    const ReservedPort port;
    const rdzv::AgentHello hello = Introduction::of(ddprun, agents + 1, port, tls != nullptr);
    Program head(ddprun_line(ddprun, agents + 1, port.number(), 0, tls != nullptr),
                 with_environment({std::string("DDPRUN_TOKEN=") + kToken}));
    while (!connect_tcp(port.endpoint(), MonotonicClock::now() + std::chrono::seconds(1))) ::usleep(2000);
    const long before_kib = kib_of(head.pid(), "VmRSS");

    const auto loop = *os::EventLoop::create({});
    const TimePoint begun = MonotonicClock::now();
    Crowd crowd(*loop, hello, port.endpoint(), agents, std::move(tls));
    crowd.run_until(&Crowd::all_assigned, "forming the world");
    const double joining = ms_between(begun, crowd.joined),
                 assigning = ms_between(crowd.joined, crowd.assigned);
    const long each_kib = (kib_of(head.pid(), "VmRSS") - before_kib) * 1024 / agents;
    const double head_cpu = cpu_ms(head.pid());

    rdzv::WorkerExited death;
    death.generation = crowd.generation();
    death.rank = death.local_rank = 0;
    death.rank = 1;
    death.status = 1;
    const TimePoint died = MonotonicClock::now();
    crowd.say(0, death);
    crowd.run_until(&Crowd::all_stopped, "stopping");
    const double stopping = ms_between(died, crowd.stopped);
    const TimePoint ended = MonotonicClock::now();
    crowd.end_all();
    crowd.run_until(&Crowd::all_assigned, "starting again");
    const double restarting = ms_between(ended, crowd.assigned);

    head.signal(SIGTERM);
    crowd.run_until(&Crowd::all_stopped, "the end");
    crowd.end_all();
    crowd.run_until(&Crowd::all_dismissed, "the end");
    const Outcome outcome = head.wait();
    fmt::print(
        "{:>6} | {:>10.0f} {:>7.1f} | {:>9.1f} {:>7.1f} | {:>9.1f} | {:>10.1f} | {:>8} | {:>8.0f} | {}\n",
        agents, joining, joining * 1e3 / agents, assigning, assigning * 1e3 / agents, stopping, restarting,
        each_kib, head_cpu, outcome.status);
    if (outcome.status != 75) fmt::print(stderr, "{}\n", outcome.err);
    std::fflush(stdout);
}

/// The file in which each worker notes its first moment (stamp.cpp).
class Stamps {
  public:
    Stamps() : file_(place_.file("stamps")) {
        const int fd = ::open(file_.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
        if (fd < 0 || ::ftruncate(fd, kBytes) != 0) give_up("stamps");
        words_ =
            static_cast<std::uint64_t*>(::mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0));
        ::close(fd);
    }
    ~Stamps() { ::munmap(words_, kBytes); }
    Stamps(const Stamps&) = delete;
    Stamps& operator=(const Stamps&) = delete;
    [[nodiscard]] const std::string& file() const { return file_; }
    /// When the last of so many began.
    [[nodiscard]] TimePoint await(std::uint64_t count) const {
        while (__atomic_load_n(words_, __ATOMIC_ACQUIRE) < count) ::usleep(200);
        ::usleep(2000);  // between counting itself and writing its stamp a worker can be interrupted
        return TimePoint(std::chrono::nanoseconds(*std::max_element(words_ + 1, words_ + 1 + count)));
    }

  private:
    static constexpr std::size_t kBytes = 65536 * 8;  // as stamp.cpp maps
    TemporaryDirectory place_;
    std::string file_;
    std::uint64_t* words_ = nullptr;
};

/// As many ddprun as nodes, all of this host, each with a worker that stays.
std::vector<std::unique_ptr<Program>> start_nodes(const std::string& ddprun, const std::string& stamp,
                                                  const std::string& nnodes, int nodes,
                                                  const ReservedPort& port, const Stamps& stamps) {
    std::vector<std::unique_ptr<Program>> all;
    for (int node = 0; node < nodes; ++node) {
        const std::vector<std::string> line = {ddprun,
                                               "-q",
                                               "--nnodes=" + nnodes,
                                               "--nproc-per-node=1",
                                               fmt::format("--node-rank={}", node),
                                               "--rdzv-id=world",
                                               "--rdzv-endpoint=" + port.text(),
                                               stamp,
                                               stamps.file(),
                                               "hold"};
        all.push_back(
            std::make_unique<Program>(line, with_environment({std::string("DDPRUN_TOKEN=") + kToken})));
    }
    return all;
}

double median(std::vector<double> values) {
    std::sort(values.begin(), values.end());
    return values[values.size() / 2];
}

void measure_real_agents(const std::string& ddprun, const std::string& stamp) {
    constexpr int kNodes = 32, kRounds = 5;
    std::vector<double> starts, successions;
    for (int round = 0; round < kRounds; ++round) {
        const ReservedPort port;
        const Stamps stamps;
        const TimePoint begun = MonotonicClock::now();
        const auto nodes = start_nodes(ddprun, stamp, std::to_string(kNodes), kNodes, port, stamps);
        starts.push_back(ms_between(begun, stamps.await(kNodes)));
    }
    for (int round = 0; round < kRounds; ++round) {
        const ReservedPort port;
        const Stamps stamps;
        const auto nodes = start_nodes(ddprun, stamp, "7:8", 8, port, stamps);
        (void)stamps.await(8);
        ::usleep(300'000);  // the standby has been told to all
        const TimePoint killed = MonotonicClock::now();
        nodes[0]->signal(SIGKILL);
        successions.push_back(ms_between(killed, stamps.await(15)));
    }
    fmt::print(
        "\n{} real agents with a worker each: {:.0f} ms from the first ddprun's start to the last worker's first instruction\n",
        kNodes, median(starts));
    fmt::print(
        "8 of them, the head is killed: {:.0f} ms to the first instruction of all workers of the next generation\n",
        median(successions));
}

}  // namespace
}  // namespace ddprun::test

int main(int argc, char** argv) {
    using namespace ddprun::test;
    if (argc < 3) return 64;
    rlimit files{};
    ::getrlimit(RLIMIT_NOFILE, &files);
    files.rlim_cur = files.rlim_max;
    ::setrlimit(RLIMIT_NOFILE, &files);
    std::vector<int> sizes;
    for (int i = 3; i < argc; ++i) sizes.push_back(std::atoi(argv[i]));
    if (sizes.empty()) sizes = {32, 1024, 4096, 16384};
    fmt::print(
        "nodes  | all joined, each us | last join to last assignment, each us | death to last stop | ended to restarted | bytes of the head each | head's CPU ms to there | exit\n");
    for (const int agents : sizes) {
        if (static_cast<rlim_t>(agents) + 64 > files.rlim_cur) {
            fmt::print("{:>6} | left out: {} descriptors are allowed (ulimit -n)\n", agents, files.rlim_cur);
            continue;
        }
        measure(argv[1], agents, nullptr);
    }
    if (const auto tls = ddprun::rdzv::TlsContext::for_client()) {
        fmt::print("with --tls:\n");
        measure(argv[1], sizes.front(), *tls);
    }
    measure_real_agents(argv[1], argv[2]);
    return 0;
}
