// Pods: containers with a file system, host name and network of their own, where ddprun is process 1 and has
// no variables but those that the manifests of examples/kubernetes and the operators give.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <cstdlib>
#include <optional>
#include <regex>

#include "env/json.h"
#include "tests/support/hosts.h"
#include "tests/system/look.h"

namespace ddprun::test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

/// The options of ddprun in a manifest, as a pod of this test gets them: its first pod is node00.
std::vector<std::string> options_in(const std::string& manifest, const std::string& first_pod) {
    const std::string text = file_content(path_of("SOURCE_ROOT") + "/examples/kubernetes/" + manifest);
    std::smatch found;
    if (!std::regex_search(text, found, std::regex("command: (\\[\"ddprun\".*\\])"))) return {"no command"};
    const Result<Json> words = parse_json(found[1].str());
    std::vector<std::string> options;
    for (const Json& word : elements(*words)) options.push_back(as<std::string>(word).value_or("no text"));
    options.erase(options.begin());  // ddprun
    options.pop_back();              // train.py
    for (std::string& option : options) {
        const std::size_t name = option.find(first_pod);
        if (name != std::string::npos) option.replace(name, first_pod.size(), Hosts::name(0));
    }
    return options;
}

class Pods : public ::testing::Test {
  protected:
    void SetUp() override {
        if (const auto reason = Hosts::why_not()) GTEST_SKIP() << *reason;
        hosts_.emplace(3);
        pods_.resize(3);
    }
    /// Starts a pod's container with the operator's variables; an earlier container of the pod is gone.
    void start(int pod, const std::vector<std::string>& variables, const std::vector<std::string>& options) {
        std::vector<std::string> words{"env", "-i", "PATH=/usr/local/bin:/usr/bin:/bin", "HOME=/tmp/home"};
        for (const char* sanitizer : {"ASAN_OPTIONS", "LSAN_OPTIONS", "UBSAN_OPTIONS"}) {
            if (const char* value = std::getenv(sanitizer))
                words.push_back(std::string(sanitizer) + "=" + value);
        }
        words.insert(words.end(), variables.begin(), variables.end());
        words.insert(words.end(), {"unshare", "--pid", "--fork", "--kill-child", "--mount-proc"});
        const std::vector<std::string> ddprun = ddprun_probe(options, acts_);
        words.insert(words.end(), ddprun.begin(), ddprun.end());
        (*this)[pod].reset();
        (*this)[pod] = std::make_unique<Program>(hosts_->command(pod, words));
    }
    /// The order of the indexes is not that of the host names, by which nodes without a rank are ordered.
    static int index_of(int pod) { return (3 - pod) % 3; }
    /// Starts a pod of examples/kubernetes/indexed-job.yaml.
    void start_indexed(int pod, const std::string& token = "secret of the job") {
        start(pod, {"JOB_COMPLETION_INDEX=" + std::to_string(index_of(pod)), "DDPRUN_TOKEN=" + token},
              options_in("indexed-job.yaml", "train-0.train"));
    }
    /// Starts a pod of examples/kubernetes/jobset.yaml, which has one more: the job begins without it.
    void start_elastic(int pod) {
        std::vector<std::string> options = options_in("jobset.yaml", "train-node-0-0.train");
        options.push_back("--rdzv-conf=last_call_timeout=1");
        start(pod, {"JOB_COMPLETION_INDEX=" + std::to_string(pod), "DDPRUN_TOKEN=secret of the job"},
              options);
    }
    bool all_in_world_of(int size) {
        const std::string world = "WORLD_SIZE=" + std::to_string(size) + "\n";
        return std::all_of(pods_.begin(), pods_.end(),
                           [&](auto& pod) { return pod->wait_for_output(world); });
    }
    void expect_success_of_all() {
        finish();
        for (const auto& pod : pods_) {
            const Outcome ended = pod->wait();
            EXPECT_EQ(ended.status, 0) << ended.err;
        }
    }
    /// Kills a container as the kernel's out-of-memory killer does: its process 1, with all others.
    void kill_container(int pod) {
        run(hosts_->command(pod, {"pkill", "-KILL", "-x", "ddprun"}));
        (*this)[pod]->wait();
    }
    void signal_container(int pod, const std::string& signal) {
        run(hosts_->command(pod, {"pkill", "-" + signal, "-o", "-x", "ddprun"}));
    }
    void finish() { std::ofstream(hosts_->shared() + "/finish"); }
    std::unique_ptr<Program>& operator[](int pod) { return pods_[static_cast<std::size_t>(pod)]; }

    std::optional<Hosts> hosts_;
    std::vector<std::string> acts_{"on",  "15",         "0",     "env",        "GROUP_RANK",
                                   "env", "WORLD_SIZE", "await", "/srv/finish"};

  private:
    std::vector<std::unique_ptr<Program>> pods_;
};

TEST_F(Pods, OfAnIndexedJobHaveTheirIndexAsNodeRank) {
    for (const int pod : {1, 0, 2}) start_indexed(pod);
    for (const int pod : {0, 1, 2})
        ASSERT_TRUE((*this)[pod]->wait_for_output("GROUP_RANK=" + std::to_string(index_of(pod)) + "\n"));
    expect_success_of_all();
}

TEST_F(Pods, AKilledPodThatIsStartedAgainIsInTheNextGeneration) {
    for (const int pod : {0, 1, 2}) start_elastic(pod);
    ASSERT_TRUE(all_in_world_of(12));
    kill_container(1);
    ASSERT_TRUE((*this)[0]->wait_for_output("WORLD_SIZE=8\n"));
    start_elastic(1);
    ASSERT_TRUE((*this)[1]->wait_for_output("GROUP_RANK=1\n")) << "its place was free";
    expect_success_of_all();
}

TEST_F(Pods, AJobOfAFixedSizeWaitsForItsKilledPod) {
    for (const int pod : {0, 1, 2}) start_indexed(pod);
    ASSERT_TRUE(all_in_world_of(12));
    kill_container(1);
    start_indexed(1);
    ASSERT_TRUE((*this)[1]->wait_for_output("WORLD_SIZE=12\n"));
    expect_success_of_all();
}

TEST_F(Pods, TheHeadsPodThatIsStartedAgainJoinsTheJobThatWentOnWithoutIt) {
    for (const int pod : {0, 1, 2}) start_elastic(pod);
    ASSERT_TRUE(all_in_world_of(12));
    ASSERT_TRUE((*this)[0]->wait_for_output("is the standby"));
    kill_container(0);
    ASSERT_TRUE((*this)[1]->wait_for_output("this node is the head from now on"));
    start_elastic(0);
    ASSERT_TRUE((*this)[0]->wait_for_output("WORLD_SIZE=12\n"));
    expect_success_of_all();
}

TEST_F(Pods, TheSigtermBehindAPreStopDrainCutsNoGrace) {
    acts_ = {"note", "15",    "saving",      "env", "WORLD_SIZE", "noted",
             "15",   "await", "/srv/finish", "say", "saved"};
    for (const int pod : {0, 1, 2}) start_indexed(pod);
    ASSERT_TRUE(all_in_world_of(12));
    const Outcome drained = run(hosts_->command(1, {"env", "HOME=/tmp/home", path_of("DDPRUN"), "drain"}));
    EXPECT_EQ(drained.status, 0) << drained.err;
    ASSERT_TRUE((*this)[1]->wait_for_output("saving\n"));
    signal_container(1, "TERM");
    ASSERT_TRUE((*this)[0]->wait_for_output("SIGTERM at the ddprun of node01"));
    finish();
    for (const int pod : {0, 1, 2}) {
        const Outcome ended = (*this)[pod]->wait();
        EXPECT_EQ(ended.status, 75) << ended.err;
        EXPECT_EQ(occurrences(ended.out, "saved\n"), 4) << ended.out;
    }
}

TEST_F(Pods, WithAnotherSecretAPodIsRefusedAndBothSidesSayWhatHelps) {
    start_indexed(0);
    ASSERT_TRUE((*this)[0]->wait_for_output("controller on port"));
    start_indexed(1, "secret of another job");
    const Outcome refused = (*this)[1]->wait();
    EXPECT_EQ(refused.status, 69) << refused.err;
    EXPECT_THAT(refused.err, HasSubstr("set it to the same text on all nodes"));
    ASSERT_TRUE((*this)[0]->wait_for_output("its token is wrong (all nodes need the same DDPRUN_TOKEN"));
    signal_container(0, "TERM");
    EXPECT_EQ((*this)[0]->wait().status, 75);
}

TEST_F(Pods, OfKubeflowsTorchPolicyNeedNoOptions) {
    for (const int pod : {2, 1, 0}) {
        const std::string index = std::to_string(pod);
        start(pod,
              {"PET_NNODES=3", "PET_NPROC_PER_NODE=4", "PET_NODE_RANK=" + index, "PET_MASTER_ADDR=node00",
               "PET_MASTER_PORT=29500", "JOB_COMPLETION_INDEX=" + index, "DDPRUN_TOKEN=secret of the job"},
              options_in("trainjob.yaml", ""));
    }
    for (const int pod : {0, 1, 2})
        ASSERT_TRUE((*this)[pod]->wait_for_output("GROUP_RANK=" + std::to_string(pod) + "\n"));
    ASSERT_TRUE(all_in_world_of(12));
    expect_success_of_all();
}

TEST_F(Pods, MetricsOfAPodAreSeenFromOutside) {
    for (const int pod : {0, 1, 2}) start_indexed(pod);
    ASSERT_TRUE(all_in_world_of(12));
    const std::string ask =
        "exec 3<>/dev/tcp/node01/9400; printf 'GET /metrics HTTP/1.0\\r\\n\\r\\n' >&3; cat <&3";
    const Outcome scraped = run(hosts_->command(0, {"bash", "-c", ask}));
    EXPECT_THAT(scraped.out, AllOf(HasSubstr("200 OK"),
                                   HasSubstr("ddprun_world_size{run_id=\"none\",host=\"node01\"} 12")));
    expect_success_of_all();
}

}  // namespace
}  // namespace ddprun::test
