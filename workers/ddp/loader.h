#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "ddp/types.h"

namespace ddp {

/// Samples of fixed size, by index. A sample has one or more fields ({image, label}), each of some bytes.
class Dataset {
  public:
    virtual ~Dataset() = default;
    [[nodiscard]] virtual std::size_t size() const = 0;
    /// The size in bytes of each field of one sample.
    [[nodiscard]] virtual std::vector<std::size_t> field_bytes() const = 0;
    /// Copies sample `index` into one span per field. Called by the loader's threads: by `num_workers` of
    /// them at once, each with another sample, so with one worker by one thread at a time. None of them is
    /// the loader's caller, unless the loader has no threads. May throw: Loader::next throws the exception
    /// again.
    virtual void read(std::size_t index, std::span<const std::span<std::byte>> fields) const = 0;
};

/// A data set whose samples a function reads or decodes:
///
///     const ddp::FunctionDataset images(files.size(), {kPixels * sizeof(float), sizeof(std::int32_t)},
///                                       [&](std::size_t index, ddp::FunctionDataset::Fields fields) {
///                                           decode(files[index], fields[0]);
///                                           std::memcpy(fields[1].data(), &labels[index], 4);
///                                       });
class FunctionDataset final : public Dataset {
  public:
    using Fields = std::span<const std::span<std::byte>>;
    using Read = std::function<void(std::size_t index, Fields fields)>;
    /// `read` is called as Dataset::read is: by several threads at once where a loader has several workers.
    /// Throws InvalidInput for an empty function.
    FunctionDataset(std::size_t size, std::vector<std::size_t> field_bytes, Read read);
    [[nodiscard]] std::size_t size() const override { return size_; }
    [[nodiscard]] std::vector<std::size_t> field_bytes() const override { return field_bytes_; }
    void read(std::size_t index, Fields fields) const override { read_(index, fields); }

  private:
    std::size_t size_;
    std::vector<std::size_t> field_bytes_;
    Read read_;
};

/// `prefetch` says how far the loader reads ahead, which is its memory (prefetch + 1 batches, whatever the
/// number of workers); `num_workers` says how many threads share that work. The threads share the samples of
/// each batch, so several help with a prefetch of 1 too. Batches and samples arrive in the same order with
/// any values.
struct LoaderOptions {
    std::size_t batch_size = 1;
    bool drop_last = false;
    /// Number of batches that are read ahead; 0: no threads, next() reads.
    std::size_t prefetch = 2;
    /// Number of threads that read, at most 1024; 0: no threads, next() reads, and `prefetch` has no effect.
    std::size_t num_workers = 1;
};

/// One batch: every field contiguous over its samples, 64-byte aligned.
class Batch {
  public:
    Batch(std::size_t capacity, std::span<const std::size_t> field_bytes);
    Batch(Batch&&) = default;
    [[nodiscard]] std::size_t size() const { return size_; }
    /// Throws InvalidInput for a field that samples do not have.
    [[nodiscard]] std::span<const std::byte> bytes(std::size_t field) const;
    template <class T>
    [[nodiscard]] std::span<const T> field(std::size_t which) const {
        const std::span<const std::byte> raw = bytes(which);
        return {reinterpret_cast<const T*>(raw.data()), raw.size() / sizeof(T)};
    }

  private:
    friend class Loader;
    struct Field {
        std::size_t bytes;  ///< size of the field in one sample
        std::shared_ptr<std::byte> memory;
    };
    void read(const Dataset& dataset, std::span<const std::size_t> indices, std::size_t begin,
              std::size_t end);

    std::vector<Field> fields_;
    std::size_t size_ = 0;
};

class Batching;
class DistributedSampler;

/// Delivers the samples `indices` of a data set in batches, in that order, once. Threads read ahead into a
/// ring of batches, so memory does not grow with the data set. The data set is borrowed.
class Loader {
  public:
    /// Throws InvalidInput for a batch size of 0, for an index that is not below the data set's size, and for
    /// several workers with a prefetch of 0.
    Loader(const Dataset& dataset, std::vector<std::size_t> indices, LoaderOptions options);
    /// Delivers the rest of the sampler's epoch. The sampler, which is borrowed, advances by each batch that
    /// next() delivers, not by those read ahead: a checkpoint between two calls of next() holds the position
    /// behind the last delivered batch. With drop_last the sampler ends before the incomplete last batch.
    Loader(const Dataset& dataset, DistributedSampler& sampler, LoaderOptions options);
    /// Stops reading ahead; waits for the reads in progress and ends the threads.
    ~Loader();
    Loader(const Loader&) = delete;
    Loader& operator=(const Loader&) = delete;

    /// The next batch, valid until the next call, or nullptr at the end. Throws the data set's exception for
    /// a sample of this batch (the first one that failed), after the batches before it, on this rank only;
    /// every later call throws again.
    const Batch* next();
    [[nodiscard]] std::size_t batches() const;

  private:
    class Ring;

    const Dataset& dataset_;
    LoaderOptions options_;
    std::unique_ptr<const Batching> batching_;
    DistributedSampler* sampler_ = nullptr;
    std::size_t delivered_ = 0;
    std::unique_ptr<Batch> inline_batch_;  ///< set without threads
    std::unique_ptr<Ring> ring_;           ///< set with threads
};

struct DeviceLoaderOptions {
    std::size_t batch_size = 1;
    bool drop_last = false;
    /// Number of batches that are read and copied ahead; at least 1.
    std::size_t prefetch = 2;
    /// Number of threads that read, 1 to 1024; see LoaderOptions.
    std::size_t num_workers = 1;
    Device device = {};
    /// cudaStream_t that uses the batches.
    void* stream = nullptr;
};

/// One batch in device memory: every field contiguous over its samples, 256-byte aligned.
struct DeviceBatch {
    struct Field {
        void* data = nullptr;
        std::size_t bytes = 0;
    };
    std::size_t size = 0;  ///< samples in it
    std::vector<Field> fields;
};

/// A Loader whose batches arrive in the memory of a CUDA device. Threads read samples into page-locked
/// memory and copy them on the loader's own stream; that stream and the user's wait for each other through
/// events, and the host waits only when the data set is slower than the training. The data set is borrowed.
///
/// The memory of a batch changes from call to call: for a CUDA graph, copy it to a fixed place before the
/// launch.
class DeviceLoader {
  public:
    /// Throws InvalidInput for a batch size, a prefetch or workers of 0, an index that is not below the data
    /// set's size, or a device that does not exist, Error when the device or its memory is not available.
    DeviceLoader(const Dataset& dataset, std::vector<std::size_t> indices, DeviceLoaderOptions options);
    /// Delivers the rest of the sampler's epoch, as Loader does.
    DeviceLoader(const Dataset& dataset, DistributedSampler& sampler, DeviceLoaderOptions options);
    /// Stops reading ahead; waits for the reads in progress and for the device.
    ~DeviceLoader();
    DeviceLoader(const DeviceLoader&) = delete;
    DeviceLoader& operator=(const DeviceLoader&) = delete;

    /// The next batch, or nullptr at the end. Work put on the user's stream from now on sees it complete. It
    /// is valid for work put there before the next call. Throws the errors of Loader::next.
    const DeviceBatch* next();
    [[nodiscard]] std::size_t batches() const;

  private:
    class Ring;
    std::unique_ptr<const Batching> batching_;
    std::unique_ptr<Ring> ring_;
    DistributedSampler* sampler_ = nullptr;
    std::size_t delivered_ = 0;
};

}  // namespace ddp
