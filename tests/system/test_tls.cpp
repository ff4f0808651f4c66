// Jobs of several hosts with --tls: what is on the wire between them, and nodes that disagree about it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <cstdlib>

#include "tests/support/hosts.h"
#include "tests/system/look.h"

namespace ddprun::test {
namespace {

using ::testing::HasSubstr;

/// Listens on a host's network until SIGTERM, and says which of its arguments it has heard.
constexpr const char* kListener = R"(
import signal, socket, sys
class Stop(Exception): pass
def stop(*_): raise Stop
wire = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
wire.bind(("eth0", 0))
heard = b""
signal.signal(signal.SIGTERM, stop)
print("listening", flush=True)
try:
    while True: heard += wire.recv(1 << 17)
except Stop: wire.setblocking(False)
try:
    while True: heard += wire.recv(1 << 17)
except BlockingIOError: pass
for word in sys.argv[1:]: print(word, "heard" if word.encode() in heard else "not heard")
)";

/// A worker that leaves a key of its own in the job's store, and reads the other's.
constexpr const char* kWorker = R"(
import os, sys
sys.path.insert(0, os.environ["SUPPORT"])
from store_client import *
rank = int(os.environ["RANK"])
store = StoreClient(os.environ["DDPRUN_STORE"], os.environ["TORCHELASTIC_RUN_ID"], os.environ["DDPRUN_TOKEN"], int(os.environ["DDPRUN_GENERATION"]))
store.ask(SET, b"value-of-%d" % rank, key="key-of-%d" % rank)
print("other:", store.ask(GET, key="key-of-%d" % (1 - rank))[2].decode())
store.ask(BARRIER, name="end", participants=2)
)";

class Tls : public ::testing::Test {
  protected:
    void SetUp() override {
        if (const auto reason = Hosts::why_not()) GTEST_SKIP() << *reason;
        if (std::getenv("WITHOUT_TLS") != nullptr) GTEST_SKIP() << "built without OpenSSL 3";
    }
    /// A job's part on a host.
    std::unique_ptr<Program> start(int host, const std::vector<std::string>& options,
                                   const std::vector<std::string>& program) {
        std::vector<std::string> line{path_of("DDPRUN"),
                                      "--nnodes=2",
                                      "--nproc-per-node=1",
                                      "--master-addr=" + Hosts::address(0),
                                      "--master-port=29412",
                                      "--rdzv-id=the-id-of-the-job",
                                      "--node-rank=" + std::to_string(host),
                                      "--rdzv-conf=join_timeout=60",
                                      "--prefix=",
                                      "--no-python"};
        line.insert(line.end(), options.begin(), options.end());
        line.insert(line.end(), program.begin(), program.end());
        const RunOptions with = with_environment(
            {"DDPRUN_TOKEN=secret of the job", "SUPPORT=" + path_of("SOURCE_ROOT") + "/tests/support"});
        auto node = std::make_unique<Program>(hosts_.command(host, line), with);
        const bool is_up = host != 0 || node->wait_for_output("controller on port");
        EXPECT_TRUE(is_up);
        return node;
    }
    /// Runs a whole job, whose workers read each other's keys; what could be heard of it on the head's
    /// network.
    std::string heard_of_job(const std::vector<std::string>& options) {
        Program listener(hosts_.command(0, {"python3", "-c", kListener, "key-of-0", "value-of-1",
                                            "the-id-of-the-job", Hosts::name(1), "secret of the job"}));
        EXPECT_TRUE(listener.wait_for_output("listening"));
        const auto zero = start(0, options, {"python3", "-c", kWorker}),
                   one = start(1, options, {"python3", "-c", kWorker});
        const Outcome of_zero = zero->wait(), of_one = one->wait();
        EXPECT_EQ(of_zero.status, 0) << of_zero.err;
        EXPECT_EQ(of_one.status, 0) << of_one.err;
        EXPECT_EQ(of_zero.out + of_one.out, "other: value-of-1\nother: value-of-0\n");
        listener.signal(SIGTERM);
        return listener.wait().out;
    }
    Hosts hosts_{2};
};

TEST_F(Tls, NothingThatGoesFromHostToHostCanBeRead) {
    EXPECT_EQ(
        heard_of_job({"--tls"}),
        "listening\nkey-of-0 not heard\nvalue-of-1 not heard\nthe-id-of-the-job not heard\nnode01 not heard\nsecret of the job not heard\n");
}

TEST_F(Tls, WithoutItAllOfThatCan) {
    EXPECT_EQ(
        heard_of_job({}),
        "listening\nkey-of-0 heard\nvalue-of-1 heard\nthe-id-of-the-job heard\nnode01 heard\nsecret of the job not heard\n");
}

TEST_F(Tls, ANodeWithoutItIsRefusedByAHeadThatHasItAndBothSayWhatToDo) {
    const auto zero = start(0, {"--tls"}, {"true"}), one = start(1, {}, {"true"});
    const Outcome of_one = one->wait();
    EXPECT_EQ(of_one.status, 69);
    constexpr const char* kRemedy =
        "this connection is plain, and the job was started with --tls: give --tls to every node, or to none";
    EXPECT_THAT(of_one.err, HasSubstr(kRemedy));
    EXPECT_TRUE(zero->wait_for_output(kRemedy));
    zero->signal(SIGTERM);
    EXPECT_THAT(zero->wait().err, HasSubstr("controller on port 29412 with TLS"));
}

TEST_F(Tls, ANodeWithItIsRefusedByAHeadThatHasNotAndBothSayWhatToDo) {
    const auto zero = start(0, {}, {"true"}), one = start(1, {"--tls"}, {"true"});
    const Outcome of_one = one->wait();
    EXPECT_EQ(of_one.status, 69);
    EXPECT_THAT(of_one.err, HasSubstr("it speaks no TLS: give --tls to every node, or to none"));
    EXPECT_TRUE(zero->wait_for_output(
        "this connection is TLS, and the job was started without --tls: give --tls to every node, or to none"));
    zero->signal(SIGTERM);
    zero->wait();
}

}  // namespace
}  // namespace ddprun::test
