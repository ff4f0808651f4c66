// What flags do to real workers. How each is read is in tests/launcher/test_options.cpp, one test for each
// row of torchrun's table; flags about log files are in test_logs.cpp, those that need a second node in
// test_two_nodes.cpp.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sched.h>

#include "env/io/socket.h"
#include "tests/support/reserved_port.h"
#include "tests/support/run_program.h"
#include "tests/support/temporary_directory.h"
#include "tests/system/look.h"

namespace ddprun::test {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

std::vector<std::string> ddprun(std::vector<std::string> words) {
    words.insert(words.begin(), path_of("DDPRUN"));
    return words;
}

/// A directory with a Python script that tells what it is, as the current directory of a run.
struct ScriptDirectory {
    TemporaryDirectory directory;
    RunOptions options;
    ScriptDirectory() {
        options.directory = directory.path();
        std::ofstream(directory.file("hello.py"))
            << "import os, sys\nprint('name', __name__, 'args', *sys.argv[1:], 'rank', os.environ['RANK'])\n"
               "print('argv0', sys.argv[0])\nprint('path0', os.path.realpath(sys.path[0]))\n";
    }
};

int available_cpus() {
    cpu_set_t set;
    ::sched_getaffinity(0, sizeof set, &set);
    return CPU_COUNT(&set);
}

// ---- workers

TEST(Flags, WorkersHaveEveryVariableOfTorchrunsAsTheFlagsAndTheirVariablesSayIt) {
    const ReservedPort port;
    RunOptions options =
        with_environment({"PET_MAX_RESTARTS=4", "PET_NPROC_PER_NODE=7",
                          "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE=[${role_name}${local_rank}]:"});
    options.unset = {"OMP_NUM_THREADS", "TORCH_NCCL_ASYNC_ERROR_HANDLING"};
    const Outcome outcome = run(ddprun({"--nproc-per-node=2", "--role=trainer", "--rdzv-id=job 17",
                                        "--master-port=" + port.number(), "--local-addr=127.0.0.7",
                                        "--signals-to-handle=SIGTERM,SIGUSR1", "--use-env", "/usr/bin/env"}),
                                options);
    EXPECT_THAT(outcome.err, AllOf(HasSubstr("--use-env"), HasSubstr("without effect")));
    for (const std::string& variable : std::vector<std::string>{
             "LOCAL_RANK=1", "RANK=1", "GROUP_RANK=0", "ROLE_RANK=1", "ROLE_NAME=trainer",
             "LOCAL_WORLD_SIZE=2", "WORLD_SIZE=2", "GROUP_WORLD_SIZE=1", "ROLE_WORLD_SIZE=2",
             "MASTER_ADDR=127.0.0.7", "MASTER_PORT=" + port.number(), "TORCHELASTIC_RESTART_COUNT=0",
             "TORCHELASTIC_MAX_RESTARTS=4", "TORCHELASTIC_RUN_ID=job 17",
             "TORCHELASTIC_USE_AGENT_STORE=False", "TORCHELASTIC_ERROR_FILE=/",
             "TORCH_NCCL_ASYNC_ERROR_HANDLING=1", "TORCHELASTIC_SIGNALS_TO_HANDLE=SIGTERM,SIGUSR1",
             "OMP_NUM_THREADS="}) {
        EXPECT_THAT(outcome.out, HasSubstr("[trainer1]:" + variable)) << outcome.err;
    }
}

TEST(Flags, NumaBindingExclusiveGivesEachWorkerCpusOfItsOwn) {
    if (available_cpus() < 2) GTEST_SKIP() << "needs two CPUs";
    const Outcome outcome =
        run(ddprun_probe({"--numa-binding=exclusive", "--nproc-per-node=2", "--prefix="}, {"cpus"}));
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    std::vector<std::string> seen;
    for (const std::string& line : sorted_lines(outcome.out)) {
        for (const std::string_view cpu : split(std::string_view(line).substr(6), ' '))
            seen.emplace_back(cpu);
    }
    std::sort(seen.begin(), seen.end());
    EXPECT_GE(seen.size(), 2u) << outcome.out;
    EXPECT_EQ(std::adjacent_find(seen.begin(), seen.end()), seen.end())
        << "a CPU of two workers: " << outcome.out;
}

TEST(Flags, InAnAllocationWhoSitsWhereIsSaidOnceAndElsewhereNot) {
    if (available_cpus() < 2) GTEST_SKIP() << "needs two CPUs";
    const std::vector<std::string> command =
        ddprun_probe({"--numa-binding=exclusive", "--nproc-per-node=2", "--max-restarts=1"},
                     {"rank", "0", "exit", "3", "end"});
    const Outcome inside = run(command, with_environment({"PBS_JOBID=12.server"}));
    EXPECT_EQ(occurrences(inside.err, "seats on "), 1) << inside.err;
    EXPECT_THAT(inside.err, AllOf(HasSubstr("  rank 0: CPUs "), HasSubstr("  rank 1: CPUs ")));
    EXPECT_THAT(run(command).err, Not(HasSubstr("CPUs")));
}

// ---- which program, and how

TEST(Flags, AScriptIsRunByPython3AsAFileAModuleOrByRunPath) {
    const ScriptDirectory scripts;
    const Outcome file = run(ddprun({"--nproc-per-node=2", "hello.py", "--lr", "0.1"}), scripts.options);
    EXPECT_THAT(file.out, AllOf(HasSubstr("[0]: name __main__ args --lr 0.1 rank 0\n"),
                                HasSubstr("[1]: argv0 hello.py\n")))
        << file.err;
    EXPECT_THAT(run(ddprun({"-m", "hello", "a"}), scripts.options).out,
                HasSubstr("name __main__ args a rank 0\n"));
    const Outcome by_path = run(ddprun({"--run-path", "hello.py", "b", "c"}), scripts.options);
    EXPECT_THAT(by_path.out,
                AllOf(HasSubstr("name __main__ args b c rank 0\n"), HasSubstr("argv0 hello.py\n"),
                      HasSubstr("path0 " + std::filesystem::canonical(scripts.directory.path()).string())))
        << by_path.err << "the surroundings of a direct run";
}

// ---- rendezvous, on one node

TEST(Flags, AMasterPortInUseIsSaidBeforeAnythingStarts) {
    const Result<Listener> taken = listen_tcp({"127.0.0.1", 0});
    const std::string port = std::to_string(taken->bound.port);
    const Outcome outcome = run(ddprun_probe({"--master-port=" + port}, {"say", "started"}));
    EXPECT_EQ(outcome.status, 69) << outcome.err;
    EXPECT_THAT(outcome.err, HasSubstr(port));
    EXPECT_EQ(outcome.out, "");
}

// ---- files

TEST(Flags, EveryRunHasADirectoryOfItsOwnInTheLogDirectoryNamedAfterTheJob) {
    const TemporaryDirectory directory;
    const std::vector<std::string> command =
        ddprun_probe({"--log-dir=" + directory.path(), "--rdzv-id=j17"}, {"say", "kept"});
    run(command);
    run(command);
    int runs = 0;
    for (const auto& entry : std::filesystem::directory_iterator(directory.path())) {
        EXPECT_TRUE(entry.path().filename().string().starts_with("j17_")) << entry.path();
        EXPECT_EQ(file_content(entry.path() / "attempt_0/0/stdout.log"), "kept\n");
        ++runs;
    }
    EXPECT_EQ(runs, 2);
}

TEST(Flags, EventLogHandlerConsoleWritesTheEventsToStandardError) {
    const Outcome outcome =
        run(ddprun_probe({"--event-log-handler=console", "--nproc-per-node=2"}, {"say", "ran"}));
    EXPECT_EQ(outcome.status, 0);
    EXPECT_THAT(sorted_lines(outcome.out), ElementsAre("[0]: ran", "[1]: ran"));
    for (const char* event : {"job_started", "generation_started", "finished"}) {
        EXPECT_EQ(occurrences(outcome.err, std::string("\"event\":\"") + event + "\""), 1) << outcome.err;
    }
    EXPECT_EQ(occurrences(outcome.err, "\"event\":\"worker_exited\""), 2) << outcome.err;
}

// ---- bad input

constexpr const char* kHostile =
    "\x1b[2J\xc2\x9b"
    "2J\xe2\x80\xae";
constexpr const char* kSpelledOut = "\\x1b[2J\\u{9b}2J\\u{202e}";

bool is_fit_for_a_terminal(const std::string& text) {
    return text.find('\x1b') == std::string::npos && text.find("\xc2\x9b") == std::string::npos &&
           text.find("\xe2\x80\xae") == std::string::npos;
}

TEST(Flags, WhatIsQuotedInAnErrorIsNotObeyedByTheTerminal) {
    const TemporaryDirectory directory;
    const std::string hostile = kHostile;
    const std::string config = directory.file("config.json");
    std::ofstream(config) << "{\"numa-binding\": \"" << hostile.substr(4) << "\"}";
    const std::vector<std::vector<std::string>> commands = {
        ddprun_probe({"--config=" + directory.file(hostile)}, {}),
        ddprun_probe({"--config", config}, {}),
        ddprun_probe({"--" + hostile}, {}),
        ddprun_probe({"--numa-binding=" + hostile}, {}),
        ddprun_probe({"--nproc-per-node=" + hostile}, {}),
        ddprun({"./" + hostile}),
        ddprun({"drain", "--job", hostile}),
        ddprun({"signal", hostile}),
        ddprun({"ps", hostile}),
        ddprun({"top", hostile}),
        ddprun({"logs", hostile}),
        ddprun({"doctor", "--" + hostile}),
        ddprun({"env", "--numa-binding=" + hostile})};
    for (const std::vector<std::string>& command : commands) {
        const Outcome outcome = run(command);
        EXPECT_NE(outcome.status, 0) << join(command, " ");
        EXPECT_NE(outcome.err, "") << join(command, " ");
        EXPECT_TRUE(is_fit_for_a_terminal(outcome.err + outcome.out)) << join(command, " ");
    }
    for (const char* variable : {"PET_NUMA_BINDING", "PET_NNODES", "PET_CONFIG"}) {
        const Outcome outcome =
            run(ddprun_probe({}, {"say", "x"}), with_environment({std::string(variable) + "=" + hostile}));
        EXPECT_TRUE(is_fit_for_a_terminal(outcome.err)) << variable;
    }
    EXPECT_THAT(run(ddprun_probe({"--numa-binding=" + hostile}, {})).err, HasSubstr(kSpelledOut));
    EXPECT_TRUE(is_fit_for_a_terminal(run(ddprun({"env"}), with_environment({"TMPDIR=" + hostile})).out));
    EXPECT_TRUE(is_fit_for_a_terminal(run(ddprun_probe({"--dry-run"}, {hostile})).out));
}

}  // namespace
}  // namespace ddprun::test
