#include "ddp/reducer.h"

#include <fmt/core.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "env/clock.h"

namespace ddp {
namespace {

/// A cache line, and the widest vector: no two gradients share one.
constexpr std::size_t kAlignment = 64;

constexpr std::size_t padded(std::size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

// Gradients are written by the host: no buckets on a device.
bool can_be_averaged(const Buffer& memory, const Device& of_group) {
    const bool is_real =
        memory.dtype == DType::F32 || memory.dtype == DType::F64 || memory.dtype == DType::BF16;
    return is_real && memory.device == Device{} && of_group == Device{};
}

/// Adds the time of its scope to a total.
class Stopwatch {
  public:
    explicit Stopwatch(double& total) : total_(total), start_(ddprun::MonotonicClock::now()) {}
    ~Stopwatch() { total_ += std::chrono::duration<double>(ddprun::MonotonicClock::now() - start_).count(); }
    Stopwatch(const Stopwatch&) = delete;
    Stopwatch& operator=(const Stopwatch&) = delete;

  private:
    double& total_;
    ddprun::TimePoint start_;
};

FinishReduction average(ProcessGroup& group, const GradientBucket& bucket) {
    return [work = group.all_reduce(bucket.buffer, ReduceOp::Avg)]() mutable { work.wait(); };
}

}  // namespace

Reducer::Reducer(ProcessGroup& group, std::vector<Tensor> parameters, ReducerOptions options)
    : group_(group), parameters_(std::move(parameters)), options_(std::move(options)) {
    std::size_t total = 0;
    for (const Tensor& parameter : parameters_) {
        if (!can_be_averaged(parameter.memory, group_.device()))
            throw InvalidInput(
                fmt::format("rank {}: gradients of parameter '{}' ({}) cannot be averaged by {}",
                            group_.rank(), parameter.name, describe(parameter), group_.describe()));
        specs_.push_back({parameter.memory.bytes(), parameter.memory.dtype, parameter.memory.device});
        total += padded(parameter.memory.bytes());
    }
    arena_ = group_.allocate_shared(std::max(total, kAlignment));
    offset_of_.resize(parameters_.size());
    bucket_of_.resize(parameters_.size());
    ready_.resize(parameters_.size());
    locally_used_.assign(parameters_.size(), 0);
    globally_used_.assign(parameters_.size(), 1);
    lay_out(plan_buckets(specs_, options_.limits));
    begin_step();
}

void Reducer::lay_out(BucketPlan plan) {
    plan_ = std::move(plan);
    buckets_.assign(plan_.size(), {});
    std::size_t offset = 0;
    for (std::size_t b = 0; b < plan_.size(); ++b) {
        const std::size_t begin = offset;
        for (const std::size_t parameter : plan_[b]) {
            offset_of_[parameter] = offset;
            bucket_of_[parameter] = b;
            offset += padded(specs_[parameter].bytes);
        }
        const DType dtype = specs_[plan_[b].front()].dtype;
        buckets_[b].buffer = {arena_.data() + begin, (offset - begin) / size_of(dtype), dtype, {}};
    }
}

Buffer Reducer::gradient(std::size_t parameter) const {
    const Buffer& memory = parameters_.at(parameter).memory;
    return {arena_.data() + offset_of_[parameter], memory.count, memory.dtype, memory.device};
}

std::vector<Buffer> Reducer::gradients() const {
    std::vector<Buffer> all;
    for (std::size_t i = 0; i < parameters_.size(); ++i) all.push_back(is_used(i) ? gradient(i) : Buffer{});
    return all;
}

void Reducer::zero_gradients() { std::memset(arena_.data(), 0, arena_.size()); }

void Reducer::begin_step() {
    for (std::size_t b = 0; b < buckets_.size(); ++b) {
        buckets_[b].missing = plan_[b].size();
        buckets_[b].finish = nullptr;
    }
    std::fill(ready_.begin(), ready_.end(), false);
    arrival_.clear();
    next_ = 0;
}

void Reducer::mark_ready(std::size_t parameter) {
    locally_used_.at(parameter) = 1;
    if (accumulating_) return;
    if (ready_[parameter])
        throw Error(
            fmt::format("rank {}: the gradient of parameter '{}' was marked ready twice in one step; call "
                        "finish() between steps, or accumulate without synchronising",
                        group_.rank(), parameters_[parameter].name));
    ready_[parameter] = true;
    arrival_.push_back(parameter);
    --buckets_[bucket_of_[parameter]].missing;
    start_complete_buckets();
}

void Reducer::start_complete_buckets() {
    if (next_ == buckets_.size() || buckets_[next_].missing > 0) return;
    const Stopwatch stopwatch(statistics_.blocked_seconds);
    while (next_ < buckets_.size() && buckets_[next_].missing == 0) start(next_++);
}

void Reducer::start(std::size_t bucket) {
    const GradientBucket complete{bucket, bucket + 1 == buckets_.size(), buckets_[bucket].buffer,
                                  plan_[bucket]};
    buckets_[bucket].finish = hook_ ? hook_(group_, complete) : average(group_, complete);
    ++statistics_.buckets;
    statistics_.bytes += complete.buffer.bytes();
}

void Reducer::settle_missing() {
    std::vector<std::size_t> missing;
    for (std::size_t i = 0; i < ready_.size(); ++i) {
        if (!ready_[i]) missing.push_back(i);
    }
    if (missing.empty()) return;
    if (!options_.find_unused_parameters) {
        std::string names;
        for (std::size_t i = 0; i < std::min<std::size_t>(missing.size(), 4); ++i)
            names += fmt::format("{}'{}'", i > 0 ? ", " : "", parameters_[missing[i]].name);
        throw Error(fmt::format(
            "rank {}: no gradient for {} of {} parameters in this step: {}{}; if that is meant, "
            "set find_unused_parameters",
            group_.rank(), missing.size(), parameters_.size(), names, missing.size() > 4 ? ", ..." : ""));
    }
    for (const std::size_t i : missing) {
        // What lies there may be the average of an earlier step: it must not count twice.
        if (locally_used_[i] == 0) std::memset(gradient(i).data, 0, specs_[i].bytes);
        --buckets_[bucket_of_[i]].missing;
    }
    start_complete_buckets();
}

void Reducer::finish() {
    if (accumulating_) return;
    settle_missing();
    {
        const Stopwatch stopwatch(statistics_.blocked_seconds);
        for (Bucket& bucket : buckets_) bucket.finish();
        if (options_.find_unused_parameters) agree_on_used();
    }
    ++statistics_.steps;
    std::fill(locally_used_.begin(), locally_used_.end(), 0);
    if (options_.rebuild && !options_.find_unused_parameters && !rebuilt_) rebuild();
    begin_step();
}

void Reducer::agree_on_used() {
    globally_used_ = locally_used_;
    group_.all_reduce(buffer_of(std::span(globally_used_)), ReduceOp::Max).wait();
}

void Reducer::rebuild() {
    rebuilt_ = true;
    std::vector<std::int64_t> order(arrival_.begin(), arrival_.end());
    group_.broadcast(buffer_of(std::span(order)), 0).wait();
    const std::vector<std::size_t> arrival(order.begin(), order.end());
    BucketPlan plan = plan_buckets(specs_, arrival, options_.limits);
    if (plan == plan_) return;

    // Padded sizes add up to the same total in any order, so the arena is kept. Nobody else touches it: the
    // last reduction of the step has ended on all ranks.
    const std::vector<std::byte> old(arena_.begin(), arena_.end());
    const std::vector<std::size_t> old_offset = offset_of_;
    lay_out(std::move(plan));
    zero_gradients();
    for (std::size_t i = 0; i < parameters_.size(); ++i)
        std::copy_n(old.data() + old_offset[i], specs_[i].bytes, arena_.data() + offset_of_[i]);
}

}  // namespace ddp
