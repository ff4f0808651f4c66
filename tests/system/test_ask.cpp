#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include <fstream>
#include <functional>
#include <thread>

#include "env/io/socket.h"
#include "env/json.h"
#include "tests/support/reserved_port.h"
#include "tests/support/run_program.h"
#include "tests/support/temporary_directory.h"
#include "tests/system/look.h"

namespace ddprun::test {
namespace {

using namespace std::chrono_literals;
using ::testing::AllOf;
using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::Not;

/// A subcommand of ddprun about the job with this run id.
Outcome ask(const std::string& run_id, std::vector<std::string> words) {
    words.insert(words.begin(), path_of("DDPRUN"));
    words.push_back("--job=" + run_id);
    return run(words);
}

Json status_of(const std::string& run_id) {
    const Outcome outcome = ask(run_id, {"ps", "--json"});
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    return parse_json(outcome.out).value_or(Json());
}

/// A job of two workers with a run id of its own; they run until told otherwise.
class Ask : public ::testing::Test {
  protected:
    Program& start(std::vector<std::string> options, std::vector<std::string> acts) {
        options.insert(options.begin(), {"--nproc-per-node=2", "--rdzv-id=" + id_});
        acts.insert(acts.end(), {"say", "up", "hold"});
        program_.emplace(ddprun_probe(options, acts), with_environment(environment_));
        EXPECT_TRUE(program_->wait_for_output("[0]: up") && program_->wait_for_output("[1]: up"));
        return *program_;
    }

    /// Waits for the log file, which a thread writes later than the terminal, where start() has seen the
    /// line.
    static void await_line_in_log_file(const TemporaryDirectory& directory, const std::string& name,
                                       const std::string& line) {
        const auto has_line = [&] {
            return log_files(directory.path())["attempt_0/" + name].find(line) != std::string::npos;
        };
        EXPECT_TRUE(comes(has_line)) << name;
    }

    std::string id_ = unique_name("ask");
    std::vector<std::string> environment_;
    std::optional<Program> program_;
};

TEST_F(Ask, PsNamesTheJobAndItsWorkers) {
    start({"--max-restarts=3"}, {});
    const Json status = status_of(id_);
    EXPECT_EQ(status["phase"], "running");
    EXPECT_EQ(status["pid"], program_->pid());
    EXPECT_EQ(status["max_restarts"], 3);
    ASSERT_EQ(status["workers"].size(), 2u);
    EXPECT_EQ(status["workers"][1]["rank"], 1);
    EXPECT_EQ(status["workers"][1]["state"], "running");
    EXPECT_GT(status["workers"][1]["rss_bytes"].get<std::int64_t>(), 0);

    const Outcome table = ask(id_, {"ps"});
    EXPECT_THAT(table.out,
                AllOf(HasSubstr("running, generation 1, 0 of 3 restarts, 2 workers"),
                      HasSubstr(std::to_string(status["workers"][0]["pid"].get<int>()) + " running")));
    EXPECT_EQ(ask(id_, {"top"}).out.find("job "), 0u);
}

TEST_F(Ask, PsShowsTheGpuOfEachWorker) {
    const TemporaryDirectory directory;
    const std::string machine = directory.file("machine.json");
    const auto is = [&](const std::string& processes) {
        std::ofstream(machine + ".new")
            << R"({"gpus": [{"uuid": "GPU-a", "total": 1000, "busy": 3}, {"uuid": "GPU-b", "total": 1000, "busy": 87, "processes": [)"
            << processes << "]}]}";
        std::filesystem::rename(machine + ".new", machine);
    };
    is("");
    environment_ = {"DDPRUN_NVML_LIBRARY=" + path_of("FAKE_NVML_LIBRARY"), "FAKE_NVML=" + machine,
                    "CUDA_VISIBLE_DEVICES=1,0"};
    start({}, {});
    // On a loaded machine the first question to the driver may time out; later ones get its measurement.
    const auto status_when = [&](const std::function<bool(const Json& second)>& is_there) {
        const auto deadline = std::chrono::steady_clock::now() + 30s;
        Json status;
        do status = status_of(id_);
        while (!is_there(status["workers"][1]) && std::chrono::steady_clock::now() < deadline);
        return status;
    };
    const Json presumed = status_when([](const Json& second) { return second.contains("gpus"); });
    EXPECT_EQ(presumed["workers"][0]["gpus"], Json::array({1}));
    EXPECT_EQ(presumed["workers"][0]["gpus_presumed"], true);
    EXPECT_EQ(presumed["workers"][1]["gpus"], Json::array({0}));

    is(R"({"bytes": 640, "pid": )" + std::to_string(presumed["workers"][1]["pid"].get<int>()) + "}");
    const Json seen =
        status_when([](const Json& second) { return member(second, "gpus_presumed") == false; })["workers"];
    EXPECT_EQ(seen[1]["gpus"], Json::array({1}));
    EXPECT_EQ(seen[1]["gpu_bytes"], 640);
    EXPECT_FALSE(seen[0].contains("gpus")) << "the driver shows that it uses none";
    EXPECT_THAT(ask(id_, {"ps"}).out, AllOf(HasSubstr("GPU MEM"), HasSubstr("GPU 1: 87 % busy")));
}

TEST(Subcommands, GpusAreShownWithoutAJob) {
    const TemporaryDirectory directory;
    std::ofstream(directory.file("machine.json"))
        << R"({"gpus": [{"uuid": "GPU-a", "total": 85899345920, "used": 1073741824, "busy": 3}]})";
    const RunOptions machine = with_environment({"DDPRUN_NVML_LIBRARY=" + path_of("FAKE_NVML_LIBRARY"),
                                                 "FAKE_NVML=" + directory.file("machine.json")});
    EXPECT_EQ(run({path_of("DDPRUN"), "gpus"}, machine).out, "GPU 0: 3 % busy, 1 GiB of 80 GiB\n");
    EXPECT_EQ(parse_json(run({path_of("DDPRUN"), "gpus", "--json"}, machine).out)
                  .value_or(Json())["gpus"][0]["uuid"],
              "GPU-a");
    const Outcome none =
        run({path_of("DDPRUN"), "gpus"}, with_environment({"DDPRUN_NVML_LIBRARY=" + directory.file("none")}));
    EXPECT_EQ(none.status, 0);
    EXPECT_THAT(none.err, HasSubstr("no NVIDIA GPU can be asked on this host"));
    EXPECT_EQ(run({path_of("DDPRUN"), "gpus", "all"}).status, 64);
}

TEST_F(Ask, ADriverThatDoesNotAnswerDoesNotDelayPs) {
    const TemporaryDirectory directory;
    const std::string machine = directory.file("machine.json");
    std::ofstream(machine) << R"({"gpus": []})";
    environment_ = {"DDPRUN_NVML_LIBRARY=" + path_of("FAKE_NVML_LIBRARY"), "FAKE_NVML=" + machine};
    start({}, {});
    // A process that opens the FIFO waits for a writer.
    std::filesystem::remove(machine);
    ASSERT_EQ(::mkfifo(machine.c_str(), 0600), 0);
    const Outcome status = ask(id_, {"ps"});
    EXPECT_EQ(status.status, 0) << status.err;
    EXPECT_EQ(occurrences(status.out, " running  "), 2) << status.out;
}

TEST_F(Ask, SignalReachesAllWorkersOrOne) {
    Program& program = start({}, {"note", "10", "all", "note", "12", "one"});
    const Outcome one = ask(id_, {"signal", "USR2", "--rank", "1"});
    EXPECT_EQ(one.status, 0) << one.err;
    EXPECT_THAT(one.out, HasSubstr("SIGUSR2 sent to rank 1"));
    ASSERT_TRUE(program.wait_for_output("[1]: one"));
    EXPECT_EQ(ask(id_, {"signal", "sigusr1"}).status, 0);
    ASSERT_TRUE(program.wait_for_output("[0]: all") && program.wait_for_output("[1]: all"));
    EXPECT_EQ(ask(id_, {"signal", "KILL"}).status, 0);
    EXPECT_THAT(program.wait().out, Not(HasSubstr("[0]: one")));
}

TEST_F(Ask, MalformedQuestionsAreRefusedAndTheJobGoesOn) {
    start({}, {});
    const Outcome rank = ask(id_, {"signal", "USR1", "--rank=9"});
    EXPECT_EQ(rank.status, 1);
    EXPECT_THAT(rank.err, HasSubstr("ddprun signal: no rank 9"));
    EXPECT_EQ(ask(id_, {"signal", "USR9"}).status, 64);
    EXPECT_EQ(ask(id_, {"ps", "--rank=x"}).status, 64);
    EXPECT_EQ(ask(id_, {"logs"}).status, 69);
    EXPECT_THAT(ask(id_, {"logs"}).err, HasSubstr("keeps no log files (start it with --log-dir DIR)"));
    EXPECT_EQ(status_of(id_)["phase"], "running");
}

TEST_F(Ask, AJobThatDoesNotRunIsNotFound) {
    const Outcome outcome = ask(id_, {"drain"});
    EXPECT_EQ(outcome.status, 69);
    EXPECT_THAT(outcome.err, HasSubstr("ddprun drain: "));
}

TEST_F(Ask, AQuestionToOneJobDoesNotWaitForAnotherThatIsStopped) {
    start({}, {});
    Program other(ddprun_probe({"--rdzv-id=" + unique_name("stopped")}, {"say", "up", "hold"}));
    ASSERT_TRUE(other.wait_for_output("up\n"));
    other.signal(SIGSTOP);
    const auto begun = std::chrono::steady_clock::now();
    const Outcome outcome = ask(id_, {"ps"});
    EXPECT_LT(std::chrono::steady_clock::now() - begun, 4s) << "it is given five to answer";
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    other.signal(SIGCONT);
    other.signal(SIGTERM);
    EXPECT_EQ(other.wait().status, 75);
}

TEST_F(Ask, DrainLetsWorkersSaveAndExitsWith75) {
    const TemporaryDirectory directory;
    Program& program = start({"--events=" + directory.file("events")},
                             {"note", "15", "saved", "say", "up", "noted", "15", "exit", "0"});
    const Outcome drained = ask(id_, {"drain"});
    EXPECT_EQ(drained.status, 0) << drained.err;
    const Outcome outcome = program.wait();
    EXPECT_EQ(outcome.status, 75) << outcome.err;
    EXPECT_THAT(outcome.out, AllOf(HasSubstr("[0]: saved"), HasSubstr("[1]: saved")));
    EXPECT_THAT(outcome.err, HasSubstr("ddprun drain: 2 workers may save"));
    std::ifstream events(directory.file("events"));
    EXPECT_THAT(std::string(std::istreambuf_iterator<char>(events), {}), HasSubstr("\"event\":\"preempt\""));
}

TEST_F(Ask, LogsPrintsOneRanksFilesAndFollowsToTheEnd) {
    const TemporaryDirectory directory;
    Program& program = start({"--log-dir=" + directory.path()},
                             {"note", "10", "later", "rank", "1", "err", "of rank one", "end"});
    await_line_in_log_file(directory, "1/stdout.log", "up\n");
    await_line_in_log_file(directory, "1/stderr.log", "of rank one\n");
    const Outcome one = ask(id_, {"logs", "-r", "1"});
    EXPECT_EQ(one.status, 0) << one.err;
    EXPECT_EQ(one.out, "up\nof rank one\n");
    Program follower({path_of("DDPRUN"), "logs", "-f", "--job=" + id_});
    ASSERT_TRUE(follower.wait_for_output("[1]: of rank one"));
    program.signal(SIGUSR1);
    ASSERT_TRUE(follower.wait_for_output("[0]: later"));
    program.signal(SIGTERM);
    program.wait();
    EXPECT_EQ(follower.wait().status, 0);
}

TEST_F(Ask, LogsShowsRotatedFilesTooAndFollowsAcrossRotations) {
    const TemporaryDirectory directory;
    // 1000 lines of 100 bytes are two files and a bit; as many again while they are followed.
    Program& program = start({"--log-dir=" + directory.path(), "--max-log-size=48KiB"},
                             {"rank", "1", "lines", "1000", "end", "note", "10", "second", "say", "up",
                              "noted", "10", "rank", "1", "lines", "1000", "end", "say", "done"});
    await_line_in_log_file(directory, "1/stdout.log", "up\n");
    const Outcome first = ask(id_, {"logs", "-r", "1"});
    EXPECT_EQ(first.status, 0) << first.err;
    EXPECT_EQ(occurrences(first.out, "\n"), 1001);
    EXPECT_TRUE(first.out.starts_with("rank 1 line 0 ")) << "the oldest piece is left out";

    Program follower({path_of("DDPRUN"), "logs", "-f", "-r", "1", "--job=" + id_});
    ASSERT_TRUE(follower.wait_for_output("up\n"));
    program.signal(SIGUSR1);
    ASSERT_TRUE(follower.wait_for_output("done\n"));
    program.signal(SIGTERM);
    program.wait();
    const Outcome followed = follower.wait();
    EXPECT_EQ(followed.err, "");
    EXPECT_TRUE(followed.out.starts_with(first.out));
    const std::string once = first.out.substr(0, first.out.size() - 3);
    EXPECT_EQ(followed.out, first.out + "second\n" + once + "done\nup\n");
}

TEST_F(Ask, NothingAnswersAfterTheJob) {
    start({}, {}).signal(SIGKILL);
    program_->wait();
    EXPECT_EQ(ask(id_, {"ps"}).status, 69);
}

TEST_F(Ask, AnotherUserIsRefused) {
    if (::geteuid() != 0) GTEST_SKIP() << "only root can become another user";
    start({}, {});
    const std::string name = "ddprun/0/" + status_of(id_)["job"].get<std::string>();
    std::string answer;
    std::thread([&] {
        // The raw call changes this thread only; connect() records its credentials.
        if (::syscall(SYS_setresuid, 65534, 65534, 65534) != 0) return;
        const UniqueFd fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
        sockaddr_un address{};
        address.sun_family = AF_UNIX;
        name.copy(address.sun_path + 1, name.size());
        const auto length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
        if (::connect(fd.get(), reinterpret_cast<sockaddr*>(&address), length) != 0) return;
        char piece[4096];
        for (ssize_t n = 0; (n = ::recv(fd.get(), piece, sizeof piece, 0)) > 0;)
            answer.append(piece, static_cast<std::size_t>(n));
    }).join();
    EXPECT_EQ(answer, "{\"ok\":false,\"error\":\"this job belongs to another user\"}\n");
}

TEST(Subcommands, AProgramOfThatNameIsStillReached) {
    const Outcome dashes = run({path_of("DDPRUN"), "--", "env"}, with_environment({"MARK=mine"}));
    EXPECT_THAT(dashes.out, HasSubstr("MARK=mine\n"));
    const Outcome option =
        run({path_of("DDPRUN"), "--nproc-per-node=1", "env"}, with_environment({"MARK=mine"}));
    EXPECT_THAT(option.out, HasSubstr("MARK=mine\n"));
}

TEST(Subcommands, EnvNamesTheSourceOfEachValue) {
    const TemporaryDirectory directory;
    std::ofstream(directory.file("job.json")) << R"({"role": "trainer"})";
    const Outcome outcome =
        run({path_of("DDPRUN"), "env", "--max-restarts=3", "--config=" + directory.file("job.json")},
            with_environment({"PET_NPROC_PER_NODE=2", "CUDA_VISIBLE_DEVICES=0", "SLURM_JOB_ID=77"}));
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    EXPECT_THAT(outcome.out, AllOf(HasSubstr("--max-restarts 3  (from command line)"),
                                   HasSubstr("--nproc-per-node 2  (from PET_NPROC_PER_NODE)"),
                                   HasSubstr("--role trainer  (from " + directory.file("job.json") + ")"),
                                   HasSubstr("SLURM_JOB_ID=77"), HasSubstr("workers of this node: 2")));
    EXPECT_EQ(run({path_of("DDPRUN"), "env", "--nnodes=x"}).status, 64);
}

// ---- events and metrics

std::vector<Json> events_in(const std::string& path) {
    std::vector<Json> events;
    std::ifstream file(path);
    for (std::string line; std::getline(file, line);) {
        events.push_back(parse_json(line).value_or(Json()));
        EXPECT_TRUE(events.back().is_object()) << line;
    }
    return events;
}

TEST(Events, TellTheWholeStoryOfARestart) {
    const TemporaryDirectory directory;
    const Outcome outcome = run(
        ddprun_probe({"--nproc-per-node=2", "--max-restarts=1", "--events=" + directory.file("events")},
                     {"rank", "1", "once", directory.file("once"), "exit", "5", "end", "end", "exit", "0"}));
    ASSERT_EQ(outcome.status, 0) << outcome.err;
    std::map<std::string, int> count;
    for (const Json& event : events_in(directory.file("events"))) {
        ++count[event["event"].get<std::string>()];
        if (event["event"] == "worker_exited" && member(event, "exit_code") == 5) {
            EXPECT_EQ(event["rank"], 1);
            EXPECT_EQ(event["generation"], 1);
        }
        if (event["event"] == "finished") {
            EXPECT_EQ(event["exit_code"], 0);
        }
    }
    EXPECT_EQ(count["job_started"], 1);
    EXPECT_EQ(count["generation_started"], 2);
    EXPECT_EQ(count["generation_ended"], 2);
    EXPECT_EQ(count["restart"], 1);
    EXPECT_EQ(count["worker_exited"], 4);
    EXPECT_EQ(count["finished"], 1);
}

TEST(Events, AFullDiskIsReportedOnceAndTheJobSucceeds) {
    const Outcome outcome = run(ddprun_probe({"--nproc-per-node=2", "--events=/dev/full"}, {"say", "done"}));
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    const std::size_t first = outcome.err.find("No space left on device");
    ASSERT_NE(first, std::string::npos) << outcome.err;
    EXPECT_EQ(outcome.err.find("No space left on device", first + 1), std::string::npos);
}

TEST(Events, AFileThatCannotBeMadeIsRefusedBeforeAnythingIsStarted) {
    const TemporaryDirectory empty;
    const std::string path = empty.file("none/events");
    const Outcome outcome = run(ddprun_probe({"--events=" + path}, {"say", "started"}));
    EXPECT_EQ(outcome.status, 64);
    EXPECT_EQ(outcome.out, "");
    EXPECT_THAT(outcome.err, HasSubstr("ddprun: --events: open " + path + ": No such file or directory"));
}

std::string scrape(std::uint16_t port, const std::string& path) {
    const TimePoint deadline = MonotonicClock::now() + 10s;
    Result<UniqueFd> fd = connect_tcp({"127.0.0.1", port}, deadline);
    if (!fd) return fd.error().what;
    if (!send_all(fd->get(), "GET " + path + " HTTP/1.1\r\nHost: x\r\n\r\n", deadline)) return "not sent";
    std::string text;
    char piece[4096];
    while (wait_readable(fd->get(), deadline).value_or(false)) {
        const ssize_t n = ::recv(fd->get(), piece, sizeof piece, 0);
        if (n <= 0) break;
        text.append(piece, static_cast<std::size_t>(n));
    }
    return text;
}

TEST_F(Ask, NoQuestionOfAJobWhoseFileCallsAllHangCostsANode) {
    const TemporaryDirectory slow;
    const std::string report = slow.path() + ".held";
    const ReservedPort port, metrics;
    std::filesystem::create_directory(slow.file("bin"));
    std::vector<std::unique_ptr<Program>> nodes;
    for (const std::string node : {"0", "1"}) {
        std::vector<std::string> command = {path_of("SLOW_CALLS"), "3000", slow.path(), report + node};
        const std::vector<std::string> job =
            ddprun_probe({"--nnodes=2", "--node-rank=" + node, "--nproc-per-node=1", "--rdzv-id=" + id_,
                          "--rdzv-endpoint=" + port.text(), "--heartbeat-timeout=1500ms", "--redirects=3",
                          "--log-dir=" + slow.file("logs" + node)},
                         {"once", slow.file("up" + node), "end", "note", "10", "noted", "hold"});
        command.insert(command.end(), job.begin(), job.end());
        if (node == "0") command.insert(command.begin() + 5, "--metrics-port=" + metrics.number());
        nodes.push_back(std::make_unique<Program>(
            command, with_environment(
                         {"DDPRUN_TOKEN=secret of the job", "PATH=" + slow.file("bin") + ":/usr/bin:/bin"})));
    }
    const auto are_up = [&] {
        return std::filesystem::exists(slow.file("up0")) && std::filesystem::exists(slow.file("up1"));
    };
    if (!comes(are_up) && nodes[0]->wait().status == 77) GTEST_SKIP() << "no seccomp listeners here";
    // The last files that ddprun needs at the start are those of the error reports.
    const auto has_begun = [&](const std::string& node) {
        const std::string held = file_content(report + node);
        return held.find("watch\n") != held.npos && held.find("open .json\n") != held.npos;
    };
    ASSERT_TRUE(comes([&] { return has_begun("0") && has_begun("1"); }));
    ASSERT_TRUE(comes([&] { return ask(id_, {"ps"}).out.find("2 workers") != std::string::npos; }));
    for (const char* node : {"0", "1"}) std::ofstream(report + node + ".all") << "";
    for (const std::vector<std::string>& question : std::vector<std::vector<std::string>>{
             {"ps"}, {"ps", "--json"}, {"top"}, {"stacks"}, {"logs"}, {"signal", "USR1"}, {"drain"}}) {
        if (question[0] == "drain") {
            EXPECT_THAT(scrape(metrics.endpoint().port, "/metrics"), HasSubstr("ddprun_"));
        }
        const Outcome answer = ask(id_, question);
        EXPECT_EQ(answer.status, 0) << question[0] << ": " << answer.err;
        EXPECT_THAT(answer.out, Not(HasSubstr("no answer"))) << question[0];
    }
    for (const char* node : {"0", "1"}) std::filesystem::remove(report + node + ".all");
    for (const auto& node : nodes) {
        const Outcome outcome = node->wait();
        EXPECT_EQ(outcome.status, 75) << outcome.err;
        EXPECT_THAT(outcome.err, AllOf(Not(HasSubstr("heartbeat")), Not(HasSubstr("lost"))));
    }
    for (const char* node : {"0", "1"}) {
        EXPECT_THAT(file_content(report + node), AllOf(HasSubstr("stat\n"), HasSubstr("access\n")));
        std::filesystem::remove(report + node);
    }
}

TEST_F(Ask, MetricsAreServedOnTheLoopbackPort) {
    const Result<Listener> taken = listen_tcp({"127.0.0.1", 0});
    ASSERT_TRUE(taken);
    const Outcome refused =
        run(ddprun_probe({"--metrics-port=" + std::to_string(taken->bound.port)}, {"say", "started"}));
    EXPECT_EQ(refused.status, 69) << refused.err;
    EXPECT_EQ(refused.out, "");
    const Outcome elsewhere = run(ddprun_probe({"--metrics-port=203.0.113.9:0"}, {"say", "started"}));
    EXPECT_EQ(elsewhere.status, 69) << elsewhere.err;
    EXPECT_EQ(elsewhere.out, "");
    EXPECT_THAT(elsewhere.err, HasSubstr("this host has no such address"));
    const ReservedPort port;
    start({"--metrics-port=" + port.number()}, {});
    EXPECT_THAT(scrape(port.endpoint().port, "/metrics"),
                AllOf(HasSubstr("200 OK"), HasSubstr("ddprun_world_size{run_id=\"" + id_ + "\""),
                      HasSubstr("rank=\"1\"} 1\n")));
    EXPECT_THAT(scrape(port.endpoint().port, "/"), HasSubstr("404 Not Found"));
}

}  // namespace
}  // namespace ddprun::test
