#include <fcntl.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <cstring>
#include <thread>
#include <vector>

#include "env/io/file.h"
#include "env/io/socket.h"
#include "tests/support/fake_clock.h"
#include "tests/support/receive_exactly.h"

namespace ddprun {
namespace {

using namespace std::chrono_literals;
using test::receive_exactly;
using test::soon;

TimePoint in(Duration span) { return MonotonicClock::now() + span; }

struct Connected {
    UniqueFd client;
    UniqueFd server;
};

Connected connected_pair() {
    const Result<Listener> listener = listen_tcp({"127.0.0.1", 0});
    EXPECT_TRUE(listener) << listener.error().what;
    Result<UniqueFd> client = connect_tcp(listener->bound, soon());
    EXPECT_TRUE(client) << client.error().what;
    EXPECT_TRUE(*wait_readable(listener->fd.get(), soon()));
    return {*std::move(client),
            UniqueFd(::accept4(listener->fd.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC))};
}

TEST(Endpoint, ParsesUsersSpellings) {
    EXPECT_EQ(*parse_endpoint("node07", 29400), (Endpoint{"node07", 29400}));
    EXPECT_EQ(*parse_endpoint("node07:1", 29400), (Endpoint{"node07", 1}));
    EXPECT_EQ(*parse_endpoint("[::1]", 29400), (Endpoint{"::1", 29400}));
    EXPECT_EQ(*parse_endpoint("[fe80::1%eth0]:8", 29400), (Endpoint{"fe80::1%eth0", 8}));
    EXPECT_EQ(*parse_endpoint("10.0.0.5:0", 29400), (Endpoint{"10.0.0.5", 0}));
}

TEST(Endpoint, IsPrintedAsItIsParsed) {
    for (const char* const text : {"node07:29400", "[::1]:29400", "10.0.0.5:65535"}) {
        EXPECT_EQ(to_string(*parse_endpoint(text, 1)), text);
    }
}

TEST(Endpoint, RefusesOtherText) {
    for (const char* const bad : {"", ":1", "node07:", "node07:x", "node07:65536", "node07:-1", "::1", "[::1",
                                  "[::1]1", "a b:1", "tcp://node07:1", "[]:1"}) {
        const Result<Endpoint> endpoint = parse_endpoint(bad, 29400);
        ASSERT_FALSE(endpoint) << bad;
        EXPECT_EQ(endpoint.error().code, Errc::InvalidArgument);
    }
    EXPECT_EQ(parse_endpoint("29400", 1).error().what, "'29400' is not host:port (a port without a host)");
    EXPECT_EQ(parse_endpoint("n:x", 1).error().what, "'n:x' is not host:port (port 'x' is not a number)");
    EXPECT_EQ(parse_endpoint("::1", 1).error().what,
              "'::1' is not host:port (write an IPv6 address as [address]:port)");
}

TEST(ListenTcp, ReturnsThePortTheKernelChose) {
    const Result<Listener> listener = listen_tcp({"127.0.0.1", 0});
    ASSERT_TRUE(listener) << listener.error().what;
    EXPECT_EQ(listener->bound.host, "127.0.0.1");
    EXPECT_NE(listener->bound.port, 0);
}

TEST(ListenTcp, ServesIpv4TooOnAllInterfaces) {
    const Result<Listener> listener = listen_tcp({"", 0});
    ASSERT_TRUE(listener) << listener.error().what;
    const Result<UniqueFd> client = connect_tcp({"127.0.0.1", listener->bound.port}, soon());
    EXPECT_TRUE(client) << client.error().what;
}

TEST(ListenTcp, NamesAPortThatIsTaken) {
    const Result<Listener> first = listen_tcp({"127.0.0.1", 0});
    ASSERT_TRUE(first);
    const Result<Listener> second = listen_tcp(first->bound);
    ASSERT_FALSE(second);
    EXPECT_EQ(second.error().code, Errc::System);
    EXPECT_EQ(second.error().sys, EADDRINUSE);
    EXPECT_EQ(second.error().what, "listen " + to_string(first->bound) + ": Address already in use");
}

TEST(ListenTcp, NamesAHostThatIsNotOurs) {
    const Result<Listener> listener = listen_tcp({"192.0.2.1", 0});
    ASSERT_FALSE(listener);
    EXPECT_EQ(listener.error().what, "listen 192.0.2.1:0: Cannot assign requested address");
}

TEST(ConnectTcp, GivesANonBlockingCloexecSocketWithoutDelay) {
    const Connected pair = connected_pair();
    EXPECT_NE(::fcntl(pair.client.get(), F_GETFL) & O_NONBLOCK, 0);
    EXPECT_NE(::fcntl(pair.client.get(), F_GETFD) & FD_CLOEXEC, 0);
    int no_delay = 0;
    socklen_t length = sizeof no_delay;
    ::getsockopt(pair.client.get(), IPPROTO_TCP, TCP_NODELAY, &no_delay, &length);
    EXPECT_NE(no_delay, 0);
}

TEST(ConnectTcp, ReportsARefusalAtOnce) {
    // Bind without listening: the kernel refuses, and no other process can take the port meanwhile.
    const UniqueFd holder(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t length = sizeof address;
    ASSERT_EQ(::bind(holder.get(), reinterpret_cast<sockaddr*>(&address), length), 0);
    ASSERT_EQ(::getsockname(holder.get(), reinterpret_cast<sockaddr*>(&address), &length), 0);
    const Endpoint server{"127.0.0.1", ntohs(address.sin_port)};

    const Result<UniqueFd> client = connect_tcp(server, soon());
    ASSERT_FALSE(client);
    EXPECT_EQ(client.error().sys, ECONNREFUSED);
    EXPECT_EQ(client.error().what, "connect " + to_string(server) + ": Connection refused");
}

TEST(ConnectTcp, GivesUpAtItsDeadline) {
    // With a full backlog the kernel drops the connection request, as a dead host does.
    const Result<Listener> listener = listen_tcp({"127.0.0.1", 0});
    ASSERT_TRUE(listener);
    ASSERT_EQ(::listen(listener->fd.get(), 0), 0);
    std::vector<UniqueFd> filling;
    for (int i = 0; i < 8; ++i) {
        const TimePoint deadline = in(100ms);
        Result<UniqueFd> client = connect_tcp(listener->bound, deadline);
        if (client) {
            filling.push_back(*std::move(client));
            continue;
        }
        EXPECT_EQ(client.error().code, Errc::Timeout);
        EXPECT_EQ(client.error().what, "connect " + to_string(listener->bound) + ": timed out");
        EXPECT_GE(MonotonicClock::now(), deadline);
        return;
    }
    FAIL() << "the backlog never filled";
}

TEST(ConnectTcp, NamesAnUnknownHost) {
    const Result<UniqueFd> client = connect_tcp({"no-such-host.invalid", 1}, soon());
    ASSERT_FALSE(client);
    EXPECT_EQ(client.error().code, Errc::NotFound);
    EXPECT_EQ(client.error().what.rfind("connect no-such-host.invalid:1: ", 0), 0U);
}

TEST(Transfer, CarriesAMessageThatArrivesByteByByte) {
    const Connected pair = connected_pair();
    const std::string message = "one byte at a time";
    std::thread sender([&] {
        for (const char c : message)
            EXPECT_TRUE(send_all(pair.client.get(), std::string_view(&c, 1), soon()));
    });
    std::string received(message.size(), '\0');
    const Status status = receive_exactly(pair.server.get(), received, soon());
    sender.join();
    ASSERT_TRUE(status) << status.error().what;
    EXPECT_EQ(received, message);
}

TEST(Transfer, CarriesMoreThanTheBuffersHold) {
    const Connected pair = connected_pair();
    const std::string message(32 << 20, 'x');
    std::thread sender([&] { EXPECT_TRUE(send_all(pair.client.get(), message, soon())); });
    std::string received(message.size(), '\0');
    const Status status = receive_exactly(pair.server.get(), received, soon());
    sender.join();
    ASSERT_TRUE(status) << status.error().what;
    EXPECT_EQ(received, message);
}

TEST(Transfer, OfNoBytesNeedsNoPeer) {
    const Connected pair = connected_pair();
    EXPECT_TRUE(send_all(pair.client.get(), "", in(0ms)));
}

TEST(Send, TimesOutOnAPeerThatDoesNotRead) {
    const Connected pair = connected_pair();
    const Status status = send_all(pair.client.get(), std::string(64 << 20, 'x'), in(50ms));
    ASSERT_FALSE(status);
    EXPECT_EQ(status.error().code, Errc::Timeout);
}

TEST(Send, KeepsItsDeadlineOnASocketThatWasLeftBlocking) {
    const Connected pair = connected_pair();
    ASSERT_EQ(::fcntl(pair.client.get(), F_SETFL, 0), 0);
    const Status status = send_all(pair.client.get(), std::string(64 << 20, 'x'), in(50ms));
    ASSERT_FALSE(status);
    EXPECT_EQ(status.error().code, Errc::Timeout);
}

TEST(Send, ToAPeerThatLeftIsAnErrorAndNotASignal) {
    Connected pair = connected_pair();
    // Closing with unread bytes resets the connection.
    ASSERT_TRUE(send_all(pair.client.get(), "unread", soon()));
    ASSERT_TRUE(*wait_readable(pair.server.get(), soon()));
    pair.server.reset();
    const Status status = send_all(pair.client.get(), std::string(64 << 20, 'x'), soon());
    ASSERT_FALSE(status);
    EXPECT_EQ(status.error().code, Errc::Closed);
    EXPECT_EQ(status.error().what.rfind("send: ", 0), 0U);
}

TEST(WaitReadable, DistinguishesReadableFromTheDeadline) {
    const Connected pair = connected_pair();
    EXPECT_FALSE(*wait_readable(pair.server.get(), in(5ms)));
    ASSERT_TRUE(send_all(pair.client.get(), "x", soon()));
    EXPECT_TRUE(*wait_readable(pair.server.get(), soon()));
}

TEST(HostName, IsTheKernelsAndNotTheVariables) {
    ::setenv("HOSTNAME", "a-lie", 1);
    EXPECT_NE(host_name(), "a-lie");
    EXPECT_FALSE(host_name().empty());
    ::unsetenv("HOSTNAME");
}

TEST(ReceivePacket, LeaksNoDescriptorOfAPacketWithTwo) {
    int ends[2];
    ASSERT_EQ(::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends), 0);
    const UniqueFd ours(ends[0]), theirs(ends[1]);
    const int sent[2] = {theirs.get(), theirs.get()};
    char byte = 'x';
    iovec part{&byte, 1};
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof sent)] = {};
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = sizeof control;
    cmsghdr* const header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof sent);
    std::memcpy(CMSG_DATA(header), sent, sizeof sent);
    ASSERT_EQ(::sendmsg(theirs.get(), &message, 0), 1);
    const std::size_t before = names_in("/proc/self/fd").size();
    {
        UniqueFd descriptor;
        ASSERT_EQ(receive_packet(ours.get(), {&byte, 1}, descriptor), 1);
        EXPECT_EQ(names_in("/proc/self/fd").size(), before + 1);
    }
    EXPECT_EQ(names_in("/proc/self/fd").size(), before);
}

}  // namespace
}  // namespace ddprun
