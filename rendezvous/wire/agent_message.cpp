#include "rendezvous/wire/agent_message.h"

#include <utility>

#include "rendezvous/wire/message_codec.h"

namespace ddprun::rdzv {

// The members are in the order of their names, as in the first release.

static void describe(Visitor& v, AgentHello& m) {
    v("addresses", m.addresses);
    v.usually("command", m.command);
    v.usually("fabric", m.fabric);
    v("host", m.host);
    v.usually("instance", m.instance);
    v.usually("keeps_workers", m.keeps_workers);
    v.usually("kept_first", m.kept_first);
    v.usually("kept_first_rank", m.kept_first_rank);
    v.usually("kept_generation", m.kept_generation);
    v("kept_place", m.kept_place);
    v.usually("kept_restarts", m.kept_restarts);
    v("node_rank", m.node_rank);
    v("pid", m.pid);
    v.usually("rejoins", m.rejoins);
    v.defaulted("role", m.role);
    v.usually("seats", m.seats);
    v("slots", m.slots);
    v.usually("terms", m.terms);
    v("version", m.version);
}
static void describe(Visitor& v, WorkersStarted& m) { v("generation", m.generation); }
static void describe(Visitor& v, WorkerExited& m) {
    v("after_start_ns", m.after_start_ns);
    v.usually("by_us", m.by_us);
    v.usually("dumped_core", m.dumped_core);
    v.usually("error_age_ns", m.error_age_ns, -1);
    v.usually("error_file", m.error_file);
    v.usually("exec_failure", m.exec_failure);
    v.usually("failed_at_exec", m.failed_at_exec);
    v("generation", m.generation);
    v.usually("last_collective", m.last_collective);
    v.usually("last_stderr", m.last_stderr);
    v("local_rank", m.local_rank);
    v.usually("meaning", m.meaning);
    v.usually("never_joined", m.never_joined);
    v("pid", m.pid);
    v("rank", m.rank);
    v.usually("signaled", m.signaled);
    v.usually("start_errno", m.start_errno);
    v("status", m.status);
    v.usually("steps", m.steps, -1);
    v.usually("stopped_failing", m.stopped_failing);
    v.usually("commits", m.commits, -1);
    v.usually("useful_ns", m.useful_ns, -1);
}
static void describe(Visitor& v, GenerationEnded& m) {
    v("generation", m.generation);
    v("notes", m.notes);
}
static void describe(Visitor& v, StepsDone& m) {
    v("generation", m.generation);
    v("highest", m.highest);
    v("listens", m.listens);
    v("step", m.step);
}
/// In the order of WorkerStage.
static constexpr std::string_view kStages[] = {"started", "announced", "joined", "finished", "suspended",
                                               "let-go",  "failing",   "slow",   "refused"};
static void describe(Visitor& v, WorkersReady& m) {
    v("generation", m.generation);
    v.choice("stage", m.stage, kStages);
    v.usually("steps", m.steps, -1);
    v.usually("why", m.why);
}
static void describe(Visitor& v, StartGeneration& m) {
    v.usually("agent_store", m.agent_store);
    v.usually("failed_rank", m.failed_rank, -1);
    v.usually("first_generation", m.first_generation);
    v("first_rank", m.first_rank);
    v("generation", m.generation);
    v("group_rank", m.group_rank);
    v("group_world_size", m.group_world_size);
    v.usually("in_place", m.in_place);
    v("local_world_size", m.local_world_size);
    v("master_addr", m.master_addr);
    v("master_port", m.master_port);
    v.defaulted("place", m.place);
    v("restart_count", m.restart_count);
    v.usually("start_limit_ns", m.start_limit_ns);
    v.defaulted("role_first_rank", m.role_first_rank);
    v.defaulted("role_world_size", m.role_world_size);
    v("world_size", m.world_size);
}
static void describe(Visitor& v, StopGeneration& m) {
    v.defaulted("failed_rank", m.failed_rank);
    v("generation", m.generation);
    v("grace_ns", m.grace_ns);
    v("signal", m.signal);
    v.usually("stop_at", m.stop_at);
    v("why", m.why);
}
static void describe(Visitor& v, SuspendGeneration& m) {
    v("failed_rank", m.failed_rank);
    v("generation", m.generation);
    v("why", m.why);
}
static void describe(Visitor& v, Release& m) { v("generation", m.generation); }
static void describe(Visitor& v, StopProposal& m) {
    v("generation", m.generation);
    v("step", m.step);
    v("why", m.why);
}
static void describe(Visitor& v, Shutdown& m) {
    v("exit_code", m.exit_code);
    v("why", m.why);
}
static void describe(Visitor& v, StopRequest& m) {
    v.usually("preempts", m.preempts);
    v("signal", m.signal);
}
static void describe(Visitor& v, RehearsalRequest& m) { v("generation", m.generation); }
static void describe(Visitor& v, Remark& m) { v("text", m.text); }
static void describe(Visitor& v, Waiting& m) { v("why", m.why); }
static void describe(Visitor& v, ForwardSignal& m) { v("signal", m.signal); }
static void describe(Visitor& v, EndCollectives& m) { v("lost_rank", m.lost_rank); }
static void describe(Visitor& v, EndJoining& m) { v("absent_rank", m.absent_rank); }
static void describe(Visitor& v, KillRank& m) {
    v("rank", m.rank);
    v("why", m.why);
}
static void describe(Visitor& v, Preempt& m) { v("why", m.why); }
static void describe(Visitor& v, Question& m) {
    v("number", m.number);
    v("request", m.request);
}
static void describe(Visitor& v, Answer& m) {
    v("number", m.number);
    v.blob(m.value);
}

static void describe(Visitor& v, JobSnapshot& m) {
    v("age_ns", m.age_ns);
    v("agents", m.agents);
    v("generation", m.generation);
    v.usually("longest_start_ns", m.longest_start_ns);
    v.usually("lost", m.lost);
    v.usually("ranks", m.ranks, 1);
    v.usually("recoveries", m.recoveries);
    v("restart_ages_ns", m.restart_ages_ns);
    v("restarts_used", m.restarts_used);
    v.usually("running", m.running);
    v("steps", m.steps);
    v("without_progress", m.without_progress);
}
static void describe(Visitor& v, StandbyListens& m) { v("port", m.port); }
static void describe(Visitor& v, JobMoved& m) {
    v("addresses", m.addresses);
    v("host", m.host);
    v("instance", m.instance);
    v("port", m.port);
}
static void describe(Visitor& v, Successor& m) {
    v("addresses", m.addresses);
    v("host", m.host);
    v("port", m.port);
}
static void describe(Visitor& v, OutputPiece& m) {
    v("stream", m.stream);
    v.blob(m.bytes);
}
static void describe(Visitor& v, WorkerScalars& m) {
    v("generation", m.generation);
    v.blob(m.lines);
}
static void describe(Visitor& v, OutputShown& m) { v("bytes", m.bytes); }
static void describe(Visitor& v, World& m) {
    v("generation", m.generation);
    v("job", m.job);
    v.blob(m.nodes);
}
static void describe(Visitor& v, FenceEntered& m) {
    v("generation", m.generation);
    v("ranks", m.ranks);
    v.blob(m.data);
}
static void describe(Visitor& v, FenceOver& m) {
    v.usually("failure", m.failure);
    v("generation", m.generation);
    v("ranks", m.ranks);
    v.blob(m.data);
}
static void describe(Visitor& v, ModexRequest& m) {
    v("generation", m.generation);
    v("number", m.number);
    v("rank", m.rank);
}
static void describe(Visitor& v, ModexReply& m) {
    v("found", m.found);
    v("generation", m.generation);
    v("number", m.number);
    v.blob(m.data);
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
