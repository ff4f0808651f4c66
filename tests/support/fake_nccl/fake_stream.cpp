#include <map>
#include <utility>

#include "tests/support/fake_nccl/fake_capture.h"
#include "tests/support/fake_nccl/fake_cuda.h"

namespace fake {

namespace {

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

}  // namespace

std::vector<std::shared_ptr<Stream>> all_streams() { return streams().all(); }

int drain(Stream& stream) {
    const auto mark = std::make_shared<std::atomic<bool>>(false);
    stream.post([mark] {
        mark->store(true);
        mark->notify_all();
    });
    mark->wait(false);
    return stream.error.load();
}

std::shared_ptr<Stream> Stream::start() {
    auto made = std::make_shared<Stream>();
    made->maker = std::this_thread::get_id();
    made->device = current_device();
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
    // Default streams, one per device, live until the process ends.
    static std::mutex mutex;
    static auto* const defaults = new std::map<int, std::shared_ptr<Stream>>;
    const std::lock_guard lock(mutex);
    std::shared_ptr<Stream>& stream = (*defaults)[current_device()];
    if (!stream) stream = Stream::start();
    return stream;
}

}  // namespace fake
