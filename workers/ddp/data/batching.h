#pragma once

#include <algorithm>
#include <cstddef>
#include <span>
#include <utility>
#include <vector>

#include "ddp/loader.h"

namespace ddp {

/// Maps each batch to its samples. For any batch size but 0.
class Batching {
  public:
    Batching(std::vector<std::size_t> indices, const LoaderOptions& options)
        : indices_(std::move(indices)), batch_size_(options.batch_size) {
        const bool has_rest = indices_.size() % batch_size_ != 0;
        batches_ = indices_.size() / batch_size_ + (has_rest && !options.drop_last ? 1 : 0);
    }
    [[nodiscard]] std::size_t batches() const { return batches_; }
    /// The size of the largest batch: the batch size may exceed the number of samples.
    [[nodiscard]] std::size_t largest() const { return std::min(batch_size_, indices_.size()); }
    [[nodiscard]] std::span<const std::size_t> samples_of(std::size_t batch) const {
        const std::size_t begin = batch * batch_size_;
        return std::span(indices_).subspan(begin, std::min(batch_size_, indices_.size() - begin));
    }
    /// The number of threads that can have a sample each.
    [[nodiscard]] std::size_t threads(std::size_t wanted) const { return std::min(wanted, indices_.size()); }
    /// The number of slots when `ahead` batches are read ahead: the caller still holds the previous one.
    [[nodiscard]] std::size_t slots(std::size_t ahead) const { return std::min(ahead, batches_) + 1; }

  private:
    std::vector<std::size_t> indices_;
    std::size_t batch_size_;
    std::size_t batches_;
};

/// Throws InvalidInput, beginning with `who`, for a batch size of 0 and for an index that is not a sample.
void check_batches(const char* who, const Dataset& dataset, std::span<const std::size_t> indices,
                   std::size_t batch_size);

/// Throws InvalidInput, beginning with `who`, for more workers than threads make sense.
void check_workers(const char* who, std::size_t num_workers);

/// The memory of one field of a batch, sample after sample.
struct FieldMemory {
    std::byte* memory;
    std::size_t bytes;  ///< size of one sample
};
/// Reads samples begin .. end - 1 of a batch into their places.
inline void read_samples(const Dataset& dataset, std::span<const std::size_t> samples, std::size_t begin,
                         std::size_t end, std::span<const FieldMemory> fields) {
    std::vector<std::span<std::byte>> one(fields.size());
    for (std::size_t i = begin; i < end; ++i) {
        for (std::size_t f = 0; f < fields.size(); ++f)
            one[f] = {fields[f].memory + i * fields[f].bytes, fields[f].bytes};
        dataset.read(samples[i], one);
    }
}

}  // namespace ddp
