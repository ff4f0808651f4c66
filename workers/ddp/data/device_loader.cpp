#include <utility>

#include "ddp/cuda/graph.h"
#include "ddp/cuda/memory.h"
#include "ddp/data/batching.h"
#include "ddp/data/read_ahead.h"
#include "ddp/loader.h"
#include "ddp/sampler.h"
#include "ddp/trace/trace.h"
#include "ddp/types.h"
#include "ddp/worker/slices.h"

namespace ddp {
namespace {

/// Alignment in bytes of the fields of a batch.
constexpr std::size_t kFieldAlignment = 256;

std::size_t total_bytes(std::span<const std::size_t> field_bytes, std::size_t samples) {
    std::size_t total = 0;
    for (const std::size_t bytes : field_bytes) total += round_up(bytes * samples, kFieldAlignment);
    return total;
}

}  // namespace

/// Slots for batches, each in page-locked and in device memory, and the threads that fill them.
class DeviceLoader::Ring {
  public:
    Ring(const Dataset& dataset, const Batching& batching, const DeviceLoaderOptions& options)
        : dataset_(dataset),
          batching_(batching),
          field_bytes_(dataset.field_bytes()),
          batch_size_(batching.largest()),
          gpu_(cuda::Gpu::of(options.device.index)),
          user_stream_(static_cast<cuda::Stream>(options.stream)),
          copies_(gpu_) {
        const std::size_t bytes = total_bytes(field_bytes_, batch_size_);
        for (std::size_t s = 0; s < batching.slots(options.prefetch); ++s)
            slots_.push_back(std::make_unique<Slot>(gpu_, bytes));
        reader_ = make_owned<ReadAhead>(ReadAhead::Reading{
            .batches = batching.batches(),
            .slots = slots_.size(),
            .threads = batching.threads(options.num_workers),
            .size_of = [this](std::size_t batch) { return batching_.samples_of(batch).size(); },
            .read = [this](const ReadAhead::Run& run) { fill(run); },
            .complete = [this](std::size_t batch) { copy_to_device(batch); }});
    }

    const DeviceBatch* take(std::size_t batch) {
        const cuda::DeviceScope here(gpu_->index());
        // The previous batch is given back, but earlier work on the stream may still use it.
        if (batch > 0) slot_of(batch - 1).used.record(user_stream_);
        reader_->take(batch);
        Slot& slot = slot_of(batch);
        slot.copied.block(user_stream_);
        return &slot.batch;
    }

  private:
    struct Slot {
        Slot(const std::shared_ptr<const cuda::Gpu>& gpu, std::size_t bytes)
            : pinned(gpu, bytes), on_device(gpu, bytes) {}
        cuda::PinnedMemory pinned;
        cuda::DeviceMemory on_device;
        cuda::Event copied;  ///< on the loader's stream
        cuda::Event used;    ///< on the user's stream
        DeviceBatch batch;
    };
    Slot& slot_of(std::size_t batch) { return *slots_[batch % slots_.size()]; }

    // On a thread of the loader. An event that was never recorded blocks no stream.
    void fill(const ReadAhead::Run& run) {
        gpu_->make_current();
        cuda::leave_captures_alone();
        Slot& slot = slot_of(run.batch);
        slot.copied.synchronize();
        std::vector<FieldMemory> targets;
        std::size_t offset = 0;
        for (const std::size_t bytes : field_bytes_) {
            targets.push_back({slot.pinned.get() + offset, bytes});
            offset += round_up(bytes * batch_size_, kFieldAlignment);
        }
        read_samples(dataset_, batching_.samples_of(run.batch), run.begin, run.end, targets);
    }

    // On the thread that has read the last samples.
    void copy_to_device(std::size_t batch) {
        Slot& slot = slot_of(batch);
        describe(slot, batching_.samples_of(batch).size());
        slot.used.block(copies_.get());
        // One copy of all fields: padding costs less than a second call.
        cuda::copy(slot.on_device.get(), slot.pinned.get(), slot.pinned.bytes(), copies_.get());
        slot.copied.record(copies_.get());
    }

    void describe(Slot& slot, std::size_t samples) const {
        slot.batch.size = samples;
        slot.batch.fields.clear();
        std::size_t offset = 0;
        for (const std::size_t bytes : field_bytes_) {
            slot.batch.fields.push_back({slot.on_device.get() + offset, bytes * samples});
            offset += round_up(bytes * batch_size_, kFieldAlignment);
        }
    }

    const Dataset& dataset_;
    const Batching& batching_;
    const std::vector<std::size_t> field_bytes_;
    const std::size_t batch_size_;
    const std::shared_ptr<const cuda::Gpu> gpu_;
    const cuda::Stream user_stream_;
    const cuda::OwnedStream copies_;
    std::vector<std::unique_ptr<Slot>> slots_;
    OwnedByProcess<ReadAhead> reader_;  // destroyed first
};

DeviceLoader::DeviceLoader(const Dataset& dataset, std::vector<std::size_t> indices,
                           DeviceLoaderOptions options) {
    check_batches("device loader", dataset, indices, options.batch_size);
    if (options.prefetch == 0) throw InvalidInput("device loader: a prefetch of 0 batches");
    if (options.num_workers == 0) throw InvalidInput("device loader: 0 workers; a thread must read ahead");
    check_workers("device loader", options.num_workers);
    if (options.device.kind != Device::Kind::Cuda)
        throw InvalidInput("device loader: the device is not a CUDA device; Loader is for host memory");
    batching_ = std::make_unique<const Batching>(
        std::move(indices), LoaderOptions{options.batch_size, options.drop_last, options.prefetch});
    if (batches() > 0) ring_ = std::make_unique<Ring>(dataset, *batching_, options);
}

DeviceLoader::DeviceLoader(const Dataset& dataset, DistributedSampler& sampler, DeviceLoaderOptions options)
    : DeviceLoader(dataset, sampler.rest_of_epoch(), std::move(options)) {
    sampler_ = &sampler;
    if (batches() == 0) sampler.note_nothing_left();
}

DeviceLoader::~DeviceLoader() = default;

std::size_t DeviceLoader::batches() const { return batching_->batches(); }

const DeviceBatch* DeviceLoader::next() {
    if (delivered_ == batches()) return nullptr;
    const trace::Scope traced(trace::TraceKind::Loader, "next batch");
    const DeviceBatch* const batch = ring_->take(delivered_);
    ++delivered_;
    if (sampler_ != nullptr) sampler_->advance(batch->size);
    return batch;
}

}  // namespace ddp
