// The CUDA runtime that programs over fakes are linked with, over host memory. It is as strict as CUDA about
// refused calls, a thread's last error and the current device.
//
// FAKE_CUDA_DEVICES        the number of devices; 0 gives cudaErrorNoDevice
// FAKE_CUDA_HOST_REGISTER  "refuse": cudaHostRegister returns cudaErrorNotSupported
// FAKE_CUDA_TRACE          a file that receives every call (fake_trace.h)
//
// int fake_cuda_fail(stream, code)
//     events recorded on that stream fail with that error
// int fake_cuda_lose_device(code)
//     every later call returns that error, as after an illegal access; 0 ends it
// void fake_cuda_blind(thread)
//     threads of that name never see an event reached; null ends it
// long fake_cuda_slow_copies(milliseconds)
//     every later copy takes that long; returns how many copies are queued or run
// long fake_cuda_blocking_calls()
//     how often the calling thread has waited for a device
// long fake_cuda_launches(), fake_cuda_copies()
//     how many kernels and copies the calling thread has started
#include "tests/support/fake_nccl/fake_cuda.h"

#include <pthread.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string_view>
#include <utility>

#include "tests/support/fake_nccl/fake_capture.h"
#include "tests/support/fake_nccl/fake_trace.h"
#include "tests/support/fake_nccl/thread_state.h"

namespace fake {

namespace {

/// One recording of an event.
struct Mark {
    std::atomic<int> reached{0};  ///< 0: not yet; else 1 + the result of cudaEventQuery
    std::chrono::steady_clock::time_point at;
};
struct Event {
    const int device = current_device();
    std::mutex mutex;
    std::shared_ptr<Mark> mark;
    std::shared_ptr<Capture> capture;  ///< set instead of `mark` on a captured stream
    Capture::Clock clock;

    std::shared_ptr<Mark> get() {
        const std::lock_guard lock(mutex);
        return mark;
    }
    std::shared_ptr<Capture> captured_in() {
        const std::lock_guard lock(mutex);
        return capture;
    }
};
Event& event_of(void* handle) { return *static_cast<Event*>(handle); }

using Graph = std::shared_ptr<const Capture::Tasks>;

void count_blocking_call() { ++this_thread().blocking_calls; }

/// Refuses calls that CUDA forbids on a captured stream, or by a thread that captures one.
int refuse_in_capture(Stream& stream) {
    if (const auto capture = stream.capture()) {
        capture->invalidate(kCaptureInvalidated);
        return kCaptureUnsupported;
    }
    return refuse_unsafe();
}
int refuse_in_capture(Event& event) {
    if (const auto capture = event.captured_in()) {
        capture->invalidate(kCaptureInvalidated);
        return kCapturedEvent;
    }
    return refuse_unsafe();
}
/// Refuses a wait for the whole device while one of its streams is captured.
int refuse_in_capture_of_device(int device) {
    int refused = refuse_unsafe();
    for (const auto& stream : all_streams()) {
        if (stream->device == device && stream->capture()) refused = refuse_in_capture(*stream);
    }
    return refused;
}

constexpr std::size_t kDeviceBytes = std::size_t{1} << 34;

int allocate_into(void** address, std::size_t bytes, Memory kind) {
    if (bytes > kDeviceBytes) return kMemoryAllocation;
    if (const int refused = refuse_unsafe()) return refused;
    if (const int lost = lost_device()) return lost;
    count_blocking_call();
    *address = allocate(bytes, kind);
    return *address != nullptr ? 0 : kMemoryAllocation;
}

int free_memory(void* address, Memory kind) {
    if (const int refused = refuse_unsafe()) return refused;
    count_blocking_call();
    return address == nullptr || release_when_idle(address, kind) ? 0 : kInvalidValue;
}

int synchronize_device() {
    if (const int refused = refuse_in_capture_of_device(current_device())) return refused;
    count_blocking_call();
    int problem = drain(*stream_of(nullptr));
    for (const auto& stream : all_streams()) {
        if (stream->device != current_device() || stream->maker != std::this_thread::get_id() ||
            stream->is_closed())
            continue;
        if (const int error = drain(*stream)) problem = error;
    }
    return problem;
}

int synchronize(Stream& stream) {
    if (const int refused = refuse_in_capture(stream)) return refused;
    count_blocking_call();
    return drain(stream);
}

int wait_for_event(const std::shared_ptr<Stream>& waiting, Event& awaited) {
    const std::lock_guard lock(awaited.mutex);
    if (awaited.capture) {
        awaited.capture->join(waiting, awaited.clock, awaited.capture);
        return 0;
    }
    if (!awaited.mark) return 0;
    if (const auto capture = waiting->capture()) {
        capture->invalidate(kCaptureInvalidated);
        return kCaptureIsolation;
    }
    waiting->post([mark = awaited.mark] { mark->reached.wait(0); });
    return 0;
}

int record(Event& event, Stream& stream) {
    if (event.device != stream.device) return kInvalidHandle;
    const std::lock_guard lock(event.mutex);
    event.mark = nullptr;
    event.capture = stream.capture();
    if (event.capture) {
        event.clock = event.capture->clock_of(stream);
        return 0;
    }
    const auto mark = std::make_shared<Mark>();
    event.mark = mark;
    // The task holds a plain pointer: a reference in its own queue would keep the stream alive.
    stream.post([mark, on = &stream] {
        mark->at = std::chrono::steady_clock::now();
        mark->reached.store(1 + on->error.load());
        mark->reached.notify_all();
    });
    return 0;
}

/// The name of threads that never see an event reached; null: none.
std::atomic<const char*> blind_thread{nullptr};

int query(Event& event) {
    char thread[16] = {};
    if (const char* const blind = blind_thread; blind != nullptr) {
        ::pthread_getname_np(::pthread_self(), thread, sizeof thread);
        if (std::string_view(thread) == blind) return kNotReady;
    }
    if (const int refused = refuse_in_capture(event)) return refused;
    const auto mark = event.get();
    if (!mark) return 0;
    const int reached = mark->reached.load();
    return reached == 0 ? kNotReady : reached - 1;
}

int synchronize(Event& event) {
    if (const int refused = refuse_in_capture(event)) return refused;
    const auto mark = event.get();
    if (!mark) return 0;
    count_blocking_call();
    mark->reached.wait(0);
    return mark->reached.load() - 1;
}

int elapsed(float* milliseconds, Event& from, Event& to) {
    const auto first = from.get(), second = to.get();
    if (!first || !second || from.device != to.device) return kInvalidHandle;
    if (first->reached == 0 || second->reached == 0) return kNotReady;
    const std::chrono::duration<float, std::milli> passed = second->at - first->at;
    *milliseconds = passed.count();
    return 0;
}

std::atomic<long> copy_milliseconds{0};
/// Each copy that is queued or runs holds a reference.
const std::shared_ptr<const char>& unfinished_copies() {
    static const auto token = std::make_shared<const char>();
    return token;
}

// The call blocks until the copy is done where host memory is not page-locked.
int copy(void* to, const void* from, std::size_t bytes, Stream& stream) {
    ++this_thread().copies;
    const bool waits = !kind_of(to) || !kind_of(from);
    if (waits && stream.capture()) return refuse_in_capture(stream);
    if (bytes == 0) return 0;
    stream.post([=, takes = std::chrono::milliseconds(copy_milliseconds), counted = unfinished_copies()] {
        std::this_thread::sleep_for(takes);
        std::memcpy(to, from, bytes);
    });
    if (!waits) return 0;
    count_blocking_call();
    return drain(stream);
}

int register_host(void* address, std::size_t bytes) {
    if (const int refused = refuse_unsafe()) return refused;
    const char* set = std::getenv("FAKE_CUDA_HOST_REGISTER");
    if (set != nullptr && std::string_view(set) == "refuse") return kNotSupported;
    return lock_pages(address, bytes);
}

int begin_capture(void* handle, CaptureMode mode) {
    const std::shared_ptr<Stream> origin = stream_of(handle);
    if (handle == nullptr || origin->capture()) return kCaptureUnsupported;
    const auto capture = std::make_shared<Capture>(origin);
    origin->set_capture(capture);
    begin_capture(capture, mode);
    return 0;
}

int end_capture(void* handle, void** graph) {
    *graph = nullptr;
    const std::shared_ptr<Stream> ending = stream_of(handle);
    const std::shared_ptr<Capture> capture = ending->capture();
    if (!capture) return kCaptureInvalidated;
    Capture::Tasks tasks;
    const int problem = capture->end(*ending, tasks);
    if (problem == kCaptureUnmatched || problem == kCaptureWrongThread) return problem;
    end_capture(capture);
    if (problem != 0) return problem;
    *graph = new Graph(std::make_shared<const Capture::Tasks>(std::move(tasks)));
    return 0;
}

const char* text_of(int code) {
    switch (code) {
        case 0: return "no error";
        case kInvalidValue: return "invalid argument";
        case kMemoryAllocation: return "out of memory";
        case kNoDevice: return "no CUDA-capable device is detected";
        case kInvalidDevice: return "invalid device ordinal";
        case kInvalidHandle: return "invalid resource handle";
        case kNotReady: return "device not ready";
        case 700: return "an illegal memory access was encountered";
        case kHostMemoryAlreadyRegistered:
            return "part or all of the requested memory range is already mapped";
        case kHostMemoryNotRegistered: return "pointer does not correspond to a registered memory region";
        case kNotSupported: return "operation not supported";
        case kCaptureUnsupported: return "operation not permitted when stream is capturing";
        case kCaptureInvalidated: return "operation failed due to a previous error during capture";
        case kCaptureUnmatched: return "capture was not ended in the same stream as it began";
        case kCaptureUnjoined: return "capturing stream has unjoined work";
        case kCaptureIsolation: return "dependency created on uncaptured work in another stream";
        case kCapturedEvent: return "operation not permitted on an event last recorded in a capturing stream";
        case kCaptureWrongThread:
            return "attempt to terminate a thread-local capture sequence from another thread";
        default: return "unknown error";
    }
}

}  // namespace

int launch(void* stream, unsigned blocks, const char* kernel, std::function<void()> run) {
    const TracedCall traced("cudaLaunchKernelExC", kernel);
    const std::shared_ptr<Stream> on = stream_of(stream);
    if (blocks == 0) return keep_error(kInvalidConfiguration);
    if (on->device != current_device()) return keep_error(kInvalidHandle);
    if (const int lost = lost_device()) return keep_error(lost);
    ++this_thread().launches;
    on->post(std::move(run));
    return 0;
}

int device_count() {
    const char* set_count = std::getenv("FAKE_CUDA_DEVICES");
    return set_count != nullptr ? std::atoi(set_count) : 8;
}

}  // namespace fake

using namespace fake;

extern "C" {

int fake_cuda_fail(void* stream, int code) { return stream_of(stream)->error = code, 0; }
void fake_cuda_blind(const char* thread) { blind_thread = thread; }
int fake_cuda_lose_device(int code) { return lose_device(code), 0; }
long fake_cuda_slow_copies(long milliseconds) {
    return copy_milliseconds = milliseconds, unfinished_copies().use_count() - 1;
}
long fake_cuda_blocking_calls() { return this_thread().blocking_calls; }
long fake_cuda_launches() { return this_thread().launches; }
long fake_cuda_copies() { return this_thread().copies; }

int cudaGetLastError() { return std::exchange(this_thread().last_error, 0); }
int cudaPeekAtLastError() { return this_thread().last_error; }
const char* cudaGetErrorString(int code) { return text_of(code); }

int cudaGetDeviceCount(int* count) {
    *count = device_count();
    return keep_error(*count > 0 ? 0 : kNoDevice);
}
int cudaGetDevice(int* device) { return *device = current_device(), keep_error(0); }
int cudaSetDevice(int device) {
    if (device < 0 || device >= device_count()) return keep_error(kInvalidDevice);
    return set_current_device(device), keep_error(0);
}
int cudaDeviceGetAttribute(int* value, int attribute, int device) {
    if (device < 0 || device >= device_count()) return keep_error(kInvalidDevice);
    constexpr int kMultiprocessors = 16, kCapabilityMajor = 75;
    *value = attribute == kMultiprocessors ? 4 : attribute == kCapabilityMajor ? 9 : 0;
    return keep_error(0);
}
// Each device has one context, with the device's number.
int cuCtxGetCurrent(void** context) {
    *context =
        this_thread().has_context ? reinterpret_cast<void*>(std::intptr_t{current_device()} + 1) : nullptr;
    return 0;
}
int cudaGetDriverEntryPointByVersion(const char* name, void** entry, unsigned, unsigned long long,
                                     int* found) {
    const bool is_known = std::string_view(name) == "cuCtxGetCurrent";
    *entry = is_known ? reinterpret_cast<void*>(&cuCtxGetCurrent) : nullptr;
    *found = is_known ? 0 : 1;
    return keep_error(0);
}
int cudaDeviceGetPCIBusId(char* text, int length, int device) {
    std::snprintf(text, static_cast<std::size_t>(length), "0000:%02x:00.0", device + 1);
    return keep_error(0);
}
int cudaMemGetInfo(std::size_t* free, std::size_t* total) {
    return *free = *total = kDeviceBytes, keep_error(0);
}
// Ranks may be threads on one device, where a GPU would see processes. Streams of other ranks may wait for
// this one, so this call does not wait for them.
int cudaDeviceSynchronize() {
    const TracedCall traced("cudaDeviceSynchronize");
    return keep_error(synchronize_device());
}
int cudaRuntimeGetVersion(int* version) { return *version = 13000, 0; }
int cudaDriverGetVersion(int* version) { return *version = 13010, 0; }
int cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
    return *least = 0, *greatest = -5, keep_error(0);
}

int cudaStreamCreateWithPriority(void** stream, unsigned, int) {
    const TracedCall traced("cudaStreamCreateWithPriority");
    if (const int lost = lost_device()) return keep_error(lost);
    *stream = new std::shared_ptr<Stream>(Stream::start());
    return 0;
}
int cudaStreamDestroy(void* stream) {
    const TracedCall traced("cudaStreamDestroy");
    if (stream == nullptr) return keep_error(kInvalidHandle);
    auto* const handle = static_cast<std::shared_ptr<Stream>*>(stream);
    (*handle)->close();
    delete handle;
    return keep_error(0);
}
int cudaStreamSynchronize(void* stream) {
    const TracedCall traced("cudaStreamSynchronize");
    return keep_error(synchronize(*stream_of(stream)));
}
int cudaStreamWaitEvent(void* stream, void* event, unsigned) {
    const TracedCall traced("cudaStreamWaitEvent");
    return keep_error(wait_for_event(stream_of(stream), event_of(event)));
}

int cudaEventCreateWithFlags(void** event, unsigned) {
    const TracedCall traced("cudaEventCreateWithFlags");
    if (const int lost = lost_device()) return keep_error(lost);
    return *event = new Event, 0;
}
int cudaEventDestroy(void* event) {
    const TracedCall traced("cudaEventDestroy");
    if (event == nullptr) return keep_error(kInvalidHandle);
    return delete &event_of(event), keep_error(0);
}
int cudaEventRecord(void* event, void* stream) {
    const TracedCall traced("cudaEventRecord");
    return keep_error(fake::record(event_of(event), *stream_of(stream)));
}
int cudaEventQuery(void* event) {
    const TracedCall traced("cudaEventQuery");
    return keep_error(query(event_of(event)));
}
int cudaEventSynchronize(void* event) {
    const TracedCall traced("cudaEventSynchronize");
    return keep_error(synchronize(event_of(event)));
}
int cudaEventElapsedTime(float* milliseconds, void* from, void* to) {
    return keep_error(elapsed(milliseconds, event_of(from), event_of(to)));
}

int cudaMalloc(void** address, std::size_t bytes) {
    const TracedCall traced("cudaMalloc");
    return keep_error(allocate_into(address, bytes, Memory::Device));
}
int cudaHostAlloc(void** address, std::size_t bytes, unsigned) {
    const TracedCall traced("cudaHostAlloc");
    return keep_error(allocate_into(address, bytes, Memory::Pinned));
}
int cudaFree(void* address) {
    const TracedCall traced("cudaFree");
    return keep_error(free_memory(address, Memory::Device));
}
int cudaFreeHost(void* address) { return keep_error(free_memory(address, Memory::Pinned)); }
int cudaHostRegister(void* address, std::size_t bytes, unsigned) {
    const TracedCall traced("cudaHostRegister");
    return keep_error(register_host(address, bytes));
}
int cudaHostUnregister(void* address) {
    const TracedCall traced("cudaHostUnregister");
    return keep_error(unlock_pages(address));
}
int cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, int, void* stream) {
    const TracedCall traced("cudaMemcpyAsync");
    return keep_error(copy(to, from, bytes, *stream_of(stream)));
}
int cudaMemsetAsync(void* address, int value, std::size_t bytes, void* stream) {
    const TracedCall traced("cudaMemsetAsync");
    stream_of(stream)->post([=] { std::memset(address, value, bytes); });
    return keep_error(0);
}

int cudaStreamBeginCapture(void* stream, CaptureMode mode) {
    const TracedCall traced("cudaStreamBeginCapture");
    return keep_error(begin_capture(stream, mode));
}
int cudaStreamEndCapture(void* stream, void** graph) {
    const TracedCall traced("cudaStreamEndCapture");
    return keep_error(end_capture(stream, graph));
}
int cudaThreadExchangeStreamCaptureMode(CaptureMode* mode) {
    return std::swap(*mode, this_thread().capture_mode), keep_error(0);
}
int cudaStreamIsCapturing(void* stream, int* status) {
    const TracedCall traced("cudaStreamIsCapturing");
    return *status = stream_of(stream)->capture() != nullptr ? 1 : 0, keep_error(0);
}
int cudaGraphInstantiateWithFlags(void** exec, void* graph, unsigned long long) {
    const TracedCall traced("cudaGraphInstantiateWithFlags");
    if (const int lost = lost_device()) return keep_error(lost);
    *exec = new Graph(*static_cast<Graph*>(graph));
    return 0;
}
int cudaGraphLaunch(void* exec, void* stream) {
    const TracedCall traced("cudaGraphLaunch");
    stream_of(stream)->post([tasks = *static_cast<Graph*>(exec)] {
        for (const auto& task : *tasks) task();
    });
    return keep_error(0);
}
int cudaGraphDestroy(void* graph) {
    const TracedCall traced("cudaGraphDestroy");
    return delete static_cast<Graph*>(graph), keep_error(0);
}
int cudaGraphExecDestroy(void* exec) {
    const TracedCall traced("cudaGraphExecDestroy");
    return delete static_cast<Graph*>(exec), keep_error(0);
}

}  // extern "C"
