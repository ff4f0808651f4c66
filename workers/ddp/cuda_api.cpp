#include "ddp/cuda_api.h"

#include <fmt/core.h>

#include <utility>

#include "ddp/cuda/advice.h"
#include "ddp/device_error.h"
#include "ddp/types.h"
#include "env/text.h"

namespace ddp::cuda {

using ddprun::Errc;
using ddprun::Result;

namespace {

/// All or none: whoever sees the last of them may use them all.
void take_graphs(const SharedLibrary& library, Api& api) {
    const bool all =
        take(library.resolve, "cudaStreamBeginCapture", api.stream_begin_capture) &&
        take(library.resolve, "cudaStreamEndCapture", api.stream_end_capture) &&
        take(library.resolve, "cudaStreamIsCapturing", api.stream_is_capturing) &&
        take(library.resolve, "cudaThreadExchangeStreamCaptureMode",
             api.thread_exchange_stream_capture_mode) &&
        take(library.resolve, "cudaGraphInstantiateWithFlags", api.graph_instantiate_with_flags) &&
        take(library.resolve, "cudaGraphLaunch", api.graph_launch) &&
        take(library.resolve, "cudaGraphDestroy", api.graph_destroy);
    if (all) take(library.resolve, "cudaGraphExecDestroy", api.graph_exec_destroy);
}

}  // namespace

Result<Api> api_from(const SharedLibrary& library) {
    Api api{};
    api.library = library.name;
    std::vector<std::string> missing;
    const auto require = [&](const char* name, auto& slot) {
        if (!take(library.resolve, name, slot)) missing.emplace_back(name);
    };
    require("cudaGetDeviceCount", api.get_device_count);
    require("cudaGetDevice", api.get_device);
    require("cudaSetDevice", api.set_device);
    require("cudaDeviceSynchronize", api.device_synchronize);
    require("cudaDeviceGetAttribute", api.device_get_attribute);
    require("cudaMemGetInfo", api.mem_get_info);
    require("cudaRuntimeGetVersion", api.runtime_get_version);
    require("cudaDriverGetVersion", api.driver_get_version);
    require("cudaDeviceGetStreamPriorityRange", api.device_get_stream_priority_range);
    require("cudaStreamCreateWithPriority", api.stream_create_with_priority);
    require("cudaStreamDestroy", api.stream_destroy);
    require("cudaStreamSynchronize", api.stream_synchronize);
    require("cudaStreamWaitEvent", api.stream_wait_event);
    require("cudaEventCreateWithFlags", api.event_create_with_flags);
    require("cudaEventRecord", api.event_record);
    require("cudaEventQuery", api.event_query);
    require("cudaEventSynchronize", api.event_synchronize);
    require("cudaEventElapsedTime", api.event_elapsed_time);
    require("cudaEventDestroy", api.event_destroy);
    require("cudaMalloc", api.malloc);
    require("cudaFree", api.free);
    require("cudaHostAlloc", api.host_alloc);
    require("cudaHostRegister", api.host_register);
    require("cudaHostUnregister", api.host_unregister);
    require("cudaDeviceGetPCIBusId", api.device_get_pci_bus_id);
    require("cudaFreeHost", api.free_host);
    require("cudaMemcpyAsync", api.memcpy_async);
    require("cudaMemsetAsync", api.memset_async);
    require("cudaGetLastError", api.get_last_error);
    require("cudaGetErrorString", api.get_error_string);
    take_graphs(library, api);
    take(library.resolve, "cuCtxGetCurrent", api.current_context);  // where one library has all, as in tests
    if (missing.empty()) return api;
    return ddprun::Error{Errc::Mismatch, fmt::format("{} lacks {}: CUDA 11 or newer is needed", library.name,
                                                     ddprun::join(missing, ", "))};
}

Result<Api> load_api() {
    const Result<SharedLibrary> library = open_library(
        library_names("DDP_CUDART_LIBRARY", {"libcudart.so.13", "libcudart.so.12", "libcudart.so.11.0"}));
    if (!library) {
        return library.error().with("loading the CUDA runtime (DDP_CUDART_LIBRARY names another file)");
    }
    Result<Api> api = api_from(*library);
    if (!api || api->current_context != nullptr) return api;
    if (const auto driver = open_library(library_names("DDP_CUDA_LIBRARY", {"libcuda.so.1"})))
        take(driver->resolve, "cuCtxGetCurrent", api->current_context);
    return api;
}

std::string Api::explain(Code code) const {
    int runtime = 0, driver = 0;
    runtime_get_version(&runtime);
    driver_get_version(&driver);
    const std::string advice = advice_for(static_cast<int>(code), runtime, driver);
    return fmt::format("{} (CUDA error {}){}{}", get_error_string(code), static_cast<int>(code),
                       advice.empty() ? "" : ": ", advice);
}

void Api::check(Code code, const char* attempt) const {
    if (code == Code::Success) return;
    const std::string what = fmt::format("{}: {}", attempt, explain(code));
    get_last_error();
    note_device_error(DeviceLibrary::Cuda, what);
    throw ddp::Error(what);
}

bool Api::succeeded(Code code) const {
    if (code != Code::Success) get_last_error();
    return code == Code::Success;
}

namespace {

bool has_context(const Api& api) {
    ContextObject* context = nullptr;
    return api.current_context != nullptr && api.current_context(&context) == Code::Success &&
           context != nullptr;
}

}  // namespace

DeviceScope::DeviceScope(const Api& api, int device) : api_(api) {
    // Where even this fails the device is lost, and the call that follows says so under its own name.
    if (!api_.succeeded(api_.get_device(&before_)) || before_ == device) return;
    const bool had_context = has_context(api_);
    api_.check(api_.set_device(device), "choosing a CUDA device");
    goes_back_ = had_context;
}

DeviceScope::~DeviceScope() {
    if (goes_back_) static_cast<void>(api_.succeeded(api_.set_device(before_)));
}

Stream make_stream(const Api& api, Priority priority, const char* attempt) {
    int least = 0, greatest = 0;
    api.check(api.device_get_stream_priority_range(&least, &greatest), "asking for stream priorities");
    Stream stream = nullptr;
    const int number = priority == Priority::High ? greatest : least;
    api.check(api.stream_create_with_priority(&stream, kStreamNonBlocking, number), attempt);
    return stream;
}

Event::Event(std::shared_ptr<const Api> api, unsigned flags) : api_(std::move(api)) {
    api_->check(api_->event_create_with_flags(&event_, flags), "creating a CUDA event");
}

Event::~Event() { api_->event_destroy(event_); }

void Event::record(Stream stream) const {
    api_->check(api_->event_record(event_, stream), "recording a CUDA event");
}

void Event::hold_back(Stream stream) const {
    api_->check(api_->stream_wait_event(stream, event_, 0), "making a CUDA stream wait");
}

Code Event::query() const {
    const Code code = api_->event_query(event_);
    // CUDA keeps it as the thread's last error, like any other.
    if (code == Code::NotReady) api_->get_last_error();
    return code;
}

void Event::synchronize() const { api_->check(api_->event_synchronize(event_), "waiting for a CUDA event"); }

double Event::milliseconds_since(const Event& earlier) const {
    float milliseconds = 0;
    api_->check(api_->event_elapsed_time(&milliseconds, earlier.event_, event_),
                "reading the time between two CUDA events");
    return milliseconds;
}

}  // namespace ddp::cuda
