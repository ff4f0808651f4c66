#include "feed.h"

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

/// Samples in host memory, batches copied to the device ahead of their use.
class StreamedFeed final : public Feed {
  public:
    explicit StreamedFeed(const Station& station) : station_(station) {}

    void begin(const Subset& subset, std::vector<std::size_t> indices, ddp::LoaderOptions options) override {
        loader_.reset();  // its memory first: there may not be room for two
        loader_.emplace(subset, std::move(indices),
                        ddp::DeviceLoaderOptions{.batch_size = options.batch_size,
                                                 .drop_last = options.drop_last,
                                                 .device = station_.choice.device,
                                                 .stream = station_.stream_handle()});
    }
    BatchSource next() override {
        const ddp::DeviceBatch* const batch = loader_->next();
        if (batch == nullptr) return {};
        return {static_cast<const float*>(batch->fields[0].data),
                static_cast<const std::int32_t*>(batch->fields[1].data), nullptr, batch->size};
    }
    std::string describe() const override { return "samples in host memory"; }

  private:
    const Station& station_;
    std::optional<ddp::DeviceLoader> loader_;
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

/// Whether the samples take less than a quarter of the memory that is free. Ranks that share a device each
/// take theirs, and so do activations.
bool take_little(const Samples& samples) {
    constexpr std::size_t kShare = 4;
    std::size_t free = 0, total = 0;
    ddp::cuda::check(cudaMemGetInfo(&free, &total), "asking for the free memory of a CUDA device");
    return samples.values.size() * sizeof(float) < free / kShare && samples.count() <= UINT32_MAX;
}

}  // namespace

std::unique_ptr<Feed> make_feed(const Station& station, const Samples& samples, const Options& options) {
    if (!station.gpu) return std::make_unique<HostFeed>();
    const bool keep = options.keep_data == KeepData::Device ||
                      (options.keep_data == KeepData::Auto && take_little(samples));
    if (keep) return std::make_unique<ResidentFeed>(station, samples);
    return std::make_unique<StreamedFeed>(station);
}

}  // namespace train
