#include "rendezvous/wire/agent_message.h"

#include <utility>

#include "rendezvous/wire/message_fields.h"

namespace ddprun::rdzv {

// The fields are in the order of their names, as in the first release.

static void fields(Fields& f, AgentHello& m) {
    f("addresses", m.addresses);
    f.usually("command", m.command, {});
    f.usually("fabric", m.fabric, {});
    f("host", m.host);
    f.usually("instance", m.instance, {});
    f.usually("keeps_workers", m.keeps_workers, false);
    f.usually("kept_first", m.kept_first, std::uint64_t{0});
    f.usually("kept_first_rank", m.kept_first_rank, 0);
    f.usually("kept_generation", m.kept_generation, std::uint64_t{0});
    f("kept_place", m.kept_place);
    f.usually("kept_restarts", m.kept_restarts, 0);
    f("node_rank", m.node_rank);
    f("pid", m.pid);
    f.usually("rejoins", m.rejoins, {});
    f.defaulted("role", m.role);
    f.usually("seats", m.seats, {});
    f("slots", m.slots);
    f.usually("terms", m.terms, {});
    f("version", m.version);
}
static void fields(Fields& f, WorkersStarted& m) { f("generation", m.generation); }
static void fields(Fields& f, WorkerExited& m) {
    f("after_start_ns", m.after_start_ns);
    f.usually("by_us", m.by_us, false);
    f.usually("dumped_core", m.dumped_core, false);
    f.usually("error_age_ns", m.error_age_ns, std::int64_t{-1});
    f.usually("error_file", m.error_file, {});
    f.usually("exec_failure", m.exec_failure, {});
    f("generation", m.generation);
    f.usually("last_collective", m.last_collective, {});
    f.usually("last_stderr", m.last_stderr, {});
    f("local_rank", m.local_rank);
    f.usually("meaning", m.meaning, {});
    f.usually("never_joined", m.never_joined, false);
    f("pid", m.pid);
    f("rank", m.rank);
    f.usually("signaled", m.signaled, false);
    f("status", m.status);
    f.usually("steps", m.steps, std::int64_t{-1});
    f.usually("stopped_failing", m.stopped_failing, false);
    f.usually("commits", m.commits, std::int64_t{-1});
    f.usually("useful_ns", m.useful_ns, std::int64_t{-1});
}
static void fields(Fields& f, GenerationEnded& m) {
    f("generation", m.generation);
    f("notes", m.notes);
}
static void fields(Fields& f, StepsDone& m) {
    f("generation", m.generation);
    f("highest", m.highest);
    f("listens", m.listens);
    f("step", m.step);
}
static void fields(Fields& f, WorkersReady& m) {
    f("generation", m.generation);
    f("stage", m.stage);
    f.usually("steps", m.steps, std::int64_t{-1});
    f.usually("why", m.why, {});
}
static void fields(Fields& f, StartGeneration& m) {
    f.usually("agent_store", m.agent_store, false);
    f.usually("failed_rank", m.failed_rank, -1);
    f.usually("first_generation", m.first_generation, std::uint64_t{0});
    f("first_rank", m.first_rank);
    f("generation", m.generation);
    f("group_rank", m.group_rank);
    f("group_world_size", m.group_world_size);
    f.usually("in_place", m.in_place, false);
    f("local_world_size", m.local_world_size);
    f("master_addr", m.master_addr);
    f("master_port", m.master_port);
    f.defaulted("place", m.place);
    f("restart_count", m.restart_count);
    f.usually("start_limit_ns", m.start_limit_ns, std::int64_t{0});
    f.defaulted("role_first_rank", m.role_first_rank);
    f.defaulted("role_world_size", m.role_world_size);
    f("world_size", m.world_size);
}
static void fields(Fields& f, StopGeneration& m) {
    f.defaulted("failed_rank", m.failed_rank);
    f("generation", m.generation);
    f("grace_ns", m.grace_ns);
    f("signal", m.signal);
    f.usually("stop_at", m.stop_at, std::uint64_t{0});
    f("why", m.why);
}
static void fields(Fields& f, SuspendGeneration& m) {
    f("failed_rank", m.failed_rank);
    f("generation", m.generation);
    f("why", m.why);
}
static void fields(Fields& f, Release& m) { f("generation", m.generation); }
static void fields(Fields& f, StopProposal& m) {
    f("generation", m.generation);
    f("step", m.step);
    f("why", m.why);
}
static void fields(Fields& f, Shutdown& m) {
    f("exit_code", m.exit_code);
    f("why", m.why);
}
static void fields(Fields& f, Notice& m) {
    f("kind", m.kind);
    f("text", m.text);
}
static void fields(Fields& f, Question& m) {
    f("number", m.number);
    f("request", m.request);
}
static void fields(Fields& f, Answer& m) {
    f("number", m.number);
    f.blob(m.value);
}

static void fields(Fields& f, JobSnapshot& m) {
    f("age_ns", m.age_ns);
    f("agents", m.agents);
    f("generation", m.generation);
    f.usually("longest_start_ns", m.longest_start_ns, std::int64_t{0});
    f.usually("lost", m.lost, {});
    f.usually("ranks", m.ranks, 1);
    f.usually("recoveries", m.recoveries, 0);
    f("restart_ages_ns", m.restart_ages_ns);
    f("restarts_used", m.restarts_used);
    f.usually("running", m.running, 0);
    f("steps", m.steps);
    f("without_progress", m.without_progress);
}
static void fields(Fields& f, StandbyListens& m) { f("port", m.port); }
static void fields(Fields& f, JobMoved& m) {
    f("addresses", m.addresses);
    f("host", m.host);
    f("instance", m.instance);
    f("port", m.port);
}
static void fields(Fields& f, Successor& m) {
    f("addresses", m.addresses);
    f("host", m.host);
    f("port", m.port);
}
static void fields(Fields& f, OutputPiece& m) {
    f("stream", m.stream);
    f.blob(m.bytes);
}
static void fields(Fields& f, WorkerScalars& m) {
    f("generation", m.generation);
    f.blob(m.lines);
}
static void fields(Fields& f, OutputShown& m) { f("bytes", m.bytes); }
static void fields(Fields& f, World& m) {
    f("generation", m.generation);
    f("job", m.job);
    f.blob(m.nodes);
}
static void fields(Fields& f, FenceEntered& m) {
    f("generation", m.generation);
    f("ranks", m.ranks);
    f.blob(m.data);
}
static void fields(Fields& f, FenceOver& m) {
    f.usually("failure", m.failure, {});
    f("generation", m.generation);
    f("ranks", m.ranks);
    f.blob(m.data);
}
static void fields(Fields& f, ModexRequest& m) {
    f("generation", m.generation);
    f("number", m.number);
    f("rank", m.rank);
}
static void fields(Fields& f, ModexReply& m) {
    f("found", m.found);
    f("generation", m.generation);
    f("number", m.number);
    f.blob(m.data);
}

static void cut_to_limits(WorkerExited& message) {
    std::vector<std::string>& lines = message.last_stderr;
    if (lines.size() > kReportLines) lines.erase(lines.begin(), lines.end() - kReportLines);
    for (std::string& line : lines) cut(line, kReportLineBytes);
    cut(message.error_file, kReportErrorBytes);
    for (std::string* text : {&message.exec_failure, &message.meaning, &message.last_collective})
        cut(*text, kReportTextBytes);
}

Result<AgentHello> decode_agent_hello(Frame frame) { return decode_one<AgentHello>(std::move(frame)); }
Result<JobMoved> decode_job_moved(Frame frame) { return decode_one<JobMoved>(std::move(frame)); }
Result<FromAgent> decode_from_agent(Frame frame) { return decode_one_of<FromAgent>(std::move(frame)); }
Result<ToAgent> decode_to_agent(Frame frame) { return decode_one_of<ToAgent>(std::move(frame)); }

Result<EncodedMessage> encode_message(AgentHello hello) { return encode_one(hello, 0); }

Result<EncodedMessage> encode_message(JobMoved moved) { return encode_one(moved, 0); }

Result<EncodedMessage> encode_message(FromAgent message) {
    if (auto* const exited = std::get_if<WorkerExited>(&message)) cut_to_limits(*exited);
    if (auto* const ready = std::get_if<WorkersReady>(&message)) cut(ready->why, kReportTextBytes);
    return std::visit([](auto& one) { return encode_one(one, 0); }, message);
}

Result<EncodedMessage> encode_message(ToAgent message) {
    return std::visit([](auto& one) { return encode_one(one, 0); }, message);
}

}  // namespace ddprun::rdzv
