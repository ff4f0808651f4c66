#pragma once

#include <cstdint>

#include "ddp/process_group.h"
#include "ddp/recovery.h"

namespace ddp {

/// What one rank has done in an epoch, or all ranks together.
struct Sums {
    double loss = 0;  ///< of all samples
    double samples = 0;
    double samples_per_second = 0;
};

inline Sums sum_over_ranks(ProcessGroup& group, const Sums& mine) {
    Sums all;
    for (const Sums& one : group.all_gather_values(mine)) {
        all.loss += one.loss;
        all.samples += one.samples;
        all.samples_per_second += one.samples_per_second;
    }
    return all;
}

/// The sums of one rank in the epoch that goes on, so that the repeat of a unit changes nothing. The loss of
/// a step is known too late for the copy of Own values that belongs to the step. It is thus added when the
/// next unit begins, each time that this unit does: a repeat begins with the copied sums.
class EpochSums {
  public:
    void keep_in(Recovery& recovery) {
        using enum Recovery::Kind;
        recovery.keep_value("epochs.epoch", epoch_, Own);
        recovery.keep_value("epochs.loss", loss_, Own);
        recovery.keep_value("epochs.samples", samples_, Own);
    }
    /// Begins a unit of this epoch, after so many committed units.
    void begin_unit(std::uint64_t epoch, std::uint64_t units) {
        if (epoch_ != epoch) {
            epoch_ = epoch;
            loss_ = samples_ = 0;
        }
        if (last_.units != units) return;
        loss_ += last_.loss;
        samples_ += last_.samples;
    }
    /// A step was committed, as the last of so many units.
    void add(std::uint64_t units, double mean_loss, double samples) {
        last_ = {units, mean_loss * samples, samples};
    }
    [[nodiscard]] double loss() const { return loss_; }
    [[nodiscard]] double samples() const { return samples_; }

  private:
    struct Step {
        std::uint64_t units = UINT64_MAX;  ///< the most: there was none
        double loss = 0, samples = 0;
    };
    std::uint64_t epoch_ = 0;
    double loss_ = 0, samples_ = 0;  ///< without the last step
    Step last_;                      ///< of this process
};

}  // namespace ddp
