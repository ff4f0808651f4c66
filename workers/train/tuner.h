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

    /// The device is current. Throws ddp::Error.
    Tuner(std::shared_ptr<const ddp::cuda::Gpu> gpu, ddp::cuda::Stream stream);

    /// For whose life things are timed.
    class Session {
      public:
        explicit Session(Tuner& tuner) : tuner_(tuner) { tuner_.is_open_ = true; }
        ~Session() { tuner_.is_open_ = false; }
        Session(const Session&) = delete;
        Session& operator=(const Session&) = delete;

      private:
        Tuner& tuner_;
    };
    [[nodiscard]] Session open() { return Session(*this); }
    /// In a session, but not while the stream is being captured: nothing runs then.
    [[nodiscard]] bool may_time() const;
    /// Milliseconds of ways 0 to `ways` - 1; kNever where there is none, 0 where there is no other. Waits for
    /// the stream. Throws ddp::Error, with how to do without, when something fails.
    std::vector<double> time(std::size_t ways, const Run& run);
    /// How long time() has taken so far.
    [[nodiscard]] double seconds() const { return seconds_; }

  private:
    std::vector<double> look_twice(std::size_t ways, const Run& run);
    double measure(std::size_t way, int repetitions, const Run& run) const;
    /// Until the device's clocks have risen, the first time. What the way takes, roughly.
    double warm_up(std::size_t way, const Run& run);

    std::shared_ptr<const ddp::cuda::Gpu> gpu_;
    ddp::cuda::Stream stream_;
    ddp::cuda::Event begin_, end_;
    double warm_milliseconds_ = 0;
    double seconds_ = 0;
    int depth_ = 0;  ///< of calls of time() in each other
    bool is_open_ = false;
};

}  // namespace train
