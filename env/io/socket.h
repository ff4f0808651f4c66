#pragma once

#include <sys/socket.h>
#include <sys/types.h>

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "env/clock.h"
#include "env/result.h"
#include "env/unique_fd.h"

namespace ddprun {

/// A TCP address as a user writes it: "node07:29400", "[::1]:29400", "10.0.0.5:29400".
struct Endpoint {
    std::string host;
    std::uint16_t port = 0;
    bool operator==(const Endpoint&) const = default;
};
/// "host:port", IPv6 hosts in brackets.
std::string to_string(const Endpoint& endpoint);
/// "host", "host:port", "[v6]:port"; a missing port takes `default_port`. Error: InvalidArgument.
Result<Endpoint> parse_endpoint(std::string_view text, std::uint16_t default_port);

/// A listening, non-blocking, CLOEXEC TCP socket and the address it got (port 0 asks the kernel for one).
/// `host` "" listens on all interfaces (IPv6 dual stack if available). Error: System
/// ("listen 0.0.0.0:29500: Address already in use").
struct Listener {
    UniqueFd fd;
    Endpoint bound;
};
Result<Listener> listen_tcp(const Endpoint& where);

/// A connected, non-blocking, CLOEXEC, TCP_NODELAY socket. Tries every address of the name in turn.
/// Error: System with the last errno ("connect node07:29400: Connection refused"), Timeout, NotFound (name).
Result<UniqueFd> connect_tcp(const Endpoint& server, TimePoint deadline);

/// A listening, non-blocking, CLOEXEC Unix socket at `path`, and a descriptor of its inode (O_PATH), by which
/// a process in any namespace can connect to "/proc/self/fd/<number>", even after the path was removed.
/// Error: System.
struct UnixListener {
    UniqueFd fd;
    UniqueFd inode;
};
Result<UnixListener> listen_unix(const std::string& path);
/// A connected, non-blocking, CLOEXEC Unix socket. Error: System ("connect /run/x: Connection refused"),
/// Timeout (its queue is full).
Result<UniqueFd> connect_unix(const std::string& path, TimePoint deadline);
/// The process at the other end of a Unix socket. Error: System.
struct UnixPeer {
    pid_t pid;  ///< 0: in another pid namespace
    uid_t uid;
};
Result<UnixPeer> unix_peer(int fd);
/// Sends one packet over a Unix socket, with a copy of `descriptor` unless that is -1. Returns what sendmsg
/// does; raises no SIGPIPE.
ssize_t send_packet(int socket, std::string_view packet, int descriptor = -1, int flags = 0);
/// Receives one packet, and the descriptor that came with it, CLOEXEC; `descriptor` becomes empty where none
/// did. Returns what recvmsg does.
ssize_t receive_packet(int socket, std::span<char> packet, UniqueFd& descriptor, int flags = 0);

/// Writes all bytes to a non-blocking socket, waiting with poll until the deadline. Error: Timeout, Closed
/// (EPIPE, RST), System. `what` of the error says only the attempt ("send: Broken pipe"); the caller knows
/// the peer.
Status send_all(int fd, std::string_view bytes, TimePoint deadline);

/// Waits until `fd` is readable (true) or the deadline passes (false).
Result<bool> wait_readable(int fd, TimePoint deadline);

Status set_nonblocking(int fd);
/// Ignores failures: for options that only tune.
void set_socket_option(int fd, int level, int option, int value);
struct SocketAddress;  // resolve.h
/// A non-blocking, CLOEXEC socket that connects: once it can be written to, connect_outcome() knows. Error:
/// System.
Result<UniqueFd> begin_connect(const SocketAddress& address);
/// The outcome of a connect in progress: 0 or its errno. A connect to a port of this host that nobody listens
/// on can meet itself, for the kernel may pick that very port for our side: that is ECONNREFUSED.
int connect_outcome(int fd);

/// True for a loopback address: nothing that is sent there leaves this host, so TLS is not needed. No
/// interface has to list the address: Debian gives a host's own name 127.0.1.1.
inline bool stays_on_host(std::string_view address) {
    return address == "::1" || address.starts_with("127.");
}
/// "10.0.0.5", "::1"; "" when it is no IP address.
std::string numeric_host(const sockaddr& address);
/// The numeric address; that of an IPv4 peer of a dual-stack listener as IPv4; host "" when it is no IP
/// address.
Endpoint numeric_endpoint(const sockaddr_storage& address, socklen_t length);
/// A socket's own address, and the address at its other end. Error: System.
Result<Endpoint> local_endpoint(int fd);
Result<Endpoint> remote_endpoint(int fd);
/// The name of this host from the kernel (gethostname), never the HOSTNAME variable.
std::string host_name();

}  // namespace ddprun
