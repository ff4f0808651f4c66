// The hosts that other suites start jobs on (tests/support/hosts.h) are what they claim to be.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include "tests/support/ssh_hosts.h"
#include "tests/system/look.h"

namespace ddprun::test {
namespace {

using namespace std::chrono_literals;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

class OnHosts : public ::testing::Test {
  protected:
    void SetUp() override {
        if (const auto reason = Hosts::why_not()) GTEST_SKIP() << *reason;
    }
    /// Stdout of a program that succeeds.
    static std::string told(const Hosts& hosts, int host, const std::vector<std::string>& argv) {
        const Outcome outcome = run(hosts.command(host, argv));
        EXPECT_EQ(outcome.status, 0) << outcome.err;
        return outcome.out;
    }
    /// A refused connection counts as an answer.
    static bool reaches(const Hosts& hosts, int from, int to) {
        return run(hosts.command(from, {"python3", "-c", R"(
import socket, sys
try: socket.create_connection((sys.argv[1], 9), timeout=2)
except ConnectionRefusedError: pass)",
                                        Hosts::name(to)}))
                   .status == 0;
    }
};

TEST_F(OnHosts, EachHostHasItsNameAndAddressAndKnowsTheOthers) {
    const Hosts hosts(3);
    for (int host = 0; host < 3; ++host) {
        EXPECT_EQ(told(hosts, host, {"uname", "-n"}), Hosts::name(host) + "\n");
        EXPECT_THAT(told(hosts, host, {"ip", "-br", "address"}),
                    AllOf(HasSubstr(Hosts::address(host) + "/16"), HasSubstr("127.0.0.1/8")));
        for (int other = 0; other < 3; ++other) {
            EXPECT_THAT(told(hosts, host, {"getent", "ahostsv4", Hosts::name(other)}),
                        HasSubstr(Hosts::address(other) + " "));
        }
    }
}

TEST_F(OnHosts, HostsShareTheHomeDirectoryAndNothingElse) {
    const Hosts hosts(2);
    told(
        hosts, 0,
        {"sh", "-c",
         "echo shared >$HOME/file; echo own >/tmp/file; echo own >/var/tmp/file; echo own >/run/file; echo own >/dev/shm/file"});
    const std::string seen =
        told(hosts, 1, {"sh", "-c", "cat $HOME/file; ls -A /tmp /var/tmp /run /dev/shm"});
    EXPECT_THAT(seen, StartsWith("shared\n"));
    EXPECT_THAT(seen, Not(HasSubstr("file")))
        << "a checkout in /tmp may be seen there, but nothing else of it";
    EXPECT_EQ(file_content(hosts.home() + "/file"), "shared\n");
    EXPECT_THAT(told(hosts, 1, {"ps", "-eo", "args"}), Not(HasSubstr("node00")));
    EXPECT_THAT(told(hosts, 1, {"ls", "/sys/class/net"}), AllOf(HasSubstr("eth0"), Not(HasSubstr("port"))));
}

TEST_F(OnHosts, FramesOverASlowSwitchArriveLateAndOvertakeEachOther) {
    const Hosts hosts(2, Hosts::Switch::Slow);
    Program listener(hosts.command(1, {"python3", "-c", R"(
import socket
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.bind(('', 9999))
s.settimeout(60)
print('listens', flush=True)
came = []
while len(came) < 40: came.append(int(s.recv(100)))
print('in order' if came == sorted(came) else 'mixed', 'each once' if sorted(came) == list(range(40)) else came))"}));
    ASSERT_TRUE(listener.wait_for_output("listens"));
    // Send one packet first, so that the addresses are known: only a few packets wait for that.
    const std::string took = told(hosts, 0, {"python3", "-c", R"(
import socket, time
began = time.monotonic()
try: socket.create_connection(('node01', 9), timeout=60)
except ConnectionRefusedError: pass
took = time.monotonic() - began
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
for i in range(40): s.sendto(b'%d' % i, ('node01', 9999))
print('late' if took >= 0.01 else took))"});
    EXPECT_EQ(took, "late\n");  // there and back
    EXPECT_THAT(listener.wait().out, HasSubstr("mixed each once"));
}

TEST_F(OnHosts, AProgramsExitStatusIsPassedOn) {
    const Hosts hosts(1);
    EXPECT_EQ(run(hosts.command(0, {"sh", "-c", "exit 7"})).status, 7);
    const Outcome killed = run(hosts.command(0, {"sh", "-c", "kill -9 $$"}));
    EXPECT_TRUE(killed.signaled);
    EXPECT_EQ(killed.status, 9);
    const Outcome missing = run(hosts.command(0, {hosts.shared() + "/none"}));
    EXPECT_EQ(missing.status, 127);
    EXPECT_THAT(missing.err, HasSubstr("No such file or directory"));
}

TEST_F(OnHosts, AProgramHasOurInputDirectoryAndEnvironment) {
    const Hosts hosts(1);
    RunOptions options = with_environment({"WORD=from outside"});
    options.input = "read\n";
    options.directory = hosts.shared();
    EXPECT_EQ(run(hosts.command(0, {"sh", "-c", "cat; echo $WORD; pwd"}), options).out,
              "read\nfrom outside\n" + hosts.shared() + "\n");
}

TEST_F(OnHosts, SignalsReachAProgramAndOurDeathKillsIt) {
    const Hosts hosts(1);
    Program asked(hosts.command(0, {path_of("PROBE"), "on", "15", "42", "say", "up", "hold"}));
    ASSERT_TRUE(asked.wait_for_output("up"));
    asked.signal(SIGTERM);
    EXPECT_EQ(asked.wait().status, 42);

    const std::string mark = "PROBE_JOB=" + unique_name("host");
    Program killed(hosts.command(0, {path_of("PROBE"), "on", "15", "42", "say", "up", "hold"}),
                   with_environment({mark}));
    ASSERT_TRUE(killed.wait_for_output("up"));
    killed.signal(SIGKILL);
    killed.wait();
    EXPECT_TRUE(all_gone(mark));
}

TEST_F(OnHosts, NoProcessOutlivesItsHost) {
    const std::string mark = "PROBE_JOB=" + unique_name("host");
    {
        const Hosts hosts(1);
        run(hosts.command(0, {path_of("PROBE"), "ignore", "15", "closeout", "child", "daemon"}),
            with_environment({mark}));
        EXPECT_FALSE(processes_with(mark).empty());
    }
    EXPECT_TRUE(all_gone(mark, 0ms));
}

TEST_F(OnHosts, AKilledTestLeavesNothing) {
    const std::string mark = "PROBE_JOB=" + unique_name("host");
    Program test({"/proc/self/exe", "--gtest_filter=*HoldsAHost", "--gtest_also_run_disabled_tests"},
                 with_environment({mark}));
    ASSERT_TRUE(test.wait_for_output("held")) << test.wait().out;
    EXPECT_GE(processes_with(mark).size(), 3U);
    test.signal(SIGKILL);
    test.wait();
    EXPECT_TRUE(all_gone(mark));
    EXPECT_FALSE(std::filesystem::exists("/srv/.hosts")) << "the common directory was the test's alone";
}

/// AKilledTestLeavesNothing runs and kills this one.
TEST_F(OnHosts, DISABLED_HoldsAHost) {
    const Hosts hosts(1);
    Program program(hosts.command(0, {path_of("PROBE"), "daemon", "say", "up", "hold"}));
    ASSERT_TRUE(program.wait_for_output("up"));
    std::printf("held\n");
    std::fflush(stdout);
    program.wait();
}

class OverSwitch : public OnHosts, public ::testing::WithParamInterface<Hosts::Switch> {};

TEST_P(OverSwitch, ACutCableIsSilenceUntilItIsMended) {
    Hosts hosts(3, GetParam());
    // Connect first, so that no address has to be looked up later.
    Program listener(hosts.command(1, {"python3", "-c", R"(
import socket
server = socket.create_server(("", 4000))
print("listening", flush=True)
peer = server.accept()[0]
print("accepted", flush=True)
print(peer.recv(10), flush=True))"}));
    ASSERT_TRUE(listener.wait_for_output("listening"));
    const std::string sent = hosts.shared() + "/sent", mended = hosts.shared() + "/mended";
    Program speaker(hosts.command(0, {"python3", "-c", R"(
import os, socket, sys, time
peer = socket.create_connection(("node01", 4000))
while not os.path.exists(sys.argv[1]): time.sleep(0.001)
peer.settimeout(0.3)
peer.send(b"word")
try: print("heard", peer.recv(1), flush=True)
except socket.timeout: print("silence", flush=True)
peer.settimeout(None)
print("end", peer.recv(1), flush=True))",
                                      sent}));
    ASSERT_TRUE(listener.wait_for_output("accepted"));
    hosts.cut_cable(1);
    std::ofstream(sent).close();
    ASSERT_TRUE(speaker.wait_for_output("silence"));
    EXPECT_FALSE(listener.wait_for_output("word", 0ms));
    EXPECT_TRUE(reaches(hosts, 0, 2));
    hosts.mend_cable(1);
    EXPECT_TRUE(listener.wait_for_output("word"));
    EXPECT_TRUE(speaker.wait_for_output("end"));
}

TEST_P(OverSwitch, AHostWithoutPowerIsSilentToo) {
    Hosts hosts(2, GetParam());
    EXPECT_TRUE(reaches(hosts, 0, 1));
    hosts.power_off(1);
    EXPECT_FALSE(reaches(hosts, 0, 1));
}

INSTANTIATE_TEST_SUITE_P(Made, OverSwitch, ::testing::Values(Hosts::Switch::Bridge, Hosts::Switch::Router),
                         [](const auto& made) {
                             return made.param == Hosts::Switch::Bridge ? "OfABridge" : "OfARouter";
                         });

class OnSshHosts : public ::testing::Test {
  protected:
    void SetUp() override {
        if (const auto reason = SshHosts::why_not()) GTEST_SKIP() << *reason;
    }
};

TEST_F(OnSshHosts, EveryHostIsReachedFromEveryHostWithoutAQuestion) {
    Hosts hosts(3);
    const SshHosts ssh(hosts);
    for (const auto& [from, to] : {std::pair{0, 1}, {0, 2}, {2, 0}}) {
        const Outcome outcome = run(
            hosts.command(from, {"ssh", "-o", "BatchMode=yes", Hosts::name(to), "uname -n; pwd; exit 3"}));
        EXPECT_EQ(outcome.out, Hosts::name(to) + "\n" + hosts.home() + "\n");
        EXPECT_EQ(outcome.status, 3) << outcome.err;
        EXPECT_EQ(outcome.err, "");
    }
}

TEST_F(OnSshHosts, NothingOfTheCallersEnvironmentArrives) {
    Hosts hosts(2);
    const SshHosts ssh(hosts);
    const Outcome outcome =
        run(hosts.command(0, {"ssh", "node01", "env"}), with_environment({"WORD=from outside"}));
    EXPECT_THAT(outcome.out, AllOf(Not(HasSubstr("WORD=")), HasSubstr("HOME=" + hosts.home())));
}

}  // namespace
}  // namespace ddprun::test
