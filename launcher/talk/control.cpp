#include "launcher/talk/control.h"

#include <fmt/core.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <optional>
#include <tuple>

#include "env/io/file.h"
#include "env/io/socket.h"
#include "env/json.h"
#include "env/text.h"

namespace ddprun {

std::string ControlRequest::argument(const std::string& key) const {
    const auto found = arguments.find(key);
    return found == arguments.end() ? "" : found->second;
}

std::string encode(const ControlRequest& request) {
    JsonWriter json;
    json("request", request.name);
    for (const auto& [key, value] : request.arguments) json(key, value);
    return std::move(json).text() + '\n';
}

Result<ControlRequest> decode_control_request(std::string_view line) {
    const Result<Json> json = parse_json_object(line);
    if (!json) return Error::protocol("the request is not a JSON object");
    ControlRequest request;
    for (const auto& [key, value] : members(*json)) {
        const Result<std::string> text = as<std::string>(value);
        if (!text) return Error::protocol("'" + excerpt(key) + "' is not a text");
        (key == "request" ? request.name : request.arguments[key]) = *text;
    }
    if (request.name.empty()) return Error::protocol("there is no 'request'");
    return request;
}

std::string control_error(std::string_view why) {
    JsonWriter json;
    json("ok", false);
    json("error", why);
    return std::move(json).text() + '\n';
}

Status check_answer(JsonReader& reader) {
    bool ok = false;
    std::string why = "the job gave no reason";
    reader.defaulted("ok", ok);
    reader.defaulted("error", why);
    if (const Status read = reader.end(); !read) return read.error().with("the answer makes no sense");
    return ok ? Status() : Error{Errc::Refused, why, 0};
}

namespace {

constexpr std::size_t kMaxSocketTable = 16 * 1024 * 1024;
constexpr std::size_t kMaxAnswer = 64 * 1024 * 1024;
/// The time for all sockets together to accept a connection, which shows their owners.
constexpr Duration kOwnersTimeout = std::chrono::seconds(1);

/// Sets an abstract address, which begins with a zero byte and has no terminator.
socklen_t set_abstract(sockaddr_un& address, const std::string& name) {
    address.sun_family = AF_UNIX;
    const std::size_t length = std::min(name.size(), sizeof address.sun_path - 1);
    std::memcpy(address.sun_path + 1, name.data(), length);
    return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + length);
}

/// The user who connected at the other end (or began to listen); nullopt: not known.
std::optional<unsigned> peer_uid(int fd) {
    ucred peer{};
    socklen_t length = sizeof peer;
    if (::getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &length) != 0) return std::nullopt;
    return peer.uid;
}

/// Limits a blocking connect to the deadline: it waits while the listener's queue is full.
void limit_connect(int fd, TimePoint deadline) {
    const auto left =
        std::max(std::chrono::round<std::chrono::microseconds>(deadline - MonotonicClock::now()),
                 std::chrono::microseconds(1000));
    const timeval limit{static_cast<time_t>(left.count() / 1'000'000),
                        static_cast<suseconds_t>(left.count() % 1'000'000)};
    // Ignoring a failure: the connect then waits longer.
    ::setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
}

Result<UniqueFd> connect_to_job(const RunningJob& job, TimePoint deadline) {
    UniqueFd fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    if (!fd) return Error::system("socket");
    limit_connect(fd.get(), deadline);
    sockaddr_un address{};
    const socklen_t length = set_abstract(address, control_socket_name(job.uid, job.id));
    if (::connect(fd.get(), reinterpret_cast<sockaddr*>(&address), length) != 0) {
        if (errno == ECONNREFUSED)
            return Error{Errc::NotFound, fmt::format("job {} does not run on this host", job.id), 0};
        if (errno == EAGAIN)
            return Error{Errc::Timeout, fmt::format("job {}: too many requests, or it is stopped", job.id),
                         0};
        return Error::system(fmt::format("connect to job {}", job.id));
    }
    if (const Status set = set_nonblocking(fd.get()); !set) return set.error();
    // Any user can take a free name of the abstract namespace.
    if (const std::optional<unsigned> uid = peer_uid(fd.get()); !uid || (*uid != job.uid && *uid != 0)) {
        return Error{Errc::Refused, fmt::format("job {}: its socket belongs to another user", job.id), 0};
    }
    return fd;
}

/// Receives the first line.
Result<std::string> receive(int fd, TimePoint deadline) {
    std::string answer;
    char piece[16 * 1024];
    for (;;) {
        const Result<bool> readable = wait_readable(fd, deadline);
        if (!readable) return readable.error();
        if (!*readable) return Error{Errc::Timeout, "no answer in time", 0};
        const ssize_t n = ::recv(fd, piece, sizeof piece, 0);
        if (n < 0 && (errno == EAGAIN || errno == EINTR)) continue;
        if (n < 0) return Error::system("recv");
        if (n == 0) return Error{Errc::Closed, "the job ended", 0};
        answer.append(piece, static_cast<std::size_t>(n));
        const std::size_t end = answer.find('\n');
        if (end != std::string::npos) return answer.substr(0, end);
        if (answer.size() > kMaxAnswer) return Error{Errc::Limit, "the answer is too long", 0};
    }
}

}  // namespace

Result<UniqueFd> listen_for_questions(const std::string& job) {
    UniqueFd fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    if (!fd) return Error::system("socket");
    sockaddr_un address{};
    const socklen_t length = set_abstract(address, control_socket_name(::geteuid(), job));
    if (::bind(fd.get(), reinterpret_cast<sockaddr*>(&address), length) != 0)
        return Error::system("bind the control socket");
    if (::listen(fd.get(), 16) != 0) return Error::system("listen on the control socket");
    return fd;
}

std::string refuse_other_users(int fd) {
    const std::optional<unsigned> uid = peer_uid(fd);
    if (uid && (*uid == 0 || *uid == ::geteuid())) return {};
    return control_error("this job belongs to another user");
}

std::string control_socket_name(unsigned uid, const std::string& job) {
    return fmt::format("ddprun/{}/{}", uid, job);
}

std::vector<RunningJob> jobs_in(std::string_view proc_net_unix) {
    std::vector<RunningJob> jobs;
    for (const std::string_view line : split(proc_net_unix, '\n')) {
        // The name is the last column; '@' stands for the zero byte of an abstract one.
        const std::size_t at = line.rfind(" @ddprun/");
        if (at == std::string_view::npos) continue;
        const std::vector<std::string_view> pieces = split(line.substr(at + 2), '/');
        if (pieces.size() != 3 || pieces[2].empty()) continue;
        const Result<std::uint64_t> uid = parse_uint(pieces[1]);
        if (uid && *uid <= 0xffffffff) jobs.push_back({static_cast<unsigned>(*uid), std::string(pieces[2])});
    }
    const auto before = [](const RunningJob& a, const RunningJob& b) {
        return std::tie(a.uid, a.id) < std::tie(b.uid, b.id);
    };
    std::sort(jobs.begin(), jobs.end(), before);
    // An open connection has the listener's name too.
    jobs.erase(std::unique(jobs.begin(), jobs.end()), jobs.end());
    return jobs;
}

std::vector<RunningJob> running_jobs() {
    const Result<std::string> table = read_file("/proc/net/unix", kMaxSocketTable);
    if (!table) return {};
    std::vector<RunningJob> jobs = jobs_in(*table);
    const unsigned me = ::geteuid();
    if (me != 0) std::erase_if(jobs, [me](const RunningJob& job) { return job.uid != me; });
    // Any user can listen under a name of ours. Only the kernel knows the owner, and tells it of a
    // connection.
    const TimePoint deadline = deadline_after(MonotonicClock::now(), kOwnersTimeout);
    std::erase_if(jobs, [deadline](const RunningJob& job) { return !connect_to_job(job, deadline); });
    return jobs;
}

Result<std::string> ask_job(const RunningJob& job, const ControlRequest& request, TimePoint deadline) {
    const Result<UniqueFd> fd = connect_to_job(job, deadline);
    if (!fd) return fd.error();
    if (const Status sent = send_all(fd->get(), encode(request), deadline); !sent) {
        return sent.error().with(fmt::format("job {}", job.id));
    }
    Result<std::string> answer = receive(fd->get(), deadline);
    if (!answer) return answer.error().with(fmt::format("job {}", job.id));
    return answer;
}

}  // namespace ddprun
