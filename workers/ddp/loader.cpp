#include "ddp/loader.h"

#include <algorithm>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <new>
#include <thread>
#include <utility>

#include "ddp/types.h"

namespace ddp {
namespace {

constexpr std::align_val_t kAlignment{64};

}  // namespace

void Batch::FreeAligned::operator()(std::byte* memory) const { ::operator delete[](memory, kAlignment); }

Batch::Batch(std::size_t capacity, std::span<const std::size_t> field_bytes) {
    for (const std::size_t bytes : field_bytes) {
        auto* memory =
            static_cast<std::byte*>(::operator new[](std::max<std::size_t>(capacity * bytes, 1), kAlignment));
        fields_.push_back({bytes, std::unique_ptr<std::byte[], FreeAligned>(memory)});
    }
}

std::span<const std::byte> Batch::bytes(std::size_t field) const {
    const Field& f = fields_.at(field);
    return {f.memory.get(), f.bytes * size_};
}

void Batch::read(const Dataset& dataset, std::span<const std::size_t> indices) {
    std::vector<std::span<std::byte>> sample(fields_.size());
    for (std::size_t i = 0; i < indices.size(); ++i) {
        for (std::size_t f = 0; f < fields_.size(); ++f)
            sample[f] = {fields_[f].memory.get() + i * fields_[f].bytes, fields_[f].bytes};
        dataset.read(indices[i], sample);
    }
    size_ = indices.size();
}

/// The batches read ahead. Slot b % slots belongs to batch b: to the reader until it is filled, then to the
/// caller until it asks for batch b + 1.
class Loader::Ring {
  public:
    explicit Ring(const Loader& loader) : loader_(loader) {
        // One more than is read ahead: the caller still holds the batch before.
        const std::size_t slots = std::min(loader.options_.prefetch, loader.batches()) + 1;
        const std::vector<std::size_t> bytes = loader.dataset_.field_bytes();
        for (std::size_t s = 0; s < slots; ++s) slots_.emplace_back(loader.options_.batch_size, bytes);
        reader_ = std::thread([this] { read_ahead(); });
    }
    ~Ring() {
        {
            const std::lock_guard lock(mutex_);
            stopping_ = true;
        }
        changed_.notify_all();
        reader_.join();
    }
    Ring(const Ring&) = delete;
    Ring& operator=(const Ring&) = delete;

    const Batch* wait_for(std::size_t batch) {
        std::unique_lock lock(mutex_);
        released_ = batch;
        changed_.notify_all();
        changed_.wait(lock, [&] { return filled_ > batch || failure_; });
        if (filled_ <= batch) std::rethrow_exception(failure_);
        return &slots_[batch % slots_.size()];
    }

  private:
    void read_ahead() {
        for (std::size_t batch = 0; batch < loader_.batches(); ++batch) {
            if (!wait_for_slot(batch)) return;
            try {
                slots_[batch % slots_.size()].read(loader_.dataset_, loader_.indices_of(batch));
            } catch (...) {
                publish(batch, std::current_exception());
                return;
            }
            publish(batch + 1, nullptr);
        }
    }

    bool wait_for_slot(std::size_t batch) {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [&] { return stopping_ || batch < released_ + slots_.size(); });
        return !stopping_;
    }

    void publish(std::size_t filled, std::exception_ptr failure) {
        {
            const std::lock_guard lock(mutex_);
            filled_ = filled;
            failure_ = std::move(failure);
        }
        changed_.notify_all();
    }

    const Loader& loader_;
    std::vector<Batch> slots_;
    std::mutex mutex_;
    std::condition_variable changed_;
    std::size_t filled_ = 0;    ///< batches that are complete
    std::size_t released_ = 0;  ///< batches that the caller has given back
    bool stopping_ = false;
    std::exception_ptr failure_;
    std::thread reader_;
};

Loader::Loader(const Dataset& dataset, std::vector<std::size_t> indices, LoaderOptions options)
    : dataset_(dataset), indices_(std::move(indices)), options_(options) {
    if (options_.batch_size == 0) throw InvalidInput("loader: a batch of 0 samples");
    if (batches() == 0) return;
    if (options_.prefetch == 0)
        inline_batch_ = std::make_unique<Batch>(options_.batch_size, dataset.field_bytes());
    else ring_ = std::make_unique<Ring>(*this);
}

Loader::~Loader() = default;

std::size_t Loader::batches() const {
    const std::size_t rest = options_.drop_last ? 0 : options_.batch_size - 1;
    return (indices_.size() + rest) / options_.batch_size;
}

std::span<const std::size_t> Loader::indices_of(std::size_t batch) const {
    const std::size_t begin = batch * options_.batch_size;
    return std::span(indices_).subspan(begin, std::min(options_.batch_size, indices_.size() - begin));
}

const Batch* Loader::next() {
    if (delivered_ == batches()) return nullptr;
    const Batch* batch = nullptr;
    if (ring_) {
        batch = ring_->wait_for(delivered_);
    } else {
        inline_batch_->read(dataset_, indices_of(delivered_));
        batch = inline_batch_.get();
    }
    ++delivered_;
    return batch;
}

}  // namespace ddp
