#pragma once

#include <memory>
#include <string>

#include "ddp/cuda/gpu.h"

namespace ddp::cuda {

/// What embed_kernels.py made of a kernel module; see kernel_dialect.h.
struct KernelImage {
    const char* name;
    const unsigned char* bytes;
};

/// A kernel on one device. Cheap to copy; valid as long as its Module.
class Function {
  public:
    /// Runs it on `stream` with `grid` blocks of 256 threads. The arguments' types must be the kernel's own,
    /// exactly: nothing converts or checks them. Does not block. Throws Error when the launch is refused.
    template <class... Arguments>
    void launch(unsigned grid, Stream stream, Arguments... arguments) const {
        void* pointers[] = {static_cast<void*>(&arguments)...};
        launch_with(grid, stream, pointers);
    }

  private:
    friend class Module;
    void launch_with(unsigned grid, Stream stream, void** arguments) const;
    const DriverApi* driver_ = nullptr;
    FunctionHandle handle_ = nullptr;
    std::string name_;
};

/// The kernels of one image, loaded onto one device.
class Module {
  public:
    /// Makes the device current. Throws Error: the device is of a kind that the image has no code for, or the
    /// build had no nvcc.
    Module(std::shared_ptr<const Gpu> gpu, KernelImage image);
    ~Module();
    Module(const Module&) = delete;
    Module& operator=(const Module&) = delete;

    /// Throws Error when there is no such kernel.
    [[nodiscard]] Function function(const std::string& name) const;

  private:
    std::shared_ptr<const Gpu> gpu_;
    KernelImage image_;
    ModuleHandle handle_ = nullptr;
};

}  // namespace ddp::cuda

/// Declares the image of the kernel module in <module>.cpp. Outside of every namespace.
#define DDP_KERNEL_IMAGE(module) extern "C" const unsigned char module##_image[];
