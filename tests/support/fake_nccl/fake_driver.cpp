// The entry points of libcuda that libddp calls. Kernels are found among those that were compiled for the
// host, and run on the stream's thread; what the image holds does not matter.
#include <cstring>
#include <mutex>

#include "ddp/cuda/host_kernel.h"
#include "tests/support/fake_nccl/fake_cuda.h"
#include "tests/support/fake_nccl/fake_trace.h"
#include "tests/support/fake_nccl/thread_state.h"

namespace {

constexpr int kInvalidContext = 201, kNotFound = 500;
using fake::kInvalidDevice, fake::kInvalidHandle, fake::kInvalidValue;

/// No result may depend on how many threads there are, so a few do: enough to show a kernel that forgets to
/// share the work, or does some of it twice.
constexpr unsigned long long kThreads = 6;
/// Of a kernel, in pretended time: more than a product with an epilogue (fake_cublaslt.cpp).
constexpr int kUnits = 10;

void run_threads(const std::function<void()>& one_thread) {
    static std::mutex mutex;  // ddp::device::host_thread is one for all
    const std::lock_guard lock(mutex);
    for (unsigned long long i = 0; i < kThreads; ++i) {
        ddp::device::host_thread = {i, kThreads};
        one_thread();
    }
}

}  // namespace

extern "C" {

int cuInit(unsigned) { return fake::device_count() > 0 ? 0 : 100; }
int cuDeviceGet(int* device, int ordinal) {
    *device = ordinal;
    return ordinal >= 0 && ordinal < fake::device_count() ? 0 : kInvalidDevice;
}
// A context is its device's number, and one.
int cuDevicePrimaryCtxRetain(void** context, int device) {
    *context = reinterpret_cast<void*>(std::intptr_t{device} + 1);
    return 0;
}
int cuCtxSetCurrent(void* context) {
    fake::set_current_device(static_cast<int>(reinterpret_cast<std::intptr_t>(context)) - 1);
    return 0;
}
int cuCtxGetCurrent(void** context) {
    if (!fake::this_thread().has_context) return *context = nullptr, 0;
    return cuDevicePrimaryCtxRetain(context, fake::current_device());
}
int cuModuleLoadData(void** module, const void* image) {
    const fake::TracedCall traced("cuModuleLoadData");
    *module = const_cast<void*>(image);
    return image != nullptr ? 0 : kInvalidValue;
}
int cuModuleUnload(void*) {
    const fake::TracedCall traced("cuModuleUnload");
    return 0;
}
int cuModuleGetFunction(void** function, void*, const char* name) {
    const auto* const kernel = ddp::device::HostKernel::find(name);
    *function = const_cast<ddp::device::HostKernel*>(kernel);
    return kernel != nullptr ? 0 : kNotFound;
}
int cuLaunchKernel(void* function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                   unsigned block_y, unsigned block_z, unsigned shared_bytes, void* stream, void** arguments,
                   void** extra) {
    const bool as_libddp_does = grid_x > 0 && grid_y == 1 && grid_z == 1 && block_x == 256 && block_y == 1 &&
                                block_z == 1 && shared_bytes == 0 && extra == nullptr;
    if (!as_libddp_does) return kInvalidValue;
    if (!fake::this_thread().has_context) return kInvalidContext;
    const std::shared_ptr<fake::Stream> on = fake::stream_of(stream);
    if (on->device != fake::current_device()) return kInvalidHandle;
    if (const int lost = fake::lost_device()) return lost;
    const auto* const kernel = static_cast<const ddp::device::HostKernel*>(function);
    fake::count_launch();
    const fake::TracedCall traced("cuLaunchKernel", kernel->name());
    on->post([one = kernel->bind(arguments), weak = std::weak_ptr(on)] {
        run_threads(one);
        if (const auto running = weak.lock()) running->spend(kUnits * fake::kPretendedUnit);
    });
    return 0;
}
int cuGetErrorString(int code, const char** text) {
    switch (code) {
        case 0:
            *text = "no error";
            return 0;
        case kInvalidValue:
            *text = "invalid argument";
            return 0;
        case 100:
            *text = "no CUDA-capable device is detected";
            return 0;
        case kInvalidDevice:
            *text = "invalid device ordinal";
            return 0;
        case kInvalidContext:
            *text = "invalid device context";
            return 0;
        case kInvalidHandle:
            *text = "invalid resource handle";
            return 0;
        case kNotFound:
            *text = "named symbol not found";
            return 0;
        case 700:
            *text = "an illegal memory access was encountered";
            return 0;
        default:
            return kInvalidValue;
    }
}

}  // extern "C"
