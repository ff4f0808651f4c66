// PyTorch's workers meet at the controller's port. Most tests use tests/support/torch_client.py, not PyTorch.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>

#include "tests/support/hosts.h"
#include "tests/support/reserved_port.h"
#include "tests/support/run_program.h"
#include "tests/support/temporary_directory.h"
#include "tests/system/look.h"

namespace ddprun::test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

/// Writes a script that can import torch_client to this path.
std::string script_in(const std::string& directory, const std::string& name, const std::string& text) {
    const std::string path = directory + "/" + name;
    std::ofstream(directory + "/torch_client.py")
        << file_content(path_of("SOURCE_ROOT") + "/tests/support/torch_client.py");
    std::ofstream(path) << "import os, socket, sys, time\n" << text;
    return path;
}

constexpr const char* kMeet = R"(
from torch_client import TorchClient
assert os.environ["TORCHELASTIC_USE_AGENT_STORE"] == "True"
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
store = TorchClient()
store.set(b"rank %d" % rank, b"%d" % (rank + 1))
store.wait(*(b"rank %d" % other for other in range(size)))
print("sum", sum(int(store.get(b"rank %d" % other)) for other in range(size)))
)";

TEST(TorchStore, OfAPythonProgramIsServedByTheControllerAndNotByAWorker) {
    const TemporaryDirectory place;
    const Outcome outcome =
        run({path_of("DDPRUN"), "--nproc-per-node=3", script_in(place.path(), "meet.py", kMeet)});
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    EXPECT_THAT(sorted_lines(outcome.out), ElementsAre("[0]: sum 6", "[1]: sum 6", "[2]: sum 6"));
}

TEST(TorchStore, IsAtTheMasterPortThatTheUserGives) {
    const TemporaryDirectory place;
    const std::string script = script_in(
        place.path(), "port.py", std::string(kMeet) + "print(os.environ['MASTER_PORT'] == sys.argv[1])\n");
    const ReservedPort port;
    const Outcome outcome = run({path_of("DDPRUN"), "--master-port=" + port.number(), script, port.number()});
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    EXPECT_THAT(outcome.out, HasSubstr("True"));
}

TEST(TorchStore, OfARestartedWorldHasNoKeyOfTheLast) {
    const TemporaryDirectory place;
    const std::string script = script_in(place.path(), "restart.py", R"(
from torch_client import TorchClient
store = TorchClient()
print("keys", store.count_keys())
store.set(b"k", b"v")
assert store.get(b"k") == b"v"
sys.exit(1 if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" else 0)
)");
    const Outcome outcome = run({path_of("DDPRUN"), "--max-restarts=1", script});
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    EXPECT_EQ(outcome.out, "keys 0\nkeys 0\n");
}

constexpr const char* kListen = R"(
assert os.environ["TORCHELASTIC_USE_AGENT_STORE"] == "False"
server = socket.socket()
server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
server.bind(("", int(os.environ["MASTER_PORT"])))
server.listen()
print("listens")
)";

TEST(TorchStore, LeavesMasterPortToProgramsThatDoNotUseIt) {
    const TemporaryDirectory place;
    const std::string script = script_in(place.path(), "listen.py", kListen);
    const Outcome off = run({path_of("DDPRUN"), "--torch-store=off", script});
    EXPECT_EQ(off.out, "listens\n") << off.err;
    const Outcome other = run({path_of("DDPRUN"), "--no-python", "sh", "-c", "exec python3 " + script});
    EXPECT_EQ(other.out, "listens\n") << other.err;
}

class TorchStoreOnHosts : public ::testing::Test {
  protected:
    void SetUp() override {
        if (const auto reason = Hosts::why_not()) GTEST_SKIP() << *reason;
    }
    /// Runs the script on the first two hosts; returns the outcome of each.
    static std::vector<std::unique_ptr<Program>> start(const Hosts& hosts, const std::string& script,
                                                       const std::vector<std::string>& environment = {
                                                           "PYTHON_EXEC=python3"}) {
        std::vector<std::unique_ptr<Program>> nodes;
        for (int host = 0; host < 2; ++host) {
            nodes.push_back(std::make_unique<Program>(
                hosts.command(host, {path_of("DDPRUN"), "--nnodes=2", "--nproc-per-node=2",
                                     "--rdzv-backend=c10d", "--rdzv-endpoint=node00:29400", script}),
                with_environment(environment)));
        }
        return nodes;
    }
};

TEST_F(TorchStoreOnHosts, WorkersOfSeveralNodesMeetThere) {
    const Hosts hosts(2);
    const auto nodes = start(hosts, script_in(hosts.shared(), "meet.py", kMeet));
    const Outcome zero = nodes[0]->wait(), one = nodes[1]->wait();
    EXPECT_THAT(sorted_lines(zero.out), ElementsAre("[0]: sum 10", "[1]: sum 10")) << zero.err;
    EXPECT_THAT(sorted_lines(one.out), ElementsAre("[2]: sum 10", "[3]: sum 10")) << one.err;
}

TEST_F(TorchStoreOnHosts, AHostOutsideTheJobIsRefused) {
    const Hosts hosts(3);
    const auto nodes = start(hosts, script_in(hosts.shared(), "stay.py", R"(
from torch_client import TorchClient
rank, store = int(os.environ["RANK"]), TorchClient()
store.set(b"rank %d" % rank, b"")
if rank == 0:
    store.wait(b"rank 1", b"rank 2", b"rank 3")
    print("all are there", flush=True)
store.wait(b"go")
)"));
    ASSERT_TRUE(nodes[0]->wait_for_output("all are there"));
    const std::string look = script_in(hosts.shared(), "look.py", R"(
from torch_client import TorchClient
try: print(TorchClient("node00", 29400).count_keys())
except ConnectionError as error: print(error)
)");
    const Outcome stranger = run(hosts.command(2, {"python3", look}));
    EXPECT_THAT(stranger.out, ::testing::AnyOf(HasSubstr("closed by the server"), HasSubstr("reset")))
        << stranger.err;
    const std::string go =
        script_in(hosts.shared(), "go.py",
                  "from torch_client import TorchClient\nTorchClient('node00', 29400).set(b'go', b'')\n");
    EXPECT_EQ(run(hosts.command(1, {"python3", go})).status, 0);
    EXPECT_EQ(nodes[0]->wait().status, 0);
    EXPECT_EQ(nodes[1]->wait().status, 0);
}

TEST_F(TorchStoreOnHosts, PyTorchsProcessGroupsMeetThere) {
    const char* const chosen = ::getenv("PYTHON_EXEC");
    const std::string python = chosen != nullptr ? chosen : "python3";
    const Hosts hosts(2);
    const Outcome has_torch = run(hosts.command(0, {python, "-c", "import torch.distributed"}));
    if (has_torch.status != 0) GTEST_SKIP() << python << " has no torch (PYTHON_EXEC names another)";
    const auto nodes = start(hosts, script_in(hosts.shared(), "torch_meet.py", R"(
import torch, torch.distributed as dist
assert os.environ["TORCHELASTIC_USE_AGENT_STORE"] == "True"
dist.init_process_group("gloo", init_method="env://")
mine = torch.full((4,), dist.get_rank() + 1.0)
dist.all_reduce(mine)
print("sum", int(mine[0]))
dist.destroy_process_group()
)"),
                             {"GLOO_SOCKET_IFNAME=eth0", std::string("PYTHON_EXEC=") + python});
    const Outcome zero = nodes[0]->wait(), one = nodes[1]->wait();
    EXPECT_THAT(sorted_lines(zero.out), ElementsAre("[0]: sum 10", "[1]: sum 10")) << zero.err;
    EXPECT_THAT(sorted_lines(one.out), ElementsAre("[2]: sum 10", "[3]: sum 10")) << one.err;
}

}  // namespace
}  // namespace ddprun::test
