#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "ddp/loader.h"
#include "env/result.h"

namespace train {

inline constexpr std::int64_t kMostClasses = 100'000;

/// Labelled samples in memory: rows of `features` values with one class each.
struct Samples {
    std::string name;  ///< for messages: "digits"
    std::size_t features = 0;
    std::size_t classes = 0;
    std::vector<float> values;  ///< row major; image values are divided by the largest magnitude in the file
    std::vector<std::int32_t> labels;
    bool needs_scaling = false;  ///< columns have different scales and are not scaled yet (Scaling)

    [[nodiscard]] std::size_t count() const { return labels.size(); }
    /// A hash of all of this except the name: equal on ranks that read the same data.
    [[nodiscard]] std::uint64_t fingerprint() const;
};

/// Reads IDX images with their labels, or CSV, detected by content. With `labels` "" they are beside the
/// images, named as MNIST's. Error: NotFound when a file is missing, InvalidArgument naming file, place and
/// fault.
ddprun::Result<Samples> read_samples(const std::string& path, const std::string& labels);

/// The size of generated samples: points around one random corner of a cube per class, far enough apart to be
/// learned. "synthetic:SAMPLES,FEATURES,CLASSES" gives the numbers; the same text and seed give the same
/// bits.
struct SyntheticSize {
    std::size_t samples = 0, features = 0, classes = 0;
};
/// nullopt when the text names a file. Error: InvalidArgument naming the fault.
ddprun::Result<std::optional<SyntheticSize>> parse_synthetic(std::string_view data);
Samples make_samples(const SyntheticSize& size, std::uint64_t seed);

/// The path of the installed digits: beside the program (build) or in its datadir (installation). Error:
/// NotFound, listing the places.
ddprun::Result<std::string> find_digits();

/// A subset of the samples, as the loader reads it: field 0 the values (float), field 1 the label (int32).
class Subset final : public ddp::Dataset {
  public:
    Subset(const Samples& samples, std::vector<std::size_t> rows)
        : samples_(samples), rows_(std::move(rows)) {}
    [[nodiscard]] std::size_t size() const override { return rows_.size(); }
    [[nodiscard]] std::vector<std::size_t> field_bytes() const override;
    void read(std::size_t index, std::span<const std::span<std::byte>> fields) const override;
    /// The index in the samples of sample `index` of this subset.
    [[nodiscard]] std::size_t row(std::size_t index) const { return rows_.at(index); }

  private:
    const Samples& samples_;
    std::vector<std::size_t> rows_;
};

/// Rows for training and a tenth held out: the same rows for the same number of samples.
struct Split {
    std::vector<std::size_t> training;
    std::vector<std::size_t> held_out;
};
Split split_samples(std::size_t count);

}  // namespace train
