// `import ddprun` in Python workers: steps, and the agreed stop.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>

#include <cstring>
#include <filesystem>
#include <random>

#include "env/json.h"
#include "env/segment.h"
#include "tests/support/comes.h"
#include "tests/support/reserved_port.h"
#include "tests/support/run_program.h"
#include "tests/support/temporary_directory.h"
#include "tests/system/look.h"

namespace ddprun::test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

const std::string kPython = "/usr/bin/python3";

/// Ranks that step until they are to stop. argv: the step at which they say so, and a file name: with one,
/// the two ranks wait for each other in every step.
const std::string kLoop = R"(
import os, socket, sys, time
import ddprun
rank, mark, path = int(os.environ["RANK"]), int(sys.argv[1]), sys.argv[2]
peer = None
if path:
    listener = socket.socket(socket.AF_UNIX)
    if rank == 0:
        listener.bind(path + ".new"); listener.listen(); os.rename(path + ".new", path)
        peer = listener.accept()[0]
    else:
        while not os.path.exists(path): time.sleep(0.001)
        listener.connect(path); peer = listener
n = 0
while True:
    time.sleep(0.0005 * (rank + 1))
    if peer:
        peer.send(b"x"); assert peer.recv(1) == b"x"
    n += 1
    ddprun.step(n)
    if ddprun.should_stop(n): break
    if n == mark: print("at the mark")
print("stopped after step", n, "for", ddprun.why(), "and saved")
)";

class PythonWorkers : public ::testing::Test {
  protected:
    void SetUp() override {
        if (!std::filesystem::exists(kPython)) GTEST_SKIP() << "python3 is not installed";
    }
    static std::vector<std::string> job(const std::string& id, const std::vector<std::string>& worker,
                                        std::vector<std::string> options = {"--nproc-per-node=2"}) {
        options.insert(options.begin(), path_of("DDPRUN"));
        options.insert(options.end(), {"--rdzv-id=" + id, "--no-python", kPython});
        options.insert(options.end(), worker.begin(), worker.end());
        return options;
    }
    static Outcome ask(const std::string& id, const std::string& what, std::vector<std::string> more = {}) {
        more.insert(more.begin(), {path_of("DDPRUN"), what, "--job", id});
        return run(more);
    }
    /// Drains a job of two ranks when both have passed this step.
    static Outcome drained_at(int mark, const std::string& socket) {
        const std::string id = unique_name("stop");
        Program program(job(id, {"-u", "-c", kLoop, std::to_string(mark), socket}));
        EXPECT_TRUE(program.wait_for_output("[0]: at the mark") &&
                    program.wait_for_output("[1]: at the mark"));
        EXPECT_EQ(ask(id, "drain").status, 0);
        return program.wait();
    }
};

/// "812" of the first "stopped after step 812" behind `prefix`; "" none.
std::string last_step(const std::string& out, const std::string& prefix = "") {
    const std::string begin = prefix + "stopped after step ";
    const std::size_t at = out.find(begin);
    if (at == std::string::npos) return "";
    return out.substr(at + begin.size(), out.find(" for ", at) - at - begin.size());
}

/// DDPRUN_TEST_DRAINS: how often; a nightly test has more.
int drains() {
    const char* const wanted = std::getenv("DDPRUN_TEST_DRAINS");
    return wanted == nullptr ? 10 : std::atoi(wanted);
}

TEST_F(PythonWorkers, ThatWaitForEachOtherStopAfterTheSameStep) {
    std::mt19937 random(7);
    for (int i = 0; i < drains(); ++i) {
        const TemporaryDirectory directory;
        const Outcome outcome = drained_at(1 + static_cast<int>(random() % 100), directory.file("socket"));
        ASSERT_EQ(outcome.status, 75) << outcome.err;
        ASSERT_NE(last_step(outcome.out, "[0]: "), "") << outcome.out << outcome.err;
        ASSERT_EQ(last_step(outcome.out, "[0]: "), last_step(outcome.out, "[1]: "))
            << outcome.out << outcome.err;
        ASSERT_THAT(outcome.err, HasSubstr("all workers stop after step " + last_step(outcome.out, "[0]: ")));
        ASSERT_THAT(outcome.out, HasSubstr("for ddprun drain and saved"));
    }
}

TEST_F(PythonWorkers, WithoutCollectivesStopAfterTheSameStep) {
    std::mt19937 random(8);
    for (int i = 0; i < drains(); ++i) {
        const Outcome outcome = drained_at(1 + static_cast<int>(random() % 100), "");
        ASSERT_EQ(outcome.status, 75) << outcome.err;
        ASSERT_NE(last_step(outcome.out, "[0]: "), "") << outcome.out << outcome.err;
        ASSERT_EQ(last_step(outcome.out, "[0]: "), last_step(outcome.out, "[1]: "))
            << outcome.out << outcome.err;
    }
}

TEST_F(PythonWorkers, OfSeveralNodesStopAfterTheSameStep) {
    const std::string id = unique_name("stop");
    const ReservedPort port;
    const std::vector<std::string> options = {"--nnodes=2", "--rdzv-backend=c10d", "--nproc-per-node=1",
                                              "--rdzv-endpoint=" + port.text()};
    const auto node = [&] { return job(id, {"-u", "-c", kLoop, "5", ""}, options); };
    Program one(node()), two(node());
    ASSERT_TRUE(one.wait_for_output("at the mark") && two.wait_for_output("at the mark"));
    const std::string shown = ask(id, "ps").out;
    const Outcome drained = ask(id, "drain");
    EXPECT_EQ(drained.status, 0);
    const std::string name = shown.substr(0, shown.find(','));  // "job 6f1de9dd (run id stop-17"
    EXPECT_EQ(drained.out.substr(0, name.size()), name) << "each ddprun has a number of its own";
    const Outcome first = one.wait(), second = two.wait();
    EXPECT_EQ(first.status, 75) << first.err;
    EXPECT_EQ(second.status, 75) << second.err;
    EXPECT_NE(last_step(first.out), "") << first.err;
    EXPECT_EQ(last_step(first.out), last_step(second.out)) << first.err << second.err;
}

/// Under PBS and Slurm the scheduler's SIGTERM reaches each worker 10 to 20 ms before or after ddprun's.
TEST_F(PythonWorkers, SaveWhenASchedulerSignalsThemAndDdprunAlike) {
    for (const bool are_workers_first : {true, false}) {
        Program program(job(unique_name("stop"), {"-u", "-c", kLoop, "5", ""}));
        ASSERT_TRUE(program.wait_for_output("[0]: at the mark") &&
                    program.wait_for_output("[1]: at the mark"));
        const std::vector<pid_t> workers = children_named(program.pid(), "python3");
        ASSERT_EQ(workers.size(), 2u);
        const auto signal_workers = [&] {
            for (const pid_t worker : workers) ::kill(worker, SIGTERM);
        };
        if (are_workers_first) signal_workers();
        program.signal(SIGTERM);
        signal_workers();
        const Outcome outcome = program.wait();
        EXPECT_EQ(outcome.status, 75) << outcome.err;
        EXPECT_NE(last_step(outcome.out, "[0]: "), "") << outcome.out << outcome.err;
        EXPECT_EQ(last_step(outcome.out, "[0]: "), last_step(outcome.out, "[1]: ")) << outcome.out;
    }
}

TEST_F(PythonWorkers, GetTheSignalAtOnceWhereOneOfThemDoesNotListen) {
    const std::string id = unique_name("stop");
    Program program(job(id, {"-u", "-c", R"(
import os, signal, sys, ddprun
signal.signal(signal.SIGTERM, lambda *_: (print("SIGTERM, stop:", ddprun.should_stop(2)), sys.exit(0)))
if os.environ["RANK"] == "0": ddprun.should_stop(1)
print("up")
signal.pause()
)"}));
    ASSERT_TRUE(program.wait_for_output("[0]: up") && program.wait_for_output("[1]: up"));
    EXPECT_EQ(ask(id, "drain").status, 0);
    const Outcome outcome = program.wait();
    EXPECT_EQ(outcome.status, 75) << outcome.err;
    EXPECT_THAT(outcome.out,
                AllOf(HasSubstr("[0]: SIGTERM, stop: False"), HasSubstr("[1]: SIGTERM, stop: False")));
    EXPECT_THAT(outcome.err, AllOf(Not(HasSubstr("agree")), Not(HasSubstr("after step"))));
}

TEST_F(PythonWorkers, AreShownWithTheirStepsAlsoWhereTheirStarterHasClosedTheDescriptors) {
    const std::string id = unique_name("steps");
    const std::string worker = R"py(
import os, subprocess, sys
program = "import ddprun, signal; ddprun.step(812); print('up', flush=True); signal.pause()"
if os.environ["RANK"] == "1": subprocess.run([sys.executable, "-c", program])  # closes all descriptors
exec(program)
)py";
    Program program(job(id, {"-c", worker}));
    ASSERT_TRUE(program.wait_for_output("[0]: up") && program.wait_for_output("[1]: up"));
    const Result<Json> status = parse_json_object(ask(id, "ps", {"--json"}).out);
    ASSERT_TRUE(status) << status.error().what;
    for (const Json& one : elements(member(*status, "workers"))) EXPECT_EQ(member(one, "step"), 812) << one;
    EXPECT_EQ(elements(member(*status, "workers")).size(), 2u);
    EXPECT_THAT(ask(id, "ps").out, HasSubstr(" 812 "));
}

TEST_F(PythonWorkers, KeepTheirPythonpathBeforeOurs) {
    const TemporaryDirectory directory;
    const Outcome outcome =
        run(job(unique_name("path"), {"-c", "import os; print('path', os.environ['PYTHONPATH'])"},
                {"--nproc-per-node=1"}),
            with_environment({"PYTHONPATH=" + directory.path()}));
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    EXPECT_THAT(outcome.out, HasSubstr("path " + directory.path() + ":"));
    EXPECT_THAT(outcome.out, HasSubstr("workers/python\n"));
    const Outcome with_empty =
        run(job(unique_name("path"), {"-c", "import os; print('path', os.environ['PYTHONPATH'])"},
                {"--nproc-per-node=1"}),
            with_environment({"PYTHONPATH=" + directory.path() + ":"}));
    EXPECT_THAT(with_empty.out, HasSubstr("path " + directory.path() + ":"));
    EXPECT_THAT(with_empty.out, HasSubstr("workers/python:\n")) << "the empty entry is the current directory";
    const Outcome other = run({path_of("DDPRUN"), "--nproc-per-node=1", "--no-python", "/usr/bin/env"});
    EXPECT_THAT(other.out, Not(HasSubstr("PYTHONPATH")));
}

/// Runs Python with our module, but without ddprun.
Outcome run_module(const std::string& program, std::vector<std::string> variables = {}) {
    variables.push_back("PYTHONPATH=" + path_of("SOURCE_ROOT") + "/workers/python");
    variables.push_back("PYTHONDONTWRITEBYTECODE=1");
    return run({kPython, "-c", program}, with_environment(variables));
}

TEST_F(PythonWorkers, RunWithoutDdprunToo) {
    const Outcome outcome = run_module(
        "import ddprun; ddprun.step(1, loss=0.5); print(ddprun.should_stop(1), repr(ddprun.why()))");
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    EXPECT_EQ(outcome.out, "False ''\n");
    EXPECT_EQ(outcome.err, "");
}

/// A file that is laid out as a segment for two ranks, 6 and 7, as rank 7 gets it.
class SegmentOnDisk {
  public:
    SegmentOnDisk() {
        const int fd = ::open(path().c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
        EXPECT_EQ(::ftruncate(fd, static_cast<off_t>(segment_arena_offset(2))), 0);
        base_ = static_cast<char*>(
            ::mmap(nullptr, segment_arena_offset(2), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0));
        ::close(fd);
        auto* const header = reinterpret_cast<SegmentHeader*>(base_);
        header->magic = kSegmentMagic;
        header->version = kSegmentVersion;
        header->local_world_size = 2;
        header->world_size = 8;
        header->first_rank = 6;
        header->scalars_offset = segment_scalars_offset(2);
    }
    ~SegmentOnDisk() { ::munmap(base_, segment_arena_offset(2)); }
    [[nodiscard]] std::string path() const { return directory_.file("segment"); }
    [[nodiscard]] SegmentHeader& header() const { return *reinterpret_cast<SegmentHeader*>(base_); }
    [[nodiscard]] RankLine& line() const { return reinterpret_cast<RankLine*>(base_ + kRankLinesOffset)[1]; }
    [[nodiscard]] ScalarRing& ring() const {
        return reinterpret_cast<ScalarRing*>(base_ + segment_scalars_offset(2))[1];
    }
    [[nodiscard]] Outcome run(const std::string& program) const {
        return run_module("import ddprun\n" + program, {"DDPRUN_SEGMENT=" + path(), "RANK=7"});
    }

  private:
    TemporaryDirectory directory_;
    char* base_ = nullptr;
};

TEST_F(PythonWorkers, WriteStepsAndScalarsWhereDdprunReadsThem) {
    const SegmentOnDisk segment;
    segment.ring().is_read = 1;
    const Outcome outcome =
        segment.run("ddprun.step(41, loss=0.25); ddprun.step(42, loss=2, **{'eval/ä': 3.5})");
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    EXPECT_EQ(segment.line().step, 42u);
    EXPECT_GT(segment.line().progress_ns, 0);
    const ScalarRing& ring = segment.ring();
    ASSERT_EQ(ring.written, 3u);
    EXPECT_EQ(ring.tag_count, 2u);
    EXPECT_STREQ(ring.tags[0], "loss");
    EXPECT_STREQ(ring.tags[1], "eval/ä");
    EXPECT_EQ(ring.records[0].step, 41u);
    EXPECT_EQ(ring.records[0].value, 0.25);
    EXPECT_EQ(ring.records[1].value, 2);
    EXPECT_EQ(ring.records[2].tag, 1u);
    EXPECT_GT(ring.records[2].time, 1.7e9);
    EXPECT_EQ(ring.lost, 0u);
}

TEST_F(PythonWorkers, GoOnInTheMemoryOfTheNextGeneration) {
    const SegmentOnDisk first, second;
    first.header().generation = 1;
    first.header().aborted = 1;
    second.header().generation = 2;
    first.ring().is_read = second.ring().is_read = 1;
    second.line().stop = stop_word(7, true);
    const Outcome outcome = first.run(R"(
import os
ddprun.step(5, loss=1)
os.environ.update(DDPRUN_SEGMENT=")" + second.path() +
                                      R"(", DDPRUN_GENERATION="2")
ddprun.step(6, loss=2)
print(ddprun.should_stop(7))
)");
    EXPECT_EQ(outcome.out, "True\n") << outcome.err;
    EXPECT_EQ(first.line().step, 5u);
    EXPECT_EQ(second.line().step, 6u);
    EXPECT_EQ(second.line().asked, 8u);
    EXPECT_EQ(first.ring().written, 1u);
    EXPECT_EQ(second.ring().written, 1u);
    EXPECT_STREQ(second.ring().tags[0], "loss");
}

TEST_F(PythonWorkers, DetachATensorThatTheyTell) {
    const SegmentOnDisk segment;
    segment.ring().is_read = 1;
    const Outcome outcome = segment.run(R"(
class Tensor:
    def __init__(self, is_detached=False): self.is_detached = is_detached
    def detach(self): return Tensor(True)
    def __float__(self): return 0.5 if self.is_detached else 1 / 0  # torch warns
ddprun.step(1, loss=Tensor())
)");
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    EXPECT_EQ(segment.ring().records[0].value, 0.5);
}

TEST_F(PythonWorkers, DropAndCountScalarsThatNobodyReads) {
    const SegmentOnDisk segment;
    EXPECT_EQ(segment.run("ddprun.step(1, loss=1)").status, 0);
    EXPECT_EQ(segment.ring().tag_count, 0u) << "nobody reads scalars, so none is written";
    segment.ring().is_read = 1;
    const Outcome outcome = segment.run(
        "for n in range(16385): ddprun.step(n, loss=n)\nfor n in range(300): ddprun.step(n, **{'x' * n: n})");
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    EXPECT_EQ(segment.ring().written, kScalarRecords);
    EXPECT_EQ(segment.ring().records[kScalarRecords - 1].step, kScalarRecords - 1);
    EXPECT_EQ(segment.ring().lost, 301u);
    EXPECT_EQ(segment.ring().tag_count, kScalarTags);
    EXPECT_EQ(std::string(segment.ring().tags[255]).size(), kScalarTagBytes - 1) << "cut";
}

TEST_F(PythonWorkers, WaitOnlyAtAProposedStep) {
    const SegmentOnDisk segment;
    const auto stops_at = [&](std::uint64_t word, int step) {
        segment.line().stop = word;
        return segment.run("print(ddprun.should_stop(" + std::to_string(step) + "), ddprun.why())").out;
    };
    std::strcpy(segment.header().stop_reason, "walltime in 2 min");
    EXPECT_EQ(stops_at(0, 9), "False \n");
    EXPECT_EQ(segment.line().asked, 10u);
    EXPECT_EQ(stops_at(stop_word(10, false), 9), "False \n");
    EXPECT_EQ(stops_at(stop_word(10, true), 9), "False walltime in 2 min\n");
    EXPECT_EQ(stops_at(stop_word(10, true), 10), "True walltime in 2 min\n");
    segment.line().stop = stop_word(10, false);
    Program waiting(
        {kPython, "-uc", "import ddprun; print('up'); print(ddprun.should_stop(10))"},
        with_environment({"DDPRUN_SEGMENT=" + segment.path(), "RANK=7", "PYTHONDONTWRITEBYTECODE=1",
                          "PYTHONPATH=" + path_of("SOURCE_ROOT") + "/workers/python"}));
    ASSERT_TRUE(waiting.wait_for_output("up"));
    EXPECT_TRUE(comes([&] { return segment.line().asked == 11; }, std::chrono::seconds(20)));
    segment.line().stop = stop_word(12, false);  // a later one is proposed
    EXPECT_EQ(waiting.wait().out, "up\nFalse\n");
}

TEST_F(PythonWorkers, TakeASigtermOfWhichDdprunMakesNoStopAsTheirEnd) {
    const SegmentOnDisk segment;
    const std::string begin = "import os, signal; ddprun.should_stop(1); os.kill(os.getpid(), 15); ";
    const Outcome soon = segment.run(begin + "print(ddprun.should_stop(2))");
    EXPECT_EQ(soon.out, "False\n") << soon.err;
    EXPECT_EQ(segment.line().outlives_term, 1u);
    const Outcome later =
        segment.run(begin + "ddprun._first_term -= 5; ddprun.should_stop(2); print('lives')");
    EXPECT_EQ(later.out, "") << "5 s later";
    const Outcome again =
        segment.run(begin + "ddprun._first_term -= 5; os.kill(os.getpid(), 15); print('lives')");
    EXPECT_EQ(again.out, "");
    EXPECT_EQ(
        segment.run("import signal; signal.signal(signal.SIGTERM, print); ddprun.should_stop(1)").status, 0);
    EXPECT_EQ(segment.line().outlives_term, 0u) << "the program's own handler stays";
}

TEST_F(PythonWorkers, LeaveSigtermToTheProcessesThatTheyFork) {
    const SegmentOnDisk segment;
    const Outcome outcome = segment.run(R"py(
import os; ddprun.should_stop(1)
child = os.fork()
if child == 0: os.kill(os.getpid(), 15); os._exit(0)
print(os.WTERMSIG(os.waitpid(child, 0)[1])))py");
    EXPECT_EQ(outcome.out, "15\n") << outcome.err;
}

TEST_F(PythonWorkers, GoOnWithOneLineWhereTheMemoryCannotBeReached) {
    const TemporaryDirectory empty;
    const Outcome missing = run_module("import ddprun; ddprun.step(1); print(ddprun.should_stop(1))",
                                       {"DDPRUN_SEGMENT=" + empty.file("none"), "RANK=0"});
    EXPECT_EQ(missing.out, "False\n");
    EXPECT_THAT(missing.err, HasSubstr("ddprun: steps are not reported: " + empty.file("none") +
                                       ": [Errno 2] No such file"));
    const SegmentOnDisk segment;
    segment.header().version = 9;
    EXPECT_THAT(segment.run("ddprun.step(1)").err,
                HasSubstr("its layout has version 9, this module knows 2: install one release"));
    segment.header().version = kSegmentVersion;
    segment.header().generation = 3;
    EXPECT_THAT(run_module("import ddprun; ddprun.step(1)",
                           {"DDPRUN_SEGMENT=" + segment.path(), "RANK=7", "DDPRUN_GENERATION=2"})
                    .err,
                HasSubstr("it is of generation 3, this process of 2"));
    EXPECT_EQ(segment.line().step, 0u);
}

TEST_F(PythonWorkers, OfAnotherLauncherInsideAWorkerDoNotTakePart) {
    const SegmentOnDisk segment;
    segment.line().stop = stop_word(1, true);
    for (const char* const rank : {"RANK=7", "RANK=3"}) {
        const Outcome outcome = run_module("import ddprun; ddprun.step(1); print(ddprun.should_stop(1))",
                                           {"DDPRUN_SEGMENT=" + segment.path(), rank, "WORLD_SIZE=16"});
        EXPECT_EQ(outcome.out, "False\n") << outcome.err;
        EXPECT_EQ(outcome.err, "");
    }
    EXPECT_EQ(segment.line().step, 0u);
}

}  // namespace
}  // namespace ddprun::test
