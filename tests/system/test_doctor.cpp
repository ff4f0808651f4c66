#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>

#include "env/io/file.h"
#include "env/json.h"
#include "tests/support/run_program.h"
#include "tests/support/temporary_directory.h"

namespace ddprun::test {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

Outcome doctor(const std::vector<std::string>& options, std::vector<std::string> environment = {},
               const std::string& ddprun = path_of("DDPRUN")) {
    std::vector<std::string> command{ddprun, "doctor"};
    command.insert(command.end(), options.begin(), options.end());
    return run(command, with_environment(std::move(environment)));
}

/// A machine with fakes of these GPUs, of NCCL and of CUDA. Its ddprun lies beside workers that are linked
/// with them.
struct GpuMachine {
    explicit GpuMachine(const std::string& gpus) {
        EXPECT_TRUE(write_file_atomically(
            directory.file("machine.json"),
            R"({"driver": "580.65.06", "cuda": 13010, "p2p": 0, "gpus": )" + gpus + "}", 0600));
        std::filesystem::create_directories(directory.file("bin"));
        std::filesystem::create_directories(directory.file("libexec"));
        std::filesystem::copy_file(path_of("DDPRUN"), directory.file("bin/ddprun"));
        std::filesystem::create_directory_symlink(path_of("OVER_FAKES"), directory.file("libexec/ddprun"));
    }
    [[nodiscard]] std::vector<std::string> environment(int cuda_devices = 2) const {
        return {"DDPRUN_NVML_LIBRARY=" + path_of("FAKE_NVML_LIBRARY"),
                "FAKE_NVML=" + directory.file("machine.json"),
                "DDP_NCCL_LIBRARY=" + path_of("FAKE_NCCL_LIBRARY"),
                "FAKE_CUDA_DEVICES=" + std::to_string(cuda_devices)};
    }
    [[nodiscard]] std::string ddprun() const { return directory.file("bin/ddprun"); }
    TemporaryDirectory directory;
};

TEST(Doctor, RunsAnAllReduceAmongTheCpusOfAMachineWithoutGpus) {
    const Outcome outcome = doctor({"--json", "--seconds=0.1"}, {"CUDA_VISIBLE_DEVICES="});
    const Json json = parse_json(outcome.out).value_or(Json());
    ASSERT_TRUE(json.is_object()) << outcome.out << outcome.err;
    ASSERT_EQ(json["all_reduce"]["exit_code"], 0) << json["all_reduce"];
    EXPECT_GE(json["all_reduce"]["workers"].get<int>(), 1);
    EXPECT_THAT(json["all_reduce"]["backend"].get<std::string>(), HasSubstr("shared memory"));
    EXPECT_EQ(outcome.status, json["worst"] == "error" ? 1 : 0);
}

TEST(Doctor, RunsAnAllReduceAmongTheGpus) {
    const GpuMachine machine(
        R"([{"name": "A", "uuid": "GPU-a", "bus_id": "00000000:3B:00.0", "total": 1000}, {"name": "B", "uuid": "GPU-b"}])");
    const Outcome outcome =
        doctor({"--json", "--seconds", "0.1", "--bytes", "64KiB"}, machine.environment(), machine.ddprun());
    const Json json = parse_json(outcome.out).value_or(Json());
    ASSERT_TRUE(json.is_object()) << outcome.out << outcome.err;
    EXPECT_EQ(json["gpus"][0]["bus_id"], "0000:3b:00.0");
    ASSERT_EQ(json["all_reduce"]["exit_code"], 0) << json["all_reduce"];
    EXPECT_EQ(json["all_reduce"]["workers"], 2);
    EXPECT_THAT(json["all_reduce"]["backend"].get<std::string>(), HasSubstr("nccl"));
}

TEST(Doctor, ExitsWithOneWhenAGpuIsDefective) {
    const GpuMachine machine(R"([{"name": "A", "uncorrected": 3}])");
    const Outcome outcome = doctor({"--no-run"}, machine.environment());
    EXPECT_EQ(outcome.status, 1);
    EXPECT_THAT(outcome.out, HasSubstr("uncorrectable ECC errors since the driver was loaded: 3"));
    EXPECT_THAT(outcome.out, HasSubstr("-> reset it (nvidia-smi --gpu-reset -i 0"));
    EXPECT_THAT(outcome.out, HasSubstr("not run (--no-run)"));
    EXPECT_THAT(outcome.out, Not(HasSubstr("\033"))) << "standard output is no terminal";
}

TEST(Doctor, ShowsTheWorkersErrorWhenTheAllReduceFails) {
    const GpuMachine machine(R"([{"name": "A"}, {"name": "B"}])");
    const Outcome outcome = doctor({"--bytes=64KiB"}, machine.environment(1), machine.ddprun());
    EXPECT_EQ(outcome.status, 1);
    EXPECT_THAT(outcome.out, HasSubstr("all-reduce"));
    EXPECT_THAT(outcome.out, HasSubstr("local rank 1"));
    EXPECT_THAT(outcome.out, HasSubstr("to see more: ddprun --standalone"));
}

TEST(Doctor, IgnoresDefaultsForJobs) {
    const Outcome outcome =
        doctor({"--json", "--seconds=0.1", "--bytes=1MiB"},
               {"PET_NNODES=2", "PET_NPROC_PER_NODE=gpu", "PET_DRY_RUN=1", "CUDA_VISIBLE_DEVICES="});
    const Json json = parse_json(outcome.out).value_or(Json());
    ASSERT_TRUE(json.is_object()) << outcome.out << outcome.err;
    EXPECT_EQ(json["all_reduce"]["exit_code"], 0) << json["all_reduce"];
}

TEST(GpuCheck, ALostGpuKeepsTheJobFromStartingUntilItIsOverridden) {
    const GpuMachine machine(R"([{"uuid": "GPU-a"}, {"lost": 15}])");
    const std::vector<std::string> environment = machine.environment();
    const Outcome refused = run({path_of("DDPRUN"), "--nproc-per-node=gpu", "/bin/echo", "started"},
                                with_environment(environment));
    EXPECT_EQ(refused.status, 69);
    EXPECT_THAT(refused.err,
                HasSubstr("ddprun: GPU 1 (local rank 1): the GPU has fallen off the bus or does not answer"));
    EXPECT_THAT(refused.err, HasSubstr("--gpu-check=warn starts all the same"));
    EXPECT_THAT(refused.out, Not(HasSubstr("started")));
    const Outcome warned =
        run({path_of("DDPRUN"), "--nproc-per-node=gpu", "--gpu-check=warn", "/bin/echo", "started"},
            with_environment(environment));
    EXPECT_EQ(warned.status, 0);
    EXPECT_THAT(warned.err, HasSubstr("GPU 1 (local rank 1)"));
    EXPECT_THAT(warned.out, HasSubstr("started"));
    const Outcome counted =
        run({path_of("DDPRUN"), "--nproc-per-node=2", "/bin/echo", "started"}, with_environment(environment));
    EXPECT_EQ(counted.status, 0);
    EXPECT_THAT(counted.err, Not(HasSubstr("GPU 1"))) << "a program that gets a count may want no GPU";
}

}  // namespace
}  // namespace ddprun::test
