#include "options.h"

#include <fmt/core.h>

#include <array>
#include <cmath>
#include <initializer_list>
#include <string_view>

#include "env/text.h"
#include "samples/data.h"

namespace train {
namespace {

using ddprun::Errc;
using ddprun::Error;
using ddprun::Result;
using ddprun::Status;

constexpr double kSgdLearningRate = 0.02, kAdamWLearningRate = 0.001;
constexpr std::size_t kWidest = 1 << 16;

Error wrong(std::string what) { return {Errc::InvalidArgument, std::move(what), 0}; }

template <class T, class Into>
Status store(Result<T> parsed, Into& into) {
    if (!parsed) return parsed.error();
    into = *std::move(parsed);
    return {};
}

Result<std::uint64_t> parse_count(std::string_view text, std::int64_t max) {
    const Result<std::int64_t> value = ddprun::parse_int_between(text, 1, max);
    if (!value) return value.error();
    return static_cast<std::uint64_t>(*value);
}

Result<double> parse_not_negative(std::string_view text) {
    const Result<double> value = ddprun::parse_double(text);
    if (!value) return value.error();
    if (!std::isfinite(*value) || *value < 0)
        return wrong(fmt::format("'{}' is not a number of at least 0", text));
    return *value;
}

Result<std::vector<std::size_t>> parse_widths(std::string_view text) {
    std::vector<std::size_t> widths;
    for (const std::string_view piece : ddprun::split(text, ',')) {
        const Result<std::uint64_t> width = parse_count(piece, kWidest);
        if (!width) return width.error();
        widths.push_back(*width);
    }
    return widths;
}

template <class T>
Result<T> parse_name(std::string_view text, std::initializer_list<T> values) {
    std::vector<std::string> names;
    for (const T value : values) {
        if (text == name_of(value)) return value;
        names.emplace_back(name_of(value));
    }
    return wrong(fmt::format("'{}' is none of {}", text, ddprun::join(names, ", ")));
}

Result<std::string> parse_backend(std::string_view text) {
    for (const std::string_view known : {"auto", "nccl", "staged", "cpu", "mpi"}) {
        if (text == known) return std::string(text);
    }
    return wrong(fmt::format("'{}' is none of auto, nccl, staged, cpu, mpi", text));
}

Result<std::string> parse_path(std::string_view text) {
    if (text.empty()) return wrong("the path is empty");
    return std::string(text);
}

Result<std::string> parse_data(std::string_view text) {
    const Result<std::optional<SyntheticSize>> size = parse_synthetic(text);
    if (!size) return size.error();
    return parse_path(text);
}

Result<double> parse_norm(std::string_view text) {
    Result<double> norm = parse_not_negative(text);
    if (norm && *norm == 0) return wrong("a norm of 0 leaves nothing of the gradients");
    return norm;
}

struct Flag {
    std::string_view name;
    std::string_view value;  ///< name of the value, for --help; "" without one
    std::string_view meaning;
    Status (*set)(Options&, std::string_view);
};

constexpr std::int64_t kMany = 1'000'000'000;

const std::array kFlags = {
    Flag{"--data", "FILE",
         "IDX images (as MNIST), CSV with the label in the last column, or\n"
         "synthetic:SAMPLES,FEATURES,CLASSES; default: digits",
         [](Options& o, std::string_view v) { return store(parse_data(v), o.data); }},
    Flag{"--labels", "FILE", "IDX labels; default: beside the images, named as MNIST's",
         [](Options& o, std::string_view v) { return store(parse_path(v), o.labels); }},
    Flag{"--hidden", "N,N,...", "widths of the hidden layers; default 128",
         [](Options& o, std::string_view v) { return store(parse_widths(v), o.hidden); }},
    Flag{"--epochs", "N", "passes over the training samples; default 40",
         [](Options& o, std::string_view v) { return store(parse_count(v, kMany), o.epochs); }},
    Flag{"--batch-size", "N", "samples per worker and step; default 16",
         [](Options& o, std::string_view v) { return store(parse_count(v, kMany), o.batch_size); }},
    Flag{"--accumulate", "N", "batches whose gradients are added up for one step; default 1",
         [](Options& o, std::string_view v) { return store(parse_count(v, kMany), o.accumulate); }},
    Flag{
        "--shard", "PART",
        "what workers divide among them: none (default), optimizer (its state),\ngradients (and that), parameters (and those)",
        [](Options& o, std::string_view v) {
            using enum ddp::Shard;
            return store(parse_name(v, {None, Optimizer, Gradients, Parameters}), o.shard);
        }},
    Flag{"--lr", "RATE", "learning rate for one worker; default 0.02 (sgd), 0.001 (adamw)",
         [](Options& o, std::string_view v) { return store(parse_not_negative(v), o.learning_rate); }},
    Flag{
        "--schedule", "SHAPE",
        "how the learning rate falls until the end: constant (default), cosine,\nlinear, step (a tenth after each third)",
        [](Options& o, std::string_view v) {
            using enum ddp::Schedule::Shape;
            return store(parse_name(v, {Constant, Cosine, Linear, Step}), o.schedule);
        }},
    Flag{"--warmup", "N", "steps over which the learning rate rises from a tenth; default 0",
         [](Options& o, std::string_view v) { return store(ddprun::parse_uint(v), o.warmup); }},
    Flag{"--clip", "NORM", "scale gradients down to this norm of all of them",
         [](Options& o, std::string_view v) { return store(parse_norm(v), o.clip); }},
    Flag{"--no-scale-lr", "", "do not multiply the learning rate by workers and --accumulate",
         [](Options& o, std::string_view) { return o.scale_learning_rate = false, Status{}; }},
    Flag{"--optimizer", "sgd|adamw", "default sgd",
         [](Options& o, std::string_view v) {
             return store(parse_name(v, {OptimizerKind::Sgd, OptimizerKind::AdamW}), o.optimizer);
         }},
    Flag{"--momentum", "M", "of sgd; default 0.9",
         [](Options& o, std::string_view v) { return store(parse_not_negative(v), o.momentum); }},
    Flag{"--weight-decay", "W", "default 0.0001",
         [](Options& o, std::string_view v) { return store(parse_not_negative(v), o.weight_decay); }},
    Flag{"--seed", "N", "of first weights, order of samples, synthetic data; default 0",
         [](Options& o, std::string_view v) { return store(ddprun::parse_uint(v), o.seed); }},
    Flag{"--checkpoint-dir", "DIR", "default ./checkpoints/digits (or the name of --data)",
         [](Options& o, std::string_view v) { return store(parse_path(v), o.checkpoint_dir); }},
    Flag{"--checkpoint-every", "N", "epochs between checkpoints; default 10, and after the last",
         [](Options& o, std::string_view v) { return store(parse_count(v, kMany), o.checkpoint_every); }},
    Flag{
        "--verify-every", "N",
        "steps between comparisons of all workers' parameters: a worker that\ndiffers from most is replaced, "
        "or ends the job; default: never",
        [](Options& o, std::string_view v) { return store(parse_count(v, kMany), o.verify_every); }},
    Flag{"--resume", "", "continue from the newest checkpoint, if there is one",
         [](Options& o, std::string_view) { return o.resume = true, Status{}; }},
    Flag{"--log-json", "FILE", "write losses, accuracies and the digest of the parameters at the end",
         [](Options& o, std::string_view v) { return store(parse_path(v), o.log_json); }},
    Flag{"--tensorboard", "DIR", "write curves for TensorBoard: loss, accuracy, learning rate, samples/s",
         [](Options& o, std::string_view v) { return store(parse_path(v), o.tensorboard); }},
    Flag{"--device", "auto|cuda|cpu", "default auto: a CUDA device where one can be used, else the CPU",
         [](Options& o, std::string_view v) {
             return store(parse_name(v, {DeviceKind::Auto, DeviceKind::Cuda, DeviceKind::Cpu}), o.device);
         }},
    Flag{"--precision", "P", "fp32 (default); on CUDA also tf32, bf16, fp16 (with a loss scale)",
         [](Options& o, std::string_view v) {
             return store(parse_name(v, {Precision::Fp32, Precision::Tf32, Precision::Bf16, Precision::Fp16}),
                          o.precision);
         }},
    Flag{"--backend", "B", "how workers talk: auto (default), nccl, staged, cpu, mpi",
         [](Options& o, std::string_view v) { return store(parse_backend(v), o.backend); }},
    Flag{"--keep-data", "auto|device|host",
         "on CUDA, where samples are kept; default auto: on the device\nwhere they take less than a quarter "
         "of it",
         [](Options& o, std::string_view v) {
             return store(parse_name(v, {KeepData::Auto, KeepData::Device, KeepData::Host}), o.keep_data);
         }},
    Flag{"--deterministic", "", "the same bits in every run, also on CUDA (the CPU gives them always)",
         [](Options& o, std::string_view) { return o.deterministic = true, Status{}; }},
    Flag{"--cuda-graph", "", "capture a whole step once and launch it as one",
         [](Options& o, std::string_view) { return o.cuda_graph = true, Status{}; }},
    Flag{"--help", "", "print this and exit",
         [](Options& o, std::string_view) { return o.help = true, Status{}; }},
};

Result<const Flag*> find_flag(std::string_view name) {
    std::vector<std::string> names;
    for (const Flag& flag : kFlags) {
        if (flag.name == name) return &flag;
        names.emplace_back(flag.name);
    }
    const std::string near = ddprun::nearest(name, names);
    return wrong(fmt::format("{}: unknown option{}", name,
                             near.empty() ? "; see train --help" : fmt::format("; did you mean {}?", near)));
}

Status check_together(const Options& o) {
    const std::string demand = o.demand_for_cuda();
    if (o.device == DeviceKind::Cpu && !demand.empty()) return wrong(demand + " needs --device cuda");
    if (o.backend == "cpu" && o.device == DeviceKind::Cuda)
        return wrong("--backend: cpu takes host memory; it needs --device cpu");
    if (o.backend == "cpu" && !demand.empty())
        return wrong(demand + " needs --device cuda, and --backend cpu takes host memory");
    if (o.backend == "staged" && o.cuda_graph)
        return wrong(
            "--cuda-graph: the staged backend goes through the host, which no graph can hold; "
            "use --backend nccl");
    const bool has_copies = o.precision == Precision::Bf16 || o.precision == Precision::Fp16;
    if (o.shard != ddp::Shard::None && (has_copies || o.cuda_graph))
        return wrong(
            fmt::format("--shard: not with {}; leave --shard none",
                        o.cuda_graph ? "--cuda-graph" : fmt::format("--precision {}", name_of(o.precision))));
    if (o.verify_every > 0 && o.cuda_graph)
        return wrong("--verify-every: the host compares, which no graph can hold; leave out --cuda-graph");
    if (!o.labels.empty() && o.data.starts_with("synthetic:"))
        return wrong("--labels: synthetic data has labels of its own");
    return {};
}

}  // namespace

const char* name_of(DeviceKind kind) {
    return std::array{"auto", "cuda", "cpu"}[static_cast<std::size_t>(kind)];
}

const char* name_of(KeepData keep) {
    return std::array{"auto", "device", "host"}[static_cast<std::size_t>(keep)];
}

const char* name_of(Precision precision) {
    return std::array{"fp32", "tf32", "bf16", "fp16"}[static_cast<std::size_t>(precision)];
}

const char* name_of(ddp::Schedule::Shape shape) {
    return std::array{"constant", "step", "cosine", "linear"}[static_cast<std::size_t>(shape)];
}

const char* name_of(OptimizerKind kind) { return kind == OptimizerKind::Sgd ? "sgd" : "adamw"; }

double Options::base_learning_rate() const {
    return learning_rate.value_or(optimizer == OptimizerKind::Sgd ? kSgdLearningRate : kAdamWLearningRate);
}

std::string Options::demand_for_cuda() const {
    if (precision != Precision::Fp32) return fmt::format("--precision {}", name_of(precision));
    if (cuda_graph) return "--cuda-graph";
    if (keep_data == KeepData::Device) return "--keep-data device";
    if (backend == "nccl" || backend == "staged") return "--backend " + backend;
    return "";
}

Result<Options> parse_options(std::span<const char* const> arguments) {
    Options options;
    for (std::size_t i = 0; i < arguments.size(); ++i) {
        const std::string_view argument = arguments[i];
        if (!argument.starts_with("-"))
            return wrong(fmt::format("'{}': train takes options only; see train --help", argument));
        const std::size_t equals = argument.find('=');
        const std::string_view name = argument.substr(0, equals);
        const Result<const Flag*> flag = find_flag(name);
        if (!flag) return flag.error();
        const bool takes_value = !(*flag)->value.empty();
        std::string_view value;
        if (equals != std::string_view::npos) {
            if (!takes_value) return wrong(fmt::format("{}: takes no value", name));
            value = argument.substr(equals + 1);
        } else if (takes_value) {
            if (++i == arguments.size()) return wrong(fmt::format("{}: {} is missing", name, (*flag)->value));
            value = arguments[i];
        }
        const Status set = (*flag)->set(options, value);
        if (!set) return set.error().with(name);
    }
    const Status fits = check_together(options);
    if (!fits) return fits.error();
    return options;
}

std::string usage() {
    std::string text =
        "Trains a multi-layer perceptron on images, on all workers of a job at once.\n\n"
        "  ddprun --nproc-per-node=4 train [options]\n\n";
    constexpr std::size_t kColumn = 26;
    for (const Flag& flag : kFlags) {
        const std::string left = fmt::format("{} {}", flag.name, flag.value);
        std::string_view indent = left;
        if (left.size() + 2 > kColumn) {
            text += fmt::format("  {}\n", left);
            indent = "";
        }
        for (const std::string_view line : ddprun::split(flag.meaning, '\n')) {
            text += fmt::format("  {:<{}}{}\n", indent, kColumn, line);
            indent = "";
        }
    }
    return text +
           "\nExit codes: 0 done, 1 failed, 64 wrong option, 65 wrong data, 66 missing file, 69 no usable device\n"
           "or too little address space (ulimit -v), 73 cannot write.\n";
}

}  // namespace train
