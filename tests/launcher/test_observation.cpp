#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cmath>
#include <cstring>
#include <fstream>
#include <future>
#include <map>
#include <thread>

#include "env/json.h"
#include "env/text.h"
#include "launcher/questions/job_curves.h"
#include "launcher/questions/request_server.h"
#include "launcher/talk/control.h"
#include "launcher/talk/event_file.h"
#include "launcher/talk/job_status.h"
#include "tests/support/other_users_socket.h"
#include "tests/support/temporary_directory.h"

namespace ddprun::test {
namespace {

using namespace std::chrono_literals;
using ::testing::AllOf;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

JobStatus two_workers() {
    JobStatus status;
    status.job = "5f3a";
    status.run_id = "a \"run\"";
    status.program = "./train";
    status.host = "node01";
    status.is_head = true;
    status.phase = "running";
    status.generation = 2;
    status.restarts_used = 1;
    status.max_restarts = 3;
    status.world_size = 2;
    status.seconds = 12;
    WorkerStatus worker;
    worker.pid = 4171;
    worker.state = "running";
    worker.seconds = 10;
    worker.cpu_seconds = 5;
    worker.rss_bytes = 1 << 20;
    status.workers.push_back(worker);
    worker.rank = worker.local_rank = 1;
    worker.pid = 4172;
    worker.uses_libddp = worker.reports_steps = true;
    worker.step = 100;
    worker.comm_seconds = 1;
    worker.collective = "in all_reduce #812 (25 MiB)";
    status.workers.push_back(worker);
    return status;
}

// ---- requests

TEST(ControlMessage, IsDecodedAsItWasSent) {
    const ControlRequest request{"signal", {{"signal", "USR1"}, {"rank", "3"}}};
    const Result<ControlRequest> read = decode_control_request(encode(request));
    ASSERT_TRUE(read);
    EXPECT_EQ(*read, request);
}

TEST(ControlMessage, MalformedTextIsAnError) {
    for (const char* line : {"", "x", "[]", "{}", "{\"request\":1}", "{\"request\":\"a\",\"rank\":3}",
                             "\xff\xfe", "{\"request\":\"\"}"}) {
        EXPECT_FALSE(decode_control_request(line)) << line;
        EXPECT_FALSE(decode_control_text(line)) << line;
    }
}

TEST(ControlMessage, ARefusalHasTheJobsReason) {
    const Result<std::string> text = decode_control_text(control_error("no rank 9"));
    ASSERT_FALSE(text);
    EXPECT_EQ(text.error().what, "no rank 9");
    EXPECT_EQ(decode_control_text(control_text("done")).value_or(""), "done");
}

TEST(RunningJobs, AreReadFromTheKernelsTableOnce) {
    const char* table =
        "Num       RefCount Protocol Flags    Type St Inode Path\n"
        "000: 00000002 00000000 00010000 0001 01 100 @ddprun/1000/5f3a\n"
        "000: 00000003 00000000 00000000 0001 03 101 @ddprun/1000/5f3a\n"
        "000: 00000002 00000000 00010000 0001 01 102 @ddprun/0/77\n"
        "000: 00000002 00000000 00010000 0001 01 103 @ddprun/x/88\n"
        "000: 00000002 00000000 00010000 0001 01 104 @ddprun/1/2/3\n"
        "000: 00000002 00000000 00010000 0001 01 105 /run/@ddprun\n"
        "000: 00000002 00000000 00010000 0001 01 106\n";
    EXPECT_THAT(jobs_in(table), ElementsAre(RunningJob{0, "77"}, RunningJob{1000, "5f3a"}));
}

/// A control socket on a loop that the test runs.
class ControlSocketTest : public ::testing::Test {
  protected:
    void SetUp() override {
        Result<std::unique_ptr<os::EventLoop>> loop = os::EventLoop::create({});
        ASSERT_TRUE(loop);
        loop_ = std::move(*loop);
        job_ = {static_cast<unsigned>(::geteuid()), random_name()};
        Result<std::unique_ptr<RequestServer>> socket = serve_questions(
            *loop_, job_.id,
            [this](const ControlRequest& request, const RequestReply& reply) { handler_(request, reply); });
        ASSERT_TRUE(socket) << socket.error().what;
        socket_ = std::move(*socket);
    }

    static std::string random_name() {
        return "test" + std::to_string(::getpid()) + "x" + std::to_string(++counter_);
    }

    UniqueFd connect() const {
        UniqueFd fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
        sockaddr_un address{};
        address.sun_family = AF_UNIX;
        const std::string name = control_socket_name(job_.uid, job_.id);
        name.copy(address.sun_path + 1, name.size());
        const auto length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
        EXPECT_EQ(::connect(fd.get(), reinterpret_cast<sockaddr*>(&address), length), 0);
        return fd;
    }

    /// The bytes that the socket sends until it closes.
    std::string exchange(const std::string& sent) {
        const UniqueFd fd = connect();
        EXPECT_EQ(::send(fd.get(), sent.data(), sent.size(), MSG_NOSIGNAL),
                  static_cast<ssize_t>(sent.size()));
        std::string got;
        const TimePoint deadline = MonotonicClock::now() + 20s;
        while (MonotonicClock::now() < deadline) {
            EXPECT_TRUE(loop_->run_once(MonotonicClock::now() + 20ms));
            char piece[4096];
            const ssize_t n = ::recv(fd.get(), piece, sizeof piece, MSG_DONTWAIT);
            if (n == 0 || (n < 0 && errno != EAGAIN)) return got;
            if (n > 0) got.append(piece, static_cast<std::size_t>(n));
        }
        ADD_FAILURE() << "the connection stays open";
        return got;
    }

    static inline int counter_ = 0;
    std::unique_ptr<os::EventLoop> loop_;
    RunningJob job_;
    std::unique_ptr<RequestServer> socket_;
    ControlHandler handler_;
};

TEST_F(ControlSocketTest, SendsTheHandlersAnswerAndCloses) {
    handler_ = [](const ControlRequest& request, const RequestReply& reply) {
        reply.send(control_text(request.argument("word")));
        reply.finish();
    };
    EXPECT_EQ(exchange(encode(ControlRequest{"echo", {{"word", "hello"}}})), control_text("hello"));
}

TEST_F(ControlSocketTest, AnAnswerMayComeLater) {
    handler_ = [this](const ControlRequest&, const RequestReply& reply) {
        loop_->call_after(5ms, [reply] { reply.send("one\n"); });
        loop_->call_after(10ms, [reply] {
            reply.send("two\n");
            reply.finish();
        });
    };
    EXPECT_EQ(exchange(encode(ControlRequest{"later", {}})), "one\ntwo\n");
}

TEST_F(ControlSocketTest, MalformedRequestsAreRefused) {
    EXPECT_THAT(exchange("nonsense\n"), HasSubstr("\"ok\":false"));
}

TEST_F(ControlSocketTest, AnEndlessRequestIsDropped) { EXPECT_EQ(exchange(std::string(17 * 1024, 'x')), ""); }

TEST_F(ControlSocketTest, AReplyOutlivesItsPeerAndItsServer) {
    std::optional<RequestReply> kept;
    handler_ = [&kept](const ControlRequest&, const RequestReply& reply) { kept = reply; };
    {
        const UniqueFd fd = connect();
        const std::string request = encode(ControlRequest{"keep", {}});
        ASSERT_GT(::send(fd.get(), request.data(), request.size(), MSG_NOSIGNAL), 0);
        while (!kept) ASSERT_TRUE(loop_->run_once(MonotonicClock::now() + 1s));
        EXPECT_TRUE(kept->is_wanted());
    }
    const TimePoint deadline = MonotonicClock::now() + 20s;
    while (kept->is_wanted() && MonotonicClock::now() < deadline)
        ASSERT_TRUE(loop_->run_once(MonotonicClock::now() + 1s));
    EXPECT_FALSE(kept->is_wanted());
    kept->send("nobody listens");
    socket_.reset();
    kept->send("nobody is there");
    kept->finish();
}

TEST_F(ControlSocketTest, LeavesNothingBehindAfterItsEnd) {
    socket_.reset();
    const Result<std::string> answer = ask_job(job_, {"status", {}}, MonotonicClock::now() + 1s);
    ASSERT_FALSE(answer);
    EXPECT_EQ(answer.error().code, Errc::NotFound);
}

TEST_F(ControlSocketTest, ManySilentConnectionsDoNotGrowWithoutLimit) {
    std::vector<UniqueFd> silent;
    for (int i = 0; i < 100; ++i) {
        silent.push_back(connect());
        ASSERT_TRUE(loop_->run_once(MonotonicClock::now() + 1s));
    }
    int open = 0;
    for (const UniqueFd& fd : silent) {
        char byte;
        open += ::recv(fd.get(), &byte, 1, MSG_DONTWAIT) < 0 && errno == EAGAIN;
    }
    EXPECT_EQ(open, 32);
}

TEST_F(ControlSocketTest, SilentConnectionsDoNotKeepOthersFromAsking) {
    handler_ = [](const ControlRequest&, const RequestReply& reply) {
        reply.send(control_text("here"));
        reply.finish();
    };
    std::vector<UniqueFd> silent;
    for (int i = 0; i < 32; ++i) {
        silent.push_back(connect());
        ASSERT_TRUE(loop_->run_once(MonotonicClock::now() + 1s));
    }
    EXPECT_EQ(exchange(encode(ControlRequest{"echo", {}})), control_text("here"));
}

TEST_F(ControlSocketTest, AClientWithARequestIsNotClosedForANewOne) {
    std::vector<RequestReply> kept;
    handler_ = [&kept](const ControlRequest&, const RequestReply& reply) { kept.push_back(reply); };
    std::vector<UniqueFd> asking;
    const std::string request = encode(ControlRequest{"keep", {}});
    for (std::size_t i = 1; i <= 32; ++i) {
        asking.push_back(connect());
        ASSERT_GT(::send(asking.back().get(), request.data(), request.size(), MSG_NOSIGNAL), 0);
        while (kept.size() < i) ASSERT_TRUE(loop_->run_once(MonotonicClock::now() + 1s));
    }
    EXPECT_EQ(exchange(request), "") << "closed: it may come again";
    for (const RequestReply& reply : kept) EXPECT_TRUE(reply.is_wanted());
}

// ---- the socket's owner

TEST_F(ControlSocketTest, ASocketThatAnotherUserOpenedUnderOurNameIsNoJobOfOurs) {
    if (::geteuid() != 0) GTEST_SKIP() << "only root can become another user";
    const RunningJob foreign{job_.uid, random_name()};
    const OtherUsersSocket squatter(control_socket_name(foreign.uid, foreign.id));
    ASSERT_TRUE(squatter.listens());
    EXPECT_THAT(running_jobs(), AllOf(Contains(job_), Not(Contains(foreign))));
    const Result<std::string> asked = ask_job(foreign, {"status", {}}, MonotonicClock::now() + 5s);
    ASSERT_FALSE(asked);
    EXPECT_EQ(asked.error().code, Errc::Refused);
}

TEST_F(ControlSocketTest, ASocketThatAcceptsNoConnectionDelaysNoOther) {
    const RunningJob stuck{job_.uid, random_name()};
    const UniqueFd listener(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    const std::string name = control_socket_name(stuck.uid, stuck.id);
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    name.copy(address.sun_path + 1, name.size());
    const auto length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
    ASSERT_EQ(::bind(listener.get(), reinterpret_cast<sockaddr*>(&address), length), 0);
    ASSERT_EQ(::listen(listener.get(), 0), 0);
    const UniqueFd queued(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    ASSERT_EQ(::connect(queued.get(), reinterpret_cast<sockaddr*>(&address), length), 0)
        << "its queue is full now";
    EXPECT_THAT(running_jobs(), AllOf(Contains(job_), Not(Contains(stuck))));
    const Result<std::string> asked = ask_job(stuck, {"status", {}}, MonotonicClock::now() + 50ms);
    ASSERT_FALSE(asked);
    EXPECT_EQ(asked.error().code, Errc::Timeout);
}

// ---- status

TEST(JobStatus, IsDecodedAsItWasSent) {
    const JobStatus status = two_workers();
    const Result<JobStatus> read = job_status_from_json(to_json(status));
    ASSERT_TRUE(read);
    EXPECT_EQ(*read, status);
}

TEST(JobStatus, ANodeThatHasNotReachedItsHeadIsNoSecondJobBesideIt) {
    const auto answer = [](const char* job, const char* run_id, bool is_head) {
        JobStatus status;
        status.job = job;
        status.run_id = run_id;
        status.is_head = is_head;
        return std::optional<JobStatus>(status);
    };
    using Indices = std::vector<std::size_t>;
    EXPECT_EQ(one_answer_each({answer("node1", "night", false), answer("head", "night", true),
                               answer("head", "night", true)}),
              Indices{1});
    EXPECT_EQ(one_answer_each({answer("head", "night", true), std::nullopt, answer("other", "day", false)}),
              (Indices{0, 2}));
    EXPECT_EQ(one_answer_each({answer("one", "none", true), answer("two", "none", true)}), (Indices{0, 1}));
}

TEST(JobStatus, OfAnotherReleaseIsReadWithoutItsUnknownFields) {
    const Result<JobStatus> read =
        job_status_from_json(R"({"ok":true,"job":7,"phase":"running","workers":[3,{"rank":"x"}],"new":[]})");
    ASSERT_TRUE(read);
    EXPECT_EQ(read->phase, "running");
    EXPECT_EQ(read->workers.size(), 1u);
    EXPECT_FALSE(job_status_from_json("{}"));
    EXPECT_FALSE(job_status_from_json("no json"));
}

TEST(JobStatus, ANumberThatDoesNotFitIsNotWrappedIntoAnotherProcess) {
    const Result<JobStatus> read =
        job_status_from_json(R"({"ok":true,"pid":4294967297,"world_size":1e400,"workers":[]})");
    EXPECT_FALSE(read);
    const Result<JobStatus> big = job_status_from_json(
        R"({"ok":true,"pid":4294967297,"generation":-1,"workers":[{"rank":4294967296,"rss_bytes":-1,"gpus":[4294967297,1]}]})");
    ASSERT_TRUE(big);
    EXPECT_EQ(big->pid, JobStatus{}.pid);
    EXPECT_EQ(big->generation, JobStatus{}.generation);
    ASSERT_EQ(big->workers.size(), 1u);
    EXPECT_EQ(big->workers[0].rank, WorkerStatus{}.rank);
    EXPECT_EQ(big->workers[0].rss_bytes, WorkerStatus{}.rss_bytes);
    EXPECT_THAT(big->workers[0].gpus.indices, ElementsAre(1u));
}

TEST(JobStatus, StepsOfAWorkerWithoutLibddpAreShownAndSent) {
    JobStatus status = two_workers();
    WorkerStatus& script = status.workers.front();
    script.reports_steps = true;
    script.step = 4711;
    EXPECT_EQ(job_status_from_json(to_json(status)).value_or(JobStatus{}), status);
    EXPECT_THAT(render_status(nullptr, status, 0), HasSubstr(" 4711 "));
    const std::string metrics = render_metrics(status);
    EXPECT_THAT(metrics,
                HasSubstr("worker_steps_total{run_id=\"a \\\"run\\\"\",host=\"node01\",rank=\"0\"} 4711\n"));
    EXPECT_THAT(
        metrics,
        Not(HasSubstr("worker_comm_seconds_total{run_id=\"a \\\"run\\\"\",host=\"node01\",rank=\"0\"}")));
}

TEST(JobStatus, TheUsefulTimeIsThatOfTheRankWithMost) {
    JobStatus status = two_workers();
    EXPECT_THAT(render_metrics(status), Not(HasSubstr("useful_seconds")));
    status.is_head = true;
    status.recovery = "in place";
    status.recoveries = 3;
    status.workers[0].useful_seconds = 8.75;
    status.workers[1].useful_seconds = 9;
    EXPECT_EQ(job_status_from_json(to_json(status)).value_or(JobStatus{}), status);
    EXPECT_THAT(render_metrics(status),
                HasSubstr("useful_seconds_total{run_id=\"a \\\"run\\\"\",host=\"node01\"} 9\n"));
    EXPECT_THAT(render_status(nullptr, status, 0),
                HasSubstr("after a failure: in place; 3 recoveries so far, 75.0 % of the time useful\n"));
    status.useful_before = 1.5;
    status.lost_to_failures = 0.25;
    status.lost_to_restarts = 2;
    EXPECT_EQ(job_status_from_json(to_json(status)).value_or(JobStatus{}), status);
    EXPECT_THAT(render_status(nullptr, status, 0),
                HasSubstr("87.5 % of the time useful, 250 ms lost in failures, 2 s lost in restarts\n"));
    const std::string metrics = render_metrics(status);
    EXPECT_THAT(metrics, HasSubstr("useful_seconds_total{run_id=\"a \\\"run\\\"\",host=\"node01\"} 10.5\n"));
    EXPECT_THAT(
        metrics,
        HasSubstr("lost_seconds_total{run_id=\"a \\\"run\\\"\",host=\"node01\",cause=\"restarts\"} 2\n"));
}

TEST(JobStatus, RatesAreOverTheTimeBetweenTwoStatuses) {
    const JobStatus before = two_workers();
    JobStatus now = before;
    now.workers[1].seconds += 2;
    now.workers[1].cpu_seconds += 1;
    now.workers[1].step += 10;
    now.workers[1].comm_seconds += 0.5;
    EXPECT_EQ(rates_between(&before, now.workers[1]), (WorkerRates{50, 5, 25}));
    EXPECT_EQ(rates_between(nullptr, before.workers[1]), (WorkerRates{50, 10, 10}));
}

TEST(JobStatus, RatesOfARestartedRankBeginAnew) {
    const JobStatus before = two_workers();
    JobStatus now = before;
    now.workers[1].pid = 5000;
    now.workers[1].seconds = 1;
    now.workers[1].cpu_seconds = 1;
    EXPECT_EQ(rates_between(&before, now.workers[1]).cpu_percent, 100);
}

TEST(JobStatus, ShowsEachWorkersGpusAndMarksPresumedOnes) {
    JobStatus status = two_workers();
    GpuUsage gpu;
    gpu.index = 3;
    gpu.busy_percent = 87;
    gpu.total_bytes = 80;
    gpu.processes = {{4171, 12}};
    status.hosts.push_back({"node01", 7, "running", "", {gpu}, ""});
    status.workers[0].gpus = {{3}, false, std::uint64_t{12} << 30};
    status.workers[1].gpus = {{3}, true, 0};
    EXPECT_EQ(job_status_from_json(to_json(status)).value_or(JobStatus{}), status);
    const std::string text = render_status(nullptr, status, 0);
    EXPECT_THAT(text, AllOf(HasSubstr("  GPU GPU%  GPU MEM "), HasSubstr("    3   87   12 GiB "),
                            HasSubstr("   3?   87        - "), HasSubstr("GPU 3: 87 % busy")));
    EXPECT_THAT(render_status(nullptr, two_workers(), 0), Not(HasSubstr("GPU")));
}

JobStatus one_node(const std::string& host, int rank) {
    JobStatus status;
    status.hosts.push_back({host, 7, "running", "/logs/" + host, {}, ""});
    status.lost_output_bytes = 5;
    WorkerStatus worker;
    worker.rank = rank;
    status.workers.push_back(worker);
    return status;
}

TEST(JobStatus, OfAllNodesHasEveryWorkerWithItsHostAndNamesASilentNode) {
    JobStatus silent;
    silent.hosts.push_back({"node03 (ranks 2-3)", 0, "", "", {}, "no answer in 2 s"});
    const JobStatus job = merge_status(two_workers(), {one_node("node01", 0), one_node("node02", 1), silent});
    EXPECT_EQ(job.job, "5f3a");
    EXPECT_EQ(job.lost_output_bytes, 10u);
    ASSERT_EQ(job.workers.size(), 2u);
    EXPECT_EQ(job.hosts[static_cast<std::size_t>(job.workers[1].node)].host, "node02");
    const std::string text = render_status(nullptr, job, 0);
    EXPECT_THAT(text, AllOf(HasSubstr("node node03 (ranks 2-3): no answer in 2 s\n"), HasSubstr("HOST "),
                            HasSubstr("\nnode02     1 ")));
    EXPECT_EQ(job_status_from_json(to_json(job)).value_or(JobStatus{}), job);
}

TEST(JobStatus, AWorkerOfAnUnknownNodeIsMovedToTheFirst) {
    const Result<JobStatus> read = job_status_from_json(
        R"({"ok":true,"hosts":[{"host":"a"},{"host":"b"}],"workers":[{"node":7,"rank":1}]})");
    ASSERT_TRUE(read);
    EXPECT_THAT(render_status(nullptr, *read, 0), HasSubstr("HOST"));
}

TEST(JobStatus, TheTableNamesEveryWorkerAndKeepsToTheWidth) {
    JobStatus status = two_workers();
    status.program = "evil\x1b[2J";
    const std::string text = render_status(nullptr, status, 120);
    EXPECT_THAT(text, AllOf(HasSubstr("generation 2, 1 of 3 restarts, 2 workers"), HasSubstr("4171 running"),
                            HasSubstr("in all_reduce #812 (25 MiB)"), Not(HasSubstr("\x1b"))));
    const std::string narrow = render_status(nullptr, status, 60);
    for (const std::string_view line : split(narrow, '\n')) EXPECT_LE(line.size(), 60u) << line;
    EXPECT_THAT(narrow, AllOf(HasSubstr("2 workers"), HasSubstr("STEPS/S"), HasSubstr("in all_reduce"),
                              Not(HasSubstr("4171"))))
        << "the least telling goes";
}

// ---- curves

std::map<std::string, double> curves_of(const JobStatus* before, const JobStatus& now) {
    std::map<std::string, double> values;
    for (const Scalar& scalar : scalars_of(before, now)) values[std::string(scalar.name)] = scalar.value;
    return values;
}

TEST(JobCurves, ShowRatesSinceTheLastSampleAndOnlyWhatIsKnown) {
    const JobStatus before = two_workers();
    JobStatus now = before;
    for (WorkerStatus& worker : now.workers) {
        worker.reports_steps = worker.uses_libddp = true;
        worker.state = "running";
        worker.seconds += 2;
        worker.step += 10;
        worker.comm_seconds += worker.rank == 0 ? 0.5 : 1.5;
    }
    std::map<std::string, double> curves = curves_of(&before, now);
    EXPECT_EQ(curves["job/workers"], 2);
    EXPECT_EQ(curves["communication/percent_of_time"], 50);
    EXPECT_EQ(curves["communication/waiting_percent_of_time"], 25) << "rank 0 waits the least";
    EXPECT_EQ(curves.count("gpu/busy_percent"), 0U);

    for (WorkerStatus& worker : now.workers) worker.reports_steps = worker.uses_libddp = false;
    curves = curves_of(&before, now);
    EXPECT_EQ(curves.count("steps/done") + curves.count("communication/percent_of_time"), 0U);

    for (WorkerStatus& worker : now.workers) worker.state = "ended";
    curves = curves_of(&before, now);
    EXPECT_EQ(curves["job/workers"], 0);
    EXPECT_EQ(curves.count("cpu/percent_of_a_core_per_worker"), 0U);
}

TEST(JobCurves, ShowTheGpusOfAllNodesAndCountTheSilentOnes) {
    JobStatus status = two_workers();
    GpuUsage busy, idle;
    busy.busy_percent = 80;
    busy.used_bytes = 3U << 20;
    idle.used_bytes = 1U << 20;
    status.hosts.resize(3);
    status.hosts[0].gpus = {busy};
    status.hosts[1].gpus = {idle};
    status.hosts[2].trouble = "no answer in 2 s";
    std::map<std::string, double> curves = curves_of(nullptr, status);
    EXPECT_EQ(curves["gpu/busy_percent"], 40);
    EXPECT_EQ(curves["gpu/mib_of_fullest"], 3);
    EXPECT_EQ(curves["job/nodes_without_answer"], 1);
}

TEST(ToldScalars, AreTakenOnceInTheirOrderAndNonsenseIsLeftOut) {
    const auto ring = std::make_unique<ScalarRing>();
    std::strcpy(ring->tags[0], "loss");
    std::strcpy(ring->tags[1], "bad\nname");
    ring->tag_count = 2;
    ring->records[0] = {1, 10.5, 0.25, 0};
    ring->records[1] = {1, 10.5, 3, 77};  // no such name
    ring->records[2] = {2, 11, 4, 1};
    ring->written = 3;
    std::vector<ToldScalar> taken = take_scalars(*ring, 1);
    EXPECT_EQ(taken, (std::vector<ToldScalar>{{1, 10.5, 0.25, "loss"}}));
    taken = take_scalars(*ring, 100);
    ASSERT_EQ(taken.size(), 1U);
    EXPECT_EQ(taken[0].name.find('\n'), std::string::npos);
    EXPECT_TRUE(take_scalars(*ring, 100).empty());
    ring->written = 1ULL << 60;  // a worker may write anything
    EXPECT_LE(take_scalars(*ring, kScalarRecords).size(), kScalarRecords);
    EXPECT_TRUE(take_scalars(*ring, kScalarRecords).empty());
}

TEST(ToldScalars, AreReadBackAsTheyWereSent) {
    const std::vector<ToldScalar> sent = {{300, 1700000000.123456, 0.1, "train/loss of a"},
                                          {0, 1, -INFINITY, "b"}};
    EXPECT_EQ(decode_scalars(encode_scalars(sent)), sent);
    EXPECT_TRUE(std::isnan(decode_scalars("1 2 nan loss\n").at(0).value));
    EXPECT_TRUE(decode_scalars("\n1\n1 2\n1 2 3\n1 2 3 \nx 2 3 loss\n1 2 3x loss\n").empty());
}

TEST(JobCurves, ARunOfAnyNameStaysBelowTheDirectory) {
    EXPECT_EQ(curve_directory("runs", "my run/1.2"), "runs/my_run_1.2");
    EXPECT_EQ(curve_directory("runs", "../up"), "runs/_._up");
    EXPECT_EQ(curve_directory("runs", ".."), "runs/_.");
}

TEST(JobCurves, AreSampledLessOftenAsTheJobGrowsOld) {
    EXPECT_EQ(sample_pause(0s), 1s);
    EXPECT_EQ(sample_pause(60s), 1s);
    EXPECT_EQ(sample_pause(10min), 10s);
    EXPECT_EQ(sample_pause(48h), 15s);
}

TEST(Metrics, FollowThePrometheusTextFormat) {
    const std::string text = render_metrics(two_workers());
    EXPECT_THAT(
        text,
        AllOf(
            HasSubstr("# TYPE ddprun_restarts_total counter\n"),
            HasSubstr("ddprun_restarts_total{run_id=\"a \\\"run\\\"\",host=\"node01\"} 1\n"),
            HasSubstr("ddprun_worker_steps_total{run_id=\"a \\\"run\\\"\",host=\"node01\",rank=\"1\"} 100\n"),
            Not(HasSubstr("worker_steps_total{run_id=\"a \\\"run\\\"\",host=\"node01\",rank=\"0\"}"))));
}

TEST(Metrics, OnlyGetMetricsIsServed) {
    const auto render = [] { return std::string("body\n"); };
    EXPECT_THAT(http_response("GET /metrics HTTP/1.1\r\n\r\n", render),
                AllOf(StartsWith("HTTP/1.1 200 "), HasSubstr("\r\n\r\nbody\n")));
    EXPECT_THAT(http_response("HEAD /metrics HTTP/1.1\r\n\r\n", render),
                AllOf(HasSubstr("Content-Length: 5"), Not(HasSubstr("body"))));
    EXPECT_THAT(http_response("GET / HTTP/1.1\r\n\r\n", render), StartsWith("HTTP/1.1 404 "));
    EXPECT_THAT(http_response("POST /metrics HTTP/1.1\r\n\r\n", render),
                AllOf(StartsWith("HTTP/1.1 405 "), HasSubstr("\r\nAllow: GET, HEAD\r\n"),
                      ::testing::EndsWith("\r\n\r\n405 Method Not Allowed\n")));
    EXPECT_THAT(http_response("hello\r\n\r\n", render), StartsWith("HTTP/1.1 400 "));
    EXPECT_EQ(http_head_length("GET / HTTP/1.1\r\n"), 0u);
    EXPECT_EQ(http_head_length("GET / HTTP/1.1\r\n\r\nmore"), 18u);
}

// ---- events

TEST(EventFile, LinesAreJsonWithTimeAndOrigin) {
    const std::string text =
        to_json({"5f3a", "run", "node01"},
                {"worker_exited", 2, {{"rank", std::int64_t{3}}, {"what", "bad \xff"}}}, 1740832205.25);
    EXPECT_EQ(text.back(), '\n');
    const Json json = parse_json(text).value_or(Json());
    EXPECT_EQ(json["time"], "2025-03-01T12:30:05.250000Z");
    EXPECT_EQ(json["generation"], 2);
    EXPECT_EQ(json["rank"], 3);
    EXPECT_EQ(json["what"], "bad \xef\xbf\xbd");
}

TEST(EventFile, AFullDiskIsReportedOnceAndTheNextLineIsWhole) {
    const TemporaryDirectory directory;
    const std::string path = directory.path() + "/events";
    std::vector<std::string> warnings;
    Result<std::unique_ptr<EventFile>> file =
        EventFile::open(path, {"5f3a", "run", "node01"}, nullptr,
                        [&](std::string_view line) { warnings.emplace_back(line); });
    ASSERT_TRUE(file) << file.error().what;
    (*file)->write({"first", 1, {}});
    rlimit before{};
    ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &before), 0);
    rlimit tight = before;
    tight.rlim_cur = 150;  // in the middle of the second line
    const auto old_handler = ::signal(SIGXFSZ, SIG_IGN);
    ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &tight), 0);
    (*file)->write({"second", 1, {}});
    (*file)->write({"third", 1, {}});
    ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &before), 0);
    ::signal(SIGXFSZ, old_handler);
    (*file)->write({"fourth", 1, {}});
    EXPECT_EQ(warnings.size(), 1u);
    EXPECT_EQ((*file)->lost(), 2u);

    std::ifstream in(path);
    std::vector<std::string> events;
    for (std::string line; std::getline(in, line);) {
        const Json json = parse_json(line).value_or(Json());
        if (json.is_object()) events.push_back(json["event"].get<std::string>());
    }
    EXPECT_THAT(events, ElementsAre("first", "fourth"));
}

TEST(EventFile, AFileThatCannotBeOpenedIsNamed) {
    const TemporaryDirectory directory;
    const std::string path = directory.file("none/events");
    const Result<std::unique_ptr<EventFile>> file = EventFile::open(path, {}, nullptr, nullptr);
    ASSERT_FALSE(file);
    EXPECT_EQ(file.error().what, "open " + path + ": No such file or directory");
}

}  // namespace
}  // namespace ddprun::test
