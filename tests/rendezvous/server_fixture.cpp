#include "server_fixture.h"

#include <fmt/core.h>
#include <gtest/gtest.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>

#include <algorithm>

#include "tests/support/receive_exactly.h"

namespace ddprun::rdzv {

LoopThread::LoopThread()
    : loop_(*os::EventLoop::create({})), wake_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
    const Status watched = loop_->watch(wake_.get(), EPOLLIN, [this](std::uint32_t) {
        std::uint64_t count = 0;
        ::eventfd_read(wake_.get(), &count);
        std::vector<std::packaged_task<void()>> todo;
        {
            const std::lock_guard lock(mutex_);
            todo.swap(work_);
            if (stop_) loop_->stop();
        }
        for (auto& task : todo) task();
    });
    EXPECT_TRUE(watched);
    thread_ = std::thread([this] { EXPECT_TRUE(loop_->run()); });
}

LoopThread::~LoopThread() {
    {
        const std::lock_guard lock(mutex_);
        stop_ = true;
    }
    ::eventfd_write(wake_.get(), 1);
    thread_.join();
}

void LoopThread::run(const std::function<void()>& work) {
    std::packaged_task<void()> task(work);
    std::future<void> done = task.get_future();
    {
        const std::lock_guard lock(mutex_);
        work_.push_back(std::move(task));
    }
    ::eventfd_write(wake_.get(), 1);
    done.get();
}

void EventLog::add(std::string line) {
    const std::lock_guard lock(mutex_);
    lines_.push_back(std::move(line));
    changed_.notify_all();
}

bool EventLog::saw(const std::string& text) {
    std::unique_lock lock(mutex_);
    const auto is_there = [&] {
        return std::any_of(lines_.begin(), lines_.end(),
                           [&](const std::string& line) { return line.find(text) != std::string::npos; });
    };
    return changed_.wait_for(lock, std::chrono::seconds(10), is_there);
}

std::vector<std::string> EventLog::lines() {
    const std::lock_guard lock(mutex_);
    return lines_;
}

RunningServer::RunningServer(ServerLimits limits, Heartbeats heartbeats, bool serves_torch,
                             std::shared_ptr<const TlsContext> tls) {
    thread_.run([&] {
        ServerOptions options;
        options.credentials = kTestJob;
        options.where = {"127.0.0.1", 0};
        options.limits = limits;
        options.heartbeats = heartbeats;
        options.serves_torch = serves_torch;
        options.tls = std::move(tls);
        Result<std::unique_ptr<Server>> server = Server::create(thread_.loop(), std::move(options), *this);
        ASSERT_TRUE(server) << server.error().what;
        server_ = *std::move(server);
        port_ = server_->bound().port;
    });
}

RunningServer::~RunningServer() { stop(); }

void RunningServer::stop() {
    thread_.run([this] { server_.reset(); });
}

void RunningServer::with(const std::function<void(Server&)>& work) {
    thread_.run([&] { work(*server_); });
}

std::unique_ptr<StoreClient> RunningServer::client(std::uint64_t generation, const std::string& name) {
    Result<std::unique_ptr<StoreClient>> connected = StoreClient::connect(
        endpoint(), {Role::Worker, kTestJob.job_id, kTestJob.token, generation, name}, soon());
    EXPECT_TRUE(connected) << connected.error().what;
    return connected ? *std::move(connected) : nullptr;
}

AgentId RunningServer::last_agent() {
    AgentId id = 0;
    thread_.run([&] { id = last_agent_; });
    return id;
}

void RunningServer::on_agent_joined(AgentId agent, const AgentHello& hello) {
    last_agent_ = agent;
    events.add("joined " + hello.host + (hello.addresses.empty() ? "" : " at " + hello.addresses.front()));
}
void RunningServer::on_agent_message(AgentId, const FromAgent& message) {
    events.add("message " + name_and_text(message));
}
void RunningServer::on_agent_lost(AgentId, const Error& why) { events.add("lost " + why.what); }
void RunningServer::on_log(const std::string& line) { events.add("log " + line); }

std::string bytes_of(const Message& message, std::uint32_t request) {
    Result<std::string> bytes = encode(message, request);
    EXPECT_TRUE(bytes);
    return std::move(bytes).value_or("");
}

RawPeer::RawPeer(const StoreAddress& server) {
    Result<UniqueFd> connected =
        server.path.empty() ? connect_tcp(server.tcp, soon()) : connect_unix(server.path, soon());
    EXPECT_TRUE(connected);
    if (connected) fd_ = *std::move(connected);
}

bool RawPeer::send(std::string_view bytes) { return send_all(fd_.get(), bytes, soon()).has_value(); }

std::optional<Message> RawPeer::receive() {
    for (;;) {
        Result<std::optional<Frame>> frame = decoder_.next();
        EXPECT_TRUE(frame) << frame.error().what;
        if (!frame) return std::nullopt;
        if (*frame) return *decode(std::move(**frame));
        char byte = 0;
        const Status got = test::receive_exactly(fd_.get(), {&byte, 1}, soon());
        if (!got) {
            EXPECT_EQ(got.error().code, Errc::Closed) << got.error().what;
            return std::nullopt;
        }
        decoder_.feed({&byte, 1});
    }
}

bool RawPeer::is_closed() {
    for (;;) {
        char bytes[4096];
        const Result<bool> ready = wait_readable(fd_.get(), soon());
        if (!ready || !*ready) return false;
        const ssize_t got = ::recv(fd_.get(), bytes, sizeof bytes, MSG_DONTWAIT);
        if (got == 0 || (got < 0 && errno == ECONNRESET)) return true;
        if (got < 0 && errno != EAGAIN) return false;
    }
}

Message RawPeer::shake_hands(const Credentials& credentials, Role role) {
    ClientHandshake handshake(credentials, Hello{role, "raw peer", "", ""},
                              "000102030405060708090a0b0c0d0e0f");
    EXPECT_TRUE(send(bytes_of(handshake.hello(), 0)));
    std::optional<Message> message = receive();
    while (message) {
        const std::optional<HandshakeMessage> said = as_handshake(*message);
        if (!said) return *message;
        const Result<std::optional<HandshakeMessage>> answer = handshake.receive(*said);
        if (!answer || !*answer) return *message;
        EXPECT_TRUE(send(bytes_of(any(**answer), 0)));
        message = receive();
    }
    return Unknown{};
}

}  // namespace ddprun::rdzv
