#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "compute.h"
#include "ddp/model.h"
#include "ddp/schedule.h"
#include "env/result.h"

namespace train {

enum class OptimizerKind : std::uint8_t { Sgd, AdamW };
/// "sgd", "adamw".
const char* name_of(OptimizerKind kind);

enum class DeviceKind : std::uint8_t { Auto, Cuda, Cpu };
/// "auto", "cuda", "cpu".
const char* name_of(DeviceKind kind);

/// The place of samples in a CUDA run.
enum class KeepData : std::uint8_t { Auto, Device, Host };
/// "auto", "device", "host".
const char* name_of(KeepData keep);

/// "constant", "step", "cosine", "linear".
const char* name_of(ddp::Schedule::Shape shape);

struct Options {
    std::string data;    ///< images (IDX), CSV or synthetic:...; "" the installed digits
    std::string labels;  ///< "" beside the images, named as MNIST's
    std::vector<std::size_t> hidden = {128};
    std::uint64_t epochs = 40;
    std::size_t batch_size = 16;  ///< per rank
    OptimizerKind optimizer = OptimizerKind::Sgd;
    std::uint64_t accumulate = 1;  ///< batches per step
    ddp::Shard shard = ddp::Shard::None;
    std::optional<double> learning_rate;  ///< for one rank's batch; unset: the optimizer's default
    ddp::Schedule::Shape schedule = ddp::Schedule::Shape::Constant;
    std::uint64_t warmup = 0;    ///< steps over which the learning rate rises
    std::optional<double> clip;  ///< largest joint norm of all gradients
    double momentum = 0.9;
    double weight_decay = 1e-4;
    bool scale_learning_rate = true;
    std::uint64_t seed = 0;
    std::string checkpoint_dir;           ///< "" ./checkpoints/<name of the data>
    std::uint64_t checkpoint_every = 10;  ///< epochs; also after the last
    std::uint64_t verify_every = 0;       ///< steps; 0: never
    bool resume = false;
    std::string log_json;     ///< "" none
    std::string tensorboard;  ///< directory of the curves; "" none
    DeviceKind device = DeviceKind::Auto;
    Precision precision = Precision::Fp32;
    std::string backend = "auto";  ///< auto, nccl, staged, cpu, mpi
    KeepData keep_data = KeepData::Auto;
    bool deterministic = false;
    bool cuda_graph = false;
    bool help = false;

    [[nodiscard]] double base_learning_rate() const;
    /// The option that needs CUDA, beside --device: "--precision bf16"; "" without one.
    [[nodiscard]] std::string demand_for_cuda() const;
};

/// Parses a command line (without the program's name): "--name value" and "--name=value". Error:
/// InvalidArgument naming option and value ("--lr: 'x' is not a number"), also for options that contradict
/// each other.
ddprun::Result<Options> parse_options(std::span<const char* const> arguments);

std::string usage();

}  // namespace train
