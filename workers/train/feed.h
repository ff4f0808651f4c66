#pragma once

#include <memory>
#include <string>
#include <vector>

#include "ddp/loader.h"
#include "options.h"
#include "samples/data.h"
#include "station.h"

namespace train {

/// Batches of samples where a compute takes them from, pass after pass.
class Feed {
  public:
    virtual ~Feed() = default;
    /// Begins a pass over the samples of those indices, in that order. A pass in progress is left. Borrows
    /// the subset.
    virtual void begin(const Subset& subset, std::vector<std::size_t> indices,
                       ddp::LoaderOptions options) = 0;
    /// The next batch; one of no rows ends the pass. Valid until the next call, for what was queued on the
    /// station's stream before it.
    virtual BatchSource next() = 0;
    /// "samples on the device (12 MiB)", "": for the lines that say what is done.
    [[nodiscard]] virtual std::string describe() const { return ""; }
};

/// The station and the samples are borrowed. In a GPU's memory the samples are kept as a whole where they
/// take little of it, or as the options say; else batches are copied ahead of the computation
/// (ddp::DeviceLoader).
std::unique_ptr<Feed> make_feed(const Station& station, const Samples& samples, const Options& options);

}  // namespace train
