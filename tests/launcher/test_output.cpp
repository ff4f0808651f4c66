#include <fcntl.h>
#include <fmt/core.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/epoll.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <random>
#include <sstream>

#include "env/io/file.h"
#include "env/os/log.h"
#include "launcher/output/kept_output.h"
#include "launcher/output/lines.h"
#include "launcher/output/output.h"
#include "launcher/output/output_sender.h"
#include "tests/support/small_disk.h"
#include "tests/support/temporary_directory.h"

namespace ddprun {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using testing::Contains;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;
using Stream = Output::Stream;

constexpr TimePoint kStart{seconds(1000)};

struct Pipe {
    UniqueFd read, write;
    Pipe() {
        int ends[2];
        if (::pipe2(ends, O_CLOEXEC) != 0) std::abort();
        read.reset(ends[0]);
        write.reset(ends[1]);
        ::fcntl(read.get(), F_SETFL, O_NONBLOCK);
    }
};

void put(const UniqueFd& fd, std::string_view text) {
    ASSERT_EQ(::write(fd.get(), text.data(), text.size()), static_cast<ssize_t>(text.size()));
}

/// Reads all available bytes.
std::string available(const UniqueFd& fd) {
    std::string text, piece(65536, '\0');
    for (ssize_t n = 0; (n = ::read(fd.get(), piece.data(), piece.size())) > 0;)
        text.append(piece, 0, static_cast<std::size_t>(n));
    return text;
}

std::string content(const std::string& path) {
    std::ostringstream text;
    text << std::ifstream(path).rdbuf();
    return text.str();
}

/// An Output whose consoles are pipes.
class OutputTest : public testing::Test {
  protected:
    OutputTest() : loop_(std::move(*os::EventLoop::create({}))) { spec_.half_line_after = seconds(60); }

    Output& output() {
        if (!output_)
            output_ = std::make_unique<Output>(*loop_, spec_, ranks_, out_.write.get(), err_.write.get());
        return *output_;
    }
    /// Adds a stream and returns the worker's end.
    UniqueFd worker(int rank, Stream stream = Stream::Out) {
        Pipe pipe;
        const Status added = output().add(std::move(pipe.read), {rank, rank, "default", "node00"}, stream);
        EXPECT_TRUE(added) << (added ? "" : added.error().what);
        return std::move(pipe.write);
    }
    /// Runs the loop until `done`, at most some seconds.
    void run_until(const std::function<bool()>& done) {
        const TimePoint deadline = deadline_after(MonotonicClock::now(), seconds(20));
        while (!done()) {
            ASSERT_LT(MonotonicClock::now(), deadline);
            ASSERT_TRUE(loop_->run_once(deadline));
        }
    }
    /// The console's text, once it has at least that many bytes.
    std::string shown(std::size_t bytes, const Pipe& console) {
        std::string text;
        run_until([&] { return (text += available(console.read)).size() >= bytes; });
        return text;
    }
    std::string shown(std::size_t bytes) { return shown(bytes, out_); }
    /// Waits for the log files, too.
    void write_all() {
        output().flush(deadline_after(MonotonicClock::now(), seconds(20)));
        EXPECT_TRUE(output().flushed());
    }
    /// Writes `text` until the pipe stays full because nobody reads the console. Returns how often it was
    /// written; -1 when the pipe never fills.
    long fill(const UniqueFd& worker, std::string_view text) {
        ::fcntl(worker.get(), F_SETFL, O_NONBLOCK);
        long written = 0;
        for (int refused = 0; refused < 3;) {
            if (written > 1'000'000) return -1;
            if (::write(worker.get(), text.data(), text.size()) == static_cast<ssize_t>(text.size())) {
                ++written;
                refused = 0;
                continue;
            }
            ++refused;
            if (!loop_->run_once(deadline_after(MonotonicClock::now(), milliseconds(10)))) return -1;
        }
        return written;
    }

    std::unique_ptr<os::EventLoop> loop_;
    Pipe out_, err_;
    OutputSpec spec_;
    OutputRanks ranks_{.here = 32, .is_whole_job = true};
    std::unique_ptr<Output> output_;
    test::TemporaryDirectory directory_;
};

TEST_F(OutputTest, PutsThePrefixBeforeEveryLine) {
    const UniqueFd worker0 = worker(0);
    put(worker0, "one\ntwo\n\n");
    EXPECT_EQ(shown(24), "[0]: one\n[0]: two\n[0]: \n");
}

TEST_F(OutputTest, LinesThatArriveInPiecesAreNotMixed) {
    const UniqueFd worker0 = worker(0);
    const UniqueFd worker1 = worker(1);
    put(worker0, "hel");
    put(worker1, "good");
    ASSERT_TRUE(loop_->run_once(deadline_after(MonotonicClock::now(), seconds(5))));
    put(worker1, "bye\n");
    EXPECT_EQ(shown(12), "[1]: goodbye\n");
    put(worker0, "lo\n");
    EXPECT_EQ(shown(10), "[0]: hello\n");
}

TEST_F(OutputTest, NoByteIsLostOrMovedHoweverItArrives) {
    constexpr int kRanks = 3;
    constexpr int kLines = 2000;
    std::mt19937 random(7);
    std::vector<UniqueFd> workers;
    std::vector<std::string> left(kRanks);
    for (int rank = 0; rank < kRanks; ++rank) {
        workers.push_back(worker(rank));
        for (int line = 0; line < kLines; ++line) {
            left[static_cast<std::size_t>(rank)] +=
                std::to_string(line) + std::string(random() % 200, 'x') + '\n';
        }
    }
    const std::vector<std::string> all = left;
    std::string text;
    while (std::any_of(left.begin(), left.end(), [](const std::string& rest) { return !rest.empty(); })) {
        for (std::size_t rank = 0; rank < left.size(); ++rank) {
            const std::size_t n = std::min<std::size_t>(left[rank].size(), 1 + random() % 3000);
            put(workers[rank], left[rank].substr(0, n));
            left[rank].erase(0, n);
        }
        ASSERT_TRUE(loop_->run_once(deadline_after(MonotonicClock::now(), seconds(5))));
        text += available(out_.read);
    }
    workers.clear();
    output().finish_attempt();
    text += available(out_.read);
    std::vector<std::string> seen(kRanks);
    std::istringstream lines(text);
    for (std::string line; std::getline(lines, line);) {
        ASSERT_EQ(line.substr(2, 3), "]: ") << line;
        seen[static_cast<std::size_t>(line[1] - '0')] += line.substr(5) + '\n';
    }
    EXPECT_EQ(seen, all);
}

TEST_F(OutputTest, AHalfLineIsShownMarkedAfterAWhileAndContinued) {
    spec_.half_line_after = milliseconds(1);
    const UniqueFd worker0 = worker(0);
    put(worker0, "loading");
    EXPECT_EQ(shown(10), "[0]: loading [line goes on]\n");
    put(worker0, " done\nnext\n");
    EXPECT_EQ(shown(30), "[0]: [line continued]  done\n[0]: next\n");
}

TEST_F(OutputTest, ALastLineWithoutNewlineIsShownAtTheEnd) {
    UniqueFd worker0 = worker(0);
    put(worker0, "bye");
    worker0.reset();
    EXPECT_EQ(shown(9), "[0]: bye\n");
}

TEST_F(OutputTest, AGiganticLinePassesInMarkedPieces) {
    UniqueFd worker0 = worker(0);
    ::fcntl(worker0.get(), F_SETFL, O_NONBLOCK);
    std::string line(3 << 20, 'a');
    line += '\n';
    std::string rest = line;
    std::string text;
    run_until([&] {
        const ssize_t n = ::write(worker0.get(), rest.data(), rest.size());
        if (n > 0) rest.erase(0, static_cast<std::size_t>(n));
        text += available(out_.read);
        return rest.empty() && text.size() > line.size();
    });
    EXPECT_EQ(std::count(text.begin(), text.end(), 'a'), 3 << 20);
    EXPECT_THAT(text.substr(0, 20), HasSubstr("[0]: aaaa"));
    EXPECT_NE(text.find(std::string(kUnfinishedMark) + "\n[0]: " + std::string(kContinuedMark)),
              std::string::npos);
}

TEST_F(OutputTest, ASlowConsoleMakesTheWorkersWaitAndLosesNothing) {
    UniqueFd worker0 = worker(0);
    const std::string line =
        std::string(127, 'x') + '\n';  // a power of two: a full pipe takes no part of a line
    const long lines = fill(worker0, line);
    ASSERT_GT(lines, 0) << "the queue grows without bound";
    EXPECT_LT(lines, 100'000);
    EXPECT_FALSE(output().flushed());
    worker0.reset();
    const std::size_t bytes = static_cast<std::size_t>(lines) * (line.size() + 5);
    EXPECT_EQ(shown(bytes).size(), bytes);
    EXPECT_EQ(output().loss().bytes, 0U);
}

TEST_F(OutputTest, AWholeLineIsNotCutBecauseNobodyReadsTheConsoleForAWhile) {
    spec_.half_line_after = milliseconds(1);
    const UniqueFd worker0 = worker(0);
    std::string block;  // as a program writes its lines: each block ends within one
    for (int i = 0; i < 40; ++i) block += std::string(99, 'x') + '\n';
    block.resize(4096, 'x');
    const long blocks = fill(worker0, block);
    ASSERT_GT(blocks, 0);
    ASSERT_TRUE(loop_->run_once(deadline_after(MonotonicClock::now(), milliseconds(20))));
    const std::size_t whole_lines = static_cast<std::size_t>(blocks) * (4096 + 40 * 5) - 96;
    const std::string text = shown(whole_lines).substr(0, whole_lines);
    EXPECT_EQ(text.find(kUnfinishedMark), std::string::npos);
}

TEST_F(OutputTest, AJammedConsoleDoesNotKeepTheLoopAwakeWhenItsWorkerEnds) {
    UniqueFd worker0 = worker(0);
    ASSERT_GT(fill(worker0, std::string(4096, '\n')), 0);
    worker0.reset();
    const TimePoint before = MonotonicClock::now();
    ASSERT_TRUE(loop_->run_once(deadline_after(before, milliseconds(30))));
    EXPECT_GE(MonotonicClock::now() - before, milliseconds(25)) << "something was ready all the time";
}

TEST_F(OutputTest, ABusyWorkerIsReadByTheClockAndAQuietOneByEvents) {
    const UniqueFd worker0 = worker(0);
    for (int i = 0; i < 3; ++i) {  // the first two reads follow each other quickly
        put(worker0, "x\n");
        ASSERT_TRUE(loop_->run_once(deadline_after(MonotonicClock::now(), seconds(5))));
    }
    (void)shown(21);
    // When all is quiet, nothing wakes the loop any more.
    ASSERT_TRUE(loop_->run_once(deadline_after(MonotonicClock::now(), milliseconds(20))));
    const std::uint64_t before = loop_->wakeups();
    ASSERT_TRUE(loop_->run_once(deadline_after(MonotonicClock::now(), milliseconds(20))));
    EXPECT_LE(loop_->wakeups(), before + 1);
    put(worker0, "y\n");
    EXPECT_EQ(shown(7), "[0]: y\n");
}

TEST_F(OutputTest, AConsoleThatNobodyReadsIsDrainedAndReportedOnce) {
    const UniqueFd worker0 = worker(0);
    out_.read.reset();
    for (int i = 0; i < 50; ++i) {
        put(worker0, std::string(10'000, 'x') + '\n');
        ASSERT_TRUE(loop_->run_once(deadline_after(MonotonicClock::now(), seconds(5))));
    }
    EXPECT_EQ(available(err_.read),
              "ddprun: output is being lost: write to the console: Broken pipe; the job goes on\n");
    EXPECT_EQ(output().loss().bytes, 50U * 10'006);
    EXPECT_EQ(output().loss().why, "write to the console: Broken pipe");
}

TEST_F(OutputTest, DoesNotMakeTheSharedConsoleNonBlocking) {
    const UniqueFd worker0 = worker(0);
    put(worker0, "x\n");
    EXPECT_EQ(shown(7), "[0]: x\n");
    EXPECT_EQ(::fcntl(out_.write.get(), F_GETFL) & O_NONBLOCK, 0);
    EXPECT_EQ(::fcntl(err_.write.get(), F_GETFL) & O_NONBLOCK, 0);
}

TEST_F(OutputTest, StderrGoesToTheErrorConsole) {
    const UniqueFd out = worker(0, Stream::Out);
    const UniqueFd err = worker(0, Stream::Err);
    put(out, "o\n");
    put(err, "e\n");
    EXPECT_EQ(shown(7, err_), "[0]: e\n");
    EXPECT_EQ(shown(7, out_), "[0]: o\n");
}

TEST_F(OutputTest, OneConsoleForBothStreamsKeepsLinesWhole) {
    Output both(*loop_, spec_, ranks_, out_.write.get(), out_.write.get());
    std::vector<UniqueFd> ends;
    for (const Stream stream : {Stream::Out, Stream::Err}) {
        Pipe pipe;
        ASSERT_TRUE(both.add(std::move(pipe.read), {0, 0, "default", ""}, stream));
        ends.push_back(std::move(pipe.write));
    }
    // These are more bytes than the console takes at once: two queues would tear a line.
    const std::string line = std::string(9000, 'y') + '\n';
    std::string text;
    for (int i = 0; i < 40; ++i) {
        put(ends[static_cast<std::size_t>(i % 2)], line);
        ASSERT_TRUE(loop_->run_once(deadline_after(MonotonicClock::now(), seconds(5))));
    }
    EXPECT_TRUE(both.say("of our own\n"));
    run_until([&] { return (text += available(out_.read)).size() >= 40 * 9006 + 11; });
    std::istringstream lines(text);
    for (std::string got; std::getline(lines, got);) {
        EXPECT_TRUE(got == "of our own" || got + '\n' == "[0]: " + line) << got.substr(0, 50);
    }
}

TEST_F(OutputTest, ALogLineOnAJammedConsoleSplitsNoLine) {
    Output both(*loop_, spec_, ranks_, out_.write.get(), out_.write.get());
    os::Log log({"node00", "agent", 1}, {os::LogLevel::Info, false, out_.write.get()});
    log.write_through([&](std::string_view line) { return both.say(line); });
    Pipe pipe;
    ASSERT_TRUE(both.add(std::move(pipe.read), {0, 0, "default", ""}, Stream::Out));
    const std::string line = std::string(8999, 'y') + '\n';
    for (int i = 0; i < 20; ++i) {
        put(pipe.write, line);
        ASSERT_TRUE(loop_->run_once(deadline_after(MonotonicClock::now(), seconds(5))));
    }
    ASSERT_FALSE(both.flushed()) << "the console is to stop within a line";
    std::string text(8192, '\0');
    ASSERT_EQ(::read(out_.read.get(), text.data(), text.size()), 8192);
    log.warning("rank 0 died");  // there is room for it now, within the line
    run_until([&] {
        text += available(out_.read);
        return both.flushed();
    });
    text += available(out_.read);
    std::istringstream lines(text);
    int ours = 0;
    for (std::string got; std::getline(lines, got);) {
        ours += got == "[node00 agent g1] rank 0 died" ? 1 : 0;
        EXPECT_TRUE(got == "[node00 agent g1] rank 0 died" || got + '\n' == "[0]: " + line)
            << got.substr(0, 50);
    }
    EXPECT_EQ(ours, 1);
}

TEST_F(OutputTest, LogLinesOnAJammedConsoleHaveALimitAndTheReportIsKept) {
    const std::string line = std::string(9999, 'z') + '\n';
    int kept = 0;
    while (kept < 100'000 && output().say(line)) ++kept;
    EXPECT_GT(kept, 50) << "an ordinary burst is kept";
    EXPECT_LT(kept, 1000);
    output().say_last("the report\n");
    const std::string text = shown(static_cast<std::size_t>(kept) * line.size() + 11, err_);
    EXPECT_TRUE(text.ends_with(line + "the report\n"));
    EXPECT_TRUE(output().say("there is room again\n"));
}

TEST_F(OutputTest, FindsTheConsoleOfADescriptor) {
    EXPECT_EQ(output().console_at(err_.write.get()), Stream::Err);
    const UniqueFd again(
        ::open(fmt::format("/proc/self/fd/{}", out_.write.get()).c_str(), O_WRONLY | O_CLOEXEC));
    EXPECT_EQ(output().console_at(again.get()), Stream::Out) << "another description of the same pipe";
    EXPECT_EQ(output().console_at(Pipe().write.get()), std::nullopt);
}

TEST_F(OutputTest, TheConsoleMayBeAFile) {
    const std::string path = directory_.file("console");
    const UniqueFd file(::open(path.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0600));
    Output output(*loop_, spec_, ranks_, file.get(), file.get());
    Pipe pipe;
    ASSERT_TRUE(output.add(std::move(pipe.read), {3, 3, "default", ""}, Stream::Out));
    put(pipe.write, "kept\n");
    run_until([&] { return !content(path).empty(); });
    EXPECT_EQ(content(path), "[3]: kept\n");
    EXPECT_TRUE(output.flushed());
}

TEST_F(OutputTest, FlushWaitsForTheConsoleUntilItsDeadline) {
    const UniqueFd worker0 = worker(0);
    ASSERT_GT(fill(worker0, std::string(4096, '\n')), 0);
    ASSERT_FALSE(output().flushed());
    output().flush(deadline_after(MonotonicClock::now(), milliseconds(5)));
    EXPECT_FALSE(output().flushed()) << "nobody reads";
    out_.read.reset();
    output().flush(deadline_after(MonotonicClock::now(), seconds(20)));
    EXPECT_TRUE(output().flushed());
}

// ---- prefix, filter

TEST_F(OutputTest, PrefixNamesRoleRanksHostAndTime) {
    spec_.prefix = "${host}/${role_name}${local_rank}/${rank} ${time}|";
    Pipe pipe;
    ASSERT_TRUE(output().add(std::move(pipe.read), {12, 4, "trainer", "node03"}, Stream::Out));
    put(pipe.write, "x\n");
    EXPECT_THAT(
        shown(30),
        testing::MatchesRegex("node03/trainer4/12 [0-9][0-9]:[0-9][0-9]:[0-9][0-9]\\.[0-9][0-9][0-9]\\|x\n"));
}

TEST_F(OutputTest, TheOnlyRankThatIsShownInAPipeHasNoPrefix) {
    ranks_.here = 2;
    spec_.local_ranks = {1};
    const UniqueFd hidden = worker(0, Stream::Err);
    const UniqueFd seen = worker(1, Stream::Err);
    put(hidden, "hidden\n");
    put(seen, "seen\n");
    EXPECT_EQ(shown(5, err_), "seen\n");
}

TEST_F(OutputTest, ARankThatSharesItsConsoleHasItsPrefix) {
    // stdout of rank 1 and stderr of rank 0 come into one pipe.
    ranks_.here = 2;
    spec_.log_dir = directory_.path();
    spec_.redirects.by_local_rank = {{0, Streams::Out}, {1, Streams::Err}};
    Output both(*loop_, spec_, ranks_, out_.write.get(), out_.write.get());
    both.begin_attempt(0);
    Pipe pipe;
    ASSERT_TRUE(both.add(std::move(pipe.read), {1, 1, "default", ""}, Stream::Out));
    put(pipe.write, "x\n");
    EXPECT_EQ(shown(7), "[1]: x\n");
}

TEST_F(OutputTest, StreamsWhoseFilesCannotBeMadeCountAsShown) {
    ranks_.here = 2;
    spec_.log_dir = directory_.file("plain") + "/logs";
    std::ofstream(directory_.file("plain")) << "a file";
    spec_.redirects.by_local_rank = {{0, Streams::All}};
    output().begin_attempt(0);
    const UniqueFd worker1 = worker(1);
    put(worker1, "x\n");
    EXPECT_EQ(shown(7), "[1]: x\n");
}

TEST_F(OutputTest, AFileOfFilteredLinesOfManyRanksHasPrefixesWhateverTheConsoleHas) {
    ranks_.here = 2;
    spec_.local_ranks = {0};
    spec_.log_dir = directory_.path();
    spec_.stdout_filters = {"loss"};
    output().begin_attempt(0);
    const UniqueFd worker0 = worker(0);
    put(worker0, "loss 3\n");
    EXPECT_EQ(shown(7), "loss 3\n");
    write_all();
    EXPECT_EQ(content(directory_.path() + "/attempt_0/filtered_stdout.log"), "[0]: loss 3\n");
}

TEST(DefaultPrefix, IsEmptyWhenAllLinesAreOfOneRank) {
    for (const bool is_terminal : {false, true}) {
        for (const bool is_whole_job : {false, true}) {
            EXPECT_EQ(default_prefix({2, is_terminal, is_whole_job}), "[${rank}]: ");
        }
        EXPECT_EQ(default_prefix({1, is_terminal, true}), "") << "there is no other rank";
    }
    EXPECT_EQ(default_prefix({1, false, false}), "") << "what reads the pipe wants the lines as they are";
    EXPECT_EQ(default_prefix({1, true, false}), "[${rank}]: ") << "people want to know which";
}

TEST_F(OutputTest, ColorsOnlyThePrefix) {
    spec_.color = OutputSpec::Color::Always;
    const UniqueFd worker0 = worker(0);
    put(worker0, "x\n");
    EXPECT_EQ(shown(10), "\x1b[32m[0]: \x1b[0mx\n");
}

TEST_F(OutputTest, TheConsoleShowsOnlyTheRanksAskedFor) {
    spec_.local_ranks = {1, 2};
    EXPECT_FALSE(output().needs_pipe({0, 0, "", ""}, Stream::Out)) << "to the null device";
    EXPECT_TRUE(output().needs_pipe({0, 0, "", ""}, Stream::Err)) << "for the report";
    EXPECT_TRUE(output().needs_pipe({1, 1, "", ""}, Stream::Out));
    const UniqueFd hidden = worker(0, Stream::Err);
    const UniqueFd seen = worker(1, Stream::Err);
    put(hidden, "hidden\n");
    put(seen, "seen\n");
    EXPECT_EQ(shown(10, err_), "[1]: seen\n");
    output().read_rest_of(0);
    EXPECT_THAT(output().last_stderr(0), ElementsAre("hidden"));
}

// ---- files

TEST_F(OutputTest, TeeWritesToTheConsoleAndToAFileByGlobalRank) {
    spec_.log_dir = directory_.file("logs");
    spec_.tee.everyone = Streams::All;
    output().begin_attempt(2);
    Pipe pipe;
    ASSERT_TRUE(output().add(std::move(pipe.read), {12, 0, "default", ""}, Stream::Err));
    put(pipe.write, "half");
    ASSERT_TRUE(loop_->run_once(deadline_after(MonotonicClock::now(), seconds(5))));
    put(pipe.write, " whole\n");
    EXPECT_EQ(shown(17, err_), "[12]: half whole\n");
    write_all();
    EXPECT_EQ(content(spec_.log_dir + "/attempt_2/12/stderr.log"), "half whole\n")
        << "no prefix in a file of its own";
    EXPECT_EQ(output().attempt_directory(), spec_.log_dir + "/attempt_2");
}

TEST_F(OutputTest, RedirectedStreamsGoStraightToTheirFile) {
    spec_.log_dir = directory_.file("logs");
    spec_.redirects.by_local_rank[11] = Streams::All;
    output().begin_attempt(0);
    const StreamOwner owner{11, 11, "default", ""};
    ASSERT_FALSE(output().needs_pipe(owner, Stream::Err));
    EXPECT_TRUE(output().needs_pipe({0, 0, "", ""}, Stream::Err));
    const Result<UniqueFd> file = output().direct_file(owner, Stream::Err);
    ASSERT_TRUE(file) << file.error().what;
    put(*file, "first\nlast\n");
    EXPECT_EQ(content(spec_.log_dir + "/attempt_0/11/stderr.log"), "first\nlast\n");
    EXPECT_THAT(output().last_stderr(11), ElementsAre("first", "last"));
    EXPECT_GT(output().last_output(11), TimePoint{});
}

TEST_F(OutputTest, AFullDiskIsReportedOnceAndTheJobGoesOn) {
    spec_.log_dir = directory_.file("logs");
    spec_.tee.everyone = Streams::Out;
    const std::string rank_directory = spec_.log_dir + "/attempt_0/0";
    std::filesystem::create_directories(rank_directory);
    std::filesystem::create_symlink("/dev/full", rank_directory + "/stdout.log");
    output().begin_attempt(0);
    const UniqueFd worker0 = worker(0);
    for (int i = 0; i < 3; ++i) {
        put(worker0, "still shown\n");
        EXPECT_EQ(shown(17), "[0]: still shown\n");
    }
    write_all();
    EXPECT_EQ(output().loss().bytes, 36U);
    EXPECT_EQ(output().loss().why, "write " + rank_directory + "/stdout.log: No space left on device");
    output().finish_attempt();
    EXPECT_EQ(output().loss().bytes, 36U) << "counted once";
    const std::string said = available(err_.read);
    EXPECT_EQ(std::count(said.begin(), said.end(), '\n'), 1) << said;
}

TEST_F(OutputTest, AFileThatCannotBeOpenedIsALossAndNoError) {
    spec_.log_dir = directory_.file("logs");
    spec_.tee.everyone = Streams::Out;
    std::filesystem::create_directories(spec_.log_dir + "/attempt_0/0/stdout.log");
    output().begin_attempt(0);
    const UniqueFd worker0 = worker(0);
    put(worker0, "shown\n");
    EXPECT_EQ(shown(11), "[0]: shown\n");
    EXPECT_THAT(output().loss().why, HasSubstr("stdout.log: Is a directory"));
}

TEST_F(OutputTest, EverythingIsShownWithoutALogDirectory) {
    spec_.log_dir = "/proc/no/logs";
    spec_.redirects.everyone = Streams::All;
    output().begin_attempt(0);
    EXPECT_THAT(output().loss().why, HasSubstr("/proc/no"));
    const UniqueFd worker0 = worker(0);
    put(worker0, "shown\n");
    EXPECT_EQ(shown(11), "[0]: shown\n");
}

TEST_F(OutputTest, FilteredLinesAreCopiedToOneFile) {
    spec_.log_dir = directory_.file("logs");
    spec_.stdout_filters = {"loss", "acc"};
    output().begin_attempt(0);
    const UniqueFd worker0 = worker(0);
    const UniqueFd worker1 = worker(1);
    put(worker0, "loss 1\nother\n");
    put(worker1, "acc 2\n");
    (void)shown(30);
    write_all();
    std::string kept = content(spec_.log_dir + "/attempt_0/filtered_stdout.log");
    EXPECT_THAT(kept, HasSubstr("[0]: loss 1\n"));
    EXPECT_THAT(kept, HasSubstr("[1]: acc 2\n"));
    EXPECT_THAT(kept, Not(HasSubstr("other")));
}

/// A log file on a disk that hangs: rank 0's is a FIFO that nobody reads.
class HungDisk : public OutputTest {
  protected:
    HungDisk() {
        spec_.log_dir = directory_.file("logs");
        spec_.tee.everyone = Streams::Out;
        const std::string rank_directory = spec_.log_dir + "/attempt_0/0";
        std::filesystem::create_directories(rank_directory);
        const std::string path = rank_directory + "/stdout.log";
        EXPECT_EQ(::mkfifo(path.c_str(), 0600), 0);
        fifo_.reset(::open(path.c_str(), O_RDWR | O_NONBLOCK | O_CLOEXEC));
        output().begin_attempt(0);
    }
    /// Writes lines of rank 0 until its pipe stays full; discards the console's text.
    long jam(const UniqueFd& worker0, const std::string& line) {
        ::fcntl(worker0.get(), F_SETFL, O_NONBLOCK);
        long written = 0;
        for (int refused = 0; refused < 20 && written < 20'000;) {
            const bool taken =
                ::write(worker0.get(), line.data(), line.size()) == static_cast<ssize_t>(line.size());
            refused = taken ? 0 : refused + 1;
            written += taken ? 1 : 0;
            if (taken) continue;
            EXPECT_TRUE(loop_->run_once(deadline_after(MonotonicClock::now(), milliseconds(5))));
            (void)available(out_.read);
        }
        return written;
    }
    UniqueFd fifo_;
};

TEST_F(HungDisk, DoesNotBlockTheLoop) {
    const UniqueFd worker0 = worker(0), worker1 = worker(1);
    for (int i = 0; i < 40; ++i) {  // more than the FIFO takes
        put(worker0, std::string(4095, 'x') + '\n');
        ASSERT_TRUE(loop_->run_once(deadline_after(MonotonicClock::now(), seconds(5))));
        (void)available(out_.read);
    }
    EXPECT_FALSE(output().flushed());
    put(worker1, "seen\n");
    std::string text;
    run_until([&] { return (text += available(out_.read)).find("[1]: seen\n") != std::string::npos; });
    std::string kept;
    run_until([&] {
        kept += available(fifo_);
        output().flush(deadline_after(MonotonicClock::now(), milliseconds(1)));
        return output().flushed();
    });
    kept += available(fifo_);
    EXPECT_EQ(kept.size(), 40U * 4096);
}

TEST_F(HungDisk, MakesTheWorkersWaitAndLosesNothing) {
    UniqueFd worker0 = worker(0);
    const std::string line = std::string(4095, 'x') + '\n';
    const long lines = jam(worker0, line);
    ASSERT_LT(lines, 20'000) << "the queue grows without bound";
    ASSERT_GT(lines, 1000);
    worker0.reset();
    std::size_t kept = 0;
    const std::size_t wanted = static_cast<std::size_t>(lines) * line.size();
    const TimePoint deadline = deadline_after(MonotonicClock::now(), seconds(60));
    while (kept < wanted && MonotonicClock::now() < deadline) {
        kept += available(fifo_).size();
        ASSERT_TRUE(loop_->run_once(deadline_after(MonotonicClock::now(), milliseconds(5))));
        (void)available(out_.read);
    }
    EXPECT_EQ(kept, wanted);
    EXPECT_EQ(output().loss().bytes, 0U);
}

TEST_F(HungDisk, DoesNotBlockTheDestructor) {
    const UniqueFd worker0 = worker(0);
    (void)jam(worker0, std::string(4095, 'x') + '\n');
    output().flush(deadline_after(MonotonicClock::now(), milliseconds(1)));
    output_.reset();
    SUCCEED() << "it would hang here";
}

TEST_F(OutputTest, NoThreadStartsWithoutLogFiles) {
    // The kernel may still list a thread of an earlier test, which has been joined.
    const auto threads = [] { return numbers_in("/proc/self/task"); };
    const std::vector<int> before = threads();
    const UniqueFd worker0 = worker(0);
    put(worker0, "x\n");
    EXPECT_EQ(shown(7), "[0]: x\n");
    for (const int thread : threads()) EXPECT_THAT(before, Contains(thread));
}

TEST(LogFile, RotatesAtLineEndsAndKeepsThreeOlderFiles) {
    const test::TemporaryDirectory directory;
    const std::string path = directory.file("stdout.log");
    Result<LogFile> file = LogFile::open(path, 10);
    ASSERT_TRUE(file);
    file->write("aaaa\nbbbb\ncccc\ndd");
    file->write("dd\neeee\n");
    EXPECT_EQ(content(path + ".2"), "aaaa\nbbbb\n");
    EXPECT_EQ(content(path + ".1"), "cccc\ndddd\n");
    EXPECT_EQ(content(path), "eeee\n");
    for (int i = 0; i < 20; ++i) file->write("ffff\n");
    EXPECT_TRUE(std::filesystem::exists(path + ".3"));
    EXPECT_FALSE(std::filesystem::exists(path + ".4"));
    file->write(std::string(30, 'g') + "\nh\n");
    EXPECT_EQ(content(path), "h\n") << "a line longer than a file stays whole";
}

TEST(LogFile, RotatesAgainAfterTheDiskWasFullForAMoment) {
    const test::SmallDisk disk("size=64k");
    if (!disk.mounted()) GTEST_SKIP() << "no file system may be mounted here";
    const std::string path = disk.path() + "/stdout.log", line = std::string(999, 'x') + '\n';
    Result<LogFile> file = LogFile::open(path, 4000);
    ASSERT_TRUE(file);
    std::ofstream(disk.path() + "/filler") << std::string(70'000, 'y');
    file->write(line);
    EXPECT_EQ(file->lost_bytes(), line.size());
    std::filesystem::remove(disk.path() + "/filler");
    for (int i = 0; i < 10; ++i) file->write(line);
    EXPECT_EQ(content(path + ".2").size(), 4000U);
    EXPECT_EQ(content(path + ".1").size(), 4000U);
    EXPECT_EQ(content(path).size(), 2000U);
}

TEST(LogFile, ThatCannotBeRotatedGoesOnAndTriesAgain) {
    const test::SmallDisk disk("size=256k,nr_inodes=2");  // the root and one file
    if (!disk.mounted()) GTEST_SKIP() << "no file system may be mounted here";
    const std::string path = disk.path() + "/stdout.log";
    Result<LogFile> file = LogFile::open(path, 10);
    ASSERT_TRUE(file);
    for (int i = 0; i < 4; ++i) file->write("aaaa\n");
    EXPECT_EQ(content(path).size(), 20U) << "no line is lost";
    ASSERT_EQ(::mount("tmpfs", disk.path().c_str(), "tmpfs", MS_REMOUNT, "nr_inodes=10"), 0);
    file->write("bbbb\n");
    EXPECT_EQ(content(path), "bbbb\n");
    EXPECT_EQ(content(path + ".1").size(), 20U);
}

// ---- memory of ranks

TEST_F(OutputTest, KeepsTheLastTwentyLinesOfStderr) {
    const UniqueFd worker0 = worker(0, Stream::Err);
    std::string text;
    for (int i = 0; i < 1000; ++i) text += "line " + std::to_string(i) + '\n';
    put(worker0, text);
    output().read_rest_of(0);
    const std::vector<std::string> last = output().last_stderr(0);
    ASSERT_EQ(last.size(), 20U);
    EXPECT_EQ(last.front(), "line 980");
    EXPECT_EQ(last.back(), "line 999");
    EXPECT_THAT(output().last_stderr(1), IsEmpty());
}

TEST_F(OutputTest, FinishReadsTheRestAndClosesPipesThatGrandchildrenHold) {
    const UniqueFd worker0 = worker(0);
    put(worker0, "left\nhalf");
    output().finish_attempt();
    EXPECT_EQ(available(out_.read), "[0]: left\n[0]: half\n");
    EXPECT_EQ(::write(worker0.get(), "x", 1), -1) << "the reading end is closed";
}

TEST_F(OutputTest, ANewAttemptForgetsTheOld) {
    const UniqueFd old = worker(0, Stream::Err);
    put(old, "old\n");
    output().begin_attempt(1);
    EXPECT_EQ(available(err_.read), "[0]: old\n");
    EXPECT_THAT(output().last_stderr(0), IsEmpty());
}

// ---- pure parts

std::vector<std::string> assembled(LineAssembler& assembler, std::string_view chunk) {
    std::vector<std::string> blocks;
    assembler.feed(chunk, kStart, [&](std::string_view block) { blocks.emplace_back(block); });
    return blocks;
}

TEST(LineAssembler, PassesWholeLinesInOneBlock) {
    LineAssembler assembler;
    EXPECT_THAT(assembled(assembler, "a\nb\nc"), ElementsAre("a\nb\n"));
    EXPECT_THAT(assembled(assembler, "d\ne\n"), ElementsAre("cd\n", "e\n"));
    EXPECT_EQ(assembler.due(seconds(1)), kNever);
}

TEST(LineAssembler, IsDueOnceAfterItsFirstByte) {
    LineAssembler assembler;
    (void)assembled(assembler, "a");
    assembler.feed("b", kStart + seconds(1), [](std::string_view) {});
    EXPECT_EQ(assembler.due(seconds(2)), kStart + seconds(2));
    EXPECT_EQ(assembler.cut(), "ab [line goes on]\n");
    EXPECT_EQ(assembler.due(seconds(2)), kNever) << "nothing new";
    EXPECT_EQ(assembler.finish(), "");
}

TEST(LineAssembler, ShowsAProgressBarAsATerminalWould) {
    LineAssembler assembler;
    (void)assembled(assembler, "\r 10%\r 20%");
    EXPECT_EQ(assembler.cut(), " 20% [line goes on]\n");
}

TEST(PrefixTemplate, ReadsTorchrunsTemplates) {
    const PrefixValues values{"5", "1", "trainer", "node03", ""};
    EXPECT_EQ(PrefixTemplate(kTorchrunPrefix).render(values), "[trainer1]:");
    EXPECT_EQ(PrefixTemplate("${hostname} $rank/$local_rank:").render(values), "node03 5/1:");
    EXPECT_EQ(PrefixTemplate("$$rank $5 $").render(values), "$rank $5 $");
}

TEST(PrefixTemplate, LeavesUnknownVariablesAsTheyAre) {
    const PrefixTemplate prefix("${rank}-${what} ${open");
    EXPECT_EQ(prefix.render({"1", "", "", "", ""}), "1-${what} ${open");
    EXPECT_FALSE(prefix.names_time());
    EXPECT_TRUE(PrefixTemplate("${time}").names_time());
}

TEST_F(OutputTest, LinesThatAnotherHostSendsAreShownWholeWhateverTheirPieces) {
    output().show_sent(1, Stream::Out, "[4]: one\n[4]: tw");
    output().show_sent(2, Stream::Out, "[8]: three\n");
    output().show_sent(1, Stream::Out, "o\n");
    output().show_sent(1, Stream::Err, "[4]: half");
    output().end_sent(1);
    EXPECT_EQ(shown(29), "[4]: one\n[8]: three\n[4]: two\n");
    EXPECT_EQ(shown(10, err_), "[4]: half\n");
}

TEST_F(OutputTest, LinesOfAnotherHostAreReportedAsShownOnlyWhileTheConsoleHasRoom) {
    std::uint64_t told = 0, sent = 0;
    output().on_shown([&](std::uint64_t sender, std::uint64_t bytes) {
        EXPECT_EQ(sender, 7u);
        told += bytes;
    });
    const std::string piece = std::string(65535, 'x') + "\n";
    for (int i = 0; i < 64; ++i, sent += piece.size()) {
        output().show_sent(7, Stream::Out, piece);
        ASSERT_TRUE(loop_->run_once(MonotonicClock::now()));
    }
    EXPECT_LT(told, sent) << "nobody reads";
    std::size_t read = 0;
    run_until([&] { return (read += available(out_.read).size()) == sent && told == sent; });
    EXPECT_EQ(told, sent);
}

/// An Output whose lines are sent, and the bytes that have arrived.
class OutputSenderTest : public OutputTest {
  protected:
    void SetUp() override {
        Result<std::unique_ptr<OutputSender>> made =
            OutputSender::create({*loop_, 100, [this](Stream stream, std::string bytes) {
                                      if (is_connected_)
                                          (stream == Stream::Out ? sent_out_ : sent_err_) += bytes;
                                      return is_connected_;
                                  }});
        ASSERT_TRUE(made) << made.error().what;
        sender_ = *std::move(made);
        output_ = std::make_unique<Output>(*loop_, spec_, ranks_, sender_->console(Stream::Out),
                                           sender_->console(Stream::Err));
    }
    void TearDown() override { output_.reset(); }
    void run_a_while() {
        for (int i = 0; i < 20; ++i) ASSERT_TRUE(loop_->run_once(MonotonicClock::now()));
    }

    bool is_connected_ = true;
    std::string sent_out_, sent_err_;
    std::unique_ptr<OutputSender> sender_;
};

TEST_F(OutputSenderTest, SendsNothingBeforeTheSessionAndAtMostItsWindowAhead) {
    const std::string text = std::string(149, 'x') + "\n";
    ASSERT_TRUE(output().say(text, Stream::Out));
    run_a_while();
    EXPECT_EQ(sent_out_, "");
    sender_->begin();
    run_until([&] { return sent_out_.size() >= 100; });
    run_a_while();
    EXPECT_EQ(sent_out_.size(), 100u);
    EXPECT_FALSE(sender_->is_done());
    sender_->shown(100);
    run_until([&] { return sent_out_ == text; });
    EXPECT_FALSE(sender_->is_done()) << "the other side has not shown it all";
    sender_->shown(50);
    EXPECT_TRUE(sender_->is_done());
}

TEST_F(OutputSenderTest, WritesUnsentBytesToItsOwnStreamsAtTheEnd) {
    sender_->begin();
    ASSERT_TRUE(output().say("sent\n"));
    run_until([&] { return sent_err_ == "sent\n"; });
    is_connected_ = false;
    ASSERT_TRUE(output().say("kept\n"));
    run_a_while();
    ASSERT_TRUE(output().say("last\n"));
    sender_->write_rest(out_.write.get(), err_.write.get());
    EXPECT_EQ(available(err_.read), "kept\nlast\n");
    EXPECT_EQ(available(out_.read), "");
}

}  // namespace
}  // namespace ddprun
