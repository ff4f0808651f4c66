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

/// Labelled samples in memory: rows of `features` values and one class each.
struct Samples {
    std::string name;  ///< for messages: "digits"
    std::size_t features = 0;
    std::size_t classes = 0;
    std::vector<float> values;  ///< row major; of images divided by the largest magnitude in the file
    std::vector<std::int32_t> labels;
    bool needs_scaling = false;  ///< columns are of different scale, as they were read (Scaling)

    [[nodiscard]] std::size_t count() const { return labels.size(); }
    /// A hash of everything above but the name: equal on ranks that read the same data.
    [[nodiscard]] std::uint64_t fingerprint() const;
};

/// Reads IDX images with their labels, or CSV; looks at the content to know which. `labels` "" looks beside
/// the images, by MNIST's naming. Error: NotFound when a file is missing, InvalidArgument naming file, place
/// and what is wrong with it.
ddprun::Result<Samples> read_samples(const std::string& path, const std::string& labels);

/// Samples that are made, not read: points around one random corner of a cube per class, far enough apart to
/// be learned. "synthetic:SAMPLES,FEATURES,CLASSES" says how many; the same words and seed give the same
/// bits.
struct SyntheticSize {
    std::size_t samples = 0, features = 0, classes = 0;
};
/// nullopt: the text names a file. Error: InvalidArgument naming what is wrong.
ddprun::Result<std::optional<SyntheticSize>> parse_synthetic(std::string_view data);
Samples make_samples(const SyntheticSize& size, std::uint64_t seed);

/// Where the digits that come with the program are: beside it (build) or in its datadir (installation).
/// Error: NotFound, listing where it looked.
ddprun::Result<std::string> find_digits();

/// Some of the samples, as the loader reads them: field 0 the values (float), field 1 the label (int32).
class Subset final : public ddp::Dataset {
  public:
    Subset(const Samples& samples, std::vector<std::size_t> rows)
        : samples_(samples), rows_(std::move(rows)) {}
    [[nodiscard]] std::size_t size() const override { return rows_.size(); }
    [[nodiscard]] std::vector<std::size_t> field_bytes() const override;
    void read(std::size_t index, std::span<const std::span<std::byte>> fields) const override;
    /// Of the samples, which of them this one is.
    [[nodiscard]] std::size_t row(std::size_t index) const { return rows_.at(index); }

  private:
    const Samples& samples_;
    std::vector<std::size_t> rows_;
};

/// Rows for training and a tenth held out: always the same ones of the same number.
struct Split {
    std::vector<std::size_t> training;
    std::vector<std::size_t> held_out;
};
Split split_samples(std::size_t count);

}  // namespace train
