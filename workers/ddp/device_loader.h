#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "ddp/loader.h"
#include "ddp/process_group.h"

namespace ddp {

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
    /// Throws InvalidInput for a batch size or a prefetch of 0 or a device that is none, Error when the
    /// device or its memory cannot be had.
    DeviceLoader(const Dataset& dataset, std::vector<std::size_t> indices, DeviceLoaderOptions options);
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
    std::size_t delivered_ = 0;
};

}  // namespace ddp
