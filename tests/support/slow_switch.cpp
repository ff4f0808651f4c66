#include "tests/support/slow_switch.h"

#include <arpa/inet.h>
#include <linux/if_ether.h>
#include <linux/if_packet.h>
#include <net/if.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <map>
#include <random>

#include "env/unique_fd.h"

namespace ddprun::test {

namespace {

using Clock = std::chrono::steady_clock;

/// Each frame has the kernel's header in front, so that work that the kernel has postponed (checksums,
/// cutting) stays postponed.
UniqueFd open_port(const std::string& name) {
    UniqueFd port(::socket(AF_PACKET, SOCK_RAW | SOCK_CLOEXEC | SOCK_NONBLOCK, htons(ETH_P_ALL)));
    constexpr int kYes = 1;
    sockaddr_ll address{};
    address.sll_family = AF_PACKET;
    address.sll_protocol = htons(ETH_P_ALL);
    address.sll_ifindex = static_cast<int>(::if_nametoindex(name.c_str()));
    if (::setsockopt(port.get(), SOL_PACKET, PACKET_VNET_HDR, &kYes, sizeof kYes) != 0 ||
        ::setsockopt(port.get(), SOL_PACKET, PACKET_IGNORE_OUTGOING, &kYes, sizeof kYes) != 0 ||
        ::bind(port.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0)
        port.reset();
    return port;
}

struct Frame {
    std::size_t from;
    std::string bytes;
};

}  // namespace

int be_slow_switch(const std::vector<std::string>& names) {
    std::vector<UniqueFd> ports;
    std::vector<pollfd> polled;
    for (const std::string& name : names) {
        ports.push_back(open_port(name));
        if (!ports.back()) return 1;
        polled.push_back({.fd = ports.back().get(), .events = POLLIN, .revents = 0});
    }
    std::minstd_rand random(1);
    std::uniform_int_distribution<int> delay_us(5'000, 80'000);
    std::multimap<Clock::time_point, Frame> waiting;
    std::string room(128 * 1024, '\0');
    for (;;) {
        const auto until_next =
            waiting.empty()
                ? std::chrono::milliseconds(-1)
                : std::chrono::ceil<std::chrono::milliseconds>(waiting.begin()->first - Clock::now());
        ::poll(polled.data(), polled.size(),
               waiting.empty() ? -1 : std::max(0, static_cast<int>(until_next.count())));
        for (std::size_t port = 0; port < ports.size(); ++port) {
            for (ssize_t n; (n = ::read(ports[port].get(), room.data(), room.size())) > 0;)
                waiting.emplace(Clock::now() + std::chrono::microseconds(delay_us(random)),
                                Frame{port, room.substr(0, static_cast<std::size_t>(n))});
        }
        while (!waiting.empty() && waiting.begin()->first <= Clock::now()) {
            const Frame& frame = waiting.begin()->second;
            for (std::size_t port = 0; port < ports.size(); ++port) {
                if (port != frame.from)
                    (void)!::write(ports[port].get(), frame.bytes.data(),
                                   frame.bytes.size());  // ignoring: networks lose frames
            }
            waiting.erase(waiting.begin());
        }
    }
}

}  // namespace ddprun::test
