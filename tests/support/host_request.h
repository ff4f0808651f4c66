#pragma once

#include <sys/socket.h>

#include <array>
#include <cstring>
#include <string>
#include <vector>

/// The dialogue of on_host (tests/support/on_host.cpp) with a host's first process (host_init.cpp), in
/// packets over a Unix socket. on_host sends a request with three descriptors, then signals; it receives the
/// process id and in the end the exit status.
namespace ddprun::test {

/// A program to start; the descriptors of its standard streams are sent with it.
struct HostRequest {
    std::string directory;
    std::vector<std::string> arguments, environment;
};

constexpr std::size_t kMaxRequestBytes = 1 << 20;

/// Strings that end with NUL: the number of arguments, the directory, the arguments, the environment.
inline std::string packed(const HostRequest& request) {
    std::string text = std::to_string(request.arguments.size()) + '\0' + request.directory + '\0';
    for (const auto* list : {&request.arguments, &request.environment}) {
        for (const std::string& one : *list) text += one + '\0';
    }
    return text;
}

inline HostRequest unpacked(const std::string& text) {
    std::vector<std::string> strings;
    for (std::size_t at = 0; at < text.size(); at += strings.back().size() + 1)
        strings.emplace_back(text.c_str() + at);
    HostRequest request;
    if (strings.size() < 3) return request;
    const auto arguments = strings.begin() + 2, environment = arguments + std::stol(strings[0]);
    request.directory = strings[1];
    request.arguments.assign(arguments, environment);
    request.environment.assign(environment, strings.end());
    return request;
}

using StandardStreams = std::array<int, 3>;

inline bool send_request(int socket, std::string text, const StandardStreams& streams) {
    iovec bytes{text.data(), text.size()};
    alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof streams)> control{};
    msghdr message{};
    message.msg_iov = &bytes;
    message.msg_iovlen = 1;
    message.msg_control = control.data();
    message.msg_controllen = control.size();
    cmsghdr* const rights = CMSG_FIRSTHDR(&message);
    rights->cmsg_level = SOL_SOCKET;
    rights->cmsg_type = SCM_RIGHTS;
    rights->cmsg_len = CMSG_LEN(sizeof streams);
    std::memcpy(CMSG_DATA(rights), streams.data(), sizeof streams);
    return ::sendmsg(socket, &message, MSG_NOSIGNAL) == static_cast<ssize_t>(text.size());
}

/// The bytes of the packet, "" if there is none, and its descriptors, if it has some.
inline std::string receive_request(int socket, StandardStreams& streams) {
    std::string text(kMaxRequestBytes, '\0');
    iovec bytes{text.data(), text.size()};
    alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof streams)> control{};
    msghdr message{};
    message.msg_iov = &bytes;
    message.msg_iovlen = 1;
    message.msg_control = control.data();
    message.msg_controllen = control.size();
    const ssize_t n = ::recvmsg(socket, &message, MSG_CMSG_CLOEXEC);
    const cmsghdr* const rights = n > 0 ? CMSG_FIRSTHDR(&message) : nullptr;
    if (rights != nullptr && rights->cmsg_len == CMSG_LEN(sizeof streams)) {
        std::memcpy(streams.data(), CMSG_DATA(rights), sizeof streams);
    }
    text.resize(n > 0 ? static_cast<std::size_t>(n) : 0);
    return text;
}

}  // namespace ddprun::test
