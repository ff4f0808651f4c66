#pragma once

#include <memory>
#include <string>
#include <vector>

#include "compute_device.h"
#include "ddp/loader.h"
#include "options.h"
#include "samples/data.h"

namespace train {

/// Delivers batches in the memory, host or device, that `Compute` reads.
class BatchFeed {
  public:
    virtual ~BatchFeed() = default;
    /// Begins a pass over the samples of those indices, in that order; ends a pass in progress. Borrows the
    /// subset.
    virtual void begin(const Subset& subset, std::vector<std::size_t> indices,
                       ddp::LoaderOptions options) = 0;
    /// The next batch; one without rows ends the pass. Valid until the next call, for work queued on the
    /// device's stream before it.
    virtual BatchSource next() = 0;
    /// "samples on the device (12 MiB)" or "": for the start-up line.
    [[nodiscard]] virtual std::string describe() const { return ""; }
};

/// Makes a feed; device and samples are borrowed. All samples stay in a GPU's memory when they take little of
/// it, or when the options say so; otherwise batches are copied ahead of the computation (ddp::DeviceLoader).
std::unique_ptr<BatchFeed> make_feed(const ComputeDevice& device, const Samples& samples,
                                     const Options& options);

}  // namespace train
