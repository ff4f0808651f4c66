#include "ddp/cuda/module.h"

#include <fmt/core.h>

#include <string_view>
#include <utility>

#include "ddp/cuda/kernel_dialect.h"
#include "ddp/types.h"

namespace ddp::cuda {
namespace {

/// What embed_kernels.py writes without a compiler.
bool has_no_code(const KernelImage& image) {
    constexpr std::string_view kMark = "no device code";
    return std::string_view(reinterpret_cast<const char*>(image.bytes), kMark.size()) == kMark;
}

}  // namespace

void Function::launch_with(unsigned grid, Stream stream, void** arguments) const {
    const DriverCode code =
        driver_->launch_kernel(handle_, grid, 1, 1, device::kBlockThreads, 1, 1, 0, stream, arguments, nullptr);
    if (code != DriverCode::Success) driver_->check(code, fmt::format("launching kernel {}", name_));
}

Module::Module(std::shared_ptr<const Gpu> gpu, KernelImage image) : gpu_(std::move(gpu)), image_(image) {
    gpu_->make_current();
    const DriverCode code = gpu_->driver().module_load_data(&handle_, image_.bytes);
    if (code == DriverCode::Success) return;
    const std::string attempt = fmt::format("loading {} onto CUDA device {}", image_.name, gpu_->index());
    if (has_no_code(image_))
        throw Error(fmt::format("{}: it was built without GPU code: build it where nvcc is", attempt));
    gpu_->driver().check(code, attempt);
}

Module::~Module() { gpu_->driver().module_unload(handle_); }

Function Module::function(const std::string& name) const {
    Function function;
    function.driver_ = &gpu_->driver();
    function.name_ = name;
    gpu_->driver().check(gpu_->driver().module_get_function(&function.handle_, handle_, name.c_str()),
                         fmt::format("looking for kernel {} in {}", name, image_.name));
    return function;
}

}  // namespace ddp::cuda
