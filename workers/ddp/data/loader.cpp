#include "ddp/loader.h"

#include <fmt/core.h>

#include <utility>

#include "ddp/data/batching.h"
#include "ddp/data/read_ahead.h"
#include "ddp/sampler.h"
#include "ddp/trace/trace.h"
#include "ddp/types.h"
#include "ddp/worker/private_memory.h"

namespace ddp {

Batch::Batch(std::size_t capacity, std::span<const std::size_t> field_bytes) {
    for (const std::size_t bytes : field_bytes) fields_.push_back({bytes, private_memory(capacity * bytes)});
}

void check_batches(const char* who, const Dataset& dataset, std::span<const std::size_t> indices,
                   std::size_t batch_size) {
    if (batch_size == 0) throw InvalidInput(fmt::format("{}: a batch of 0 samples", who));
    const std::size_t samples = dataset.size();
    for (const std::size_t index : indices) {
        if (index >= samples)
            throw InvalidInput(fmt::format("{}: there is no sample {} in a data set of {}, counted from 0",
                                           who, index, samples));
    }
}

void check_workers(const char* who, std::size_t num_workers) {
    constexpr std::size_t kMost = 1024;
    if (num_workers > kMost)
        throw InvalidInput(fmt::format("{}: num_workers is {}; at most {}", who, num_workers, kMost));
}

FunctionDataset::FunctionDataset(std::size_t size, std::vector<std::size_t> field_bytes, Read read)
    : size_(size), field_bytes_(std::move(field_bytes)), read_(std::move(read)) {
    if (!read_) throw InvalidInput("data set: the function that reads a sample is empty");
}

std::span<const std::byte> Batch::bytes(std::size_t field) const {
    if (field >= fields_.size())
        throw InvalidInput(fmt::format("batch: there is no field {}; samples have {}, counted from 0", field,
                                       fields_.size()));
    const Field& f = fields_[field];
    return {f.memory.get(), f.bytes * size_};
}

void Batch::read(const Dataset& dataset, std::span<const std::size_t> indices, std::size_t begin,
                 std::size_t end) {
    std::vector<FieldMemory> targets;
    for (const Field& field : fields_) targets.push_back({field.memory.get(), field.bytes});
    read_samples(dataset, indices, begin, end, targets);
}

/// The slots of batches read ahead, and the threads that fill them.
class Loader::Ring {
  public:
    explicit Ring(const Loader& loader) : slots_(make_slots(loader)) {
        const Batching& batching = *loader.batching_;
        reader_ = make_owned<ReadAhead>(ReadAhead::Reading{
            .batches = batching.batches(),
            .slots = slots_.size(),
            .threads = batching.threads(loader.options_.num_workers),
            .size_of = [&batching](std::size_t batch) { return batching.samples_of(batch).size(); },
            .read =
                [this, &loader](const ReadAhead::Run& run) {
                    slot_of(run.batch).read(loader.dataset_, loader.batching_->samples_of(run.batch),
                                            run.begin, run.end);
                },
            .complete =
                [this, &batching](std::size_t batch) {
                    slot_of(batch).size_ = batching.samples_of(batch).size();
                }});
    }
    const Batch* take(std::size_t batch) {
        reader_->take(batch);
        return &slot_of(batch);
    }

  private:
    Batch& slot_of(std::size_t batch) { return slots_[batch % slots_.size()]; }
    static std::vector<Batch> make_slots(const Loader& loader) {
        const std::vector<std::size_t> bytes = loader.dataset_.field_bytes();
        std::vector<Batch> slots;
        for (std::size_t s = 0; s < loader.batching_->slots(loader.options_.prefetch); ++s)
            slots.emplace_back(loader.batching_->largest(), bytes);
        return slots;
    }
    std::vector<Batch> slots_;
    OwnedByProcess<ReadAhead> reader_;  // destroyed first
};

Loader::Loader(const Dataset& dataset, std::vector<std::size_t> indices, LoaderOptions options)
    : dataset_(dataset), options_(options) {
    check_batches("loader", dataset, indices, options_.batch_size);
    check_workers("loader", options_.num_workers);
    if (options_.prefetch == 0 && options_.num_workers > 1)
        throw InvalidInput(fmt::format(
            "loader: {} workers and a prefetch of 0 batches: workers read ahead; give a prefetch of 1 or "
            "more, or num_workers 0 to read in next()",
            options_.num_workers));
    batching_ = std::make_unique<const Batching>(std::move(indices), options_);
    if (batches() == 0) return;
    if (options_.prefetch == 0 || options_.num_workers == 0)
        inline_batch_ = std::make_unique<Batch>(batching_->largest(), dataset.field_bytes());
    else ring_ = std::make_unique<Ring>(*this);
}

Loader::Loader(const Dataset& dataset, DistributedSampler& sampler, LoaderOptions options)
    : Loader(dataset, sampler.rest_of_epoch(), options) {
    sampler_ = &sampler;
    if (batches() == 0) sampler.note_nothing_left();
}

Loader::~Loader() = default;

std::size_t Loader::batches() const { return batching_->batches(); }

const Batch* Loader::next() {
    if (delivered_ == batches()) return nullptr;
    const Batch* batch = nullptr;
    const trace::Scope traced(trace::TraceKind::Loader, "next batch");
    if (ring_) {
        batch = ring_->take(delivered_);
    } else {
        const std::span<const std::size_t> samples = batching_->samples_of(delivered_);
        inline_batch_->read(dataset_, samples, 0, samples.size());
        inline_batch_->size_ = samples.size();
        batch = inline_batch_.get();
    }
    ++delivered_;
    if (sampler_ != nullptr) sampler_->advance(batch->size());
    return batch;
}

}  // namespace ddp
