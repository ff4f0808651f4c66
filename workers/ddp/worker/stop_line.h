#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "ddp/worker/segment_map.h"
#include "env/worker_env.h"

namespace ddp {

/// This rank's part in the agreed stop (launcher/head/control/stop_agreement.h), in the launcher's segment.
class StopLine {
  public:
    /// Null without a launcher, where its segment cannot be reached, and for a rank of another launcher that
    /// runs inside one of its workers.
    static std::unique_ptr<StopLine> open(const ddprun::WorkerEnv& env);

    /// See Lifeline::should_stop.
    bool should_stop(std::uint64_t step);
    /// Why the launcher asks for the stop.
    [[nodiscard]] std::string reason() const;

  private:
    StopLine(std::unique_ptr<SegmentMap> segment, std::uint32_t index)
        : segment_(std::move(segment)), line_(segment_->line(index)) {}

    std::unique_ptr<SegmentMap> segment_;
    ddprun::RankLine& line_;
};

}  // namespace ddp
