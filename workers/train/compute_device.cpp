#include "compute_device.h"

#include <fmt/core.h>

#include <utility>

#include "cuda_compute.h"

namespace train {
namespace {

std::string count_of(int devices) {
    return fmt::format("{} CUDA device{}", devices, devices == 1 ? "" : "s");
}

/// Throws ddp::Error.
ComputeDevice on_cuda(const Options& options, int index, std::shared_ptr<const cublas::Api> cublas) {
    ComputeDevice device;
    device.gpu = ddp::cuda::Gpu::of(index);
    device.gpu->make_current();
    device.stream = std::make_unique<ddp::cuda::OwnedStream>(device.gpu);
    device.compute =
        make_cuda_compute(device.gpu, std::move(cublas), device.stream->get(), options.precision);
    return device;
}

/// The number of devices, or the reason why there is none.
CudaFacts count_devices(int local_rank) {
    CudaFacts facts{.devices = 0, .problem = "", .local_rank = local_rank};
    const cudaError_t code = cudaGetDeviceCount(&facts.devices);
    if (!ddp::cuda::succeeded(code))
        facts.problem = fmt::format("counting CUDA devices: {}", ddp::cuda::explain(code));
    else if (facts.devices < 1) facts.problem = "there is no CUDA device";
    return facts;
}

/// Tries to use CUDA; a failure becomes the problem in `facts`.
ComputeDevice try_cuda(const Options& options, CudaFacts& facts) {
    ddprun::Result<cublas::Api> cublas = cublas::load_api();
    if (!cublas) {
        facts.problem = cublas.error().what;
        return {};
    }
    try {
        return on_cuda(options, facts.local_rank % facts.devices,
                       std::make_shared<const cublas::Api>(*std::move(cublas)));
    } catch (const ddp::Error& error) {
        facts.problem = error.what();
        return {};
    }
}

}  // namespace

bool may_use_cuda(const Options& options) {
    return options.device != DeviceKind::Cpu && options.backend != "cpu";
}

ddprun::Result<DeviceChoice> choose_device(const Options& options, const CudaFacts& facts) {
    if (options.device == DeviceKind::Cpu) return DeviceChoice{{}, "asked for"};
    if (options.backend == "cpu") return DeviceChoice{{}, "auto: --backend cpu takes host memory"};
    const bool requested = options.device == DeviceKind::Cuda;
    const std::string demand = requested ? "--device cuda" : options.demand_for_cuda();
    if (!facts.problem.empty()) {
        if (demand.empty()) return DeviceChoice{{}, "auto: " + facts.problem};
        return ddprun::Error{ddprun::Errc::NotFound, fmt::format("{}: {}", demand, facts.problem), 0};
    }
    const ddp::Device device{ddp::Device::Kind::Cuda, facts.local_rank % facts.devices};
    if (requested) return DeviceChoice{device, "asked for"};
    return DeviceChoice{device, demand.empty() ? "auto: " + count_of(facts.devices) : "for " + demand};
}

ddprun::Result<ComputeDevice> open_compute_device(const Options& options, int local_rank) {
    CudaFacts facts{.devices = 0, .problem = "", .local_rank = local_rank};
    ComputeDevice device;
    if (may_use_cuda(options)) {
        facts = count_devices(local_rank);
        if (facts.problem.empty()) device = try_cuda(options, facts);
    }
    ddprun::Result<DeviceChoice> choice = choose_device(options, facts);
    if (!choice) return choice.error();
    device.choice = *std::move(choice);
    if (!device.compute) device.compute = make_cpu_compute();
    return device;
}

}  // namespace train
