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

#include "env/hmac.h"
#include "env/io/socket.h"
#include "env/os/event_loop.h"
#include "rendezvous/client/store_client.h"
#include "rendezvous/client/store_relay.h"
#include "rendezvous/serve/server.h"
#include "rendezvous/wire/handshake.h"
#include "tests/support/reserved_port.h"
#include "tests/support/temporary_directory.h"
#include "torch_python.h"

/// Store operations against our server, beside the least any store can cost: one round trip over loopback
/// between two threads that do nothing else, measured in the same run. Ratios, because machines differ.
/// By TCP, by the Unix socket of the head's own workers, and by another node's relay, here on the same host.
/// Then many clients of one thread that multiplexes, as redis-benchmark's are, one request at a time each and
/// several, and barriers by each way (of eight relays). What TLS adds for one client comes last. Where
/// redis-server and redis-benchmark are installed, and PyTorch (PYTHON_EXEC), their numbers stand below.
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
Timing measure(int clients, const std::function<std::function<void()>(int)>& prepare,
               int operations = kOperationsInAll) {
    const int rounds = operations / clients;
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

std::shared_ptr<StoreClient> client_at(const StoreAddress& address, bool tls = false) {
    auto connected =
        StoreClient::connect(address, {Role::Worker, "bench", "token", 0, "bench", tls}, patience());
    if (!connected) give_up(connected.error().what);
    return *std::move(connected);
}

/// A socket as workers have it.
struct WorkersWay {
    WorkersWay() {
        const test::TemporaryDirectory directory;
        listener = *listen_unix(directory.file("store"));
    }
    [[nodiscard]] StoreAddress address() const {
        return StoreAddress(fmt::format("/proc/self/fd/{}", listener.inode.get()));
    }
    UnixListener listener;
};

/// Our server on a loop of its own, as in the launcher.
class StoreServer : private ServerHandler {
  public:
    explicit StoreServer(std::shared_ptr<const TlsContext> tls = nullptr) : stop_(::eventfd(0, EFD_CLOEXEC)) {
        std::atomic<std::uint16_t> port = 0;
        thread_ = std::thread([this, &port, tls = std::move(tls)] { run(port, tls); });
        port.wait(0);
        endpoint_ = {"127.0.0.1", port};
    }
    ~StoreServer() override {
        ::eventfd_write(stop_.get(), 1);
        thread_.join();
    }
    [[nodiscard]] const Endpoint& endpoint() const { return endpoint_; }
    [[nodiscard]] StoreAddress local() const { return way_.address(); }

  private:
    void run(std::atomic<std::uint16_t>& port, std::shared_ptr<const TlsContext> tls) {
        const auto loop = *os::EventLoop::create({});
        ServerOptions options;
        options.credentials = {"bench", "token"};
        options.where = {"127.0.0.1", 0};
        options.tls = std::move(tls);
        options.local_listener = std::move(way_.listener.fd);
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
    WorkersWay way_;
    std::thread thread_;
    Endpoint endpoint_;
};

/// The agent of another node and its relay, likewise.
class StoreNode : private AgentLinkHandler {
  public:
    explicit StoreNode(const Endpoint& controller) : stop_(::eventfd(0, EFD_CLOEXEC)) {
        thread_ = std::thread([this, controller] { run(controller); });
        is_connected_.wait(false);
    }
    ~StoreNode() override {
        ::eventfd_write(stop_.get(), 1);
        thread_.join();
    }
    [[nodiscard]] StoreAddress address() const { return way_.address(); }

  private:
    void run(const Endpoint& controller) {
        const auto loop = *os::EventLoop::create({});
        AgentLinkOptions options;
        options.controllers = {controller};
        options.credentials = {"bench", "token"};
        options.name = "agent";
        auto relay = StoreRelay::serve({*loop, [this] { return link_.get(); },
                                        [](const std::string& line) { fmt::print(stderr, "{}\n", line); }},
                                       std::move(way_.listener.fd), {"bench", "token"});
        if (!relay) give_up(relay.error().what);
        relay_ = *std::move(relay);
        AgentLinkHandler& self = *this;
        link_ = std::make_unique<AgentLink>(*loop, std::move(options), self);
        if (!loop->watch(stop_.get(), EPOLLIN, [&loop](std::uint32_t) { loop->stop(); })) give_up("watch");
        if (!loop->run()) give_up("event loop");
        link_.reset();
        relay_.reset();
    }
    void on_connected() override {
        is_connected_ = true;
        is_connected_.notify_one();
    }
    void on_message(const ToAgent&) override {}
    void on_lost(const Error& why) override { give_up(why.what); }
    void on_log(const std::string& line) override { fmt::print(stderr, "{}\n", line); }
    void on_store_reply(std::uint32_t number, const StoreReply& reply) override {
        relay_->on_store_reply(number, reply);
    }
    void on_acknowledged() override { relay_->on_acknowledged(); }

    UniqueFd stop_;
    WorkersWay way_;
    std::atomic<bool> is_connected_ = false;
    std::unique_ptr<AgentLink> link_;
    std::unique_ptr<StoreRelay> relay_;
    std::thread thread_;
};

/// Many connections of one thread. Requests are bytes that are made before; answers are cut, and looked at no
/// further.
class Crowd {
  public:
    /// As many by each way.
    Crowd(const std::vector<StoreAddress>& ways, int clients) : epoll_(::epoll_create1(EPOLL_CLOEXEC)) {
        for (int i = 0; i < clients; ++i) {
            members_.push_back(std::make_unique<Member>());
            join(*members_.back(), ways[static_cast<std::size_t>(i) % ways.size()]);
            epoll_event event{};
            event.events = EPOLLIN;
            event.data.ptr = members_.back().get();
            ::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, members_.back()->fd.get(), &event);
        }
    }

    /// Each sends `depth` times its request, and again when all are answered, until so many operations are
    /// done. Per second.
    double rate(const std::function<StoreOp(int)>& op, int depth, int operations) {
        int left = operations, open = 0;
        const auto send = [&](Member& member) {
            write(member);
            member.unanswered = depth;
            open += depth;
            left -= depth;
        };
        for (std::size_t i = 0; i < members_.size(); ++i) {
            members_[i]->requests.clear();
            for (int n = 0; n < depth; ++n) members_[i]->requests += bytes_of(op(static_cast<int>(i)));
        }
        const TimePoint start = MonotonicClock::now();
        for (const auto& member : members_) send(*member);
        while (open > 0) {
            for_each_answer([&](Member& member) {
                --open;
                if (--member.unanswered == 0 && left > 0) send(member);
            });
        }
        return operations / std::chrono::duration<double>(MonotonicClock::now() - start).count();
    }
    /// From the first that enters to the last that is let out, in milliseconds.
    double barrier(const std::string& name) {
        const TimePoint start = MonotonicClock::now();
        const std::string enter = bytes_of(store_op::Barrier{name, static_cast<int>(members_.size())});
        for (const auto& member : members_) {
            member->requests = enter;
            write(*member);
        }
        for (std::size_t open = members_.size(); open > 0;) for_each_answer([&](Member&) { --open; });
        return std::chrono::duration<double, std::milli>(MonotonicClock::now() - start).count();
    }

  private:
    struct Member {
        UniqueFd fd;
        FrameDecoder decoder{kPeerLimits};
        std::string requests;
        int unanswered = 0;
    };
    static std::string bytes_of(StoreOp op) {
        return std::move(*encode_message(StoreRequest{0, std::nullopt, std::move(op)}, 1)).whole();
    }
    static void write(const Member& member) {
        if (!send_all(member.fd.get(), member.requests, patience())) give_up("send of a crowd");
    }
    void join(Member& member, const StoreAddress& server) {
        member.fd = server.path.empty() ? *connect_tcp(server.tcp, patience())
                                        : *connect_unix(server.path, patience());
        ClientHandshake handshake({"bench", "token"}, Hello{Role::Worker, "bench", "", ""},
                                  *random_hex(kNonceBytes));
        std::optional<HandshakeMessage> next = handshake.hello();
        while (!handshake.authenticated()) {
            if (next)
                (void)send_all(member.fd.get(), std::move(*encode_message(*next, 0)).whole(), patience());
            Result<std::optional<HandshakeMessage>> answer =
                handshake.receive(*decode_handshake(receive(member)));
            if (!answer) give_up(answer.error().what);
            next = *std::move(answer);
        }
    }
    Frame receive(Member& member) {
        for (;;) {
            Result<std::optional<Frame>> frame = member.decoder.next();
            if (!frame) give_up(frame.error().what);
            if (*frame) return std::move(**frame);
            if (!*wait_readable(member.fd.get(), patience())) give_up("handshake");
            read(member);
        }
    }
    void read(Member& member) {
        const ssize_t got = ::recv(member.fd.get(), buffer_.data(), buffer_.size(), MSG_DONTWAIT);
        if (got <= 0) give_up("a crowd was disconnected");
        member.decoder.feed({buffer_.data(), static_cast<std::size_t>(got)});
    }
    template <class F>
    void for_each_answer(F&& heard) {
        std::array<epoll_event, 128> events;
        const int count = ::epoll_wait(epoll_.get(), events.data(), static_cast<int>(events.size()), 60'000);
        if (count <= 0) give_up("no answer");
        for (int i = 0; i < count; ++i) {
            Member& member = *static_cast<Member*>(events[static_cast<std::size_t>(i)].data.ptr);
            read(member);
            for (;;) {
                Result<std::optional<Frame>> frame = member.decoder.next();
                if (!frame) give_up(frame.error().what);
                if (!*frame) break;
                if ((*frame)->type == Failure::kType.number) give_up((*frame)->json);
                heard(member);
            }
        }
    }

    UniqueFd epoll_;
    std::vector<std::unique_ptr<Member>> members_;
    std::array<char, 65536> buffer_;
};

void print(const std::string& what, int clients, const Timing& timing, const Timing& bare) {
    fmt::print("{:<16} {:>7} {:>11.1f} {:>9.1f} {:>12.0f} {:>9.2f}\n", what, clients, timing.median_us,
               timing.p99_us, timing.per_second, timing.median_us / bare.median_us);
}

void compare(int clients) {
    // The bare round trips have a serving thread each: a fair floor for one client, a generous one for many.
    const Timing bare =
        measure(clients, [](int) { return [echo = std::make_shared<Echo>()] { echo->round_trip(); }; });
    print("bare round trip", clients, bare, bare);
    const StoreServer server;
    const StoreNode node(server.endpoint());
    const std::string value(32, 'v');
    const std::pair<const char*, StoreAddress> ways[] = {
        {"TCP", server.endpoint()}, {"Unix", server.local()}, {"relay", node.address()}};
    for (const auto& [way, address] : ways) {
        const auto row = [&, where = &address](
                             const char* what,
                             const std::function<void(StoreClient&, const std::string& key)>& operation) {
            const auto prepare = [&](int i) {
                return [&, client = client_at(*where), key = fmt::format("{}/{}", what, i)] {
                    operation(*client, key);
                };
            };
            print(fmt::format("{}, {}", what, way), clients, measure(clients, prepare), bare);
        };
        row("set", [&](StoreClient& client, const std::string& key) {
            if (!client.set(key, value)) give_up("set");
        });
        row("get", [&](StoreClient& client, const std::string& key) {
            if (!client.get("set" + key.substr(3), patience())) give_up("get");
        });
        row("add", [](StoreClient& client, const std::string&) {
            if (!client.add("counter", 1)) give_up("add");
        });
    }
}

/// Operations a second of 64 clients.
void measure_crowd(const char* way, const StoreAddress& address, const Blob& value) {
    fmt::print("\n64 clients of one thread, {}, operations a second\n{:<24} {:>9} {:>9} {:>9}\n", way,
               "requests at a time", "set", "get", "add");
    Crowd crowd({address}, 64);
    for (const int depth : {1, 16, 64}) {
        const int operations = kOperationsInAll * (depth == 1 ? 5 : 25);
        const double set = crowd.rate(
            [&](int i) {
                return store_op::Set{fmt::format("key/{}", i), value};
            },
            depth, operations);
        const double get =
            crowd.rate([&](int i) { return store_op::Get{fmt::format("key/{}", i)}; }, depth, operations);
        const double add = crowd.rate([&](int) { return store_op::Add{"counter", 1}; }, depth, operations);
        fmt::print("{:<24} {:>9.0f} {:>9.0f} {:>9.0f}\n", depth, set, get, add);
    }
}

/// The same by each way.
void measure_crowds() {
    const StoreServer server;
    const StoreNode node(server.endpoint());
    const Blob value(std::string(32, 'v'));
    const std::pair<const char*, StoreAddress> ways[] = {
        {"TCP", server.endpoint()}, {"Unix", server.local()}, {"relay", node.address()}};
    for (const auto& [way, address] : ways) measure_crowd(way, address, value);
    fmt::print("\n");
}

/// How long a barrier of 32 and of 1,000 takes: of nodes or workers that come straight, as workers of the
/// head, and as workers of eight other nodes, whose agents are threads of this process.
void measure_barriers() {
    const StoreServer server;
    std::vector<std::unique_ptr<StoreNode>> nodes;
    std::vector<StoreAddress> relays;
    for (int node = 0; node < 8; ++node)
        relays.push_back(nodes.emplace_back(std::make_unique<StoreNode>(server.endpoint()))->address());
    const std::pair<const char*, std::vector<StoreAddress>> ways[] = {
        {"TCP", {server.endpoint()}}, {"Unix", {server.local()}}, {"8 relays", relays}};
    for (const auto& [way, addresses] : ways) {
        for (const int clients : {32, 1000}) {
            Crowd all(addresses, clients);
            std::vector<double> barriers;
            for (int i = 0; i < 21; ++i)
                barriers.push_back(all.barrier(fmt::format("barrier/{}/{}/{}", way, clients, i)));
            std::sort(barriers.begin(), barriers.end());
            fmt::print("barrier of {} clients, {}: least {:.2f} ms, median {:.2f} ms, longest {:.2f} ms\n",
                       clients, way, barriers[0], barriers[10], barriers.back());
        }
    }
}

/// One client without TLS and with it: to be served, and an operation on a small and on a large value.
void compare_with_tls() {
    const auto tls = TlsContext::for_server();
    if (!tls) return fmt::print("\nno TLS: {}\n", tls.error().what);
    StoreServer server(*tls);
    fmt::print("\n{:<24} {:>12} {:>12}   median us of one client\n", "", "plain", "TLS");
    const auto row = [&](const char* what, const std::function<std::function<void()>(bool)>& prepare) {
        const auto median = [&](bool sealed) {
            return measure(
                       1, [&](int) { return prepare(sealed); }, what[0] == 'c' ? 500 : 5000)
                .median_us;
        };
        fmt::print("{:<24} {:>12.1f} {:>12.1f}\n", what, median(false), median(true));
    };
    row("connect and be served",
        [&](bool sealed) { return [&server, sealed] { (void)client_at(server.endpoint(), sealed); }; });
    for (const std::size_t bytes : {std::size_t{32}, std::size_t{1} << 20}) {
        row(bytes == 32 ? "set of 32 bytes" : "set of 1 MiB", [&](bool sealed) {
            return [client = client_at(server.endpoint(), sealed), value = std::string(bytes, 'v')] {
                if (!client->set("key", value)) give_up("set");
            };
        });
    }
}

/// redis-benchmark's own report, where it is installed: started on a Unix-only port of the kernel's choice.
void compare_with_redis() {
    if (std::system("command -v redis-server redis-benchmark >/dev/null 2>&1") != 0) {
        fmt::print("\nredis-server and redis-benchmark are not installed: no comparison with redis\n");
        return;
    }
    const test::ReservedPort port;
    const test::TemporaryDirectory directory;
    const std::string script = fmt::format(
        "redis-server --port {0} --bind 127.0.0.1 --unixsocket {2} --save '' --appendonly no >/dev/null & server=$!; "
        "until redis-cli -p {0} ping >/dev/null 2>&1; do kill -0 $server || exit 1; done; "
        "for clients in 1 8 64; do echo; echo \"redis, $clients clients\"; "
        "redis-benchmark -h 127.0.0.1 -p {0} -n {1} -c $clients -d 32 -t set,get,incr --csv; done; "
        "echo; echo 'redis, 1 client, by its Unix socket'; redis-benchmark -s {2} -n {1} -c 1 -d 32 -t set,get,incr --csv; "
        "echo; echo 'redis, 64 clients, 16 requests at a time'; "
        "redis-benchmark -h 127.0.0.1 -p {0} -n 1000000 -c 64 -P 16 -d 32 -t set,get,incr --csv; "
        "kill $server; wait $server",
        port.number(), kOperationsInAll, directory.file("redis"));
    fmt::print("\n");
    std::fflush(stdout);
    if (std::system(script.c_str()) < 0) give_up("redis");
}

/// PyTorch's own client and server, where there is a torch: times are its, two processes as here two threads.
void compare_with_torch(const char* script) {
    const std::string python = bench::torch_python();
    fmt::print("\n");
    std::fflush(stdout);
    if (python.empty() || std::system(fmt::format("{} {}", python, script).c_str()) != 0)
        fmt::print("no comparison with PyTorch's TCPStore: PYTHON_EXEC names a Python with PyTorch\n");
}

}  // namespace

int main(int argc, char** argv) {
    fmt::print("{:<16} {:>7} {:>11} {:>9} {:>12} {:>9}\n", "operation", "clients", "median us", "p99 us",
               "per second", "x bare");
    for (const int clients : {1, 8, 64}) compare(clients);
    measure_crowds();
    measure_barriers();
    compare_with_tls();
    compare_with_redis();
    if (argc > 1) compare_with_torch(argv[1]);
    return 0;
}
