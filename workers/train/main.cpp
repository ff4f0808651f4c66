// Trains an MLP on images, data-parallel over all workers of a ddprun job.

#include <fmt/core.h>
#include <poll.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "agreement.h"
#include "compute_device.h"
#include "ddp/checkpoint/durable_file.h"
#include "ddp/checkpoint/writer_lock.h"
#include "ddp/context.h"
#include "ddp/error_report.h"
#include "ddp/lifeline.h"
#include "ddp/process_group.h"
#include "ddp/recovery.h"
#include "env/print.h"
#include "env/text.h"
#include "env/worker_env.h"
#include "matrix.h"
#include "options.h"
#include "samples/data.h"
#include "trainer.h"

namespace {

using train::ExitCode;
using train::Options;
using train::StartupError;

int print_error(const StartupError& error) {
    ddprun::print(stderr, "train: {}\n", ddprun::printable(error.what));
    ddp::write_error_report(error.what);
    return static_cast<int>(error.code);
}

/// Ends a rank. To exit before the rank that reports the error would make this one, which is silent, the root
/// cause for the launcher: it waits to be ended, and reports the error itself after a timeout.
/// `is_told_to_end` tells of signals that are caught; each of them also ends a wait.
int report(const StartupError& error, int reporter, int rank,
           const std::function<bool()>& is_told_to_end = {}) {
    constexpr int kWaits = 50, kWaitMilliseconds = 100;
    for (int waits = 0; rank != reporter && waits < kWaits; ++waits) {
        if (is_told_to_end && is_told_to_end()) return static_cast<int>(error.code);
        ::poll(nullptr, 0, kWaitMilliseconds);
    }
    return print_error(error);
}

/// OMP_NUM_THREADS from the launcher or the user; one thread otherwise.
int matrix_threads() {
    const std::optional<std::string> text = ddprun::process_environment("OMP_NUM_THREADS");
    const ddprun::Result<std::int64_t> threads = ddprun::parse_int_between(text.value_or("1"), 1, 1024);
    return threads ? static_cast<int>(*threads) : 1;
}

/// An error when rank 0 cannot write files into this directory, which is made where it is missing.
std::optional<StartupError> check_directory(std::string_view option, const std::string& directory) {
    std::error_code error;
    std::filesystem::create_directories(directory, error);
    if (error)
        return StartupError{ExitCode::CannotCreate,
                            fmt::format("{}: {}: {}", option, directory, error.message())};
    if (::access(directory.c_str(), W_OK) == 0) return std::nullopt;
    return StartupError{ExitCode::CannotCreate, fmt::format("{}: {} cannot be written", option, directory)};
}

/// Reports before the training that rank 0 cannot write an output.
std::optional<StartupError> check_outputs(const Options& options, const train::Samples& samples) {
    if (auto error = check_directory("--checkpoint-dir", train::checkpoint_dir_for(options, samples)))
        return error;
    if (!options.tensorboard.empty()) {
        if (auto error = check_directory("--tensorboard", options.tensorboard)) return error;
    }
    if (options.log_json.empty()) return std::nullopt;
    const std::string parent = std::filesystem::path(options.log_json).parent_path();
    if (::access(parent.empty() ? "." : parent.c_str(), W_OK) == 0 &&
        !std::filesystem::is_directory(options.log_json))
        return std::nullopt;
    return StartupError{ExitCode::CannotCreate,
                        fmt::format("--log-json: {} cannot be written", options.log_json)};
}

std::optional<StartupError> load(const Options& options, train::Samples& samples) {
    if (const auto size = train::parse_synthetic(options.data); size && *size) {
        samples = train::make_samples(**size, options.seed);
        return std::nullopt;
    }
    std::string path = options.data;
    if (path.empty()) {
        const ddprun::Result<std::string> digits = train::find_digits();
        if (!digits) return StartupError{ExitCode::NoInput, digits.error().what};
        path = *digits;
    }
    ddprun::Result<train::Samples> read = train::read_samples(path, options.labels);
    if (!read) {
        const bool missing = read.error().code == ddprun::Errc::NotFound;
        return StartupError{missing ? ExitCode::NoInput : ExitCode::DataError, "data: " + read.error().what};
    }
    samples = *std::move(read);
    return std::nullopt;
}

std::optional<StartupError> prepare(const Options& options, const ddp::Context& context,
                                    const ddp::Device& device, train::Samples& samples) {
    if (device != ddp::Device{} && options.shard == ddp::Shard::Parameters)
        return StartupError{ExitCode::Usage, "--shard: parameters cannot be divided on a GPU; use gradients"};
    if (device != ddp::Device{} && options.shard != ddp::Shard::None && options.clip)
        return StartupError{ExitCode::Usage,
                            "--clip: divided gradients are not clipped on a GPU; use --shard none"};
    if (std::optional<StartupError> error = load(options, samples)) return error;
    if (std::optional<StartupError> error = train::check_fit(options, samples, context.world_size()))
        return error;
    return context.rank() == 0 ? check_outputs(options, samples) : std::nullopt;
}

void print_line(const std::string& line) {
    ddprun::print("{}\n", line);
    std::fflush(stdout);
}

std::string place_of(const ddp::Device& device) {
    return device.kind == ddp::Device::Kind::Cuda ? fmt::format("CUDA device {}", device.index) : "the CPU";
}

/// Leaves the training on all ranks.
struct Ended {
    train::AgreedError why;
};

/// One process of the training, through all generations.
class Process {
  public:
    Process(const Options& options, const ddp::Context& context, const train::ComputeDevice& device)
        : options_(options),
          context_(context),
          device_(device),
          problem_(prepare(options, context, device.choice.device, samples_)),
          common_(train::common_settings(options, samples_)),
          lifeline_(context),
          group_options_{
              .backend = options.backend, .device = device.choice.device, .stream = device.stream_handle()},
          recovery_(context, group_options_, &lifeline_) {
        // Divided weights are memory of the group, which ends with it, and a graph holds the group's
        // collectives.
        if (problem_ || options.cuda_graph || options.shard != ddp::Shard::None) return;
        kept_ = make_trainer({context.rank(), context.world_size()});
        kept_->keep_in(recovery_);
    }

    /// Returns the reason where all ranks end early.
    std::optional<train::AgreedError> run() {
        std::optional<train::AgreedError> why = run_generations();
        if (why) recovery_.refuse("the run cannot go on");
        return why;
    }
    /// True when the run was asked to stop, and has saved before its end.
    [[nodiscard]] bool stopped() const { return stopped_; }

    bool is_told_to_end() { return lifeline_.preemption_requested(); }

  private:
    std::optional<train::AgreedError> run_generations() {
        try {
            recovery_.run([this](ddp::ProcessGroup& group, const ddp::Start& start) { train(group, start); });
        } catch (const Ended& ended) {
            return ended.why;
        } catch (const ddp::MismatchError&) {
            if (has_group_) throw;
            // Ranks with other options, or with a problem, keep other state: say which.
            const auto group = ddp::ProcessGroup::create(context_, group_options_);
            if (const auto agreed = train::agree(*group, problem_, common_)) return agreed;
            throw;
        } catch (const ddp::InvalidInput& error) {
            if (has_group_) throw;
            // No group fits the options or the host: the user can correct it, so there is no stack trace.
            return train::AgreedError{{ExitCode::Usage, error.what()}, 0};
        }
        return std::nullopt;
    }

    void train(ddp::ProcessGroup& group, const ddp::Start& start) {
        has_group_ = true;
        if (options_.cuda_graph)
            group.refuse_recovery("--cuda-graph: a graph holds the communicator of its capture");
        if (start.is_new()) begin(group);
        if (kept_) kept_->attach(group, start.is_new());
        const std::unique_ptr<train::Trainer> of_group = kept_ ? nullptr : make_trainer(group);
        train::Trainer& trainer = kept_ ? *kept_ : *of_group;
        const std::string run_id = ddp::run_identity(context_.env());
        if (start.is_new()) {
            claim_checkpoints(trainer);
            resume(trainer, start, run_id);
        }
        try {
            const train::Summary summary = trainer.run(run_id);
            stopped_ = summary.stopped;
            if (group.rank() == 0 && !options_.log_json.empty() && !summary.stopped)
                ddp::replace_file(options_.log_json, train::to_json(summary));
        } catch (const ddp::FileError& error) {
            // The disk has become full since the outputs were checked. All ranks learn of a checkpoint that
            // cannot be written.
            throw Ended{{{ExitCode::CannotCreate, error.what()}, 0}};
        }
    }

    void begin(ddp::ProcessGroup& group) {
        if (!problem_ && options_.cuda_graph && group.choice().starts_with("staged"))
            problem_ = StartupError{
                ExitCode::Usage,
                fmt::format("--cuda-graph: backend {} goes through the host, which no graph can hold; "
                            "leave it out, or give each worker a device of its own",
                            group.choice())};
        if (const auto agreed = train::agree(group, problem_, common_)) throw Ended{*agreed};
        if (group.rank() == 0)
            print_line(fmt::format("train: on {} ({}); backend {}", place_of(device_.choice.device),
                                   device_.choice.why, group.choice()));
        lifeline_.ready();
    }

    std::unique_ptr<train::Trainer> make_trainer(const train::World& world) {
        return std::make_unique<train::Trainer>(
            world, device_, options_, std::move(samples_), print_line,
            train::StopRequest{[this] { return lifeline_.preemption_requested(); },
                               [this](std::uint64_t steps) { return lifeline_.should_stop(steps); }});
    }

    static void claim_checkpoints(train::Trainer& trainer) {
        try {
            trainer.claim_checkpoints();
        } catch (const ddp::FileError& error) {
            throw Ended{{{ExitCode::CannotCreate, fmt::format("--checkpoint-dir: {}", error.what())}, 0}};
        }
    }

    void resume(train::Trainer& trainer, const ddp::Start& start, const std::string& run_id) {
        try {
            if (options_.resume) trainer.resume(std::nullopt);
            else if ((context_.restart_count() > 0 || start.generation > 1) && !run_id.empty())
                trainer.resume(run_id);  // a worker died, or a node was lost or added: continue from this
                                         // run's checkpoint
        } catch (const ddp::InvalidInput& error) {
            // Every rank throws it, with the same message.
            throw Ended{{{ExitCode::DataError,
                          fmt::format("{}; use another --checkpoint-dir, or the options it was written with",
                                      error.what())},
                         0}};
        }
    }

    const Options& options_;
    const ddp::Context& context_;
    const train::ComputeDevice& device_;
    train::Samples samples_;
    std::optional<StartupError> problem_;
    const train::CommonSettings common_;
    ddp::Lifeline lifeline_;
    const ddp::ProcessGroupOptions group_options_;
    ddp::Recovery recovery_;
    std::unique_ptr<train::Trainer> kept_;  ///< null where a run ends with its group
    bool has_group_ = false;
    bool stopped_ = false;
};

int run(const Options& options, const ddp::Context& context) {
    train::set_matrix_threads(matrix_threads());
    const ddprun::Result<train::ComputeDevice> device =
        train::open_compute_device(options, context.local_rank());
    if (!device) return report({ExitCode::Unavailable, device.error().what}, 0, context.rank());
    Process process(options, context, *device);
    const std::optional<train::AgreedError> why = process.run();
    // The lifeline goes on through the wait, so that no signal is lost that comes before it.
    if (why)
        return report(why->error, why->reporter, context.rank(), [&] { return process.is_told_to_end(); });
    return static_cast<int>(process.stopped() ? ExitCode::Stopped : ExitCode::Ok);
}

/// OpenBLAS's threads may try to allocate for ever, which would block an orderly exit too.
[[noreturn]] void exit_now(int code) {
    std::fflush(stdout);
    std::fflush(stderr);
    std::_Exit(code);
}

int run_command_line(int argc, char** argv) {
    std::optional<ddp::Context> context;
    try {
        context = ddp::Context::from_env();
    } catch (const ddp::Error& error) {
        return print_error({ExitCode::Failed, error.what()});
    }
    if (const std::string lack = train::reserve_matrix_memory(matrix_threads()); !lack.empty())
        exit_now(report({ExitCode::Unavailable, lack}, 0, context->rank()));
    const std::vector<const char*> arguments(argv + 1, argv + argc);
    const ddprun::Result<Options> options = train::parse_options(arguments);
    // The command line is the same on all ranks, so rank 0 reports.
    if (!options) return report({ExitCode::Usage, options.error().what}, 0, context->rank());
    if (options->help) {
        if (context->rank() == 0) ddprun::print("{}", train::usage());
        return static_cast<int>(ExitCode::Ok);
    }
    return run(*options, *context);
}

}  // namespace

int main(int argc, char** argv) {
    return ddp::run_main("train", [&] { return run_command_line(argc, argv); });
}
