// The entry points of libcudart that libddp calls, over host memory.
//
// FAKE_CUDA_DEVICES  how many devices there are; 0 answers cudaErrorNoDevice
#include "tests/support/fake_nccl/fake_cuda.h"

#include <pthread.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <thread>

namespace fake {

namespace {

constexpr int kNotReady = 600;
constexpr int kNoDevice = 100;
constexpr int kInvalidDevice = 101;

/// One recording of an event: 0 not reached, else 1 + what cudaEventQuery answers.
using Mark = std::shared_ptr<std::atomic<int>>;
struct Event {
    std::mutex mutex;
    Mark mark;
    Mark get() {
        const std::lock_guard lock(mutex);
        return mark;
    }
};

// The calling thread's device. Not thread_local: ThreadSanitizer takes the freeing of a loaded module's
// variables at the end of a thread for a race.
pthread_key_t device_key() {
    static const pthread_key_t key = [] {
        pthread_key_t made;
        ::pthread_key_create(&made, nullptr);
        return made;
    }();
    return key;
}
int current_device() {
    return static_cast<int>(reinterpret_cast<std::intptr_t>(::pthread_getspecific(device_key())));
}

int device_count() {
    const char* set = std::getenv("FAKE_CUDA_DEVICES");
    return set != nullptr ? std::atoi(set) : 8;
}

}  // namespace

std::shared_ptr<Stream> Stream::start() {
    auto made = std::make_shared<Stream>();
    std::thread([made] { made->run(); }).detach();
    return made;
}

void Stream::post(std::function<void()> task) {
    {
        const std::lock_guard lock(mutex_);
        tasks_.push_back(std::move(task));
    }
    changed_.notify_one();
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

int cudaGetDeviceCount(int* count) {
    *count = fake::device_count();
    return *count > 0 ? 0 : fake::kNoDevice;
}
int cudaSetDevice(int device) {
    if (device >= fake::device_count()) return fake::kInvalidDevice;
    return ::pthread_setspecific(fake::device_key(), reinterpret_cast<void*>(std::intptr_t{device}));
}
int cudaRuntimeGetVersion(int* version) { return *version = 13000, 0; }
int cudaDriverGetVersion(int* version) { return *version = 13010, 0; }
int cudaDeviceGetStreamPriorityRange(int* least, int* greatest) { return *least = 0, *greatest = -5, 0; }

int cudaStreamCreateWithPriority(void** stream, unsigned, int) {
    *stream = new std::shared_ptr<fake::Stream>(fake::Stream::start());
    return 0;
}
int cudaStreamDestroy(void* stream) {
    auto* const handle = static_cast<std::shared_ptr<fake::Stream>*>(stream);
    (*handle)->close();
    delete handle;
    return 0;
}
int cudaStreamWaitEvent(void* stream, void* event, unsigned) {
    const fake::Mark mark = static_cast<fake::Event*>(event)->get();
    if (mark) fake::stream_of(stream)->post([mark] { mark->wait(0); });
    return 0;
}

int cudaEventCreateWithFlags(void** event, unsigned) { return *event = new fake::Event, 0; }
int cudaEventDestroy(void* event) { return delete static_cast<fake::Event*>(event), 0; }
int cudaEventRecord(void* event, void* stream) {
    auto* const recorded = static_cast<fake::Event*>(event);
    const auto mark = std::make_shared<std::atomic<int>>(0);
    {
        const std::lock_guard lock(recorded->mutex);
        recorded->mark = mark;
    }
    const std::shared_ptr<fake::Stream> where = fake::stream_of(stream);
    // The stream by a plain pointer: a task in its own queue must not keep it alive.
    where->post([mark, on = where.get()] {
        mark->store(1 + on->error.load());
        mark->notify_all();
    });
    return 0;
}
int cudaEventQuery(void* event) {
    const fake::Mark mark = static_cast<fake::Event*>(event)->get();
    if (!mark) return 0;
    const int reached = mark->load();
    return reached == 0 ? fake::kNotReady : reached - 1;
}

int cudaMalloc(void** address, std::size_t bytes) {
    *address = std::malloc(bytes);
    return *address != nullptr ? 0 : 2;
}
int cudaFree(void* address) { return std::free(address), 0; }
int cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, int, void* stream) {
    fake::stream_of(stream)->post([=] { std::memcpy(to, from, bytes); });
    return 0;
}
int cudaMemsetAsync(void* address, int value, std::size_t bytes, void* stream) {
    fake::stream_of(stream)->post([=] { std::memset(address, value, bytes); });
    return 0;
}

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
        case 700:
            return "an illegal memory access was encountered";
        default:
            return "unknown error";
    }
}

}  // extern "C"
