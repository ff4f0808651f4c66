#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <vector>

#include "ddp/cuda/gpu.h"
#include "ddp/cuda_api.h"

namespace train {

/// Times several ways to one result on a stream, by events. Not thread-safe.
class Tuner {
  public:
    /// Queues one way, or queues nothing and returns false: there is no such way. Is called many times: to
    /// repeat it may change no result.
    using Run = std::function<bool(std::size_t way)>;

    /// The device is current. Throws ddp::Error, as do all calls.
    Tuner(std::shared_ptr<const ddp::cuda::Gpu> gpu, ddp::cuda::Stream stream);

    /// Not while the stream is being captured: nothing runs then.
    [[nodiscard]] bool may_time() const;
    /// Milliseconds of ways 0 to `ways` - 1; kNever where there is none, 0 where there is no other. Waits for
    /// the stream.
    std::vector<double> time(std::size_t ways, const Run& run);
    /// How long time() has taken so far.
    [[nodiscard]] double seconds() const { return seconds_; }

  private:
    double measure(std::size_t way, int repetitions, const Run& run) const;
    void warm_up(std::size_t way, const Run& run);

    std::shared_ptr<const ddp::cuda::Gpu> gpu_;
    ddp::cuda::Stream stream_;
    ddp::cuda::Event begin_, end_;
    double warm_milliseconds_ = 0;
    double seconds_ = 0;
};

}  // namespace train
