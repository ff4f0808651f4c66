#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/stat.h>

#include <fstream>

#include "env/text.h"
#include "launcher/cli/help.h"
#include "launcher/cli/option_table.h"
#include "launcher/cli/options.h"
#include "launcher/cli/subcommand.h"
#include "launcher/spec/signals.h"
#include "tests/support/temporary_directory.h"

namespace ddprun {
namespace {

using std::chrono::milliseconds;
using std::chrono::minutes;
using std::chrono::seconds;
using testing::Contains;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;

using Variables = std::map<std::string, std::string>;

Result<CommandLine> parse(const std::vector<std::string>& args, const Variables& variables = {}) {
    return parse_command_line(args, [&](std::string_view name) -> std::optional<std::string> {
        const auto found = variables.find(std::string(name));
        return found == variables.end() ? std::nullopt : std::optional(found->second);
    });
}

/// The options before a program named "prog".
CommandLine line_of(std::vector<std::string> options, const Variables& variables = {}) {
    options.emplace_back("prog");
    Result<CommandLine> line = parse(options, variables);
    EXPECT_TRUE(line) << (line ? "" : line.error().what);
    return line ? *line : CommandLine{};
}

JobSpec spec_of(std::vector<std::string> options, const Variables& variables = {}) {
    return line_of(std::move(options), variables).spec;
}

std::string error_of(std::vector<std::string> options, const Variables& variables = {}) {
    options.emplace_back("prog");
    const Result<CommandLine> line = parse(options, variables);
    EXPECT_FALSE(line) << "was accepted";
    return line ? "" : line.error().what;
}

// ---- one test for each row of torchrun's table

TEST(Option, NnodesTakesACountOrARange) {
    EXPECT_EQ(spec_of({}).nodes, (Nodes{1, 1}));
    EXPECT_EQ(spec_of({"--nnodes", "3"}).nodes, (Nodes{3, 3}));
    EXPECT_EQ(spec_of({"--nnodes=2:8"}).nodes, (Nodes{2, 8}));
    EXPECT_EQ(spec_of({}, {{"PET_NNODES", "1:4"}}).nodes, (Nodes{1, 4}));
    EXPECT_EQ(error_of({"--nnodes", "4:2"}),
              "--nnodes: '4:2': the minimum 4 is above the maximum 2 (expected MIN:MAX)");
    EXPECT_THAT(error_of({"--nnodes", "0"}), HasSubstr("--nnodes: '0' is not a number of nodes"));
    EXPECT_THAT(error_of({"--nnodes", "1:2:3"}), HasSubstr("is not N or MIN:MAX"));
    EXPECT_THAT(error_of({"--nnodes", "1:"}), HasSubstr("'' is not a number"));
}

TEST(Option, NprocPerNodeTakesACountOrADeviceClass) {
    using Kind = WorkerCount::Kind;
    EXPECT_EQ(spec_of({}).workers, (WorkerCount{Kind::Number, 1}));
    EXPECT_EQ(spec_of({"--nproc-per-node=4"}).workers, (WorkerCount{Kind::Number, 4}));
    EXPECT_EQ(spec_of({"--nproc_per_node", "auto"}).workers.kind, Kind::Auto);
    EXPECT_EQ(spec_of({"--nproc-per-node", "gpu"}).workers.kind, Kind::Gpu);
    EXPECT_EQ(spec_of({}, {{"PET_NPROC_PER_NODE", "cpu"}}).workers.kind, Kind::Cpu);
    EXPECT_EQ(error_of({"--nproc-per-node=eight"}),
              "--nproc-per-node: 'eight' is not a number (expected a count, auto, gpu or cpu)");
    EXPECT_THAT(error_of({"--nproc-per-node=0"}), HasSubstr("'0' is not between 1 and"));
    EXPECT_THAT(error_of({"--nproc-per-node=-1"}), HasSubstr("'-1' is not between"));
    EXPECT_THAT(error_of({}, {{"PET_NPROC_PER_NODE", "x"}}),
                HasSubstr("PET_NPROC_PER_NODE: 'x' is not a number"));
}

TEST(Option, AWordOfAnMpiLauncherIsAnsweredWithOursAndTheUsersValue) {
    const auto unknown = [](const std::string& word, const std::string& ours) {
        return word + ": unknown option; ddprun's is " + ours;
    };
    const std::string count = "--nproc-per-node=4, the workers of each node";
    for (const char* word : {"-n", "-np", "--nprocs", "-ppn", "--ppn", "--npernode", "--ntasks-per-node"}) {
        EXPECT_EQ(error_of({word, "4", "./train"}), unknown(word, count));
        EXPECT_EQ(error_of({"--standalone", word + std::string("=4"), "./train"}), unknown(word, count));
    }
    EXPECT_EQ(error_of({"-n4", "./train"}), unknown("-n", count));
    EXPECT_EQ(error_of({"-np", "--standalone"}),
              unknown("-np", "--nproc-per-node=N, the workers of each node"));
    EXPECT_EQ(error_of({"-N", "2"}),
              unknown("-N", "--nnodes=2 for srun's -N, --nproc-per-node=2 for mpirun's"));
    EXPECT_EQ(error_of({"-hostfile", "nodes"}), unknown("-hostfile", "--hostfile=nodes"));
    EXPECT_EQ(error_of({"-machinefile", "nodes"}), unknown("-machinefile", "--hostfile=nodes"));
    EXPECT_EQ(error_of({"-H", "a,b"}), unknown("-H", "--hosts=a,b"));
    EXPECT_EQ(error_of({"-x"}), "-x: unknown option (see ddprun --help)");
    EXPECT_EQ(error_of({"--nnodes=x", "./train", "-n", "4"}), error_of({"--nnodes=x", "./train"}))
        << "a word of the program is no option";
}

TEST(Option, RdzvBackendIsStaticOrC10d) {
    EXPECT_EQ(spec_of({}).rendezvous.backend, "static");
    EXPECT_EQ(spec_of({"--rdzv-backend", "c10d"}).rendezvous.backend, "c10d");
    EXPECT_EQ(spec_of({"--rdzv_backend=c10d"}).rendezvous.backend, "c10d");
    EXPECT_EQ(spec_of({}, {{"PET_RDZV_BACKEND", "c10d"}}).rendezvous.backend, "c10d");
    EXPECT_THAT(error_of({"--rdzv-backend", "etcd-v2"}), HasSubstr("'etcd-v2' is not supported"));
    EXPECT_EQ(error_of({"--rdzv-backend", "x"}), "--rdzv-backend: 'x' is not static or c10d");
}

TEST(Option, RdzvEndpointHasTheDefaultPort29400) {
    EXPECT_FALSE(spec_of({}).rendezvous.endpoint);
    EXPECT_EQ(spec_of({"--rdzv-endpoint", "node00"}).rendezvous.endpoint, (Endpoint{"node00", 29400}));
    EXPECT_EQ(spec_of({"--rdzv_endpoint=node00:1234"}).rendezvous.endpoint, (Endpoint{"node00", 1234}));
    EXPECT_EQ(spec_of({}, {{"PET_RDZV_ENDPOINT", "a:1"}}).rendezvous.endpoint, (Endpoint{"a", 1}));
    EXPECT_FALSE(spec_of({"--rdzv-endpoint", ""}).rendezvous.endpoint);
    EXPECT_FALSE(spec_of({"--rdzv-endpoint", "localhost:0"}).rendezvous.endpoint);
    EXPECT_EQ(
        error_of({"--rdzv-endpoint", "localhost:0", "--nnodes", "2"}),
        "--rdzv-endpoint localhost:0 and --nnodes 2 contradict each other: other nodes cannot find port 0; give a port");
    EXPECT_THAT(error_of({"--rdzv-endpoint", "a:b"}), HasSubstr("--rdzv-endpoint: "));
}

TEST(Option, RdzvIdNamesTheJob) {
    EXPECT_EQ(spec_of({"--nnodes=2"}).rendezvous.run_id, "none") << "all nodes need the same";
    EXPECT_EQ(spec_of({"--nnodes=1:2"}).rendezvous.run_id, "none");
    EXPECT_EQ(spec_of({"--rdzv-id", "j7"}).rendezvous.run_id, "j7");
    EXPECT_EQ(spec_of({"--rdzv_id=j8"}, {{"PET_RDZV_ID", "other"}}).rendezvous.run_id, "j8");
    EXPECT_EQ(error_of({"--rdzv-id="}), "--rdzv-id: the value is empty");
}

TEST(Option, AJobOfOneNodeWithoutAnIdHasAUniqueOne) {
    EXPECT_EQ(spec_of({}).rendezvous.run_id.size(), 16U);
    EXPECT_NE(spec_of({}).rendezvous.run_id, spec_of({}).rendezvous.run_id);
    EXPECT_NE(spec_of({"--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"}).rendezvous.run_id, "none");
    EXPECT_EQ(spec_of({"--rdzv-id=none"}).rendezvous.run_id, "none");
}

TEST(Option, RdzvConfMayStandInQuotes) {
    for (const char* conf :
         {"'timeout=900,is_host=0'", "\"timeout=900\",'is_host=0'", "timeout='900', 'is_host'=\"0\""}) {
        const CommandLine line = line_of({"--rdzv-conf", conf});
        EXPECT_EQ(line.spec.rendezvous.join_timeout, seconds(900)) << conf;
        EXPECT_EQ(line.spec.rendezvous.is_host, false) << conf;
        EXPECT_THAT(line.remarks, ElementsAre()) << conf;
    }
    EXPECT_THAT(line_of({"--rdzv-conf='timeout=900"}).remarks, ElementsAre(HasSubstr("''timeout'")))
        << "an open quote belongs to the key";
}

TEST(Option, UnknownKeysOfRdzvConfAreReportedAndIgnored) {
    const CommandLine line = line_of({"--rdzv-conf", "jointimeout=3,color=red,timeout=7"});
    EXPECT_THAT(
        line.remarks,
        ElementsAre(
            "--rdzv-conf: 'jointimeout' is not a known key (did you mean join_timeout?), without effect",
            HasSubstr("'color' is not a known key, without effect (known are join_timeout, ")));
    EXPECT_EQ(line.spec.rendezvous.join_timeout, seconds(7));
}

TEST(Option, RdzvConfTakesTorchrunsKeys) {
    const RendezvousSpec rdzv =
        spec_of({"--rdzv-conf", "join_timeout=90,last_call_timeout=5,is_host=1"}).rendezvous;
    EXPECT_EQ(rdzv.join_timeout, seconds(90));
    EXPECT_EQ(rdzv.last_call, seconds(5));
    EXPECT_EQ(rdzv.is_host, true);
    EXPECT_EQ(spec_of({"--rdzv_conf=timeout=900"}).rendezvous.join_timeout, seconds(900));
    EXPECT_EQ(spec_of({"--rdzv-conf=timeout=900,join_timeout=1"}).rendezvous.join_timeout, seconds(1));
    EXPECT_EQ(spec_of({}, {{"PET_RDZV_CONF", "keep_alive_interval=2,keep_alive_max_attempt=4"}})
                  .rendezvous.keep_alive_attempts,
              4);
    EXPECT_THAT(
        line_of({"--rdzv-conf=read_timeout=20,close_timeout=3,store_type=tcp,join_timeout=9"}).remarks,
        ElementsAre(HasSubstr("close_timeout: accepted, without effect"),
                    HasSubstr("read_timeout: accepted, without effect")));
    EXPECT_EQ(error_of({"--rdzv-conf", "=5"}), "--rdzv-conf: '=5' is not KEY=VALUE");
    EXPECT_EQ(error_of({"--heartbeat-timeout=50ms"}),
              "--heartbeat-timeout: '50ms' is not a time of at least 100 ms");
    EXPECT_EQ(error_of({"--heartbeat-timeout=100000d"}),
              "--heartbeat-timeout: '100000d' is too long a duration");
    EXPECT_THAT(error_of({"--heartbeat-timeout=5x"}), HasSubstr("'5x' is not a time span"));
    EXPECT_EQ(error_of({"--rdzv-conf", "keep_alive_interval=0"}),
              "--rdzv-conf: keep_alive_interval: '0' is not a time of at least 10 ms");
    EXPECT_EQ(error_of({"--rdzv-conf", "join_timeout=soon"}),
              "--rdzv-conf: join_timeout: 'soon' is not a time in seconds");
    EXPECT_EQ(error_of({"--rdzv-conf", "is_host"}), "--rdzv-conf: 'is_host' is not KEY=VALUE");
    EXPECT_THAT(error_of({"--rdzv-conf", "ca_cert=/a"}), HasSubstr("etcd"));
    EXPECT_THAT(error_of({"--rdzv-conf", "store_type=file"}), HasSubstr("expected tcp"));
}

TEST(Option, StandaloneOverridesTheRendezvous) {
    const CommandLine line = line_of({"--standalone", "--rdzv-endpoint=far:1", "--rdzv-id=x"});
    EXPECT_EQ(line.spec.rendezvous.backend, "c10d");
    EXPECT_FALSE(line.spec.rendezvous.endpoint);
    EXPECT_EQ(line.spec.rendezvous.run_id.size(), 16U);
    EXPECT_THAT(line.remarks, ElementsAre("--rdzv-endpoint: ignored, --standalone chooses it",
                                          "--rdzv-id: ignored, --standalone chooses it"));
    EXPECT_NE(spec_of({"--standalone"}).rendezvous.run_id, spec_of({"--standalone"}).rendezvous.run_id);
    EXPECT_EQ(spec_of({}, {{"PET_STANDALONE", "1"}}).rendezvous.backend, "c10d");
    EXPECT_EQ(spec_of({}, {{"PET_STANDALONE", "0"}}).rendezvous.backend, "static");
    EXPECT_EQ(error_of({"--standalone", "--nnodes", "2"}),
              "--standalone and --nnodes 2 contradict each other: standalone is one node");
    EXPECT_EQ(error_of({"--standalone"}, {{"PET_NNODES", "2"}}),
              "--standalone and PET_NNODES=2 contradict each other: standalone is one node");
}

TEST(Option, RecoveryInPlaceIsOnUnlessTheUserWantsRestarts) {
    EXPECT_EQ(spec_of({}).recover.mode, RecoverSpec::Mode::Auto);
    EXPECT_EQ(spec_of({"--recover=restart"}).recover.mode, RecoverSpec::Mode::Restart);
    EXPECT_EQ(spec_of({"--recover-within=2m"}).recover.within, std::chrono::minutes(2));
    EXPECT_THAT(error_of({"--recover-within=0"}), HasSubstr("--recover=restart turns recovery off"));
    EXPECT_EQ(spec_of({"--rehearse=100"}).recover.rehearse, 100);
    EXPECT_THAT(error_of({"--rehearse=0"}), HasSubstr("--rehearse"));
    EXPECT_THAT(error_of({"--rehearse=100", "--recover=restart"}), HasSubstr("contradict each other"));
}

TEST(Option, MaxRestartsTakesACountOrABudgetOverTime) {
    EXPECT_EQ(spec_of({}).restart.max_restarts, 0);
    EXPECT_EQ(spec_of({"--max-restarts=3"}).restart.max_restarts, 3);
    EXPECT_FALSE(spec_of({"--max_restarts", "3"}).restart.window);
    EXPECT_EQ(spec_of({"--max-restarts", "3/1h"}).restart.window, std::chrono::hours(1));
    EXPECT_EQ(spec_of({}, {{"PET_MAX_RESTARTS", "2"}}).restart.max_restarts, 2);
    EXPECT_THAT(error_of({"--max-restarts", "-1"}), HasSubstr("'-1' is not a count of restarts"));
    EXPECT_THAT(error_of({"--max-restarts", "3/"}), HasSubstr("'' is not a time span"));
    EXPECT_THAT(error_of({"--max-restarts", "3/0"}), HasSubstr("'0' is not a time span"));
}

TEST(Option, MonitorIntervalIsAcceptedWithARemark) {
    EXPECT_THAT(line_of({"--monitor-interval", "0.1"}).remarks,
                ElementsAre(HasSubstr("--monitor-interval: accepted")));
    EXPECT_THAT(line_of({}, {{"PET_MONITOR_INTERVAL", "5"}}).remarks,
                ElementsAre(HasSubstr("--monitor-interval")));
    EXPECT_THAT(line_of({}).remarks, IsEmpty());
    EXPECT_EQ(error_of({"--monitor_interval=often"}),
              "--monitor_interval: 'often' is not a number of seconds");
}

TEST(Option, StartMethodIsAcceptedWithARemark) {
    EXPECT_THAT(line_of({"--start-method=fork"}).remarks, ElementsAre(HasSubstr("--start-method: accepted")));
    EXPECT_THAT(line_of({}, {{"PET_START_METHOD", "spawn"}}).remarks,
                ElementsAre(HasSubstr("--start-method")));
    EXPECT_EQ(error_of({"--start_method=thread"}),
              "--start_method: 'thread' is not spawn, fork or forkserver");
}

TEST(Option, EventLogHandlerConsoleWritesEvents) {
    EXPECT_EQ(spec_of({"--event-log-handler", "console"}).events_file, "/dev/stderr");
    EXPECT_EQ(spec_of({"--event_log_handler=null"}).events_file, "");
    EXPECT_EQ(spec_of({"--event-log-handler=console", "--events=e.json"}).events_file, "e.json");
    EXPECT_EQ(spec_of({}, {{"PET_EVENT_LOG_HANDLER", "console"}}).events_file, "/dev/stderr");
    EXPECT_THAT(line_of({"--event-log-handler=mine"}).remarks, ElementsAre(HasSubstr("plug-ins")));
}

TEST(Option, RoleNamesTheRole) {
    EXPECT_EQ(spec_of({}).role, "default");
    EXPECT_EQ(spec_of({"--role=trainer"}).role, "trainer");
    EXPECT_EQ(spec_of({}, {{"PET_ROLE", "reader"}}).role, "reader");
}

TEST(Option, ModuleRunsAPythonModule) {
    EXPECT_EQ(spec_of({"-m"}).program.kind, ProgramSpec::Kind::Module);
    EXPECT_EQ(spec_of({"--module"}).program.kind, ProgramSpec::Kind::Module);
    EXPECT_EQ(spec_of({}, {{"PET_MODULE", "1"}}).program.kind, ProgramSpec::Kind::Module);
    EXPECT_EQ(error_of({"-m", "--no-python"}),
              "-m and --no-python contradict each other: a module is run by Python");
    EXPECT_EQ(
        error_of({"--pass-mpi-env", "--pmix=on"}),
        "--pass-mpi-env and --pmix on contradict each other: the MPI of the workers can use one launcher only");
}

TEST(Option, NoPythonExecutesDirectly) {
    EXPECT_EQ(spec_of({}).program.kind, ProgramSpec::Kind::Detect);
    EXPECT_EQ(spec_of({"--no-python"}).program.kind, ProgramSpec::Kind::Executable);
    EXPECT_EQ(spec_of({"--no_python"}).program.kind, ProgramSpec::Kind::Executable);
    EXPECT_EQ(spec_of({}, {{"PET_NO_PYTHON", "1"}}).program.kind, ProgramSpec::Kind::Executable);
    EXPECT_THAT(error_of({"--no-python=1"}), HasSubstr("--no-python: takes no value"));
    EXPECT_EQ(error_of({}, {{"PET_NO_PYTHON", "maybe"}}), "PET_NO_PYTHON: 'maybe' is not true or false");
}

TEST(Option, RunPathWinsOverNoPython) {
    EXPECT_EQ(spec_of({"--run-path"}).program.kind, ProgramSpec::Kind::RunPath);
    EXPECT_EQ(spec_of({"--run_path", "--no-python"}).program.kind, ProgramSpec::Kind::RunPath);
    EXPECT_EQ(spec_of({}, {{"PET_RUN_PATH", "1"}}).program.kind, ProgramSpec::Kind::RunPath);
}

TEST(Option, LogDirAloneTeesAllStreams) {
    const OutputSpec output = spec_of({"--log-dir", "logs"}).output;
    EXPECT_EQ(output.log_dir, "logs");
    EXPECT_EQ(output.tee.everyone, Streams::All);
    EXPECT_EQ(spec_of({"--log_dir=logs", "-r", "1"}).output.tee.everyone, Streams::None);
    EXPECT_EQ(spec_of({"--log-dir=logs", "-t", "0"}).output.tee.everyone, Streams::None);
    EXPECT_EQ(spec_of({}, {{"PET_LOG_DIR", "logs"}}).output.log_dir, "logs");
    EXPECT_EQ(spec_of({}).output.tee, StreamsMap{});
}

TEST(Option, RedirectsTakesABitMaskOrAMapWithAnyDigits) {
    EXPECT_EQ(spec_of({"-r", "3"}).output.redirects.everyone, Streams::All);
    EXPECT_EQ(spec_of({"-r2"}).output.redirects.everyone, Streams::Err);
    EXPECT_EQ(spec_of({"-r=1"}).output.redirects.everyone, Streams::Out);
    const StreamsMap map = spec_of({"--redirects=0:1,11:2"}).output.redirects;
    EXPECT_EQ(map.of(0), Streams::Out);
    EXPECT_EQ(map.of(11), Streams::Err);
    EXPECT_EQ(map.of(1), Streams::None);
    EXPECT_EQ(spec_of({}, {{"PET_REDIRECTS", "3"}}).output.redirects.everyone, Streams::All);
    EXPECT_THAT(error_of({"-r", "4"}),
                HasSubstr("-r: '4' is not 0 (none), 1 (stdout), 2 (stderr) or 3 (both)"));
    EXPECT_EQ(error_of({"-r", "0:1,0:2"}), "-r: '0:1,0:2' names local rank 0 twice");
    EXPECT_THAT(error_of({"-r", "0:1,2"}), HasSubstr("'2' is not LOCAL_RANK:STREAMS"));
}

TEST(Option, TeeIsWrittenLikeRedirects) {
    EXPECT_EQ(spec_of({"-t", "3"}).output.tee.everyone, Streams::All);
    EXPECT_EQ(spec_of({"--tee=12:3"}).output.tee.of(12), Streams::All);
    EXPECT_EQ(spec_of({}, {{"PET_TEE", "1"}}).output.tee.everyone, Streams::Out);
    EXPECT_THAT(error_of({"-t", "x"}), HasSubstr("-t: 'x' is not"));
}

TEST(Option, LocalRanksFilterListsLocalRanks) {
    EXPECT_THAT(spec_of({"--local-ranks-filter", "0,12"}).output.local_ranks, ElementsAre(0, 12));
    EXPECT_THAT(spec_of({"--local_ranks_filter="}).output.local_ranks, IsEmpty());
    EXPECT_THAT(spec_of({}, {{"PET_LOCAL_RANKS_FILTER", "3"}}).output.local_ranks, ElementsAre(3));
    EXPECT_THAT(error_of({"--local-ranks-filter", "0,x"}), HasSubstr("'x' is not a rank"));
}

TEST(Option, DuplicateStdoutFiltersTakeADoubleCommaAsAComma) {
    EXPECT_THAT(spec_of({"--duplicate-stdout-filters", "loss,,acc,step"}).output.stdout_filters,
                ElementsAre("loss,acc", "step"));
    EXPECT_THAT(spec_of({}, {{"PET_DUPLICATE_STDOUT_FILTERS", "a"}}).output.stdout_filters, ElementsAre("a"));
}

TEST(Option, DuplicateStderrFiltersAreTheirOwn) {
    const OutputSpec output = spec_of({"--duplicate_stderr_filters=warn"}).output;
    EXPECT_THAT(output.stderr_filters, ElementsAre("warn"));
    EXPECT_THAT(output.stdout_filters, IsEmpty());
    EXPECT_THAT(spec_of({}, {{"PET_DUPLICATE_STDERR_FILTERS", "a"}}).output.stderr_filters, ElementsAre("a"));
}

TEST(Option, LogsSpecsIsAcceptedAlsoFromItsVariable) {
    EXPECT_THAT(line_of({"--logs-specs=default"}).remarks, IsEmpty());
    EXPECT_THAT(line_of({"--logs_specs=mine"}).remarks, ElementsAre(HasSubstr("--logs-specs: accepted")));
    EXPECT_THAT(line_of({}, {{"PET_LOGS_SPECS", "mine"}}).remarks, ElementsAre(HasSubstr("--logs-specs")));
}

TEST(Option, NumaBindingHasFourPoliciesAlsoFromItsVariable) {
    EXPECT_EQ(spec_of({}).binding, NumaBinding::Auto);
    EXPECT_EQ(spec_of({"--numa-binding=node"}).binding, NumaBinding::Node);
    EXPECT_EQ(spec_of({"--numa_binding", "socket"}).binding, NumaBinding::Socket);
    EXPECT_EQ(spec_of({"--numa-binding=exclusive"}).binding, NumaBinding::Exclusive);
    EXPECT_EQ(spec_of({}, {{"PET_NUMA_BINDING", "core-complex"}}).binding, NumaBinding::CoreComplex);
    EXPECT_EQ(spec_of({"--fabric=ib"}).fabric, Fabric::Infiniband);
    EXPECT_EQ(spec_of({"--fabric=none"}).fabric, Fabric::None);
    EXPECT_EQ(spec_of({"--fabric=auto"}).fabric, std::nullopt);
    EXPECT_EQ(error_of({"--fabric=tcp"}),
              "--fabric: 'tcp' is not auto, slingshot, ib, efa, ethernet or none");
    EXPECT_EQ(spec_of({"--numa-binding=none"}).binding, NumaBinding::None);
    EXPECT_EQ(error_of({"--numa-binding=core"}),
              "--numa-binding: 'core' is not none, auto, node, socket, exclusive or core-complex");
}

TEST(Option, LinesThatWebPagesAndHabitsMakeAreAnsweredByWhatIsWrong) {
    EXPECT_EQ(error_of({"\u2013nproc-per-node=4", "train"}),
              "'\u2013nproc-per-node=4' begins with '\u2013', a typographic dash, and not with '-'");
    EXPECT_THAT(error_of({"--rdzv-endpoint=29400"}), HasSubstr("a port without a host"));
    EXPECT_EQ(error_of({"--nnodes=2", "--master-addr=node01:29400"}),
              "--master-addr: 'node01:29400' is not an address alone; its port goes into --master-port");
    EXPECT_EQ(spec_of({"--nnodes=2", "--master-addr=fd00::1"}).rendezvous.master_addr, "fd00::1");
    for (const char* const name : {"A B=1", "=1", "1A=x", "-x", "A$(id)=4"})
        EXPECT_THAT(error_of({"--env", name}), HasSubstr("is not NAME or NAME=VALUE of a variable")) << name;
}

TEST(Option, SignalsToHandleStopTheJob) {
    auto signals = spec_of({"--signals-to-handle", "SIGUSR1,SIGTERM"}).signals;
    complete_signals(signals);
    EXPECT_EQ(signals.at(SIGUSR1), SignalAction::Stop);
    EXPECT_EQ(signals.at(SIGTERM), SignalAction::Stop);
    EXPECT_EQ(signals.at(SIGINT), SignalAction::Stop) << "not listed, and yet no worker may be left behind";
    EXPECT_EQ(signals.at(SIGUSR2), SignalAction::Forward);
    EXPECT_EQ(spec_of({}, {{"PET_SIGNALS_TO_HANDLE", "SIGUSR2"}}).signals.at(SIGUSR2), SignalAction::Stop);
    EXPECT_THAT(error_of({"--signals_to_handle=SIGFOO"}), HasSubstr("'SIGFOO' is not a signal"));
    EXPECT_THAT(error_of({"--signals-to-handle=SIGKILL"}), HasSubstr("'SIGKILL' cannot be handled"));
}

TEST(Option, ShutdownTimeoutIsSecondsAndHasAVariableOfItsOwn) {
    EXPECT_EQ(spec_of({}).shutdown_timeout, seconds(30));
    EXPECT_EQ(spec_of({"--shutdown-timeout", "5"}).shutdown_timeout, seconds(5));
    EXPECT_EQ(spec_of({}, {{"TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "7"}}).shutdown_timeout, seconds(7));
    EXPECT_EQ(spec_of({"--shutdown_timeout=1"}, {{"TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "7"}}).shutdown_timeout,
              seconds(1));
    EXPECT_EQ(spec_of({}, {{"PET_SHUTDOWN_TIMEOUT", "0"}}).shutdown_timeout, seconds(0));
    EXPECT_EQ(spec_of({"--shutdown-timeout=2"}).failure_grace, seconds(2))
        << "never longer than the shutdown";
    EXPECT_THAT(error_of({"--shutdown-timeout", "-3"}),
                HasSubstr("--shutdown-timeout: '-3' is not a time span"));
}

TEST(Option, VirtualLocalRankIsASwitch) {
    EXPECT_FALSE(spec_of({}).virtual_local_rank);
    EXPECT_TRUE(spec_of({"--virtual-local-rank"}).virtual_local_rank);
    EXPECT_TRUE(spec_of({}, {{"PET_VIRTUAL_LOCAL_RANK", "1"}}).virtual_local_rank);
}

TEST(Option, NodeRankIsBelowNnodes) {
    EXPECT_FALSE(spec_of({}).rendezvous.node_rank);
    EXPECT_EQ(spec_of({"--node-rank=1", "--nnodes=2"}).rendezvous.node_rank, 1);
    EXPECT_EQ(spec_of({}, {{"PET_NODE_RANK", "0"}}).rendezvous.node_rank, 0);
    EXPECT_EQ(error_of({"--node_rank=2", "--nnodes=2"}),
              "--node_rank 2 and --nnodes 2 contradict each other: nodes have ranks 0 to 1");
    EXPECT_THAT(error_of({"--standalone", "--node-rank=1"}),
                HasSubstr("--standalone and --node-rank 1 contradict"));
}

TEST(Option, MasterAddrIsTheStaticEndpointOfSeveralNodes) {
    EXPECT_FALSE(spec_of({}).rendezvous.master_addr);
    const RendezvousSpec rdzv = spec_of({"--master-addr=node00", "--nnodes=2"}).rendezvous;
    EXPECT_EQ(rdzv.master_addr, "node00");
    EXPECT_EQ(rdzv.endpoint, (Endpoint{"node00", 29500}));
    EXPECT_EQ(spec_of({}, {{"PET_MASTER_ADDR", "h"}}).rendezvous.master_addr, "h");
    EXPECT_FALSE(spec_of({"--master_addr=node00"}).rendezvous.endpoint) << "one node needs no fixed port";
    EXPECT_FALSE(spec_of({"--master-addr=h", "--nnodes=2", "--rdzv-backend=c10d"}).rendezvous.endpoint);
}

TEST(Option, MasterPortIsAPort) {
    EXPECT_FALSE(spec_of({}).rendezvous.master_port);
    EXPECT_EQ(spec_of({"--master-port=29511"}).rendezvous.master_port, 29511);
    EXPECT_EQ(spec_of({"--master_port=1", "--master-addr=h", "--nnodes=2"}).rendezvous.endpoint,
              (Endpoint{"h", 1}));
    EXPECT_EQ(spec_of({}, {{"PET_MASTER_PORT", "2"}}).rendezvous.master_port, 2);
    EXPECT_THAT(error_of({"--master-port", "70000"}), HasSubstr("--master-port: '70000' is not a port"));
}

TEST(Option, LocalAddrArrives) {
    EXPECT_FALSE(spec_of({}).rendezvous.local_addr);
    EXPECT_EQ(spec_of({"--local-addr", "10.0.0.1"}).rendezvous.local_addr, "10.0.0.1");
    EXPECT_EQ(spec_of({}, {{"PET_LOCAL_ADDR", "h"}}).rendezvous.local_addr, "h");
    EXPECT_EQ(spec_of({}).rendezvous.iface, "");
    EXPECT_EQ(spec_of({"--iface=10.1.0.0/16"}).rendezvous.iface, "10.1.0.0/16");
    EXPECT_EQ(spec_of({}, {{"PET_IFACE", "ib0"}}).rendezvous.iface, "ib0");
}

TEST(Option, PrintCompletionNeedsNoProgram) {
    for (const char* shell : {"bash", "zsh", "fish", "tcsh"}) {
        const Result<CommandLine> line = parse({"--print-completion", shell});
        ASSERT_TRUE(line) << shell;
        EXPECT_THAT(line->text, HasSubstr("__complete")) << shell;
    }
    EXPECT_EQ(parse({}, {{"PET_PRINT_COMPLETION", "bash"}})->text, parse({"--print-completion=bash"})->text);
    EXPECT_EQ(error_of({"--print-completion=csh"}),
              "--print-completion: 'csh' is not bash, zsh, fish or tcsh");
}

TEST(Option, UseEnvIsAccepted) {
    EXPECT_THAT(line_of({"--use-env"}).remarks,
                ElementsAre(HasSubstr("LOCAL_RANK is always in the environment")));
    EXPECT_THAT(line_of({"--use_env"}).remarks, Not(IsEmpty()));
}

// ---- ddprun's own options

TEST(Option, RestartBackoffTakesFirstAndLongestWait) {
    EXPECT_EQ(spec_of({"--restart-backoff=500ms"}).restart.backoff, milliseconds(500));
    EXPECT_EQ(spec_of({"--restart-backoff=1s:5m"}).restart.backoff_max, minutes(5));
    EXPECT_EQ(spec_of({"--restart-backoff=2m"}).restart.backoff_max, minutes(2));
    EXPECT_THAT(error_of({"--restart-backoff=2m:1s"}), HasSubstr("above the longest"));
}

TEST(Option, StdinAndAttachNameARank) {
    EXPECT_FALSE(spec_of({}).stdin_rank);
    EXPECT_EQ(spec_of({"--stdin", "3"}).stdin_rank, 3);
    EXPECT_FALSE(spec_of({"--stdin=none"}, {{"PET_STDIN", "1"}}).stdin_rank);
    const auto attached = spec_of({"--attach", "2=gdb -q --args"}).attach;
    ASSERT_TRUE(attached);
    EXPECT_EQ(*attached, (std::pair{2, std::string("gdb -q --args")}));
    EXPECT_EQ(error_of({"--attach=2"}), "--attach: '2' is not RANK=COMMAND (as in 0=gdb)");
    EXPECT_EQ(error_of({"--attach", "0=gdb", "--stdin", "1"}),
              "--attach 0=gdb and --stdin 1 contradict each other: the attached rank reads the terminal");
}

TEST(Option, DdprunsTimesAndFilesArrive) {
    const JobSpec spec =
        spec_of({"--preempt-grace=2m", "--hang-timeout=15m", "--failure-grace=1s", "--report=r.json",
                 "--events=e", "--metrics-port=9000", "--tensorboard=t", "--dry-run", "-q", "--narrow-gpus"});
    EXPECT_EQ(spec.preempt_grace, minutes(2));
    EXPECT_EQ(spec.hang_timeout, minutes(15));
    EXPECT_EQ(spec.failure_grace, seconds(1));
    EXPECT_EQ(spec.report_file, "r.json");
    EXPECT_EQ(spec.events_file, "e");
    EXPECT_EQ(spec.metrics_at, (Endpoint{"127.0.0.1", 9000}));
    EXPECT_EQ(spec.tensorboard, "t");
    EXPECT_TRUE(spec.dry_run && spec.quiet && spec.narrow_gpus);
}

TEST(Option, MetricsAreServedOnTheLoopbackUnlessAnAddressIsNamed) {
    const auto served_at = [](const char* value) {
        return spec_of({std::string("--metrics-port=") + value}).metrics_at;
    };
    EXPECT_EQ(served_at("0"), (Endpoint{"127.0.0.1", 0}));
    EXPECT_EQ(served_at("10.0.0.5:9400"), (Endpoint{"10.0.0.5", 9400}));
    EXPECT_EQ(served_at("[::1]:9400"), (Endpoint{"::1", 9400}));
    EXPECT_EQ(served_at("*:9400"), (Endpoint{"", 9400}));
    EXPECT_THAT(error_of({"--metrics-port=node01"}), HasSubstr("'node01' is not a port"));
    EXPECT_THAT(error_of({"--metrics-port=*:94000"}), HasSubstr("'*:94000' is not host:port"));
}

TEST(Option, ThePodIndexOfKubernetesIsTheNodeRankOfSeveralNodes) {
    const Variables pod{{"JOB_COMPLETION_INDEX", "2"}};
    const CommandLine line = line_of({"--nnodes=4"}, pod);
    EXPECT_EQ(line.spec.rendezvous.node_rank, 2);
    EXPECT_EQ(line.sources.at("node-rank"), "JOB_COMPLETION_INDEX");
    EXPECT_EQ(line.values.at("node-rank"), "2") << "ddprun env shows it";
    EXPECT_EQ(spec_of({"--nnodes=1"}, pod).rendezvous.node_rank, std::nullopt) << "each pod is its own job";
    EXPECT_EQ(spec_of({"--nnodes=4", "--node-rank=1"}, pod).rendezvous.node_rank, 1);
    EXPECT_EQ(spec_of({"--hosts=a,b"}, pod).rendezvous.node_rank, std::nullopt);
    EXPECT_EQ(error_of({"--nnodes=4"}, {{"JOB_COMPLETION_INDEX", "x"}}),
              "JOB_COMPLETION_INDEX: 'x' is not a rank (expected 0, 1, ...)");
}

TEST(Option, PrefixComesFromTheFlagOrTorchrunsVariable) {
    EXPECT_FALSE(spec_of({}).output.prefix);
    EXPECT_FALSE(spec_of({}, {{"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", ""}}).output.prefix);
    EXPECT_EQ(spec_of({}, {{"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", "${role_name} "}}).output.prefix,
              "${role_name} ");
    EXPECT_EQ(
        spec_of({"--log-prefix=${host}:"}, {{"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", "x"}}).output.prefix,
        "${host}:");
    EXPECT_EQ(spec_of({"--prefix="}).output.prefix, "");
    EXPECT_EQ(spec_of({"--prefix=none"}).output.prefix, "");
    EXPECT_FALSE(spec_of({"--prefix=auto"}, {{"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", "x"}}).output.prefix);
    EXPECT_EQ(spec_of({"--log-line-prefix-template=${hostname} ${local_rank}:"}).output.prefix,
              "${hostname} ${local_rank}:");
    EXPECT_EQ(spec_of({"--log_line_prefix_template=theirs", "--prefix=ours"}).output.prefix, "ours");
    EXPECT_THAT(error_of({"--prefix=${rnak}"}),
                HasSubstr("'${rnak}' is not known (expected ${rank}, ${local_rank}"));
}

TEST(Option, TeeWritesWhatReadersOfTorchrunsTeeExpect) {
    EXPECT_EQ(spec_of({"-t", "1:3"}).output.prefix, "[${role_name}${local_rank}]:");
    EXPECT_EQ(spec_of({}, {{"PET_TEE", "3"}}).output.prefix, "[${role_name}${local_rank}]:");
    EXPECT_EQ(spec_of({"-t3", "--prefix=none"}).output.prefix, "");
    EXPECT_FALSE(spec_of({"-t0"}).output.prefix);
    EXPECT_FALSE(spec_of({"--log-dir=/l"}).output.prefix)
        << "everything is kept and shown, but nobody said --tee";
}

TEST(Option, OutputSwitchesArrive) {
    const OutputSpec output = spec_of({"--color=always", "--max-log-size=100MiB"}).output;
    EXPECT_EQ(output.color, OutputSpec::Color::Always);
    EXPECT_EQ(output.max_file_bytes, 100U << 20);
    EXPECT_EQ(spec_of({}, {{"NO_COLOR", "1"}}).output.color, OutputSpec::Color::Never);
    EXPECT_THAT(error_of({"--max-log-size=big"}), HasSubstr("--max-log-size: 'big'"));
}

TEST(Signals, ThoseThatTheStarterIgnoresStayIgnoredUnlessTheyAreNamed) {
    for (const int signal : {SIGHUP, SIGINT, SIGUSR1, SIGCONT}) ::signal(signal, SIG_IGN);
    std::map<int, SignalAction> actions{{SIGINT, SignalAction::Preempt}};
    complete_signals(actions);
    EXPECT_EQ(actions.at(SIGHUP), SignalAction::Ignore);
    EXPECT_EQ(actions.at(SIGUSR1), SignalAction::Ignore);
    EXPECT_EQ(actions.at(SIGINT), SignalAction::Preempt);
    EXPECT_EQ(actions.at(SIGCONT), SignalAction::Forward) << "it ends a Ctrl-Z";
    EXPECT_EQ(actions.at(SIGTERM), SignalAction::Stop);
    EXPECT_EQ(::signal(SIGINT, SIG_DFL), SIG_DFL) << "workers would inherit that it is ignored";
    for (const int signal : {SIGHUP, SIGUSR1, SIGCONT}) EXPECT_EQ(::signal(signal, SIG_DFL), SIG_IGN);
}

TEST(Option, SignalMayBeRepeatedAndWinsOverTheList) {
    const auto signals = spec_of({"--signal", "USR1=preempt", "--signal=hup=ignore,SIGTERM=preempt"}).signals;
    EXPECT_EQ(signals.at(SIGUSR1), SignalAction::Preempt);
    EXPECT_EQ(signals.at(SIGHUP), SignalAction::Ignore);
    EXPECT_EQ(signals.at(SIGTERM), SignalAction::Preempt);
    EXPECT_EQ(spec_of({"--signal=USR1=forward", "--signals-to-handle=USR1"}).signals.at(SIGUSR1),
              SignalAction::Forward);
    EXPECT_THAT(error_of({"--signal=USR1=die"}), HasSubstr("'die' is not forward, stop, preempt or ignore"));
    EXPECT_THAT(error_of({"--signal=CHLD=ignore"}), HasSubstr("'CHLD' cannot be handled"));
}

// ---- the grammar

TEST(CommandLineGrammar, EverythingBehindTheProgramBelongsToIt) {
    const Result<CommandLine> line =
        parse({"--nnodes=1", "train", "--help", "--nproc-per-node=9", "--", "-r"});
    ASSERT_TRUE(line);
    EXPECT_EQ(line->text, "");
    EXPECT_EQ(line->spec.program.name, "train");
    EXPECT_THAT(line->spec.program.arguments, ElementsAre("--help", "--nproc-per-node=9", "--", "-r"));
    EXPECT_EQ(line->spec.workers.number, 1);
}

TEST(CommandLineGrammar, DoubleDashEndsTheOptions) {
    const Result<CommandLine> line = parse({"--nproc-per-node", "2", "--", "--odd-name", "x"});
    ASSERT_TRUE(line);
    EXPECT_EQ(line->spec.program.name, "--odd-name");
    EXPECT_THAT(line->spec.program.arguments, ElementsAre("x"));
}

TEST(CommandLineGrammar, LaterValuesReplaceEarlierOnes) {
    EXPECT_EQ(spec_of({"--nproc-per-node=2", "--nproc_per_node=3"}).workers.number, 3);
}

TEST(CommandLineGrammar, UnknownOptionSuggestsTheNearest) {
    EXPECT_EQ(error_of({"--nproc-per-nods=2"}),
              "--nproc-per-nods: unknown option (did you mean --nproc-per-node?)");
    EXPECT_EQ(error_of({"--zzzzzzzz"}), "--zzzzzzzz: unknown option (see ddprun --help)");
    EXPECT_EQ(error_of({"-x"}), "-x: unknown option (see ddprun --help)");
    EXPECT_EQ(error_of({"--=2"}), "--: unknown option (see ddprun --help)");
}

TEST(CommandLineGrammar, AnUnambiguousBeginningNamesItsOption) {
    EXPECT_EQ(spec_of({"--redirect=3"}).output.redirects.everyone, Streams::All);
    EXPECT_EQ(spec_of({"--nproc", "2", "--stand"}).workers.number, 2);
    EXPECT_EQ(spec_of({"--nproc_per=3"}).workers.number, 3);
    EXPECT_EQ(spec_of({"--log-p=x "}, {}).output.prefix, "x ") << "an alias";
    EXPECT_EQ(spec_of({"--signal=USR1=stop"}).signals.at(SIGUSR1), SignalAction::Stop)
        << "a whole name is no beginning";
    EXPECT_EQ(line_of({"--redir=3"}).sources.count("redirects"), 1U);
    EXPECT_EQ(error_of({"--rdzv-i", "--stand"}),
              "--rdzv-i: needs a value (ID), but --stand follows; write --rdzv-i=VALUE if it is the value");
}

TEST(CommandLineGrammar, AnAmbiguousBeginningListsItsOptions) {
    EXPECT_EQ(error_of({"--master=h"}), "--master: ambiguous, it could be --master-addr or --master-port");
    EXPECT_EQ(error_of({"--max=3"}), "--max: ambiguous, it could be --max-restarts or --max-log-size");
    EXPECT_EQ(
        error_of({"--n"}),
        "--n: ambiguous, it could be --nproc-per-node, --nnodes, --no-python, --numa-binding, --narrow-gpus or --node-rank");
}

TEST(CommandLineGrammar, AMissingValueIsAnError) {
    EXPECT_EQ(
        error_of({"--rdzv-id", "--standalone"}),
        "--rdzv-id: needs a value (ID), but --standalone follows; write --rdzv-id=VALUE if it is the value");
    const Result<CommandLine> line = parse({"--rdzv-id"});
    ASSERT_FALSE(line);
    EXPECT_EQ(line.error().what, "--rdzv-id: needs a value (ID)");
    EXPECT_EQ(spec_of({"--rdzv-id", "-odd-"}).rendezvous.run_id, "-odd-");
}

TEST(CommandLineGrammar, AValueIsNotChanged) {
    for (const std::string value : {"[1,2]", "{}", "=x", "--standalone", "a,b", " "}) {
        EXPECT_EQ(spec_of({"--rdzv-id=" + value}).rendezvous.run_id, value);
    }
    for (const std::string value : {"[1,2]", "{}", "=x", "-5", "--", "a,b", " "}) {
        EXPECT_EQ(spec_of({"--rdzv-id", value}).rendezvous.run_id, value);
    }
}

TEST(CommandLineGrammar, ASwitchTakesNoValueHoweverItIsWritten) {
    EXPECT_EQ(error_of({"--standalone=true"}), "--standalone: takes no value (got 'true')");
    EXPECT_EQ(error_of({"--quiet="}), "--quiet: takes no value (got '')");
    EXPECT_EQ(error_of({"-q=1"}), "-q: takes no value (got '1')");
    EXPECT_EQ(error_of({"-qt3"}), "-q: takes no value (got 't3')");
}

TEST(CommandLineGrammar, AMistypedOptionIsNotTheProgram) {
    EXPECT_THAT(error_of({"--nproc-per-nods", "2", "--quiet"}),
                HasSubstr("--nproc-per-nods: unknown option"));
    EXPECT_THAT(error_of({"-5"}), HasSubstr("-5: unknown option"));
    EXPECT_THAT(error_of({"---"}), HasSubstr("---: unknown option"));
    EXPECT_EQ(parse({"-"})->spec.program.name, "-");
}

TEST(SubcommandOptions, StandAmongTheWords) {
    const Result<SubcommandDraft> options =
        parse_subcommand("signal", {"USR1", "--rank=3", "--job", "j7", "more"});
    ASSERT_TRUE(options) << options.error().what;
    EXPECT_THAT(options->ask.words, ElementsAre("USR1", "more"));
    EXPECT_EQ(options->ask.rank, 3);
    EXPECT_EQ(options->ask.job, "j7");
    EXPECT_TRUE(parse_subcommand("logs", {"-f", "--rank=3"})->ask.follow);
    EXPECT_THAT(parse_subcommand("logs", {"stderr"}).error().what, HasSubstr("stderr: unknown (expected"))
        << "logs takes no word";
}

TEST(SubcommandOptions, OfAnotherSubcommandAreRefusedAndNotIgnored) {
    EXPECT_EQ(parse_subcommand("drain", {"--rank", "1"}).error().what,
              "--rank: unknown option (expected --job)")
        << "it preempts the whole job";
    struct Taken {
        std::string subcommand;
        std::vector<std::string> options;
    };
    const std::vector<std::vector<std::string>> all = {{"--job", "j"}, {"--rank", "1"}, {"-r", "1"},
                                                       {"--follow"},   {"-f"},          {"--json"}};
    for (const Taken& row : std::vector<Taken>{{"ps", {"--job", "--json"}},
                                               {"top", {"--job"}},
                                               {"signal", {"--job", "--rank", "-r"}},
                                               {"stacks", {"--job", "--rank", "-r"}},
                                               {"drain", {"--job"}},
                                               {"logs", {"--job", "--rank", "-r", "--follow", "-f"}},
                                               {"gpus", {"--json"}}}) {
        for (const std::vector<std::string>& words : all) {
            const bool is_own = std::ranges::find(row.options, words.front()) != row.options.end();
            EXPECT_EQ(parse_subcommand(row.subcommand, words).has_value(), is_own)
                << row.subcommand << ' ' << words.front();
        }
    }
}

TEST(SubcommandOptions, AreNamedIfTheyAreWrong) {
    EXPECT_EQ(parse_subcommand("logs", {"-r", "x"}).error().what,
              "-r: 'x' is not a rank (expected 0, 1, ...)");
    EXPECT_EQ(parse_subcommand("ps", {"--job"}).error().what, "--job: needs a value (ID)");
    EXPECT_EQ(parse_subcommand("ps", {"--jbo", "j7"}).error().what,
              "--jbo: unknown option (expected --job, --json)");
    EXPECT_EQ(parse_subcommand("doctor", {"--seconds", "31"}).error().what,
              "--seconds: '31' is not between 0 and 30");
    EXPECT_THAT(parse_subcommand("doctor", {"quickly"}).error().what,
                HasSubstr("quickly: unknown (expected --json"));
    EXPECT_EQ(parse_subcommand("clean", {"--user", "jane", "--dry-run"})->clean.user, "jane");
    EXPECT_TRUE(parse_subcommand("clean", {"--dry-run"})->clean.dry_run);
    EXPECT_FALSE(parse_subcommand("clean", {})->clean.dry_run);
    EXPECT_THAT(parse_subcommand("clean", {"all"}).error().what,
                HasSubstr("all: unknown (expected --dry-run"));
}

TEST(CommandLineGrammar, NoProgramIsAnError) {
    for (const auto& args : {std::vector<std::string>{}, {"--standalone"}, {"--standalone", "--"}}) {
        const Result<CommandLine> line = parse(args);
        ASSERT_FALSE(line);
        EXPECT_THAT(line.error().what, HasSubstr("no program given"));
    }
}

TEST(CommandLineGrammar, SourcesTellTheOriginOfEachValue) {
    const CommandLine line = line_of({"--tee=3"}, {{"PET_NNODES", "2"}, {"PET_TEE", "1"}});
    EXPECT_EQ(line.sources,
              (std::map<std::string, std::string>{{"nnodes", "PET_NNODES"}, {"tee", "command line"}}));
}

TEST(CommandLineGrammar, AVariableThatNoOptionHasGetsALine) {
    EXPECT_THAT(
        remarks_on_variables({"PET_NPROC_PER_NODE=2", "PET_N_PROC_PER_NODE=2", "PET_XYZZY=1", "PATH=/bin"}),
        ElementsAre("PET_N_PROC_PER_NODE is ignored: no option of ddprun has this variable (did you mean "
                    "PET_NPROC_PER_NODE?)",
                    "PET_XYZZY is ignored: no option of ddprun has this variable"));
}

TEST(CommandLineGrammar, BlanksAroundANumberOfAVariableAreNoMistake) {
    EXPECT_EQ(spec_of({}, {{"PET_NPROC_PER_NODE", " 2"}}).workers.number, 2) << "torchrun takes them";
    EXPECT_EQ(spec_of({}, {{"PET_NNODES", "1: 4 "}}).nodes, (Nodes{1, 4}));
}

TEST(CommandLineGrammar, ARankThatReadsTheTerminalAndIsNotShownGetsALine) {
    const auto remarks = [](std::vector<std::string> words) { return line_of(std::move(words)).remarks; };
    EXPECT_THAT(remarks({"--nproc-per-node=2", "--stdin=1", "--local-ranks-filter=0"}),
                ElementsAre(HasSubstr("--stdin 1: that rank's questions are not seen")));
    EXPECT_THAT(remarks({"--nproc-per-node=2", "--stdin=1", "--local-ranks-filter=0,1"}), ElementsAre());
    EXPECT_THAT(remarks({"--nproc-per-node=2", "--local-ranks-filter=0"}), ElementsAre());
    EXPECT_THAT(remarks({"--nnodes=2", "--rdzv-endpoint=h:1", "--nproc-per-node=2", "--stdin=2",
                         "--local-ranks-filter=0"}),
                ElementsAre())
        << "rank 2 is local rank 0 of the second node";
}

TEST(CommandLineGrammar, AnEmptyVariableIsNoValue) {
    EXPECT_EQ(spec_of({}, {{"PET_NPROC_PER_NODE", ""}}).workers.number, 1);
}

TEST(CommandLineGrammar, AWrongValueIsNamedWithItsOptionAndWhatWasExpectedInOneLine) {
    struct Refusal {
        std::vector<std::string> words;
        std::vector<std::string> told;  ///< all of these stand in the error
    };
    const std::vector<Refusal> refusals = {
        {{"--nnodes=0"}, {"--nnodes", "0"}},
        {{"--nnodes=3:2"}, {"--nnodes", "3:2"}},
        {{"--nnodes=two"}, {"--nnodes", "two"}},
        {{"--nproc-per-node=-1"}, {"--nproc-per-node", "-1"}},
        {{"--nproc-per-node=xpu"}, {"--nproc-per-node", "xpu", "gpu"}},
        {{"--nproc-per-node=99999999999"}, {"--nproc-per-node", "99999999999"}},
        {{"--nproc-per-nods=2"}, {"--nproc-per-nods", "--nproc-per-node"}},
        {{"--master=here"}, {"--master", "--master-addr", "--master-port"}},
        {{"--max-restarts=-1"}, {"--max-restarts", "-1"}},
        {{"--max-restarts=3/soon"}, {"--max-restarts", "soon"}},
        {{"--monitor-interval=often"}, {"--monitor-interval", "often"}},
        {{"--start-method=thread"}, {"--start-method", "thread", "spawn"}},
        {{"--redirects=4"}, {"--redirects", "4"}},
        {{"-t", "0:1,1"}, {"-t", "'1'", "LOCAL_RANK"}},
        {{"--local-ranks-filter=a"}, {"--local-ranks-filter", "a"}},
        {{"--numa-binding=chip"}, {"--numa-binding", "chip", "core-complex"}},
        {{"--signals-to-handle=SIGFOO"}, {"--signals-to-handle", "SIGFOO"}},
        {{"--signals-to-handle=SIGKILL"}, {"--signals-to-handle", "SIGKILL"}},
        {{"--shutdown-timeout=-1"}, {"--shutdown-timeout", "-1"}},
        {{"--node-rank=-1"}, {"--node-rank", "-1"}},
        {{"--node-rank=2", "--nnodes=2"}, {"--node-rank 2", "--nnodes 2"}},
        {{"--master-port=70000"}, {"--master-port", "70000"}},
        {{"--rdzv-conf=join_timeout"}, {"--rdzv-conf", "join_timeout"}},
        {{"--rdzv-endpoint=host:port"}, {"--rdzv-endpoint", "host:port"}},
        {{"--standalone", "--nnodes=2"}, {"--standalone", "--nnodes 2"}},
        {{"-m", "--no-python"}, {"-m", "--no-python"}},
        {{"--standalone=1"}, {"--standalone", "takes no value"}},
        {{"--rdzv-id", "--standalone"}, {"--rdzv-id", "--standalone"}},
        {{"--print-completion=cmd"}, {"--print-completion", "cmd", "bash"}},
        {{"--event-log-handler="}, {"--event-log-handler"}},
        {{"--max-log-size=big"}, {"--max-log-size", "big"}},
        {{"--prefix=${rnk}"}, {"--prefix", "rnk"}},
        {{"--role="}, {"--role", "empty"}},
    };
    for (const Refusal& refusal : refusals) {
        const std::string error = error_of(refusal.words);
        for (const std::string& text : refusal.told) EXPECT_THAT(error, HasSubstr(text));
        EXPECT_EQ(error.find('\n'), std::string::npos) << error;
    }
}

TEST(ManualPage, ExplainsEveryOptionOfTheHelp) {
    const std::string page = parse({"--print-man"})->text, help = parse({"--help=all"})->text;
    EXPECT_TRUE(page.starts_with(".TH DDPRUN 1"));
    EXPECT_THAT(page, HasSubstr(".PP\nEach worker finds")) << "no part of the entry before";
    EXPECT_THAT(page, HasSubstr(".PP\n\\-\\-signal and"));
    int options = 0;
    for (const std::string_view line :
         split(std::string_view(help).substr(0, help.find("\nOther commands")), '\n')) {
        const std::size_t at = line.find("--");
        if (!line.starts_with("  ") || at == line.npos || at > 6) continue;
        std::string name(line.substr(at, line.find_first_of(' ', at) - at));
        for (std::size_t dash = name.find('-'); dash != name.npos; dash = name.find('-', dash + 2))
            name.insert(dash, "\\");
        EXPECT_THAT(page, HasSubstr("\\fB" + name + "\\fR"));
        ++options;
    }
    EXPECT_GT(options, 40);
    for (const char* section : {".SH EXIT STATUS", ".SH SIGNALS", ".SH EXAMPLES"})
        EXPECT_THAT(page, HasSubstr(section));
}

/// The text of a help whose lines all fit into 100 columns.
std::string help_of(std::vector<std::string> words) {
    const Result<CommandLine> line = parse(std::move(words));
    if (!line) return line.error().what;
    EXPECT_NE(line->text, "");
    for (const std::string_view text : split(line->text, '\n')) {
        EXPECT_LE(text.size(), 100U) << text;
        EXPECT_FALSE(text.ends_with(' ')) << text;
    }
    return line->text;
}

TEST(Help, OpensWithSixExamplesAndTwentyOptions) {
    const std::string text = help_of({"--nnodes=1", "--help", "--never-reached"});
    int commands = 0, options = 0;
    for (const std::string_view line : split(text, '\n')) {
        commands += line.starts_with("  ddprun ") ? 1 : 0;
        options += line.find("--") == 6 ? 1 : 0;  // "  -t, --tee", "      --hosts"
    }
    EXPECT_EQ(commands, 6);
    EXPECT_EQ(options, 20);
    EXPECT_THAT(text, HasSubstr("--help=all"));
    EXPECT_THAT(text, Not(HasSubstr("--event-log-handler")));
}

TEST(Help, AllListsEveryOption) {
    const std::string text = help_of({"--nnodes=1", "--help=all", "--never-reached"});
    const DdprunOptions options;
    for (const CLI::Option* option : options.list.options()) EXPECT_THAT(text, HasSubstr(option->get_name()));
    EXPECT_EQ(help_of({"-h", "all"}), text);
    EXPECT_EQ(help_of({"--help=some"}), "--help: 'some' is not all");
}

TEST(Help, VersionIsOneLineAndOneForEachPartThatTheBuildLacks) {
    const Result<CommandLine> line = parse({"--version"});
    ASSERT_TRUE(line);
    EXPECT_THAT(line->text, testing::MatchesRegex("ddprun [0-9]+\\.[0-9]+\\.[0-9]+\n"
                                                  "(built without [a-z]+: [^\n]+\n)*"));
}

/// A value that the option takes.
std::string sample_of(const CLI::Option& option) {
    static const std::map<std::string_view, std::string> samples = {
        {"nproc-per-node", "2"},         {"nnodes", "1:2"},        {"rdzv-endpoint", "host:1"},
        {"rdzv-conf", "join_timeout=3"}, {"node-rank", "0"},       {"master-port", "1234"},
        {"metrics-port", "1234"},        {"max-restarts", "1"},    {"signals-to-handle", "SIGTERM"},
        {"signal", "USR1=stop"},         {"redirects", "0:1"},     {"tee", "3"},
        {"local-ranks-filter", "0"},     {"stdin", "0"},           {"attach", "0=gdb"},
        {"prefix", "${rank}"},           {"max-log-size", "1MiB"}, {"env", "NAME=1"}};
    if (is_flag(option)) return "1";
    if (const auto found = samples.find(name_of(option)); found != samples.end()) return found->second;
    const std::string& words = option.get_option_text();
    return words.empty() || words[0] == '@' ? "1" : words.substr(0, words.find(' '));
}

TEST(OptionTable, EveryOptionIsTakenInBothSpellingsAndFromItsVariable) {
    const std::set<std::string> not_here = {"help", "version", "config", "print-completion", "print-man"};
    const DdprunOptions options;
    EXPECT_GT(options.list.options().size(), 50U);
    for (const CLI::Option* option : options.list.options()) {
        const std::string& name = name_of(*option);
        if (not_here.contains(name)) continue;
        const std::string value = sample_of(*option);
        std::string underscored = name;
        std::replace(underscored.begin(), underscored.end(), '-', '_');
        for (const std::string& spelling : {"--" + name, "--" + underscored}) {
            const std::string word = is_flag(*option) ? spelling : spelling + "=" + value;
            EXPECT_EQ(line_of({word}).sources.count(name), 1u) << word;
        }
        const std::string variable = option->get_envname();
        const CommandLine line = line_of({}, {{variable, value}});
        const auto source = line.sources.find(name);
        ASSERT_NE(source, line.sources.end()) << variable;
        EXPECT_EQ(source->second, variable);
    }
}

// ---- configuration files

class ConfigFileOption : public testing::Test {
  protected:
    std::string write(const std::string& text) {
        const std::string path = directory_.file("job.json");
        std::ofstream(path) << text;
        return path;
    }
    std::string error(const std::string& text) {
        const Result<CommandLine> line = parse({"--config", write(text)});
        return line ? "accepted" : line.error().what;
    }
    test::TemporaryDirectory directory_;
};

TEST_F(ConfigFileOption, GivesOptionsProgramAndArguments) {
    const std::string path =
        write(R"({"nproc-per-node": 4, "log_dir": "logs", "standalone": true, "quiet": false,
        "local-ranks-filter": [0, 2], "signal": ["USR1=stop", "USR2=ignore"], "program": "train", "args": ["--epochs", "2"]})");
    const Result<CommandLine> line = parse({"--config", path});
    ASSERT_TRUE(line) << line.error().what;
    EXPECT_EQ(line->spec.workers.number, 4);
    EXPECT_EQ(line->spec.output.log_dir, "logs");
    EXPECT_EQ(line->spec.rendezvous.backend, "c10d");
    EXPECT_FALSE(line->spec.quiet);
    EXPECT_THAT(line->spec.output.local_ranks, ElementsAre(0, 2));
    EXPECT_EQ(line->spec.signals.at(SIGUSR1), SignalAction::Stop);
    EXPECT_EQ(line->spec.signals.at(SIGUSR2), SignalAction::Ignore);
    EXPECT_EQ(line->spec.program.name, "train");
    EXPECT_THAT(line->spec.program.arguments, ElementsAre("--epochs", "2"));
    EXPECT_EQ(line->sources.at("log-dir"), path);
}

TEST_F(ConfigFileOption, IsWeakerThanVariablesAndTheCommandLine) {
    const std::string path =
        write(R"({"nnodes": 5, "nproc-per-node": 5, "role": "file", "program": "a", "args": ["1"]})");
    const Result<CommandLine> line =
        parse({"--nnodes=2", "other"}, {{"PET_CONFIG", path}, {"PET_NPROC_PER_NODE", "3"}});
    ASSERT_TRUE(line) << line.error().what;
    EXPECT_EQ(line->spec.nodes.max, 2);
    EXPECT_EQ(line->spec.workers.number, 3);
    EXPECT_EQ(line->spec.role, "file");
    EXPECT_EQ(line->spec.program.name, "other");
    EXPECT_THAT(line->spec.program.arguments, IsEmpty())
        << "the file's arguments belong to the file's program";
}

TEST_F(ConfigFileOption, ErrorsNameTheFileTheKeyAndASuggestion) {
    EXPECT_THAT(
        error(R"({"nproc-per-nod": 4})"),
        HasSubstr("job.json: 'nproc-per-nod' is not an option of ddprun (did you mean nproc-per-node?)"));
    EXPECT_THAT(error(R"({"progam": "x"})"), HasSubstr("did you mean program?"));
    EXPECT_THAT(error(R"({"nproc-per-node": "eight"})"),
                HasSubstr("job.json: nproc-per-node: 'eight' is not a number"));
    EXPECT_THAT(error("{\n\"a\": }"), HasSubstr("line 2"));
    EXPECT_THAT(error("[1]"), HasSubstr("expected one JSON object"));
    EXPECT_THAT(error(R"({"tee": {"0": 1}})"), HasSubstr("tee: expected text, a number"));
    EXPECT_THAT(error(R"({"args": "x"})"), HasSubstr("args: expected a list"));
    EXPECT_THAT(error(R"({"tee": 1, "tee": 2, "no-python": true, "no_python": true})"), HasSubstr("twice"));
    EXPECT_THAT(error(R"({"config": "x"})"), HasSubstr("cannot name another"));
    const Result<CommandLine> absent = parse({"--config", directory_.file("absent.json"), "x"});
    ASSERT_FALSE(absent);
    EXPECT_THAT(absent.error().what,
                HasSubstr("--config: " + directory_.file("absent.json") + ": No such file"));
}

TEST_F(ConfigFileOption, ANumberThatIsOutOfRangeIsAnErrorInOneLine) {
    const std::string what = error("{\"nproc-per-node\": 1e400,\n\"program\": \"train\"}");
    EXPECT_THAT(what,
                HasSubstr("job.json: parse error at line 1, column 24: the number 1e400 is out of range"));
    EXPECT_THAT(what, testing::Not(HasSubstr("\n")));
    EXPECT_THAT(error(R"({"nproc-per-node": 1e300})"), HasSubstr("nproc-per-node: '1e+300' is not a number"));
}

TEST_F(ConfigFileOption, APipeIsRefusedInsteadOfWaitedFor) {
    const std::string path = directory_.file("fifo");
    ASSERT_EQ(::mkfifo(path.c_str(), 0600), 0);
    const Result<CommandLine> line = parse({"--config", path, "x"});
    ASSERT_FALSE(line);
    EXPECT_THAT(line.error().what, HasSubstr(path + ": is a pipe, not a file"));
}

TEST_F(ConfigFileOption, AnOptionThatStandsTwiceIsRefusedInsteadOfTheLastOneWinning) {
    EXPECT_THAT(error(R"({"nproc-per-node": 2, "program": "train", "nproc-per-node": 4})"),
                HasSubstr("the name 'nproc-per-node' stands twice"));
}

// ---- help of subcommands

TEST(Help, OfASubcommandHasAUsageLineAndItsOwnOptions) {
    const std::string text = render_subcommand_help(*find_subcommand("logs"));
    EXPECT_THAT(text, testing::StartsWith("usage: ddprun logs [-f] [-r RANK] [--job ID]\n\nPrint the log"));
    EXPECT_THAT(text, HasSubstr("  -f, --follow "));
    EXPECT_THAT(text, Not(HasSubstr("--json")));
    for (const Subcommand& row : subcommands()) {
        EXPECT_THAT(render_subcommand_help(row), HasSubstr("ddprun " + std::string(row.name)));
        EXPECT_THAT(parse({"--print-man"})->text, HasSubstr(".B ddprun " + std::string(row.name)));
    }
}

// ---- completions

std::vector<std::string> words_for(std::vector<std::string> words) {
    std::vector<std::string> offered;
    for (const Offer& offer : complete(std::move(words))) offered.push_back(offer.word);
    return offered;
}

TEST(Completion, OffersTheOptionsOfTheCommandInTheUsersSpelling) {
    EXPECT_THAT(words_for({"--nproc"}), ElementsAre("--nproc-per-node"));
    EXPECT_THAT(words_for({"--nproc_p"}), ElementsAre("--nproc_per_node"));
    EXPECT_THAT(words_for({"--nnodes", "2", "--nproc"}), ElementsAre("--nproc-per-node"));
    EXPECT_THAT(words_for({"stacks", "--"}), ElementsAre("--rank", "--job", "--help"));
    EXPECT_THAT(words_for({"env", "--nno"}), ElementsAre("--nnodes"));
    EXPECT_THAT(words_for({"pbs", "submit", "--gpus"}), ElementsAre("--gpus-per-node"));
    EXPECT_EQ(complete({"--nno"}).front().text, "Number of nodes, or a range for an elastic job");
}

TEST(Completion, OffersTheValuesOfAnOptionHoweverTheShellSplitsIt) {
    EXPECT_THAT(words_for({"--nproc-per-node", ""}), ElementsAre("auto", "gpu", "cpu"));
    EXPECT_THAT(words_for({"--numa_binding", "=", "no"}), ElementsAre("none", "node")) << "bash";
    EXPECT_THAT(words_for({"--numa-binding=no"}), ElementsAre("none", "node")) << "zsh and fish";
    EXPECT_THAT(words_for({"--numa-binding", "="}), Contains("core-complex"));
    EXPECT_THAT(words_for({"--hostfile", "x"}), ElementsAre("@file"));
    EXPECT_THAT(words_for({"--trace=x"}), ElementsAre("@directory"));
    EXPECT_THAT(words_for({"--rdzv-id", ""}), IsEmpty());
    EXPECT_THAT(words_for({"slurm", "submit", "--site", "tr"}), ElementsAre("@file"));
    EXPECT_THAT(words_for({"--env", "A", "=", "1", "--quie"}), ElementsAre("--quiet"));
}

TEST(Completion, LeavesTheProgramsArgumentsAlone) {
    EXPECT_THAT(words_for({"train", "--nproc"}), ElementsAre("@file"));
    EXPECT_THAT(words_for({"--nnodes", "2", "train", "--"}), ElementsAre("@file"));
    EXPECT_THAT(words_for({"pbs", "submit", "train", "--"}), ElementsAre("@file"));
    EXPECT_THAT(words_for({"trai"}), ElementsAre("@command"));
}

TEST(Completion, OffersSubcommandsAndTheirWords) {
    EXPECT_THAT(words_for({"drai"}), ElementsAre("drain", "@command"));
    EXPECT_THAT(words_for({"--quiet", "drai"}), ElementsAre("@command"));
    EXPECT_THAT(words_for({"signal", "US"}), ElementsAre("USR1", "USR2"));
    EXPECT_THAT(words_for({"signal", "USR1", ""}), IsEmpty());
    EXPECT_THAT(words_for({"pbs", ""}), ElementsAre("script", "submit", "status"));
    EXPECT_THAT(words_for({"pbs", "script", "tr"}), ElementsAre("@file"));
    EXPECT_THAT(words_for({"trace", ""}), ElementsAre("@directory"));
    EXPECT_THAT(words_for({"ps", ""}), IsEmpty());
}

}  // namespace
}  // namespace ddprun
