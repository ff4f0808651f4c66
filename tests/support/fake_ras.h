#pragma once

#include <sys/socket.h>

#include <atomic>
#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "env/io/socket.h"

namespace ddprun::test {

/// A fake of NCCL's RAS service: its thread answers each line of one client with the next of its texts, then
/// closes the connection or stays silent.
class FakeRas {
  public:
    enum class Then { Close, StaySilent };
    FakeRas(const std::vector<std::string>& answers, Then then)
        : listener_(*listen_tcp({"127.0.0.1", 0})),
          thread_([this, answers, then] { serve(answers, then); }) {}
    ~FakeRas() { (void)heard(); }
    FakeRas(const FakeRas&) = delete;
    FakeRas& operator=(const FakeRas&) = delete;

    [[nodiscard]] Endpoint where() const { return {"localhost", listener_.bound.port}; }
    /// The lines that it received. Ends the service.
    const std::vector<std::string>& heard() {
        stop_ = true;
        if (thread_.joinable()) thread_.join();
        return heard_;
    }

  private:
    void serve(const std::vector<std::string>& answers, Then then) {
        if (!readable(listener_.fd.get())) return;
        const UniqueFd peer(::accept4(listener_.fd.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
        std::string line;
        for (const std::string& answer : answers) {
            while (line.find('\n') == std::string::npos) {
                char piece[256];
                if (!readable(peer.get())) return;
                const ssize_t n = ::recv(peer.get(), piece, sizeof piece, 0);
                if (n <= 0) return;
                line.append(piece, static_cast<std::size_t>(n));
            }
            heard_.push_back(line.substr(0, line.find('\n')));
            line.erase(0, line.find('\n') + 1);
            if (!send_all(peer.get(), answer, MonotonicClock::now() + std::chrono::seconds(20))) return;
        }
        while (then == Then::StaySilent && !stop_)
            (void)wait_readable(peer.get(), MonotonicClock::now() + std::chrono::milliseconds(20));
    }
    bool readable(int fd) {
        while (!stop_) {
            if (wait_readable(fd, MonotonicClock::now() + std::chrono::milliseconds(20)).value_or(false))
                return true;
        }
        return false;
    }

    std::atomic<bool> stop_ = false;
    std::vector<std::string> heard_;
    Listener listener_;
    std::thread thread_;
};

}  // namespace ddprun::test
