#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <vector>

#include "ddp/types.h"

namespace ddp {

/// Samples of fixed size, by index. A sample has one or more fields ({image, label}), each some bytes.
class Dataset {
  public:
    virtual ~Dataset() = default;
    [[nodiscard]] virtual std::size_t size() const = 0;
    /// Bytes of each field of one sample.
    [[nodiscard]] virtual std::vector<std::size_t> field_bytes() const = 0;
    /// Copies sample `index` into one span per field. Called by one thread at a time, not always the caller's
    /// of the loader. May throw: the exception comes out of Loader::next.
    virtual void read(std::size_t index, std::span<const std::span<std::byte>> fields) const = 0;
};

struct LoaderOptions {
    std::size_t batch_size = 1;
    /// Leave an incomplete last batch out.
    bool drop_last = false;
    /// Batches read ahead by a thread. 0: no thread, next() reads.
    std::size_t prefetch = 2;
};

/// One batch: every field contiguous over its samples, 64-byte aligned.
class Batch {
  public:
    Batch(std::size_t capacity, std::span<const std::size_t> field_bytes);
    /// Samples in it.
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
    struct FreeAligned {
        void operator()(std::byte* memory) const;
    };
    struct Field {
        std::size_t bytes;  ///< of one sample
        std::unique_ptr<std::byte[], FreeAligned> memory;
    };
    void read(const Dataset& dataset, std::span<const std::size_t> indices);

    std::vector<Field> fields_;
    std::size_t size_ = 0;
};

class Batching;
class DistributedSampler;

/// Batches of a data set in the order of `indices`, once. A bounded ring of batches is filled ahead by one
/// thread; memory does not grow with the data set. The data set is borrowed.
class Loader {
  public:
    /// Throws InvalidInput for a batch size of 0, and for an index that is not below the data set's size.
    Loader(const Dataset& dataset, std::vector<std::size_t> indices, LoaderOptions options);
    /// The rest of the sampler's epoch. The sampler, which is borrowed, advances by each batch that next()
    /// delivers, not by those read ahead: a checkpoint between two calls of next() has the place behind the
    /// last batch that was seen. With drop_last the sampler stands before the incomplete batch at the end.
    Loader(const Dataset& dataset, DistributedSampler& sampler, LoaderOptions options);
    /// Stops reading ahead; waits for a read in progress.
    ~Loader();
    Loader(const Loader&) = delete;
    Loader& operator=(const Loader&) = delete;

    /// The next batch, or nullptr at the end. It is valid until the next call. Throws what the data set threw
    /// for a sample of this batch; the batches before it are delivered first, and every later call throws
    /// again.
    const Batch* next();
    /// Batches in all.
    [[nodiscard]] std::size_t batches() const;

  private:
    class Ring;

    const Dataset& dataset_;
    LoaderOptions options_;
    std::unique_ptr<const Batching> batching_;
    DistributedSampler* sampler_ = nullptr;
    std::size_t delivered_ = 0;
    std::unique_ptr<Batch> inline_batch_;  ///< without a thread
    std::unique_ptr<Ring> ring_;           ///< with one
};

struct DeviceLoaderOptions {
    std::size_t batch_size = 1;
    /// Leave an incomplete last batch out.
    bool drop_last = false;
    /// Batches that are read and copied ahead; at least 1.
    std::size_t prefetch = 2;
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

/// Loader whose batches arrive in the memory of a CUDA device. A thread reads samples into page-locked memory
/// and copies them on a stream of its own; that stream and the user's wait for each other through events, the
/// host waits only when the data set is slower than the training. The data set is borrowed.
///
/// The memory of a batch changes from call to call: what a CUDA graph reads is a copy made before its launch.
class DeviceLoader {
  public:
    /// Throws InvalidInput for a batch size or a prefetch of 0, an index that is not below the data set's
    /// size, or a device that is none, Error when the device or its memory cannot be had.
    DeviceLoader(const Dataset& dataset, std::vector<std::size_t> indices, DeviceLoaderOptions options);
    /// The rest of the sampler's epoch, as of Loader.
    DeviceLoader(const Dataset& dataset, DistributedSampler& sampler, DeviceLoaderOptions options);
    /// Stops reading ahead; waits for a read in progress and for the device.
    ~DeviceLoader();
    DeviceLoader(const DeviceLoader&) = delete;
    DeviceLoader& operator=(const DeviceLoader&) = delete;

    /// The next batch, or nullptr at the end. What the user's stream is given from now on sees it complete.
    /// It is valid until the next call, for what the stream was given by then. Throws as Loader::next.
    const DeviceBatch* next();
    /// Batches in all.
    [[nodiscard]] std::size_t batches() const;

  private:
    class Ring;
    std::unique_ptr<const Batching> batching_;
    std::unique_ptr<Ring> ring_;
    DistributedSampler* sampler_ = nullptr;
    std::size_t delivered_ = 0;
};

}  // namespace ddp
