// The entry points of libcudart that libddp calls, over host memory.
//
// FAKE_CUDA_DEVICES  how many devices there are; 0 answers cudaErrorNoDevice
// FAKE_CUDA_TRACE    a file to write every call into (fake_trace.h)
//
// int fake_cuda_fail(stream, code)  events recorded on that stream answer with that error once it comes to them
// long fake_cuda_blocking_calls()   how often the calling thread had to wait for a device so far
// long fake_cuda_launches()         how many kernels the calling thread has launched so far
// long fake_cuda_copies()           how many copies it has started
#include "tests/support/fake_nccl/fake_cuda.h"

#include <pthread.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <thread>

#include "tests/support/fake_nccl/fake_capture.h"
#include "tests/support/fake_nccl/fake_trace.h"

namespace fake {

namespace {

constexpr int kMemoryAllocation = 2;
constexpr int kNoDevice = 100;
constexpr int kInvalidDevice = 101;
constexpr int kInvalidHandle = 400;
constexpr int kNotReady = 600;
constexpr int kCaptureUnsupported = 900, kCaptureInvalidated = 901, kCaptureIsolation = 905,
              kCapturedEvent = 907;

/// One recording of an event.
struct Mark {
    std::atomic<int> reached{0};  ///< 0 not yet, else 1 + what cudaEventQuery answers
    std::chrono::steady_clock::time_point at;
    std::chrono::milliseconds spent{0};  ///< by the stream, before
};
struct Event {
    std::mutex mutex;
    std::shared_ptr<Mark> mark;
    std::shared_ptr<Capture> capture;  ///< recorded on a captured stream: no mark, but
    Capture::Clock clock;

    std::shared_ptr<Mark> get() {
        const std::lock_guard lock(mutex);
        return mark;
    }
    bool is_captured() {
        const std::lock_guard lock(mutex);
        return capture != nullptr;
    }
};

using Graph = std::shared_ptr<const Capture::Tasks>;

// Numbers of the calling thread. Not thread_local: ThreadSanitizer takes the freeing of a loaded module's
// variables at the end of a thread for a race.
pthread_key_t make_key() {
    pthread_key_t made;
    ::pthread_key_create(&made, nullptr);
    return made;
}
enum class PerThread { Device, Captures, BlockingCalls, Launches, Copies };
pthread_key_t key_of(PerThread which) {
    static const pthread_key_t keys[] = {make_key(), make_key(), make_key(), make_key(), make_key()};
    return keys[static_cast<int>(which)];
}
std::intptr_t get(PerThread which) {
    return reinterpret_cast<std::intptr_t>(::pthread_getspecific(key_of(which)));
}
void set(PerThread which, std::intptr_t value) {
    ::pthread_setspecific(key_of(which), reinterpret_cast<void*>(value));
}
void count(PerThread which) { set(which, get(which) + 1); }
void count_blocking_call() { count(PerThread::BlockingCalls); }

/// What was allocated, by its address.
struct Allocations {
    struct Piece {
        std::size_t bytes;
        Memory kind;
    };
    std::mutex mutex;
    std::map<std::uintptr_t, Piece> pieces;
    /// Whether a copy need not wait for it: a device's, or page-locked.
    bool knows(const void* address) {
        const auto at = reinterpret_cast<std::uintptr_t>(address);
        const std::lock_guard lock(mutex);
        const auto next = pieces.upper_bound(at);
        return next != pieces.begin() && at < std::prev(next)->first + std::prev(next)->second.bytes;
    }
};
Allocations& allocations() {
    static auto* const all = new Allocations;
    return *all;
}

/// Every stream there is.
class Streams {
  public:
    void add(const std::shared_ptr<Stream>& stream) {
        const std::lock_guard lock(mutex_);
        std::erase_if(streams_, [](const auto& one) { return one.expired(); });
        streams_.push_back(stream);
    }
    std::vector<std::shared_ptr<Stream>> all() {
        const std::lock_guard lock(mutex_);
        std::vector<std::shared_ptr<Stream>> living;
        for (const auto& one : streams_) {
            if (auto stream = one.lock()) living.push_back(std::move(stream));
        }
        return living;
    }

  private:
    std::mutex mutex_;
    std::vector<std::weak_ptr<Stream>> streams_;
};
Streams& streams() {
    static auto* const all = new Streams;
    return *all;
}

/// Runs everything the stream was given so far. What went wrong on it.
int drain(Stream& stream) {
    const auto mark = std::make_shared<std::atomic<bool>>(false);
    stream.post([mark] {
        mark->store(true);
        mark->notify_all();
    });
    mark->wait(false);
    return stream.error.load();
}

/// What the stream, or this thread, may not do while a capture goes on.
int refuse_in_capture(Stream* stream) {
    if (stream != nullptr) {
        if (const auto capture = stream->capture()) {
            capture->invalidate(kCaptureInvalidated);
            return kCaptureUnsupported;
        }
        return 0;
    }
    return get(PerThread::Captures) > 0 ? kCaptureUnsupported : 0;
}

constexpr std::size_t kDeviceBytes = std::size_t{1} << 34;

int allocate_into(void** address, std::size_t bytes, Memory kind) {
    if (bytes > kDeviceBytes) return kMemoryAllocation;
    if (const int refused = refuse_in_capture(nullptr)) return refused;
    count_blocking_call();
    *address = allocate(bytes, kind);
    return *address != nullptr ? 0 : kMemoryAllocation;
}

}  // namespace

int device_count() {
    const char* set_count = std::getenv("FAKE_CUDA_DEVICES");
    return set_count != nullptr ? std::atoi(set_count) : 8;
}
int current_device() { return static_cast<int>(get(PerThread::Device)); }
void set_current_device(int device) { set(PerThread::Device, device); }
void count_launch() { count(PerThread::Launches); }

void* allocate(std::size_t bytes, Memory kind) {
    constexpr std::size_t kAlignment = 256;
    void* const address = std::aligned_alloc(kAlignment, (bytes + kAlignment) / kAlignment * kAlignment);
    if (address == nullptr) return nullptr;
    const std::lock_guard lock(allocations().mutex);
    allocations().pieces[reinterpret_cast<std::uintptr_t>(address)] = {bytes, kind};
    return address;
}

void release(void* address) {
    {
        const std::lock_guard lock(allocations().mutex);
        allocations().pieces.erase(reinterpret_cast<std::uintptr_t>(address));
    }
    std::free(address);
}

void release_when_idle(void* address) {
    const std::shared_ptr<void> last_reference(address, release);
    for (const auto& stream : streams().all()) stream->post_now([last_reference] {});
}

std::shared_ptr<Stream> Stream::start() {
    auto made = std::make_shared<Stream>();
    made->maker = std::this_thread::get_id();
    streams().add(made);
    std::thread([made] { made->run(); }).detach();
    return made;
}

std::shared_ptr<Capture> Stream::capture() const {
    const std::lock_guard lock(mutex_);
    return capture_;
}

void Stream::set_capture(std::shared_ptr<Capture> capture) {
    const std::lock_guard lock(mutex_);
    capture_ = std::move(capture);
}

void Stream::post(std::function<void()> task) {
    if (const std::shared_ptr<Capture> capture = this->capture())
        return capture->record(*this, std::move(task));
    post_now(std::move(task));
}

void Stream::post_now(std::function<void()> task) {
    {
        const std::lock_guard lock(mutex_);
        tasks_.push_back(std::move(task));
    }
    changed_.notify_one();
}

bool Stream::is_closed() const {
    const std::lock_guard lock(mutex_);
    return closed_;
}

void Stream::close() {
    {
        const std::lock_guard lock(mutex_);
        closed_ = true;
    }
    changed_.notify_one();
}

void Stream::run() {
    for (;;) {
        std::function<void()> task;
        {
            std::unique_lock lock(mutex_);
            changed_.wait(lock, [this] { return closed_ || !tasks_.empty(); });
            if (tasks_.empty()) return;
            task = std::move(tasks_.front());
            tasks_.pop_front();
        }
        task();
    }
}

std::shared_ptr<Stream> stream_of(void* handle) {
    if (handle != nullptr) return *static_cast<std::shared_ptr<Stream>*>(handle);
    // Never freed: the default streams, one per device, live as long as the process.
    static std::mutex mutex;
    static auto* const defaults = new std::map<int, std::shared_ptr<Stream>>;
    const std::lock_guard lock(mutex);
    std::shared_ptr<Stream>& stream = (*defaults)[current_device()];
    if (!stream) stream = Stream::start();
    return stream;
}

}  // namespace fake

extern "C" {

int fake_cuda_fail(void* stream, int code) { return fake::stream_of(stream)->error = code, 0; }
long fake_cuda_blocking_calls() { return fake::get(fake::PerThread::BlockingCalls); }
long fake_cuda_launches() { return fake::get(fake::PerThread::Launches); }
long fake_cuda_copies() { return fake::get(fake::PerThread::Copies); }

int cudaGetDeviceCount(int* count) {
    *count = fake::device_count();
    return *count > 0 ? 0 : fake::kNoDevice;
}
int cudaGetDevice(int* device) { return *device = fake::current_device(), 0; }
int cudaSetDevice(int device) {
    if (device >= fake::device_count()) return fake::kInvalidDevice;
    return fake::set_current_device(device), 0;
}
int cudaDeviceGetAttribute(int* value, int attribute, int) {
    constexpr int kMultiprocessors = 16, kCapabilityMajor = 75;
    *value = attribute == kMultiprocessors ? 4 : attribute == kCapabilityMajor ? 9 : 0;
    return 0;
}
int cudaDeviceGetPCIBusId(char* text, int length, int device) {
    std::snprintf(text, static_cast<std::size_t>(length), "0000:%02x:00.0", device + 1);
    return 0;
}
int cudaMemGetInfo(std::size_t* free, std::size_t* total) { return *free = *total = fake::kDeviceBytes, 0; }
// Ranks may be threads on one device, where a GPU would see processes: another rank's streams are not waited for,
// they may wait for this one.
int cudaDeviceSynchronize() {
    const fake::TracedCall traced("cudaDeviceSynchronize");
    if (const int refused = fake::refuse_in_capture(nullptr)) return refused;
    fake::count_blocking_call();
    int problem = fake::drain(*fake::stream_of(nullptr));
    for (const auto& stream : fake::streams().all()) {
        if (stream->maker != std::this_thread::get_id() || stream->is_closed()) continue;
        if (const int error = fake::drain(*stream)) problem = error;
    }
    return problem;
}
int cudaRuntimeGetVersion(int* version) { return *version = 13000, 0; }
int cudaDriverGetVersion(int* version) { return *version = 13010, 0; }
int cudaDeviceGetStreamPriorityRange(int* least, int* greatest) { return *least = 0, *greatest = -5, 0; }

int cudaStreamCreateWithPriority(void** stream, unsigned, int) {
    const fake::TracedCall traced("cudaStreamCreateWithPriority");
    *stream = new std::shared_ptr<fake::Stream>(fake::Stream::start());
    return 0;
}
int cudaStreamDestroy(void* stream) {
    const fake::TracedCall traced("cudaStreamDestroy");
    auto* const handle = static_cast<std::shared_ptr<fake::Stream>*>(stream);
    (*handle)->close();
    delete handle;
    return 0;
}
int cudaStreamSynchronize(void* stream) {
    const fake::TracedCall traced("cudaStreamSynchronize");
    const std::shared_ptr<fake::Stream> waited_for = fake::stream_of(stream);
    if (const int refused = fake::refuse_in_capture(waited_for.get())) return refused;
    fake::count_blocking_call();
    return fake::drain(*waited_for);
}
int cudaStreamWaitEvent(void* stream, void* event, unsigned) {
    const fake::TracedCall traced("cudaStreamWaitEvent");
    auto* const awaited = static_cast<fake::Event*>(event);
    const std::shared_ptr<fake::Stream> waiting = fake::stream_of(stream);
    const std::lock_guard lock(awaited->mutex);
    if (awaited->capture) {
        awaited->capture->join(waiting, awaited->clock, awaited->capture);
        return 0;
    }
    if (!awaited->mark) return 0;
    if (const auto capture = waiting->capture()) {
        capture->invalidate(fake::kCaptureInvalidated);
        return fake::kCaptureIsolation;
    }
    waiting->post([mark = awaited->mark] { mark->reached.wait(0); });
    return 0;
}

int cudaEventCreateWithFlags(void** event, unsigned) {
    const fake::TracedCall traced("cudaEventCreateWithFlags");
    return *event = new fake::Event, 0;
}
int cudaEventDestroy(void* event) {
    const fake::TracedCall traced("cudaEventDestroy");
    return delete static_cast<fake::Event*>(event), 0;
}
int cudaEventRecord(void* event, void* stream) {
    const fake::TracedCall traced("cudaEventRecord");
    auto* const recorded = static_cast<fake::Event*>(event);
    const std::shared_ptr<fake::Stream> where = fake::stream_of(stream);
    const std::lock_guard lock(recorded->mutex);
    recorded->mark = nullptr;
    recorded->capture = where->capture();
    if (recorded->capture) {
        recorded->clock = recorded->capture->clock_of(*where);
        return 0;
    }
    const auto mark = std::make_shared<fake::Mark>();
    recorded->mark = mark;
    // The stream by a plain pointer: a task in its own queue must not keep it alive.
    where->post([mark, on = where.get()] {
        mark->at = std::chrono::steady_clock::now();
        mark->spent = on->spent();
        mark->reached.store(1 + on->error.load());
        mark->reached.notify_all();
    });
    return 0;
}
int cudaEventQuery(void* event) {
    const fake::TracedCall traced("cudaEventQuery");
    auto* const asked = static_cast<fake::Event*>(event);
    if (asked->is_captured()) return fake::kCapturedEvent;
    if (const int refused = fake::refuse_in_capture(nullptr)) return refused;
    const auto mark = asked->get();
    if (!mark) return 0;
    const int reached = mark->reached.load();
    return reached == 0 ? fake::kNotReady : reached - 1;
}
int cudaEventSynchronize(void* event) {
    const fake::TracedCall traced("cudaEventSynchronize");
    auto* const awaited = static_cast<fake::Event*>(event);
    if (awaited->is_captured()) return fake::kCapturedEvent;
    if (const int refused = fake::refuse_in_capture(nullptr)) return refused;
    const auto mark = awaited->get();
    if (!mark) return 0;
    fake::count_blocking_call();
    mark->reached.wait(0);
    return mark->reached.load() - 1;
}
int cudaEventElapsedTime(float* milliseconds, void* from, void* to) {
    const auto first = static_cast<fake::Event*>(from)->get(), second = static_cast<fake::Event*>(to)->get();
    if (!first || !second) return fake::kInvalidHandle;
    if (first->reached == 0 || second->reached == 0) return fake::kNotReady;
    const std::chrono::duration<float, std::milli> passed = second->at - first->at;
    *milliseconds = passed.count() + static_cast<float>((second->spent - first->spent).count());
    return 0;
}

int cudaMalloc(void** address, std::size_t bytes) {
    const fake::TracedCall traced("cudaMalloc");
    return fake::allocate_into(address, bytes, fake::Memory::Device);
}
int cudaHostAlloc(void** address, std::size_t bytes, unsigned) {
    const fake::TracedCall traced("cudaHostAlloc");
    return fake::allocate_into(address, bytes, fake::Memory::Pinned);
}
int cudaHostRegister(void* address, std::size_t bytes, unsigned) {
    const fake::TracedCall traced("cudaHostRegister");
    const std::lock_guard lock(fake::allocations().mutex);
    fake::allocations().pieces[reinterpret_cast<std::uintptr_t>(address)] = {bytes, fake::Memory::Pinned};
    return 0;
}
int cudaHostUnregister(void* address) {
    const fake::TracedCall traced("cudaHostUnregister");
    const std::lock_guard lock(fake::allocations().mutex);
    return fake::allocations().pieces.erase(reinterpret_cast<std::uintptr_t>(address)) == 1 ? 0 : 713;
}
int cudaFree(void* address) {
    const fake::TracedCall traced("cudaFree");
    if (const int refused = fake::refuse_in_capture(nullptr)) return refused;
    fake::count_blocking_call();
    return fake::release_when_idle(address), 0;
}
int cudaFreeHost(void* address) { return cudaFree(address); }
int cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, int, void* stream) {
    const fake::TracedCall traced("cudaMemcpyAsync");
    const std::shared_ptr<fake::Stream> on = fake::stream_of(stream);
    fake::count(fake::PerThread::Copies);
    on->post([=] { std::memcpy(to, from, bytes); });
    if (fake::allocations().knows(to) && fake::allocations().knows(from)) return 0;
    // Host memory that is not page-locked, as CUDA does it: the call returns when the copy is done.
    if (on->capture()) return 0;
    fake::count_blocking_call();
    return fake::drain(*on);
}
int cudaMemsetAsync(void* address, int value, std::size_t bytes, void* stream) {
    const fake::TracedCall traced("cudaMemsetAsync");
    fake::stream_of(stream)->post([=] { std::memset(address, value, bytes); });
    return 0;
}

int cudaStreamBeginCapture(void* stream, int) {
    const fake::TracedCall traced("cudaStreamBeginCapture");
    const std::shared_ptr<fake::Stream> origin = fake::stream_of(stream);
    if (stream == nullptr || origin->capture()) return fake::kCaptureUnsupported;
    origin->set_capture(std::make_shared<fake::Capture>(origin));
    fake::set(fake::PerThread::Captures, fake::get(fake::PerThread::Captures) + 1);
    return 0;
}
int cudaStreamEndCapture(void* stream, void** graph) {
    const fake::TracedCall traced("cudaStreamEndCapture");
    *graph = nullptr;
    const std::shared_ptr<fake::Stream> ending = fake::stream_of(stream);
    const std::shared_ptr<fake::Capture> capture = ending->capture();
    if (!capture) return fake::kCaptureInvalidated;
    fake::Capture::Tasks tasks;
    fake::set(fake::PerThread::Captures, fake::get(fake::PerThread::Captures) - 1);
    if (const int problem = capture->end(*ending, tasks)) return problem;
    *graph = new fake::Graph(std::make_shared<const fake::Capture::Tasks>(std::move(tasks)));
    return 0;
}
int cudaStreamIsCapturing(void* stream, int* status) {
    const fake::TracedCall traced("cudaStreamIsCapturing");
    return *status = fake::stream_of(stream)->capture() != nullptr ? 1 : 0, 0;
}
int cudaGraphInstantiateWithFlags(void** exec, void* graph, unsigned long long) {
    const fake::TracedCall traced("cudaGraphInstantiateWithFlags");
    *exec = new fake::Graph(*static_cast<fake::Graph*>(graph));
    return 0;
}
int cudaGraphLaunch(void* exec, void* stream) {
    const fake::TracedCall traced("cudaGraphLaunch");
    fake::stream_of(stream)->post([tasks = *static_cast<fake::Graph*>(exec)] {
        for (const auto& task : *tasks) task();
    });
    return 0;
}
int cudaGraphDestroy(void* graph) {
    const fake::TracedCall traced("cudaGraphDestroy");
    return delete static_cast<fake::Graph*>(graph), 0;
}
int cudaGraphExecDestroy(void* exec) {
    const fake::TracedCall traced("cudaGraphExecDestroy");
    return delete static_cast<fake::Graph*>(exec), 0;
}

int cudaGetLastError() { return 0; }
const char* cudaGetErrorString(int code) {
    switch (code) {
        case 0:
            return "no error";
        case fake::kNoDevice:
            return "no CUDA-capable device is detected";
        case fake::kInvalidDevice:
            return "invalid device ordinal";
        case fake::kNotReady:
            return "device not ready";
        case fake::kMemoryAllocation:
            return "out of memory";
        case fake::kCaptureUnsupported:
            return "operation not permitted when stream is capturing";
        case fake::kCaptureInvalidated:
            return "operation failed due to a previous error during capture";
        case 904:
            return "capturing stream has unjoined work";
        case fake::kCaptureIsolation:
            return "dependency created on uncaptured work in another stream";
        case fake::kCapturedEvent:
            return "operation not permitted on an event last recorded in a capturing stream";
        case 700:
            return "an illegal memory access was encountered";
        default:
            return "unknown error";
    }
}

}  // extern "C"
