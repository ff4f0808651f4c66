#pragma once

#include <netinet/in.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <functional>
#include <list>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "env/io/socket.h"

namespace ddprun::rdzv {

/// A relay before a server, which records the bytes and loses connections. Each connection consists of two
/// TCP connections, so neither end knows more than that its own is lost.
class FlakyRelay {
  public:
    explicit FlakyRelay(Endpoint server)
        : server_(std::move(server)),
          listener_(*listen_tcp({"127.0.0.1", 0})),
          wake_(::eventfd(0, EFD_CLOEXEC)) {
        thread_ = std::thread([this] { run(); });
    }
    ~FlakyRelay() {
        tell([this] { is_over_ = true; });
        thread_.join();
    }
    FlakyRelay(const FlakyRelay&) = delete;
    FlakyRelay& operator=(const FlakyRelay&) = delete;

    [[nodiscard]] Endpoint endpoint() const { return {"127.0.0.1", listener_.bound.port}; }
    /// Resets each connection at both ends after this number of bytes, at any place in a message; 0: never.
    void reset_after(std::size_t bytes) {
        tell([this, bytes] { reset_after_ = bytes; });
    }
    void reset_all() {
        tell([this] {
            for (Pair& pair : pairs_) reset(pair);
        });
    }
    /// Stops passing bytes on all present connections without telling either end.
    void freeze_all() {
        tell([this] {
            for (Pair& pair : pairs_) pair.is_frozen = true;
        });
    }
    /// Resets all new connections at once.
    void refuse_new(bool refuses) {
        tell([this, refuses] { refuses_ = refuses; });
    }
    [[nodiscard]] int carried() const { return carried_; }
    /// True if these bytes have passed in either direction of one connection.
    [[nodiscard]] bool has_seen(std::string_view bytes) {
        const std::lock_guard lock(mutex_);
        return std::any_of(seen_.begin(), seen_.end(),
                           [&](const std::string& one) { return one.find(bytes) != std::string::npos; });
    }

  private:
    struct Pair {
        UniqueFd client, server;
        std::string* from_client = nullptr;
        std::string* from_server = nullptr;
        std::size_t passed = 0;
        bool is_frozen = false, is_over = false;
    };

    void tell(std::function<void()> what) {
        const std::lock_guard lock(mutex_);
        told_.push_back(std::move(what));
        ::eventfd_write(wake_.get(), 1);
    }
    static void reset(Pair& pair) {
        const linger at_once{1, 0};
        for (UniqueFd* end : {&pair.client, &pair.server}) {
            if (*end) ::setsockopt(end->get(), SOL_SOCKET, SO_LINGER, &at_once, sizeof at_once);
            end->reset();
        }
        pair.is_over = true;
    }
    void run() {
        while (!is_over_) {
            std::vector<pollfd> waits{{wake_.get(), POLLIN, 0}, {listener_.fd.get(), POLLIN, 0}};
            for (const Pair& pair : pairs_) {
                const short events = pair.is_frozen ? short{0} : short{POLLIN};
                waits.push_back({pair.is_frozen ? -1 : pair.client.get(), events, 0});
                waits.push_back({pair.is_frozen ? -1 : pair.server.get(), events, 0});
            }
            ::poll(waits.data(), waits.size(), -1);
            std::size_t at = 2;
            for (Pair& pair : pairs_) {
                if (waits[at].revents != 0) pass_on(pair, pair.client, pair.server);
                if (!pair.is_over && waits[at + 1].revents != 0) pass_on(pair, pair.server, pair.client);
                at += 2;
            }
            pairs_.remove_if([](const Pair& pair) { return pair.is_over; });
            if ((waits[1].revents & POLLIN) != 0) take_one();
            if ((waits[0].revents & POLLIN) != 0) do_as_told();
        }
    }
    void take_one() {
        Pair pair;
        pair.client = UniqueFd(::accept4(listener_.fd.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
        if (!pair.client) return;
        if (refuses_) return reset(pair);
        Result<UniqueFd> server = connect_tcp(server_, MonotonicClock::now() + std::chrono::seconds(20));
        if (!server) return reset(pair);
        pair.server = *std::move(server);
        ++carried_;
        const std::lock_guard lock(mutex_);
        pair.from_client = &seen_.emplace_back();
        pair.from_server = &seen_.emplace_back();
        pairs_.push_back(std::move(pair));
    }
    void do_as_told() {
        std::uint64_t count = 0;
        ::eventfd_read(wake_.get(), &count);
        std::vector<std::function<void()>> told;
        {
            const std::lock_guard lock(mutex_);
            told.swap(told_);
        }
        for (const auto& one : told) one();
    }
    void note_down(std::string& seen, std::string_view bytes) {
        const std::lock_guard lock(mutex_);
        seen += bytes;
    }
    void pass_on(Pair& pair, UniqueFd& from, UniqueFd& to) {
        std::array<char, 1500> bytes;
        ssize_t got = ::recv(from.get(), bytes.data(), bytes.size(), MSG_DONTWAIT);
        if (got < 0 && errno == EAGAIN) return;
        if (got <= 0) return reset(pair);
        const bool is_last = reset_after_ > 0 && pair.passed + static_cast<std::size_t>(got) >= reset_after_;
        note_down(from.get() == pair.client.get() ? *pair.from_client : *pair.from_server,
                  {bytes.data(), static_cast<std::size_t>(got)});
        if (is_last) got = static_cast<ssize_t>(reset_after_ - std::min(reset_after_, pair.passed));
        const Status sent = send_all(to.get(), {bytes.data(), static_cast<std::size_t>(got)},
                                     MonotonicClock::now() + std::chrono::seconds(20));
        pair.passed += static_cast<std::size_t>(got);
        if (!sent || is_last) reset(pair);
    }

    Endpoint server_;
    Listener listener_;
    UniqueFd wake_;
    std::list<Pair> pairs_;
    std::list<std::string> seen_;  ///< two for each connection there ever was
    std::size_t reset_after_ = 0;
    bool refuses_ = false, is_over_ = false;
    std::atomic<int> carried_ = 0;
    std::mutex mutex_;
    std::vector<std::function<void()>> told_;
    std::thread thread_;
};

}  // namespace ddprun::rdzv
