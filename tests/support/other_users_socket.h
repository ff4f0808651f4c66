#pragma once

#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstddef>
#include <future>
#include <string>
#include <thread>

#include "env/unique_fd.h"

namespace ddprun::test {

/// Listens under an abstract name as another user, until its destructor. Only root can do this.
class OtherUsersSocket {
  public:
    explicit OtherUsersSocket(const std::string& name) : thread_([this, name] { listen_as_nobody(name); }) {
        listens_ = ready_.get_future().get();
    }
    ~OtherUsersSocket() {
        end_.set_value();
        thread_.join();
    }
    [[nodiscard]] bool listens() const { return listens_; }

  private:
    void listen_as_nobody(const std::string& name) {
        // The raw call changes this thread only; listen() records its credentials.
        if (::syscall(SYS_setresuid, 65534, 65534, 65534) != 0) return ready_.set_value(false);
        const UniqueFd fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
        sockaddr_un address{};
        address.sun_family = AF_UNIX;
        name.copy(address.sun_path + 1, name.size());
        const auto length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
        ready_.set_value(::bind(fd.get(), reinterpret_cast<sockaddr*>(&address), length) == 0 &&
                         ::listen(fd.get(), 8) == 0);
        end_.get_future().wait();
    }

    std::promise<bool> ready_;
    std::promise<void> end_;
    bool listens_ = false;
    std::thread thread_;
};

}  // namespace ddprun::test
