#include <fcntl.h>
#include <fmt/core.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "env/io/socket.h"
#include "env/os/event_loop.h"
#include "rendezvous/client.h"
#include "rendezvous/server.h"
#include "tests/support/reserved_port.h"

/// Store operations against our server, beside the least any store can cost: one round trip over loopback
/// between two threads that do nothing else, measured in the same run. Ratios, because machines differ.
/// Where redis-server and redis-benchmark are installed, its numbers stand below; its client is one thread
/// that multiplexes, ours are threads that block, so compare them with care.
namespace {

using namespace ddprun;
using namespace ddprun::rdzv;

constexpr std::size_t kMessageBytes = 64;
constexpr int kOperationsInAll = 40'000;

[[noreturn]] void give_up(const std::string& why) {
    fmt::print(stderr, "bench_store: {}\n", why);
    std::exit(1);
}

TimePoint patience() { return MonotonicClock::now() + std::chrono::seconds(60); }

struct Timing {
    double median_us = 0;
    double p99_us = 0;
    double per_second = 0;
};

/// Runs `clients` threads; `prepare(i)` makes each one's operation, the operation is timed.
Timing measure(int clients, const std::function<std::function<void()>(int)>& prepare) {
    const int rounds = kOperationsInAll / clients;
    std::vector<std::vector<double>> samples(static_cast<std::size_t>(clients));
    std::vector<std::thread> threads;
    std::atomic<int> ready = 0;
    std::atomic<bool> go = false;
    for (int i = 0; i < clients; ++i) {
        threads.emplace_back([&, i] {
            const std::function<void()> operation = prepare(i);
            for (int warm = 0; warm < 50; ++warm) operation();
            ++ready;
            ready.notify_one();
            go.wait(false);
            std::vector<double>& mine = samples[static_cast<std::size_t>(i)];
            mine.reserve(static_cast<std::size_t>(rounds));
            for (int n = 0; n < rounds; ++n) {
                const TimePoint start = MonotonicClock::now();
                operation();
                mine.push_back(
                    std::chrono::duration<double, std::micro>(MonotonicClock::now() - start).count());
            }
        });
    }
    for (int seen = ready; seen < clients; seen = ready) ready.wait(seen);
    const TimePoint start = MonotonicClock::now();
    go = true;
    go.notify_all();
    for (std::thread& thread : threads) thread.join();
    const std::chrono::duration<double> took = MonotonicClock::now() - start;
    std::vector<double> all;
    for (const std::vector<double>& mine : samples) all.insert(all.end(), mine.begin(), mine.end());
    std::sort(all.begin(), all.end());
    return {all[all.size() / 2], all[all.size() * 99 / 100], static_cast<double>(all.size()) / took.count()};
}

/// A thread that sends back what it gets, with plain blocking calls.
class Echo {
  public:
    Echo() : listener_(*listen_tcp({"127.0.0.1", 0})), thread_([this] { run(); }) {
        Result<UniqueFd> connected = connect_tcp(listener_.bound, patience());
        if (!connected) give_up(connected.error().what);
        ours_ = *std::move(connected);
        make_blocking(ours_.get());
    }
    ~Echo() {
        ours_.reset();
        thread_.join();
    }
    void round_trip() {
        std::array<char, kMessageBytes> bytes{};
        if (::send(ours_.get(), bytes.data(), bytes.size(), 0) < 0) give_up("echo send");
        if (::recv(ours_.get(), bytes.data(), bytes.size(), MSG_WAITALL) <= 0) give_up("echo receive");
    }

  private:
    static void make_blocking(int fd) {
        const int flags = ::fcntl(fd, F_GETFL);
        ::fcntl(fd, F_SETFL, flags & ~O_NONBLOCK);
    }
    void run() {
        if (!*wait_readable(listener_.fd.get(), patience())) give_up("echo accept");
        const UniqueFd peer(::accept(listener_.fd.get(), nullptr, nullptr));
        const int on = 1;
        ::setsockopt(peer.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
        std::array<char, kMessageBytes> bytes{};
        while (::recv(peer.get(), bytes.data(), bytes.size(), MSG_WAITALL) > 0) {
            if (::send(peer.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL) < 0) return;
        }
    }

    Listener listener_;
    std::thread thread_;
    UniqueFd ours_;
};

/// Our server on a loop of its own, as in the launcher.
class StoreServer : private ServerHandler {
  public:
    StoreServer() : stop_(::eventfd(0, EFD_CLOEXEC)) {
        std::atomic<std::uint16_t> port = 0;
        thread_ = std::thread([this, &port] { run(port); });
        port.wait(0);
        endpoint_ = {"127.0.0.1", port};
    }
    ~StoreServer() override {
        ::eventfd_write(stop_.get(), 1);
        thread_.join();
    }
    std::shared_ptr<StoreClient> client() {
        auto connected =
            StoreClient::connect(endpoint_, {Role::Worker, "bench", "token", 0, "bench"}, patience());
        if (!connected) give_up(connected.error().what);
        return *std::move(connected);
    }

  private:
    void run(std::atomic<std::uint16_t>& port) {
        const auto loop = *os::EventLoop::create({});
        ServerOptions options;
        options.credentials = {"bench", "token"};
        options.where = {"127.0.0.1", 0};
        auto server = Server::create(*loop, std::move(options), *this);
        if (!server) give_up(server.error().what);
        if (!loop->watch(stop_.get(), EPOLLIN, [&loop](std::uint32_t) { loop->stop(); })) give_up("watch");
        port = (*server)->bound().port;
        port.notify_one();
        if (!loop->run()) give_up("event loop");
    }
    void on_agent_joined(AgentId, const AgentHello&) override {}
    void on_agent_message(AgentId, const FromAgent&) override {}
    void on_agent_lost(AgentId, const Error&) override {}
    void on_log(const std::string& line) override { fmt::print(stderr, "{}\n", line); }

    UniqueFd stop_;
    std::thread thread_;
    Endpoint endpoint_;
};

void print(const char* what, int clients, const Timing& timing, const Timing& bare) {
    fmt::print("{:<16} {:>7} {:>11.1f} {:>9.1f} {:>12.0f} {:>9.2f}\n", what, clients, timing.median_us,
               timing.p99_us, timing.per_second, timing.median_us / bare.median_us);
}

void compare(int clients) {
    // The bare round trips have a serving thread each: a fair floor for one client, a generous one for many.
    const Timing bare =
        measure(clients, [](int) { return [echo = std::make_shared<Echo>()] { echo->round_trip(); }; });
    print("bare round trip", clients, bare, bare);
    StoreServer server;
    const std::string value(32, 'v');
    print("set", clients,
          measure(clients,
                  [&](int i) {
                      return [&value, client = server.client(), key = fmt::format("key/{}", i)] {
                          if (!client->set(key, value)) give_up("set");
                      };
                  }),
          bare);
    print("get", clients,
          measure(clients,
                  [&](int i) {
                      return [client = server.client(), key = fmt::format("key/{}", i)] {
                          if (!client->get(key, patience())) give_up("get");
                      };
                  }),
          bare);
    print("add", clients,
          measure(clients,
                  [&](int) {
                      return [client = server.client()] {
                          if (!client->add("counter", 1)) give_up("add");
                      };
                  }),
          bare);
}

/// redis-benchmark's own report, where it is installed: started on a Unix-only port of the kernel's choice.
void compare_with_redis() {
    if (std::system("command -v redis-server redis-benchmark >/dev/null 2>&1") != 0) {
        fmt::print("\nredis-server and redis-benchmark are not installed: no comparison with redis\n");
        return;
    }
    const test::ReservedPort port;
    const std::string script = fmt::format(
        "redis-server --port {0} --bind 127.0.0.1 --save '' --appendonly no >/dev/null & server=$!; "
        "until redis-benchmark -p {0} -n 1 -c 1 -t ping >/dev/null 2>&1; do kill -0 $server || exit 1; done; "
        "for clients in 1 8 64; do echo; echo \"redis, $clients clients\"; "
        "redis-benchmark -h 127.0.0.1 -p {0} -n {1} -c $clients -d 32 -t set,get,incr --csv; done; "
        "kill $server; wait $server",
        port.number(), kOperationsInAll);
    fmt::print("\n");
    std::fflush(stdout);
    if (std::system(script.c_str()) < 0) give_up("redis");
}

}  // namespace

int main() {
    fmt::print("{:<16} {:>7} {:>11} {:>9} {:>12} {:>9}\n", "operation", "clients", "median us", "p99 us",
               "per second", "x bare");
    for (const int clients : {1, 8, 64}) compare(clients);
    compare_with_redis();
    return 0;
}
