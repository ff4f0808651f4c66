#include "batch_feed.h"

#include <fmt/core.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "ddp/loader.h"
#include "env/text.h"

namespace train {
namespace {

using ddp::cuda::DeviceMemory;

BatchSource rows_of(const ddp::Batch& batch) {
    return {batch.field<float>(0).data(), batch.field<std::int32_t>(1).data(), nullptr, batch.size()};
}

class HostFeed final : public BatchFeed {
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

/// Keeps samples in host memory, and copies batches to the device ahead of their use.
class StreamedFeed final : public BatchFeed {
  public:
    explicit StreamedFeed(const ComputeDevice& device) : device_(device) {}

    void begin(const Subset& subset, std::vector<std::size_t> indices, ddp::LoaderOptions options) override {
        loader_.reset();  // frees its memory first: there may not be enough for two
        loader_.emplace(subset, std::move(indices),
                        ddp::DeviceLoaderOptions{.batch_size = options.batch_size,
                                                 .drop_last = options.drop_last,
                                                 .device = device_.choice.device,
                                                 .stream = device_.stream_handle()});
    }
    BatchSource next() override {
        const ddp::DeviceBatch* const batch = loader_->next();
        if (batch == nullptr) return {};
        return {static_cast<const float*>(batch->fields[0].data),
                static_cast<const std::int32_t*>(batch->fields[1].data), nullptr, batch->size};
    }
    std::string describe() const override { return "samples in host memory"; }

  private:
    const ComputeDevice& device_;
    std::optional<ddp::DeviceLoader> loader_;
};

/// Keeps all samples on the device; a pass copies the order of its rows, a batch is a piece of it.
class ResidentFeed final : public BatchFeed {
  public:
    ResidentFeed(const ComputeDevice& device, const Samples& samples)
        : gpu_(device.gpu),
          stream_(device.stream->get()),
          values_(gpu_, samples.values.size() * sizeof(float)),
          labels_(gpu_, samples.labels.size() * sizeof(std::int32_t)),
          order_(gpu_, samples.count() * sizeof(std::uint32_t)) {
        ddp::cuda::copy(values_.get(), samples.values.data(), values_.bytes(), stream_);
        ddp::cuda::copy(labels_.get(), samples.labels.data(), labels_.bytes(), stream_);
        ddp::cuda::synchronize(stream_);
    }

    void begin(const Subset& subset, std::vector<std::size_t> indices, ddp::LoaderOptions options) override {
        std::vector<std::uint32_t> rows;
        for (const std::size_t index : indices) rows.push_back(static_cast<std::uint32_t>(subset.row(index)));
        if (options.drop_last) rows.resize(rows.size() / options.batch_size * options.batch_size);
        ddp::cuda::copy(order_.get(), rows.data(), rows.size() * sizeof(std::uint32_t), stream_);
        ddp::cuda::synchronize(stream_);
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

/// True when the samples take less than a quarter of the free memory. Ranks that share a device each need
/// their part, and so do activations.
bool fits_easily(const Samples& samples) {
    constexpr std::size_t kShare = 4;
    std::size_t free = 0, total = 0;
    ddp::cuda::check(cudaMemGetInfo(&free, &total), "asking for the free memory of a CUDA device");
    return samples.values.size() * sizeof(float) < free / kShare && samples.count() <= UINT32_MAX;
}

}  // namespace

std::unique_ptr<BatchFeed> make_feed(const ComputeDevice& device, const Samples& samples,
                                     const Options& options) {
    if (!device.gpu) return std::make_unique<HostFeed>();
    const bool keep = options.keep_data == KeepData::Device ||
                      (options.keep_data == KeepData::Auto && fits_easily(samples));
    if (keep) return std::make_unique<ResidentFeed>(device, samples);
    return std::make_unique<StreamedFeed>(device);
}

}  // namespace train
