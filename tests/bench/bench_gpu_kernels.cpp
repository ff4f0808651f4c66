// The bandwidth of libddp's kernels as a share of the device's own copy in the same run, and the host time
// per step of DistributedDataParallel. Prints the bars; slow runs are no failure. Exit code 77, with one
// line, without a GPU.
//
//   bench_gpu_kernels [--json FILE] [--elements N] [--repetitions N]
#include <dlfcn.h>
#include <fmt/core.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "ddp/context.h"
#include "ddp/cuda/cast.h"
#include "ddp/cuda/memory.h"
#include "ddp/ddp.h"
#include "ddp/grad_clipper.h"
#include "ddp/grad_scaler.h"
#include "ddp/loader.h"
#include "ddp/optimizer.h"
#include "env/clock.h"
#include "env/json.h"
#include "env/text.h"
#include "train/train_kernels.h"

namespace {

using ddp::Buffer;
using ddp::DType;
using ddp::Tensor;
using ddp::cuda::DeviceMemory;
using ddp::cuda::Event;
using ddp::cuda::Gpu;
using ddprun::Json;
using GpuPointer = std::shared_ptr<const Gpu>;

constexpr int kUsage = 64, kSkipped = 77;
constexpr double kShareBar = 0.85;      ///< of the copy's bandwidth
constexpr double kBookkeepingBar = 50;  ///< microseconds per step
/// The numbers of parameters of the rows with several parameters.
constexpr std::size_t kFew = 200, kMany = 10'000;

struct Options {
    std::string json;
    std::size_t elements = std::size_t{64} << 20;
    int repetitions = 30;
};

double median(std::vector<double> values) {
    std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2),
                     values.end());
    return values[values.size() / 2];
}

/// The fake device is host memory, whose times mean nothing.
bool is_fake() { return ::dlsym(RTLD_DEFAULT, "fake_cuda_blocking_calls") != nullptr; }

/// The median seconds of device time for the work that `enqueue` puts on the default stream. `keep_busy`
/// queues work before it, so that the device does not wait for the host.
double seconds_of(int repetitions, const std::function<void()>& keep_busy,
                  const std::function<void()>& enqueue) {
    const Event begin(cudaEventDefault), end(cudaEventDefault);
    std::vector<double> times;
    enqueue();
    for (int i = 0; i < repetitions; ++i) {
        keep_busy();
        begin.record(nullptr);
        enqueue();
        end.record(nullptr);
        end.synchronize();
        times.push_back(end.milliseconds_since(begin) / 1000);
    }
    return median(times);
}

/// Divides an array into `count` parameters of equal whole packs; the last one takes the rest.
std::vector<Tensor> parts(const Buffer& array, std::size_t count) {
    std::vector<Tensor> cut;
    const std::size_t each = std::max<std::size_t>(array.count / count / 8 * 8, 1);
    for (std::size_t i = 0; i < count; ++i) {
        Buffer part = array;
        part.data = static_cast<std::byte*>(array.data) + i * each * ddp::size_of(array.dtype);
        part.count = i + 1 < count ? each : array.count - i * each;
        cut.push_back({fmt::format("p{}", i), {static_cast<std::int64_t>(part.count)}, part});
    }
    return cut;
}

std::vector<Buffer> memory_of(const std::vector<Tensor>& tensors) {
    std::vector<Buffer> buffers;
    for (const Tensor& tensor : tensors) buffers.push_back(tensor.memory);
    return buffers;
}

struct Result {
    std::string name;
    double gigabytes_per_second;
    bool has_bar;
};

/// Arrays for all kernels, whose speed does not depend on the contents.
class Bench {
  public:
    Bench(GpuPointer gpu, const Options& options) : gpu_(std::move(gpu)), options_(options) {
        for (int i = 0; i < 4; ++i)
            arrays_.emplace_back(gpu_, options.elements * sizeof(float)).clear(nullptr);
    }

    std::vector<Result> run() {
        measure_copies();
        measure_optimizers();
        measure_layers();
        return std::move(results_);
    }

  private:
    void add(std::string name, std::size_t bytes_per_element, bool has_bar,
             const std::function<void()>& body) {
        // This takes an H100 about 0.5 ms: more than the host needs for a step of 10,000 parameters.
        const auto keep_busy = [this] {
            for (int i = 0; i < 4; ++i) arrays_[3].clear(nullptr);
        };
        const double seconds = seconds_of(options_.repetitions, keep_busy, body);
        const auto bytes = static_cast<double>(bytes_per_element * options_.elements);
        results_.push_back({std::move(name), bytes / std::max(seconds, 1e-9) / 1e9, has_bar});
    }

    void measure_copies() {
        const Buffer a = array(0, DType::F32), b = array(1, DType::F32), half = array(2, DType::BF16);
        const Buffer f16 = array(3, DType::F16);
        add("copy (the device's own)", 8, false,
            [&] { ddp::cuda::copy(b.data, a.data, a.bytes(), nullptr); });
        add("scale f32 in place", 8, true, [&] { ddp::cuda::scale_cast(*gpu_, a, a, 0.5F, nullptr); });
        add("scale and cast f32 to bf16", 6, true,
            [&] { ddp::cuda::scale_cast(*gpu_, a, half, 0.5F, nullptr); });
        add("scale and cast bf16 to f32", 6, true,
            [&] { ddp::cuda::scale_cast(*gpu_, half, a, 1, nullptr); });
        add("scale and cast f32 to f16", 6, true,
            [&] { ddp::cuda::scale_cast(*gpu_, a, f16, 0.5F, nullptr); });
    }

    /// The same elements as one parameter and as many; the bar holds for both.
    void measure_optimizers() {
        for (const std::size_t count : {std::size_t{1}, kFew, kMany}) {
            if (options_.elements < count) continue;
            const std::string many = count > 1 ? fmt::format(", {} parameters", count) : "";
            const std::vector<Tensor> values = parts(array(0, DType::F32), count);
            const auto step = [&](const char* name, std::size_t bytes, const Buffer& gradient,
                                  ddp::Optimizer& optimizer) {
                const std::vector<Buffer> gradients = memory_of(parts(gradient, count));
                add(name + many, bytes, true, [&] { optimizer.step(gradients); });
            };
            const Buffer wide = array(1, DType::F32), half = array(1, DType::BF16);
            const std::vector<Buffer> copies = memory_of(parts(array(2, DType::BF16), count));
            step("sgd f32", 12, wide, *ddp::make_sgd(values, {}));
            step("sgd f32, momentum", 20, wide, *ddp::make_sgd(values, {.momentum = 0.9}));
            step("adamw f32", 28, wide, *ddp::make_adamw(values, {}));
            step("adamw bf16 gradient, bf16 copy, zeroing", 30, half,
                 *ddp::make_adamw(values, {.device = {.zero_gradients = true, .copies = copies}}));
            ddp::GradScaler scaler(values.front().memory.device);
            const std::vector<Buffer> checked = memory_of(values);
            add("find non-finite f32" + many, 4, false, [&] { scaler.check(checked); });
            ddp::GradClipper clipper(values.front().memory.device, 1);
            add("norm f32" + many, 4, false, [&] { clipper.measure(checked); });
        }
    }

    /// The kernels of train beside its products, for layers of 4096 neurons in bfloat16.
    void measure_layers() {
        constexpr std::size_t kColumns = 4096;
        if (options_.elements < kColumns) return;
        const train::kernels::Rows matrix{arrays_[0].get(), options_.elements / kColumns, kColumns, kColumns};
        const train::kernels::LaunchConfig config{ddp::device::ElementType::BF16,
                                                  gpu_->grid_for(options_.elements), nullptr};
        add("bias and ReLU bf16", 4, false, [=, this] {
            ddp::cuda::check(train::kernels::add_bias(config, matrix, arrays_[1].get(), true),
                             "adding a bias");
        });
        add("gradient of ReLU bf16", 6, false, [=, this] {
            ddp::cuda::check(train::kernels::relu_gradient(config, matrix, arrays_[1].get()),
                             "launching the gradient of ReLU");
        });
    }

    Buffer array(std::size_t which, DType type) const {
        return {arrays_[which].get(), options_.elements, type, {ddp::Device::Kind::Cuda, gpu_->index()}};
    }

    GpuPointer gpu_;
    Options options_;
    std::vector<DeviceMemory> arrays_;
    std::vector<Result> results_;
};

/// The host time of one step of a model: in all, and without starting collectives.
struct Bookkeeping {
    std::string model;
    double all_us, own_us;
};

Bookkeeping bookkeeping(ddp::ProcessGroup& group, const GpuPointer& gpu, std::string name,
                        const std::vector<std::size_t>& counts, int steps) {
    std::vector<DeviceMemory> memory;
    std::vector<ddp::Tensor> parameters;
    for (std::size_t i = 0; i < counts.size(); ++i) {
        memory.emplace_back(gpu, counts[i] * sizeof(float)).clear(nullptr);
        parameters.push_back({"p" + std::to_string(i),
                              {static_cast<std::int64_t>(counts[i])},
                              {memory[i].get(), counts[i], DType::F32, group.device()}});
    }
    ddp::DistributedDataParallel model(group, parameters);
    std::vector<double> all, own;
    for (int step = 0; step < steps; ++step) {
        const double blocked = model.statistics().blocked_seconds;
        const auto begin = ddprun::MonotonicClock::now();
        for (std::size_t i = counts.size(); i-- > 0;) model.mark_ready(i);
        model.finish();
        const double seconds = std::chrono::duration<double>(ddprun::MonotonicClock::now() - begin).count();
        ddp::cuda::check(cudaDeviceSynchronize(), "waiting for the device");
        if (step == 0) continue;  // the first step warms up
        all.push_back(seconds * 1e6);
        own.push_back((seconds - (model.statistics().blocked_seconds - blocked)) * 1e6);
    }
    return {std::move(name), median(all), median(own)};
}

std::vector<Bookkeeping> measure_bookkeeping(const GpuPointer& gpu) {
    const auto group = ddp::ProcessGroup::create(ddp::Context::from_env(),
                                                 {.device = {ddp::Device::Kind::Cuda, gpu->index()}});
    const std::vector<std::size_t> mlp = {784 * 4096,  4096, 4096 * 4096, 4096,
                                          4096 * 4096, 4096, 4096 * 10,   10};
    std::vector<Bookkeeping> results;
    if (!is_fake()) results.push_back(bookkeeping(*group, gpu, "784-4096x3-10", mlp, 200));
    results.push_back(
        bookkeeping(*group, gpu, "200 parameters of 1000", std::vector<std::size_t>(200, 1000), 200));
    return results;
}

/// The host time of the optimizer's part of a step. It has no bar.
struct StepCost {
    std::string part;
    double us;
};

std::vector<StepCost> measure_step_costs(const GpuPointer& gpu) {
    constexpr std::size_t kParameters = 200, kElements = 1000;
    constexpr int kSteps = 200;
    const DeviceMemory memory(gpu, 2 * kParameters * kElements * sizeof(float));
    memory.clear(nullptr);
    const ddp::Device device{ddp::Device::Kind::Cuda, gpu->index()};
    const Buffer values{memory.get(), kParameters * kElements, DType::F32, device};
    const Buffer slopes{memory.as<float>() + values.count, values.count, DType::F32, device};
    const std::vector<Buffer> gradients = memory_of(parts(slopes, kParameters));
    ddp::GradScaler scaler(device);
    ddp::GradClipper clipper(device, 1, {.scaler = &scaler});
    const auto adamw =
        ddp::make_adamw(parts(values, kParameters), {.device = {.scaler = &scaler, .clipper = &clipper}});
    const auto cost = [&](const char* part, const std::function<void()>& body) {
        std::vector<double> times;
        for (int i = 0; i <= kSteps; ++i) {
            const auto begin = ddprun::MonotonicClock::now();
            body();
            const double seconds =
                std::chrono::duration<double>(ddprun::MonotonicClock::now() - begin).count();
            ddp::cuda::check(cudaDeviceSynchronize(), "waiting for the device");
            if (i > 0)
                times.push_back(seconds * 1e6);  // the first step also uploads the addresses of the gradients
        }
        return StepCost{part, median(times)};
    };
    return {cost("optimizer->step", [&] { adamw->step(gradients); }),
            cost("scaler.check", [&] { scaler.check(gradients); }),
            cost("clipper.measure", [&] { clipper.measure(gradients); })};
}

Json print_step_costs(const std::vector<StepCost>& costs) {
    Json rows = Json::array();
    for (const StepCost& cost : costs) {
        fmt::print("host time of {:32} {:7.1f} us for 200 parameters of 1000\n", cost.part, cost.us);
        rows.push_back({{"part", cost.part}, {"model", "200 parameters of 1000"}, {"us", cost.us}});
    }
    return rows;
}

Json print_kernels(const std::vector<Result>& results) {
    Json rows = Json::array();
    const double copy = results.front().gigabytes_per_second;
    for (const Result& result : results) {
        const double share = result.gigabytes_per_second / copy;
        fmt::print("{:42} {:9.1f} GB/s {:6.1f} % of the copy{}\n", result.name, result.gigabytes_per_second,
                   100 * share,
                   !result.has_bar      ? ""
                   : share >= kShareBar ? ""
                                        : fmt::format("  below {:.0f} %", 100 * kShareBar));
        rows.push_back({{"name", result.name},
                        {"gb_per_s", result.gigabytes_per_second},
                        {"share_of_copy", share},
                        {"bar", result.has_bar ? Json(kShareBar) : Json()}});
    }
    return rows;
}

Json print_bookkeeping(const std::vector<Bookkeeping>& results) {
    Json rows = Json::array();
    for (const Bookkeeping& result : results) {
        fmt::print("host time of DDP per step, {:24} {:7.1f} us, {:6.1f} us without starting collectives{}\n",
                   result.model, result.all_us, result.own_us,
                   result.own_us <= kBookkeepingBar ? "" : fmt::format("  above {:.0f} us", kBookkeepingBar));
        rows.push_back({{"model", result.model},
                        {"us", result.all_us},
                        {"own_us", result.own_us},
                        {"bar_us", kBookkeepingBar}});
    }
    return rows;
}

/// The summary line.
std::string summary(const std::vector<Result>& kernels, const std::vector<Bookkeeping>& hosts) {
    const Result* slowest = nullptr;
    for (const Result& result : kernels) {
        if (result.has_bar &&
            (slowest == nullptr || result.gigabytes_per_second < slowest->gigabytes_per_second))
            slowest = &result;
    }
    std::string text = fmt::format("slowest kernel: {}, {:.0f} % of the copy (bar {:.0f} %)", slowest->name,
                                   100 * slowest->gigabytes_per_second / kernels.front().gigabytes_per_second,
                                   100 * kShareBar);
    for (const Bookkeeping& host : hosts)
        text += fmt::format("; DDP {:.1f} us per step ({})", host.own_us, host.model);
    return text;
}

int run(const Options& options) {
    const GpuPointer gpu = Gpu::of(0);
    gpu->make_current();
    Options sized = options;
    if (is_fake()) {
        fmt::print("a fake GPU (host memory): the times mean nothing\n");
        sized.elements = 10'000;
        sized.repetitions = 2;
    }
    const std::vector<Result> kernels = Bench(gpu, sized).run();
    Json json = {{"fake", is_fake()}, {"elements", sized.elements}};
    json["kernels"] = print_kernels(kernels);
    json["optimizer_host_time"] = print_step_costs(measure_step_costs(gpu));
    std::vector<Bookkeeping> hosts;
    try {
        hosts = measure_bookkeeping(gpu);
        json["bookkeeping"] = print_bookkeeping(hosts);
    } catch (const ddp::Error& error) {
        fmt::print("host time of DDP per step: not measured: {}\n", error.what());
    }
    fmt::print("{}\n", summary(kernels, hosts));
    if (options.json.empty()) return 0;
    std::ofstream file(options.json);
    file << ddprun::to_text(json, 2) << "\n";
    if (file.flush()) return 0;
    fmt::print(stderr, "bench_gpu_kernels: {} cannot be written\n", options.json);
    return 1;
}

std::optional<Options> parse(int argc, char** argv) {
    Options options;
    for (int i = 1; i + 1 < argc; i += 2) {
        const std::string_view name = argv[i];
        const auto number = ddprun::parse_int_between(argv[i + 1], 1, 1'000'000'000);
        if (name == "--json") options.json = argv[i + 1];
        else if (name == "--elements" && number) options.elements = static_cast<std::size_t>(*number);
        else if (name == "--repetitions" && number) options.repetitions = static_cast<int>(*number);
        else return std::nullopt;
    }
    if (argc % 2 == 0) return std::nullopt;
    return options;
}

}  // namespace

int main(int argc, char** argv) {
    const std::optional<Options> options = parse(argc, argv);
    if (!options) {
        fmt::print(stderr, "usage: bench_gpu_kernels [--json FILE] [--elements N] [--repetitions N]\n");
        return kUsage;
    }
    try {
        static_cast<void>(Gpu::of(0));
    } catch (const ddp::Error& error) {
        fmt::print("skipped: {}\n", error.what());
        return kSkipped;
    }
    try {
        return run(*options);
    } catch (const ddp::Error& error) {
        fmt::print(stderr, "bench_gpu_kernels: {}\n", error.what());
        return 1;
    }
}
