#include "feed.h"

#include <fmt/core.h>

#include <array>
#include <cstring>
#include <optional>
#include <utility>

#include "env/text.h"

namespace train {
namespace {

using ddp::cuda::DeviceMemory;
using ddp::cuda::PinnedMemory;

BatchSource rows_of(const ddp::Batch& batch) {
    return {batch.field<float>(0).data(), batch.field<std::int32_t>(1).data(), nullptr, batch.size()};
}

class HostFeed final : public Feed {
  public:
    void begin(const Subset& subset, std::vector<std::size_t> indices, ddp::LoaderOptions options) override {
        loader_.emplace(subset, std::move(indices), options);
    }
    BatchSource next() override {
        const ddp::Batch* const batch = loader_->next();
        return batch == nullptr ? BatchSource{} : rows_of(*batch);
    }

  private:
    std::optional<ddp::Loader> loader_;
};

/// A ring of slots, each with page-locked memory and the device memory that it is copied to. A slot is filled
/// again when its copy has ended (the host looks) and its batch has been used (the copies' stream looks).
class StreamedFeed final : public Feed {
  public:
    StreamedFeed(const Station& station, const Samples& samples, std::size_t largest_batch)
        : gpu_(station.gpu), stream_(station.stream->get()), copies_(gpu_) {
        value_bytes_ = largest_batch * samples.features * sizeof(float);
        value_bytes_ = (value_bytes_ + kAlignment - 1) / kAlignment * kAlignment;
        for (auto& slot : slots_)
            slot = std::make_unique<Slot>(gpu_, value_bytes_ + largest_batch * sizeof(std::int32_t));
    }
    ~StreamedFeed() override {
        // The slots' memory may still be read. What has failed by now was thrown elsewhere.
        (void)gpu_->api().stream_synchronize(copies_.get());
        (void)gpu_->api().stream_synchronize(stream_);
    }

    void begin(const Subset& subset, std::vector<std::size_t> indices, ddp::LoaderOptions options) override {
        loader_.emplace(subset, std::move(indices), options);
    }

    BatchSource next() override {
        if (in_use_ != nullptr) in_use_->used.record(stream_);
        in_use_ = nullptr;
        const ddp::Batch* const batch = loader_->next();
        if (batch == nullptr) return {};
        Slot& slot = *slots_[next_++ % slots_.size()];
        slot.copied.synchronize();
        const std::span<const std::byte> values = batch->bytes(0), labels = batch->bytes(1);
        std::memcpy(slot.pinned.get(), values.data(), values.size());
        std::memcpy(slot.pinned.get() + value_bytes_, labels.data(), labels.size());
        slot.used.hold_back(copies_.get());
        copy(slot, 0, values.size());
        copy(slot, value_bytes_, labels.size());
        slot.copied.record(copies_.get());
        slot.copied.hold_back(stream_);
        in_use_ = &slot;
        return {slot.device.as<const float>(),
                reinterpret_cast<const std::int32_t*>(slot.device.get() + value_bytes_), nullptr,
                batch->size()};
    }

    std::string describe() const override { return "samples in host memory"; }

  private:
    static constexpr std::size_t kAlignment = 256;
    struct Slot {
        Slot(const std::shared_ptr<const ddp::cuda::Gpu>& gpu, std::size_t bytes)
            : pinned(gpu, bytes), device(gpu, bytes), copied(gpu->shared_api()), used(gpu->shared_api()) {}
        PinnedMemory pinned;
        DeviceMemory device;
        ddp::cuda::Event copied, used;
    };
    void copy(const Slot& slot, std::size_t at, std::size_t bytes) const {
        ddp::cuda::copy(*gpu_, slot.device.get() + at, slot.pinned.get() + at, bytes, copies_.get());
    }

    std::shared_ptr<const ddp::cuda::Gpu> gpu_;
    ddp::cuda::Stream stream_;
    ddp::cuda::OwnedStream copies_;
    std::optional<ddp::Loader> loader_;
    std::size_t value_bytes_ = 0;  ///< room for a batch's values; its labels follow
    std::array<std::unique_ptr<Slot>, 3> slots_;
    std::size_t next_ = 0;
    Slot* in_use_ = nullptr;
};

/// All samples on the device; a pass copies the order of its rows, a batch is a piece of that.
class ResidentFeed final : public Feed {
  public:
    ResidentFeed(const Station& station, const Samples& samples)
        : gpu_(station.gpu),
          stream_(station.stream->get()),
          values_(gpu_, samples.values.size() * sizeof(float)),
          labels_(gpu_, samples.labels.size() * sizeof(std::int32_t)),
          order_(gpu_, samples.count() * sizeof(std::uint32_t)) {
        ddp::cuda::copy(*gpu_, values_.get(), samples.values.data(), values_.bytes(), stream_);
        ddp::cuda::copy(*gpu_, labels_.get(), samples.labels.data(), labels_.bytes(), stream_);
        ddp::cuda::synchronize(*gpu_, stream_);
    }

    void begin(const Subset& subset, std::vector<std::size_t> indices, ddp::LoaderOptions options) override {
        std::vector<std::uint32_t> rows;
        for (const std::size_t index : indices) rows.push_back(static_cast<std::uint32_t>(subset.row(index)));
        if (options.drop_last) rows.resize(rows.size() / options.batch_size * options.batch_size);
        ddp::cuda::copy(*gpu_, order_.get(), rows.data(), rows.size() * sizeof(std::uint32_t), stream_);
        ddp::cuda::synchronize(*gpu_, stream_);
        batch_size_ = options.batch_size;
        next_ = 0;
        end_ = rows.size();
    }

    BatchSource next() override {
        const std::size_t count = std::min(batch_size_, end_ - next_);
        const std::uint32_t* const rows = order_.as<const std::uint32_t>() + next_;
        next_ += count;
        return {values_.as<const float>(), labels_.as<const std::int32_t>(), rows, count};
    }

    std::string describe() const override {
        return fmt::format("samples on the device ({})", ddprun::format_bytes(values_.bytes()));
    }

  private:
    std::shared_ptr<const ddp::cuda::Gpu> gpu_;
    ddp::cuda::Stream stream_;
    DeviceMemory values_, labels_, order_;
    std::size_t batch_size_ = 1, next_ = 0, end_ = 0;
};

/// Whether the samples take less than a quarter of the memory that is free. Ranks that share a device each
/// take theirs, and so do activations.
bool take_little(const ddp::cuda::Gpu& gpu, const Samples& samples) {
    constexpr std::size_t kShare = 4;
    std::size_t free = 0, total = 0;
    gpu.api().check(gpu.api().mem_get_info(&free, &total), "asking for the free memory of a CUDA device");
    return samples.values.size() * sizeof(float) < free / kShare && samples.count() <= UINT32_MAX;
}

}  // namespace

std::unique_ptr<Feed> make_feed(const Station& station, const Samples& samples, const Options& options,
                                std::size_t largest_batch) {
    if (!station.gpu) return std::make_unique<HostFeed>();
    const bool keep = options.keep_data == KeepData::Device ||
                      (options.keep_data == KeepData::Auto && take_little(*station.gpu, samples));
    if (keep) return std::make_unique<ResidentFeed>(station, samples);
    return std::make_unique<StreamedFeed>(station, samples, largest_batch);
}

}  // namespace train
