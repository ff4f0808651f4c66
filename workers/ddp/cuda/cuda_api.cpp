#include "ddp/cuda/cuda_api.h"

#include <fmt/core.h>

#include "ddp/cuda/advice.h"
#include "ddp/types.h"
#include "ddp/worker/device_error.h"

namespace ddp::cuda {

std::string explain(cudaError_t code) {
    int runtime = 0, driver = 0;
    cudaRuntimeGetVersion(&runtime);
    cudaDriverGetVersion(&driver);
    const std::string advice = advice_for(static_cast<int>(code), runtime, driver);
    return fmt::format("{} (CUDA error {}){}{}", cudaGetErrorString(code), static_cast<int>(code),
                       advice.empty() ? "" : ": ", advice);
}

void check(cudaError_t code, const char* attempt) {
    if (code == cudaSuccess) return;
    const std::string what = fmt::format("{}: {}", attempt, explain(code));
    cudaGetLastError();
    note_device_error(DeviceLibrary::Cuda, what);
    throw ddp::Error(what);
}

bool succeeded(cudaError_t code) {
    if (code != cudaSuccess) cudaGetLastError();
    return code == cudaSuccess;
}

namespace {

/// True when the calling thread has a context on a device. Only the driver knows; the runtime has loaded it
/// and gives its entry point.
bool has_context() {
    using Ask = int (*)(void** context);
    void* ask = nullptr;
    void* context = nullptr;
    cudaDriverEntryPointQueryResult found{};
    return succeeded(
               cudaGetDriverEntryPointByVersion("cuCtxGetCurrent", &ask, 12000, cudaEnableDefault, &found)) &&
           ask != nullptr && reinterpret_cast<Ask>(ask)(&context) == 0 && context != nullptr;
}

}  // namespace

DeviceScope::DeviceScope(int device) {
    // When even this fails the device is lost, and the next call reports that under its own name.
    if (!succeeded(cudaGetDevice(&before_)) || before_ == device) return;
    const bool had_context = has_context();
    check(cudaSetDevice(device), "choosing a CUDA device");
    restores_ = had_context;
}

DeviceScope::~DeviceScope() {
    if (restores_) static_cast<void>(succeeded(cudaSetDevice(before_)));
}

Stream make_stream(Priority priority, const char* attempt) {
    int least = 0, greatest = 0;
    check(cudaDeviceGetStreamPriorityRange(&least, &greatest), "asking for stream priorities");
    Stream stream = nullptr;
    const int number = priority == Priority::High ? greatest : least;
    check(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, number), attempt);
    return stream;
}

Event::Event(unsigned flags) { check(cudaEventCreateWithFlags(&event_, flags), "creating a CUDA event"); }

Event::~Event() { cudaEventDestroy(event_); }

void Event::record(Stream stream) const { check(cudaEventRecord(event_, stream), "recording a CUDA event"); }

void Event::block(Stream stream) const {
    check(cudaStreamWaitEvent(stream, event_, 0), "making a CUDA stream wait");
}

cudaError_t Event::query() const {
    const cudaError_t code = cudaEventQuery(event_);
    // CUDA keeps it as the thread's last error, like any other.
    if (code == cudaErrorNotReady) cudaGetLastError();
    return code;
}

void Event::synchronize() const { check(cudaEventSynchronize(event_), "waiting for a CUDA event"); }

double Event::milliseconds_since(const Event& earlier) const {
    float milliseconds = 0;
    check(cudaEventElapsedTime(&milliseconds, earlier.event_, event_),
          "reading the time between two CUDA events");
    return milliseconds;
}

}  // namespace ddp::cuda
