#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>

#include <array>

#include "env/clock.h"
#include "env/io/file.h"
#include "env/os/log.h"
#include "env/unique_fd.h"
#include "tests/env/process_fixture.h"
#include "tests/support/temporary_directory.h"

namespace ddprun::os {
namespace {

using namespace std::chrono_literals;

/// A blocking pipe of one page, as a shell makes it, only smaller.
struct SmallPipe {
    UniqueFd read;
    UniqueFd write;
    SmallPipe() {
        std::array<int, 2> ends{};
        EXPECT_EQ(::pipe2(ends.data(), O_CLOEXEC), 0);
        read = UniqueFd(ends[0]);
        write = UniqueFd(ends[1]);
        EXPECT_EQ(::fcntl(write.get(), F_SETPIPE_SZ, 4096), 4096);
    }
};

const LogPrefix kAgent{"node02", "agent", 3};

LogOptions into(int fd, LogLevel level = LogLevel::Info) { return {level, false, fd}; }

/// What `speak` says into a pipe that is then read to its end.
template <class Speak>
std::string said(Speak speak) {
    SmallPipe pipe;
    speak(pipe.write.get());
    pipe.write.reset();
    return test::read_to_end(pipe.read.get());
}

TEST(Log, WritesOneLineWithWhoSpeaks) {
    EXPECT_EQ(said([](int fd) { Log(kAgent, into(fd)).info("rank {} (pid {}) died", 5, 4171); }),
              "[node02 agent g3] rank 5 (pid 4171) died\n");
    EXPECT_EQ(said([](int fd) { Log({"", "job", std::nullopt}, into(fd)).info("x"); }), "[job] x\n");
    EXPECT_EQ(said([](int fd) { Log({}, into(fd)).info("x"); }), "x\n");
}

TEST(Log, ChangesGenerationOfOneVoiceOnly) {
    EXPECT_EQ(said([](int fd) {
                  Log agent(kAgent, into(fd));
                  Log job = agent.with_component("job");
                  job.set_generation(4);
                  job.info("a");
                  agent.info("b");
              }),
              "[node02 job g4] a\n[node02 agent g3] b\n");
}

TEST(Log, KeepsToItsLevel) {
    const auto speak = [](LogLevel level) {
        return said([level](int fd) {
            Log log({}, into(fd, level));
            log.debug("d");
            log.info("i");
            log.warning("w");
            log.error("e");
        });
    };
    EXPECT_EQ(speak(LogLevel::Debug), "d\ni\nw\ne\n");
    EXPECT_EQ(speak(LogLevel::Info), "i\nw\ne\n");
    EXPECT_EQ(speak(LogLevel::Warning), "w\ne\n");
    EXPECT_EQ(speak(LogLevel::Error), "e\n");
    EXPECT_EQ(speak(LogLevel::Quiet), "");
}

TEST(Log, ReadsTorchrunsLevels) {
    EXPECT_EQ(*parse_log_level("DEBUG"), LogLevel::Debug);
    EXPECT_EQ(*parse_log_level("Info"), LogLevel::Info);
    EXPECT_EQ(*parse_log_level("WARN"), LogLevel::Warning);
    EXPECT_EQ(*parse_log_level("CRITICAL"), LogLevel::Error);
    EXPECT_EQ(*parse_log_level("quiet"), LogLevel::Quiet);
    EXPECT_EQ(*parse_log_level("10"), LogLevel::Debug);
    EXPECT_EQ(*parse_log_level("30"), LogLevel::Warning);
    EXPECT_EQ(parse_log_level("loud").error().what,
              "'loud' is not a log level (expected debug, info, warning, error or quiet)");
    EXPECT_FALSE(parse_log_level(""));
}

TEST(Log, KeepsAHostileTextOnOneLineAndAwayFromTheTerminal) {
    EXPECT_EQ(said([](int fd) { Log({}, into(fd)).info("{}", "a\nb\033[2Jc\td {} \x7f"); }),
              "a\\nb\\x1b[2Jc\td {} \\x7f\n");
    EXPECT_EQ(said([](int fd) { Log({"h\n", "a", 1}, into(fd)).info("x"); }), "[h\\n a g1] x\n");
}

TEST(Log, SpellsOutWhatEightBitTerminalsObeyAndWhatReordersText) {
    EXPECT_EQ(said([](int fd) {
                  Log({}, into(fd))
                      .info("{}",
                            "a \xc2\x9b"
                            "2J b \x9b"
                            "2J c \xe2\x80\xae"
                            "d \xc3\xa4");
              }),
              "a \\u{9b}2J b \\x9b2J c \\u{202e}d \xc3\xa4\n");
}

TEST(Log, ColorsWarningsAndErrorsOnlyWhenAsked) {
    const std::string text = said([](int fd) {
        Log log({}, {LogLevel::Debug, true, fd});
        log.info("i");
        log.warning("w");
        log.error("e");
    });
    EXPECT_EQ(text, "i\n\033[33mw\033[0m\n\033[31me\033[0m\n");
}

TEST(Log, IsNotHeldUpByAReaderThatSleepsAndSaysWhatWasLost) {
    SmallPipe pipe;
    Log log({}, into(pipe.write.get()));
    const std::string page(4095, 'x');
    log.info("{}", page);
    const TimePoint start = MonotonicClock::now();
    for (int i = 0; i < 1000; ++i) log.info("{}", page);
    EXPECT_LT(MonotonicClock::now() - start, 10s) << "waited for each line";

    std::string first(4096, '\0');
    ASSERT_EQ(::read(pipe.read.get(), first.data(), first.size()), 4096);
    log.info("back");
    pipe.write.reset();
    { const Log gone = std::move(log); }
    EXPECT_EQ(test::read_to_end(pipe.read.get()), "1000 lines could not be written before this one\nback\n");
}

TEST(Log, WaitsAMomentForAReaderThatIsOnlySlow) {
    const SmallPipe pipe;
    Log log({}, into(pipe.write.get()));
    log.info("{}", std::string(4095, 'x'));
    const TimePoint start = MonotonicClock::now();
    log.info("nobody reads");
    EXPECT_GE(MonotonicClock::now() - start, 100ms);
}

TEST(Log, SurvivesAReaderThatLeft) {
    SmallPipe pipe;
    pipe.read.reset();
    ::signal(SIGPIPE, SIG_DFL);
    Log log({}, into(pipe.write.get()));
    log.info("into the void");
    std::array<int, 2> ends{};
    ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends.data()), 0);
    const UniqueFd ours(ends[0]);
    UniqueFd(ends[1]).reset();
    Log({}, into(ours.get())).info("into the void");
    Log({}, into(-1)).info("nowhere");
    sigset_t pending;
    ::sigpending(&pending);
    EXPECT_EQ(::sigismember(&pending, SIGPIPE), 0);
}

TEST(Log, DoesNotMakeTheUsersPipeNonBlocking) {
    const SmallPipe pipe;
    Log({}, into(pipe.write.get())).info("x");
    EXPECT_EQ(::fcntl(pipe.write.get(), F_GETFL) & O_NONBLOCK, 0);
}

TEST(Log, WritesToASocket) {
    std::array<int, 2> ends{};
    ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends.data()), 0);
    UniqueFd ours(ends[0]);
    const UniqueFd reader(ends[1]);
    Log({}, into(ours.get())).info("x");
    ours.reset();
    EXPECT_EQ(test::read_to_end(reader.get()), "x\n");
}

TEST(Log, OverwritesNothingInAFileThatOthersWriteTo) {
    const test::TemporaryDirectory dir;
    const UniqueFd file(::open(dir.file("log").c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0644));
    Log log({}, into(file.get()));
    log.info("ours");
    ASSERT_EQ(::write(file.get(), "theirs\n", 7), 7);
    log.info("ours again");
    EXPECT_EQ(*read_file(dir.file("log"), 1000), "ours\ntheirs\nours again\n");
}

}  // namespace
}  // namespace ddprun::os
