// One test per row of torchrun's flag table: the flag keeps its meaning. Those about log files are in test_logs.cpp,
// those that need a second node in test_two_nodes.cpp.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <signal.h>
#include <sys/stat.h>

#include "env/io/file.h"
#include "env/io/socket.h"
#include "tests/support/reserved_port.h"
#include "tests/support/run_program.h"
#include "tests/support/temporary_directory.h"
#include "tests/system/look.h"

namespace ddprun::test {
namespace {

using namespace std::chrono_literals;
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

/// A machine with two GPUs, by the fake NVML.
struct TwoGpus {
    TemporaryDirectory directory;
    TwoGpus() {
        EXPECT_TRUE(write_file_atomically(directory.file("machine.json"), R"({"gpus": [{"uuid": "GPU-aaaa"}, {"uuid": "GPU-bbbb"}]})", 0600));
    }
    [[nodiscard]] RunOptions with(std::vector<std::string> variables = {}) const {
        variables.insert(variables.end(), {"DDPRUN_NVML_LIBRARY=" + path_of("FAKE_NVML_LIBRARY"), "FAKE_NVML=" + directory.file("machine.json")});
        return with_environment(std::move(variables));
    }
};

int available_cpus() {
    cpu_set_t set;
    ::sched_getaffinity(0, sizeof set, &set);
    return CPU_COUNT(&set);
}

// ---- workers

TEST(Flags, NnodesOfOneIsOneNodeInEitherSpelling) {
    for (const char* nodes : {"1", "1:1"}) {
        const Outcome outcome = run(ddprun_probe({"--nnodes", nodes, "--nproc_per_node", "2"}, {"env", "GROUP_WORLD_SIZE", "env", "WORLD_SIZE"}));
        EXPECT_EQ(outcome.status, 0) << outcome.err;
        EXPECT_THAT(sorted_lines(outcome.out), ElementsAre("[0]: GROUP_WORLD_SIZE=1", "[0]: WORLD_SIZE=2", "[1]: GROUP_WORLD_SIZE=1", "[1]: WORLD_SIZE=2"));
    }
}

TEST(Flags, NprocPerNodeCpuStartsOneWorkerPerCpuThatMayBeUsed) {
    for (const char* word : {"cpu", "auto"}) {
        const Outcome outcome = run(ddprun_probe({std::string("--nproc-per-node=") + word}, {"env", "LOCAL_WORLD_SIZE"}),
                                    with_environment({"CUDA_VISIBLE_DEVICES="}));
        EXPECT_EQ(occurrences(outcome.out, "LOCAL_WORLD_SIZE=" + std::to_string(available_cpus())), available_cpus())
            << word << ": " << outcome.out << outcome.err;
    }
}

TEST(Flags, NprocPerNodeGpuWithoutGpusIsRefused) {
    const Outcome outcome = run(ddprun_probe({"--nproc-per-node=gpu"}, {"say", "started"}), with_environment({"CUDA_VISIBLE_DEVICES="}));
    EXPECT_EQ(outcome.status, 64) << outcome.err;
    EXPECT_THAT(outcome.err, HasSubstr("gpu"));
    EXPECT_EQ(outcome.out, "");
}

TEST(Flags, NprocPerNodeGpuAndAutoStartOneWorkerPerVisibleGpu) {
    const TwoGpus machine;
    RunOptions all = machine.with();
    all.unset = {"CUDA_VISIBLE_DEVICES"};
    for (const char* word : {"gpu", "auto"}) {
        const std::vector<std::string> command = ddprun_probe({std::string("--nproc-per-node=") + word}, {"env", "WORLD_SIZE"});
        EXPECT_THAT(sorted_lines(run(command, all).out), ElementsAre("[0]: WORLD_SIZE=2", "[1]: WORLD_SIZE=2")) << word;
        EXPECT_EQ(run(command, machine.with({"CUDA_VISIBLE_DEVICES=1"})).out, "WORLD_SIZE=1\n") << word;
    }
}

TEST(Flags, ARangeOfNodesStartsWithTheLeastWhenTheLastCallIsOver) {
    const ReservedPort port;
    const Outcome outcome = run(ddprun_probe({"--nnodes=1:2", "--rdzv-backend=c10d", "--rdzv-endpoint=" + port.text(), "--rdzv-conf=last_call_timeout=1"},
                                             {"env", "GROUP_WORLD_SIZE", "env", "WORLD_SIZE"}));
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    EXPECT_THAT(sorted_lines(outcome.out), ElementsAre("GROUP_WORLD_SIZE=1", "WORLD_SIZE=1"));
    EXPECT_GE(outcome.took, 1s) << "another node could still have come";
}

TEST(Flags, WorkersHaveEveryVariableOfTorchruns) {
    RunOptions bare;
    bare.unset = {"OMP_NUM_THREADS", "TORCH_NCCL_ASYNC_ERROR_HANDLING"};
    const Outcome outcome = run(ddprun({"--nproc-per-node=2", "/usr/bin/env"}), bare);
    for (const char* variable :
         {"LOCAL_RANK=1", "RANK=1", "GROUP_RANK=0", "ROLE_RANK=1", "ROLE_NAME=default", "LOCAL_WORLD_SIZE=2", "WORLD_SIZE=2", "GROUP_WORLD_SIZE=1",
          "ROLE_WORLD_SIZE=2", "MASTER_ADDR=127.0.0.1", "MASTER_PORT=", "TORCHELASTIC_RESTART_COUNT=0", "TORCHELASTIC_MAX_RESTARTS=0",
          "TORCHELASTIC_RUN_ID=", "TORCHELASTIC_USE_AGENT_STORE=False", "TORCHELASTIC_ERROR_FILE=/", "TORCH_NCCL_ASYNC_ERROR_HANDLING=1",
          "TORCHELASTIC_SIGNALS_TO_HANDLE=SIGTERM,", "OMP_NUM_THREADS="}) {
        EXPECT_THAT(outcome.out, HasSubstr(std::string("[1]: ") + variable)) << outcome.err;
    }
}

TEST(Flags, RoleIsToldToTheWorkersAndToThePrefix) {
    const Outcome outcome = run(ddprun_probe({"--role=trainer", "--nproc-per-node=2"}, {"env", "ROLE_NAME"}),
                                with_environment({"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE=[${role_name}${local_rank}]:"}));
    EXPECT_THAT(sorted_lines(outcome.out), ElementsAre("[trainer0]:ROLE_NAME=trainer", "[trainer1]:ROLE_NAME=trainer"));
}

TEST(Flags, VirtualLocalRankIsZeroForAll) {
    const Outcome outcome = run(ddprun_probe({"--virtual-local-rank", "--nproc-per-node=2"}, {"env", "LOCAL_RANK", "env", "RANK"}),
                                with_environment({"CUDA_VISIBLE_DEVICES="}));
    EXPECT_THAT(sorted_lines(outcome.out), ElementsAre("[0]: LOCAL_RANK=0", "[0]: RANK=0", "[1]: LOCAL_RANK=0", "[1]: RANK=1"));
}

TEST(Flags, VirtualLocalRankNarrowsToOneGpuOfTheListThatWeWereGiven) {
    const TwoGpus machine;
    const std::vector<std::string> command = ddprun_probe({"--virtual-local-rank", "--nproc-per-node=2"}, {"env", "CUDA_VISIBLE_DEVICES"});
    EXPECT_THAT(sorted_lines(run(command, machine.with({"CUDA_VISIBLE_DEVICES=1,0"})).out), ElementsAre("[0]: CUDA_VISIBLE_DEVICES=1", "[1]: CUDA_VISIBLE_DEVICES=0"));
    EXPECT_THAT(sorted_lines(run(command, machine.with({"CUDA_VISIBLE_DEVICES=GPU-bbbb,GPU-aaaa"})).out),
                ElementsAre("[0]: CUDA_VISIBLE_DEVICES=GPU-bbbb", "[1]: CUDA_VISIBLE_DEVICES=GPU-aaaa"));
    const Outcome too_few = run(command, machine.with({"CUDA_VISIBLE_DEVICES=1"}));
    EXPECT_NE(too_few.status, 0);
    EXPECT_THAT(too_few.err, AllOf(HasSubstr("2 workers"), HasSubstr("1 visible GPU")));
}

TEST(Flags, EveryNumaPolicyGivesWorkersCpusThatWeMayUse) {
    cpu_set_t ours;
    ::sched_getaffinity(0, sizeof ours, &ours);
    for (const char* policy : {"node", "socket", "exclusive", "core-complex"}) {
        const Outcome outcome = run(ddprun_probe({std::string("--numa-binding=") + policy, "--prefix="}, {"cpus"}));
        EXPECT_EQ(outcome.status, 0) << policy << outcome.err;
        const std::vector<std::string> lines = sorted_lines(outcome.out);
        ASSERT_EQ(lines.size(), 1u) << policy;
        for (const std::string_view cpu : split(std::string_view(lines[0]).substr(6), ' ')) EXPECT_TRUE(CPU_ISSET(std::stoul(std::string(cpu)), &ours)) << policy;
    }
}

TEST(Flags, NumaBindingExclusiveGivesEachWorkerCpusOfItsOwn) {
    if (available_cpus() < 2) GTEST_SKIP() << "needs two CPUs";
    const Outcome outcome = run(ddprun_probe({"--numa-binding=exclusive", "--nproc-per-node=2", "--prefix="}, {"cpus"}));
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    std::vector<std::string> seen;
    for (const std::string& line : sorted_lines(outcome.out)) {
        for (const std::string_view cpu : split(std::string_view(line).substr(6), ' ')) seen.emplace_back(cpu);
    }
    std::sort(seen.begin(), seen.end());
    EXPECT_GE(seen.size(), 2u) << outcome.out;
    EXPECT_EQ(std::adjacent_find(seen.begin(), seen.end()), seen.end()) << "a CPU of two workers: " << outcome.out;
}

TEST(Flags, InAnAllocationWhoSitsWhereIsSaidOnceAndElsewhereNot) {
    if (available_cpus() < 2) GTEST_SKIP() << "needs two CPUs";
    const std::vector<std::string> command = ddprun_probe({"--numa-binding=exclusive", "--nproc-per-node=2", "--max-restarts=1"}, {"rank", "0", "exit", "3", "end"});
    const Outcome inside = run(command, with_environment({"PBS_JOBID=12.server"}));
    EXPECT_EQ(occurrences(inside.err, "seats on "), 1) << inside.err;
    EXPECT_THAT(inside.err, AllOf(HasSubstr("  rank 0: CPUs "), HasSubstr("  rank 1: CPUs ")));
    EXPECT_THAT(run(command).err, Not(HasSubstr("CPUs")));
}

TEST(Flags, ThreadsThatPbsPresetForTheWholeChunkAreSharedByItsWorkers) {
    const std::string cpus = std::to_string(available_cpus());
    if (available_cpus() < 2) GTEST_SKIP() << "needs two CPUs";
    const std::vector<std::string> command = ddprun_probe({"--nproc-per-node=" + cpus, "--prefix="}, {"rank", "0", "env", "OMP_NUM_THREADS", "end"});
    EXPECT_EQ(run(command, with_environment({"PBS_JOBID=12.server", "NCPUS=" + cpus, "OMP_NUM_THREADS=" + cpus})).out, "OMP_NUM_THREADS=1\n");
    EXPECT_EQ(run(command, with_environment({"NCPUS=" + cpus, "OMP_NUM_THREADS=" + cpus})).out, "OMP_NUM_THREADS=" + cpus + "\n") << "no batch job: the user's word";
}

// ---- which program, and how

TEST(Flags, AScriptIsRunByPython3FromTheCurrentDirectory) {
    const ScriptDirectory scripts;
    const Outcome outcome = run(ddprun({"--nproc-per-node=2", "hello.py", "--lr", "0.1"}), scripts.options);
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    EXPECT_THAT(outcome.out, AllOf(HasSubstr("[0]: name __main__ args --lr 0.1 rank 0\n"), HasSubstr("[1]: argv0 hello.py\n")));
}

TEST(Flags, PythonExecNamesThePython) {
    const ScriptDirectory scripts;
    std::ofstream(scripts.directory.file("python")) << "#!/bin/sh\necho \"run with $*\"\n";
    ::chmod(scripts.directory.file("python").c_str(), 0755);
    RunOptions options = scripts.options;
    options.environment = {"PYTHON_EXEC=" + scripts.directory.file("python")};
    EXPECT_EQ(run(ddprun({"hello.py", "x"}), options).out, "run with -u hello.py x\n");
}

TEST(Flags, ModuleIsRunAsPythonDashM) {
    const ScriptDirectory scripts;
    for (const char* flag : {"-m", "--module"}) {
        const Outcome outcome = run(ddprun({flag, "hello", "a"}), scripts.options);
        EXPECT_THAT(outcome.out, HasSubstr("name __main__ args a rank 0\n")) << outcome.err;
    }
}

TEST(Flags, RunPathGivesTheScriptTheSurroundingsOfADirectRun) {
    const ScriptDirectory scripts;
    const Outcome outcome = run(ddprun({"--run-path", "hello.py", "b", "c"}), scripts.options);
    EXPECT_THAT(outcome.out, AllOf(HasSubstr("name __main__ args b c rank 0\n"), HasSubstr("argv0 hello.py\n"),
                                   HasSubstr("path0 " + std::filesystem::canonical(scripts.directory.path()).string())))
        << outcome.err;
}

TEST(Flags, RunPathWinsOverNoPython) {
    const ScriptDirectory scripts;
    EXPECT_THAT(run(ddprun({"--no-python", "--run-path", "hello.py", "e"}), scripts.options).out, HasSubstr("name __main__ args e rank 0\n"));
}

TEST(Flags, NoPythonExecutesTheFileItself) {
    const ScriptDirectory scripts;
    std::ofstream(scripts.directory.file("tool.py")) << "#!/bin/sh\necho \"a shell script, $1\"\n";
    ::chmod(scripts.directory.file("tool.py").c_str(), 0755);
    EXPECT_EQ(run(ddprun({"--no-python", "./tool.py", "d"}), scripts.options).out, "a shell script, d\n");
}

TEST(Flags, WhatFollowsTheProgramBelongsToIt) {
    const Outcome outcome = run(ddprun({"--nproc-per-node=1", "/bin/echo", "--nproc-per-node=7", "-m", "--", "--version"}));
    EXPECT_EQ(outcome.out, "--nproc-per-node=7 -m -- --version\n");
}

// ---- rendezvous, on one node

TEST(Flags, RdzvIdIsTheRunIdOfTheWorkers) {
    const Outcome outcome = run(ddprun_probe({"--rdzv-id=job 17", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "--rdzv-conf=timeout=60,read_timeout=20"},
                                             {"env", "TORCHELASTIC_RUN_ID"}));
    EXPECT_EQ(outcome.out, "TORCHELASTIC_RUN_ID=job 17\n") << outcome.err;
}

TEST(Flags, TwoJobsOfOneNodeWithoutAnIdAreToldApart) {
    const std::vector<std::string> command = ddprun_probe({}, {"env", "TORCHELASTIC_RUN_ID"});
    const std::string one = run(command).out, other = run(command).out;
    EXPECT_THAT(one, ::testing::MatchesRegex("TORCHELASTIC_RUN_ID=[0-9a-f]{16}\n"));
    EXPECT_NE(one, other) << "directories named after the id would be the same";
}

TEST(Flags, StandaloneOverridesTheRendezvousWithAnIdOfItsOwn) {
    const std::vector<std::string> command = ddprun_probe(
        {"--standalone", "--rdzv-id=mine", "--rdzv-endpoint=nowhere.invalid:1"}, {"env", "TORCHELASTIC_RUN_ID", "env", "MASTER_ADDR"});
    const Outcome one = run(command), other = run(command);
    EXPECT_EQ(one.status, 0) << one.err;
    EXPECT_THAT(one.out, AllOf(HasSubstr("MASTER_ADDR=127.0.0.1"), Not(HasSubstr("mine"))));
    EXPECT_NE(one.out, other.out) << "two standalone jobs have one id";
}

TEST(Flags, MasterAddressAndPortAreTheWorkers) {
    const ReservedPort port;
    const Outcome outcome = run(ddprun_probe({"--master-addr=127.0.0.1", "--master-port=" + port.number()}, {"env", "MASTER_ADDR", "env", "MASTER_PORT"}));
    EXPECT_THAT(sorted_lines(outcome.out), ElementsAre("MASTER_ADDR=127.0.0.1", "MASTER_PORT=" + port.number())) << outcome.err;
}

TEST(Flags, LocalAddrIsTheMasterAddressUnlessThatIsGiven) {
    const std::vector<std::string> acts = {"env", "MASTER_ADDR"};
    EXPECT_EQ(run(ddprun_probe({"--local-addr=127.0.0.7"}, acts)).out, "MASTER_ADDR=127.0.0.7\n");
    EXPECT_EQ(run(ddprun_probe({"--local-addr=127.0.0.7", "--master-addr=127.0.0.8"}, acts)).out, "MASTER_ADDR=127.0.0.8\n");
}

TEST(Flags, RdzvConfKeysWithoutEffectSaySo) {
    const Outcome outcome = run(ddprun_probe({"--rdzv-conf=read_timeout=20,close_timeout=5,heartbeat_timeout=5,join_timeout=60,store_type=tcp"}, {"say", "ran"}));
    EXPECT_EQ(outcome.out, "ran\n");
    EXPECT_EQ(occurrences(outcome.err, "without effect"), 3) << outcome.err;
    for (const char* key : {"read_timeout", "close_timeout", "heartbeat_timeout"}) EXPECT_THAT(outcome.err, HasSubstr(key));
}

TEST(Flags, RdzvConfOfAJobScriptInQuotesAndWithAKeyOfAnotherBackendStartsTheJob) {
    const Outcome outcome = run(ddprun_probe({"--rdzv-conf='timeout=60,pool=big'"}, {"say", "ran"}));
    EXPECT_EQ(outcome.out, "ran\n");
    EXPECT_THAT(outcome.err, AllOf(HasSubstr("'pool'"), HasSubstr("without effect")));
}

TEST(Flags, AMasterPortInUseIsSaidBeforeAnythingStarts) {
    const Result<Listener> taken = listen_tcp({"127.0.0.1", 0});
    const std::string port = std::to_string(taken->bound.port);
    const Outcome outcome = run(ddprun_probe({"--master-port=" + port}, {"say", "started"}));
    EXPECT_EQ(outcome.status, 69) << outcome.err;
    EXPECT_THAT(outcome.err, HasSubstr(port));
    EXPECT_EQ(outcome.out, "");
}

TEST(Flags, WithEtcdNobodyWaitsForAServerThatIsNotThere) {
    for (const char* name : {"etcd", "etcd-v2"}) {
        const Outcome outcome = run(ddprun_probe({"--rdzv-backend", name}, {"say", "started"}));
        EXPECT_EQ(outcome.status, 64);
        EXPECT_THAT(outcome.err, AllOf(HasSubstr("--rdzv-backend"), HasSubstr(name), HasSubstr("c10d")));
    }
}

// ---- restarts and signals

TEST(Flags, MaxRestartsIsToldToTheWorkersAndCounted) {
    const Outcome outcome = run(ddprun_probe({"--max-restarts=2"}, {"env", "TORCHELASTIC_RESTART_COUNT", "env", "TORCHELASTIC_MAX_RESTARTS", "exit", "5"}));
    EXPECT_EQ(outcome.status, 5);
    for (const char* line : {"RESTART_COUNT=0", "RESTART_COUNT=1", "RESTART_COUNT=2"}) EXPECT_EQ(occurrences(outcome.out, line), 1);
    EXPECT_EQ(occurrences(outcome.out, "MAX_RESTARTS=2"), 3);
}

TEST(Flags, EverySignalToHandleEndsTheJobAndReachesTheWorkers) {
    Program program(ddprun_probe({"--signals-to-handle=SIGTERM,SIGUSR1", "--nproc-per-node=2"}, {"on", "10", "0", "say", "up", "hold"}));
    ASSERT_TRUE(program.wait_for_output("[0]: up") && program.wait_for_output("[1]: up"));
    program.signal(SIGUSR1);
    EXPECT_EQ(program.wait().status, 75);
}

TEST(Flags, TheSignalsToHandleAreToldToTheWorkers) {
    const std::vector<std::string> acts = {"env", "TORCHELASTIC_SIGNALS_TO_HANDLE"};
    EXPECT_EQ(run(ddprun_probe({}, acts)).out, "TORCHELASTIC_SIGNALS_TO_HANDLE=SIGTERM,SIGINT,SIGHUP,SIGQUIT\n");
    EXPECT_EQ(run(ddprun_probe({"--signals-to-handle=SIGTERM,SIGUSR1"}, acts)).out, "TORCHELASTIC_SIGNALS_TO_HANDLE=SIGTERM,SIGUSR1\n");
}

TEST(Flags, ShutdownTimeoutOfZeroKillsAtOnce) {
    const auto stop = [](const std::vector<std::string>& options, const RunOptions& surroundings) {
        Program program(ddprun_probe(options, {"ignore", "15", "say", "up", "hold"}), surroundings);
        EXPECT_TRUE(program.wait_for_output("up\n"));
        program.signal(SIGTERM);
        const Outcome outcome = program.wait();
        EXPECT_EQ(outcome.status, 75) << outcome.err;
        return outcome.took;
    };
    EXPECT_LT(stop({"--shutdown-timeout=0"}, {}), 15s);
    EXPECT_LT(stop({}, with_environment({"TORCH_ELASTIC_SHUTDOWN_TIMEOUT=0"})), 15s);
    EXPECT_LT(stop({"--shutdown-timeout=0"}, with_environment({"TORCH_ELASTIC_SHUTDOWN_TIMEOUT=60"})), 15s) << "the flag wins";
}

// ---- files

TEST(Flags, EveryRunHasADirectoryOfItsOwnInTheLogDirectoryNamedAfterTheJob) {
    const TemporaryDirectory directory;
    const std::vector<std::string> command = ddprun_probe({"--log-dir=" + directory.path(), "--rdzv-id=j17"}, {"say", "kept"});
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

// ---- accepted without effect

TEST(Flags, FlagsWithoutEffectAreAcceptedAndSaySo) {
    for (const char* flag : {"--monitor-interval=0.5", "--start-method=fork", "--logs-specs=mine", "--event-log-handler=plugin", "--use-env"}) {
        const Outcome outcome = run(ddprun_probe({flag}, {"say", "ran"}));
        const std::string name = std::string(flag).substr(0, std::string(flag).find('='));
        EXPECT_EQ(outcome.status, 0) << flag << outcome.err;
        EXPECT_THAT(outcome.err, AllOf(HasSubstr(name), HasSubstr("without effect")));
        EXPECT_EQ(outcome.out, "ran\n");
    }
    EXPECT_EQ(said_of_its_own_job(run(ddprun_probe({"--logs-specs=default", "--event-log-handler=null"}, {}))), "");
}

TEST(Flags, EventLogHandlerConsoleWritesTheEventsToStandardError) {
    const Outcome outcome = run(ddprun_probe({"--event-log-handler=console", "--nproc-per-node=2"}, {"say", "ran"}));
    EXPECT_EQ(outcome.status, 0);
    EXPECT_THAT(sorted_lines(outcome.out), ElementsAre("[0]: ran", "[1]: ran"));
    for (const char* event : {"job_started", "generation_started", "finished"}) {
        EXPECT_EQ(occurrences(outcome.err, std::string("\"event\":\"") + event + "\""), 1) << outcome.err;
    }
    EXPECT_EQ(occurrences(outcome.err, "\"event\":\"worker_exited\""), 2) << outcome.err;
}

TEST(Flags, CompletionScriptsAreWhatTheirShellReads) {
    const Outcome script = run(ddprun({"--print-completion=bash"}));
    RunOptions options;
    options.input = script.out + "\nCOMP_WORDS=(ddprun --print-comp); COMP_CWORD=1; _ddprun; echo \"${COMPREPLY[@]}\"\n"
                                 "COMP_WORDS=(ddprun --color al); COMP_CWORD=2; _ddprun; echo \"${COMPREPLY[@]}\"\n";
    const Outcome completed = run({"bash", "--norc"}, options);
    EXPECT_EQ(completed.out, "--print-completion\nalways\n") << completed.err;
    for (const char* shell : {"zsh", "fish", "tcsh"}) {
        EXPECT_THAT(run(ddprun({"--print-completion", shell})).out, HasSubstr("nproc-per-node")) << shell;
    }
}

TEST(Flags, TheManualPageExplainsEveryOptionOfTheHelp) {
    const Outcome help = run(ddprun({"--help"})), page = run(ddprun({"--print-man"}));
    EXPECT_EQ(page.status, 0) << page.err;
    EXPECT_TRUE(page.out.starts_with(".TH DDPRUN 1"));
    EXPECT_THAT(page.out, AllOf(HasSubstr(".PP\nEach worker finds"), HasSubstr(".PP\n\\-\\-signal and"))) << "no part of the entry before";
    const std::string of_options = help.out.substr(0, help.out.find("\nOther commands"));
    int options = 0;
    for (const std::string_view line : split(of_options, '\n')) {
        const std::size_t at = line.find("--");
        if (!line.starts_with("  ") || at == line.npos || at > 6) continue;
        std::string name(line.substr(at, line.find_first_of(" ", at) - at));
        for (std::size_t dash = name.find('-'); dash != name.npos; dash = name.find('-', dash + 2)) name.insert(dash, "\\");
        EXPECT_THAT(page.out, HasSubstr("\\fB" + name + "\\fR"));
        ++options;
    }
    EXPECT_GT(options, 40);
    EXPECT_THAT(page.out, AllOf(HasSubstr(".SH EXIT STATUS"), HasSubstr(".SH SIGNALS"), HasSubstr(".SH EXAMPLES")));
}

// ---- PET_ variables

TEST(Flags, EveryFlagHasItsVariableAlsoThoseThatTorchrunForgot) {
    const Outcome outcome = run(ddprun_probe({}, {"env", "ROLE_NAME", "env", "LOCAL_RANK"}),
                                with_environment({"PET_NPROC_PER_NODE=2", "PET_ROLE=pet", "PET_VIRTUAL_LOCAL_RANK=1", "PET_NNODES=1:1",
                                                  "PET_STANDALONE=1", "PET_NUMA_BINDING=none", "PET_LOGS_SPECS=default", "CUDA_VISIBLE_DEVICES="}));
    EXPECT_THAT(sorted_lines(outcome.out), ElementsAre("[0]: LOCAL_RANK=0", "[0]: ROLE_NAME=pet", "[1]: LOCAL_RANK=0", "[1]: ROLE_NAME=pet")) << outcome.err;
    EXPECT_THAT(run(ddprun({}), with_environment({"PET_PRINT_COMPLETION=fish"})).out, HasSubstr("complete -c ddprun"));
}

TEST(Flags, TheCommandLineWinsOverTheVariable) {
    const Outcome outcome = run(ddprun_probe({"--nproc-per-node=1"}, {"env", "ROLE_NAME"}), with_environment({"PET_NPROC_PER_NODE=3", "PET_ROLE="}));
    EXPECT_EQ(outcome.out, "ROLE_NAME=default\n");
}

TEST(Flags, AVariableThatIsWrongIsNamed) {
    const Outcome outcome = run(ddprun_probe({}, {"say", "started"}), with_environment({"PET_NUMA_BINDING=chip"}));
    EXPECT_EQ(outcome.status, 64);
    EXPECT_THAT(outcome.err, AllOf(HasSubstr("PET_NUMA_BINDING"), HasSubstr("chip"), HasSubstr("socket")));
}

// ---- bad input

constexpr const char* kHostile = "\x1b[2J\xc2\x9b" "2J\xe2\x80\xae";
constexpr const char* kSpelledOut = "\\x1b[2J\\u{9b}2J\\u{202e}";

bool is_fit_for_a_terminal(const std::string& text) {
    return text.find('\x1b') == std::string::npos && text.find("\xc2\x9b") == std::string::npos && text.find("\xe2\x80\xae") == std::string::npos;
}

TEST(Flags, WhatIsQuotedInAnErrorIsNotObeyedByTheTerminal) {
    const TemporaryDirectory directory;
    const std::string hostile = kHostile;
    const std::string config = directory.file("config.json");
    std::ofstream(config) << "{\"numa-binding\": \"" << hostile.substr(4) << "\"}";
    const std::vector<std::vector<std::string>> commands = {
        ddprun_probe({"--config=" + directory.file(hostile)}, {}), ddprun_probe({"--config", config}, {}), ddprun_probe({"--" + hostile}, {}),
        ddprun_probe({"--numa-binding=" + hostile}, {}), ddprun_probe({"--nproc-per-node=" + hostile}, {}), ddprun({"./" + hostile}),
        ddprun({"drain", "--job", hostile}), ddprun({"signal", hostile}), ddprun({"ps", hostile}), ddprun({"top", hostile}),
        ddprun({"logs", hostile}), ddprun({"doctor", "--" + hostile}), ddprun({"env", "--numa-binding=" + hostile})};
    for (const std::vector<std::string>& command : commands) {
        const Outcome outcome = run(command);
        EXPECT_NE(outcome.status, 0) << join(command, " ");
        EXPECT_NE(outcome.err, "") << join(command, " ");
        EXPECT_TRUE(is_fit_for_a_terminal(outcome.err + outcome.out)) << join(command, " ");
    }
    for (const char* variable : {"PET_NUMA_BINDING", "PET_NNODES", "PET_CONFIG"}) {
        const Outcome outcome = run(ddprun_probe({}, {"say", "x"}), with_environment({std::string(variable) + "=" + hostile}));
        EXPECT_TRUE(is_fit_for_a_terminal(outcome.err)) << variable;
    }
    EXPECT_THAT(run(ddprun_probe({"--numa-binding=" + hostile}, {})).err, HasSubstr(kSpelledOut));
    EXPECT_TRUE(is_fit_for_a_terminal(run(ddprun({"env"}), with_environment({"TMPDIR=" + hostile})).out));
    EXPECT_TRUE(is_fit_for_a_terminal(run(ddprun_probe({"--dry-run"}, {hostile})).out));
}

TEST(Flags, AProgramsNameInTheReportIsNotObeyedByTheTerminal) {
    const TemporaryDirectory directory;
    const std::string program = directory.file(kHostile);
    std::filesystem::create_symlink("/bin/false", program);
    const Outcome outcome = run(ddprun({program}));
    EXPECT_EQ(outcome.status, 1);
    EXPECT_THAT(outcome.err, AllOf(HasSubstr(kSpelledOut), HasSubstr("failed: rank 0")));
    EXPECT_TRUE(is_fit_for_a_terminal(outcome.err));
}

struct Refusal {
    std::vector<std::string> words;
    std::vector<std::string> told;  ///< all of these stand in the error
};

void PrintTo(const Refusal& refusal, std::ostream* out) { *out << join(refusal.words, " "); }

class Refused : public ::testing::TestWithParam<Refusal> {};

TEST_P(Refused, BeforeAnythingStartsWithTheFlagTheValueAndWhatWasExpected) {
    const Outcome outcome = run(ddprun_probe(GetParam().words, {"say", "started"}));
    EXPECT_EQ(outcome.status, 64);
    EXPECT_EQ(outcome.out, "");
    for (const std::string& text : GetParam().told) EXPECT_THAT(outcome.err, HasSubstr(text));
    EXPECT_EQ(occurrences(outcome.err, "\n"), 1) << outcome.err;
}

INSTANTIATE_TEST_SUITE_P(Flags, Refused, ::testing::Values(
    Refusal{{"--nnodes=0"}, {"--nnodes", "0"}},
    Refusal{{"--nnodes=3:2"}, {"--nnodes", "3:2"}},
    Refusal{{"--nnodes=two"}, {"--nnodes", "two"}},
    Refusal{{"--nproc-per-node=-1"}, {"--nproc-per-node", "-1"}},
    Refusal{{"--nproc-per-node=xpu"}, {"--nproc-per-node", "xpu", "gpu"}},
    Refusal{{"--nproc-per-node=99999999999"}, {"--nproc-per-node", "99999999999"}},
    Refusal{{"--nproc-per-nods=2"}, {"--nproc-per-nods", "--nproc-per-node"}},
    Refusal{{"--master=here"}, {"--master", "--master-addr", "--master-port"}},
    Refusal{{"--max-restarts=-1"}, {"--max-restarts", "-1"}},
    Refusal{{"--max-restarts=3/soon"}, {"--max-restarts", "soon"}},
    Refusal{{"--monitor-interval=often"}, {"--monitor-interval", "often"}},
    Refusal{{"--start-method=thread"}, {"--start-method", "thread", "spawn"}},
    Refusal{{"--redirects=4"}, {"--redirects", "4"}},
    Refusal{{"-t", "0:1,1"}, {"-t", "'1'", "LOCAL_RANK"}},
    Refusal{{"--local-ranks-filter=a"}, {"--local-ranks-filter", "a"}},
    Refusal{{"--numa-binding=chip"}, {"--numa-binding", "chip", "core-complex"}},
    Refusal{{"--signals-to-handle=SIGFOO"}, {"--signals-to-handle", "SIGFOO"}},
    Refusal{{"--signals-to-handle=SIGKILL"}, {"--signals-to-handle", "SIGKILL"}},
    Refusal{{"--shutdown-timeout=-1"}, {"--shutdown-timeout", "-1"}},
    Refusal{{"--node-rank=-1"}, {"--node-rank", "-1"}},
    Refusal{{"--node-rank=2", "--nnodes=2"}, {"--node-rank 2", "--nnodes 2"}},
    Refusal{{"--master-port=70000"}, {"--master-port", "70000"}},
    Refusal{{"--rdzv-conf=join_timeout"}, {"--rdzv-conf", "join_timeout"}},
    Refusal{{"--rdzv-endpoint=host:port"}, {"--rdzv-endpoint", "host:port"}},
    Refusal{{"--standalone", "--nnodes=2"}, {"--standalone", "--nnodes 2"}},
    Refusal{{"-m", "--no-python"}, {"-m", "--no-python"}},
    Refusal{{"--standalone=1"}, {"--standalone", "takes no value"}},
    Refusal{{"--rdzv-id", "--standalone"}, {"--rdzv-id", "--standalone"}},
    Refusal{{"--print-completion=cmd"}, {"--print-completion", "cmd", "bash"}},
    Refusal{{"--event-log-handler="}, {"--event-log-handler"}},
    Refusal{{"--max-log-size=big"}, {"--max-log-size", "big"}},
    Refusal{{"--prefix=${rnk}"}, {"--prefix", "rnk"}},
    Refusal{{"--role="}, {"--role", "empty"}}));

}  // namespace
}  // namespace ddprun::test
