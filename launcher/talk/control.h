#pragma once

#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "env/clock.h"
#include "env/describe.h"
#include "env/result.h"
#include "env/unique_fd.h"

namespace ddprun {

/// A request to a running job, as one line of JSON: {"request":"signal","signal":"USR1","rank":"3"}.
struct ControlRequest {
    std::string name;
    std::map<std::string, std::string> arguments;  ///< all values are texts
    bool operator==(const ControlRequest&) const = default;

    /// The value of an argument; "" when it is absent.
    [[nodiscard]] std::string argument(const std::string& key) const;
};

/// The time for the stacks of one node: a debugger reads the symbols of a large program.
inline constexpr Duration kStackTimeout = std::chrono::seconds(15);

/// The request as one line with its newline.
std::string encode(const ControlRequest& request);
/// Error: Protocol (no JSON, no object, no "request", a value that is no text).
Result<ControlRequest> decode_control_request(std::string_view line);

// Answers, each one line with its newline: {"ok":true,...} and {"ok":false,"error":...}.

std::string control_error(std::string_view why);
/// The answer that has the members of a described value.
template <class T>
std::string answer_of(const T& value) {
    JsonWriter json;
    json("ok", true);
    describe(json, const_cast<T&>(value));
    return std::move(json).text() + '\n';
}
/// The answer with one member.
template <class T>
std::string answer_of(std::string_view name, const T& value) {
    JsonWriter json;
    json("ok", true);
    json(name, value);
    return std::move(json).text() + '\n';
}
inline std::string control_text(std::string_view text) { return answer_of("text", text); }

/// Error: Refused with the job's reason; Protocol.
Status check_answer(JsonReader& reader);
/// Reads the "ok" of an answer, then by `read_members` what follows. Error: Refused with the job's reason;
/// Protocol.
template <class T, class ReadMembers>
Result<T> read_answer(std::string_view line, Strictness strictness, const ReadMembers& read_members) {
    JsonReader reader(line, strictness);
    Status status = check_answer(reader);
    T value{};
    if (status) read_members(reader, value);
    if (status) status = reader.end();
    return status ? Result<T>(std::move(value)) : status.error();
}
template <class T>
Result<T> answer_from(std::string_view line, Strictness strictness = Strictness::Exact) {
    return read_answer<T>(line, strictness, [](JsonReader& reader, T& value) { describe(reader, value); });
}
template <class T>
Result<T> answer_from(std::string_view line, std::string_view name) {
    return read_answer<T>(line, Strictness::Exact,
                          [name](JsonReader& reader, T& value) { reader(name, value); });
}
inline Result<std::string> decode_control_text(std::string_view line) {
    return answer_from<std::string>(line, "text");
}

/// Listens for questions to a running ddprun: a non-blocking Unix stream socket in the abstract namespace, of
/// which no kill leaves a file. The abstract namespace belongs to the network namespace, so other containers
/// do not see the job. Error: System.
Result<UniqueFd> listen_for_questions(const std::string& job);
/// "" when the peer of a connection is the job's user or root, else the answer that refuses it.
std::string refuse_other_users(int fd);

/// "ddprun/1000/<job>": the socket's name without the leading zero byte.
std::string control_socket_name(unsigned uid, const std::string& job);

/// A job that runs on this host.
struct RunningJob {
    unsigned uid = 0;
    std::string id;  ///< the job's DDPRUN_JOB
    bool operator==(const RunningJob&) const = default;
};
/// The jobs in the text of /proc/net/unix, each once, sorted. Pure.
std::vector<RunningJob> jobs_in(std::string_view proc_net_unix);
/// This user's jobs that listen now; for root those of all users. Leaves out sockets that another user opened
/// under such a name, and those that accept no connection within a second.
std::vector<RunningJob> running_jobs();

/// Asks a job and returns the first line of its answer, without newline. Blocks until `deadline` at most.
/// Error: NotFound (no such job), Refused (the socket belongs to another user), Timeout, Closed, System.
Result<std::string> ask_job(const RunningJob& job, const ControlRequest& request, TimePoint deadline);

}  // namespace ddprun
