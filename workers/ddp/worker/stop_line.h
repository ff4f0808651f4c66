#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "ddp/worker/segment_map.h"
#include "env/worker_env.h"

namespace ddp {

/// This rank's part in the agreed stop (launcher/head/control/stop_agreement.h), in the launcher's segment.
class StopLine {
  public:
    /// Null without a launcher, or where its segment cannot be reached.
    static std::unique_ptr<StopLine> open(const ddprun::WorkerEnv& env);

    /// See Lifeline::should_stop.
    bool should_stop(std::uint64_t step);
    /// Why the launcher asks for the stop.
    [[nodiscard]] std::string reason() const;

  private:
    StopLine(ddprun::UniqueFd fd, int rank);

    SegmentMap segment_;
    ddprun::RankLine& line_;
};

}  // namespace ddp
