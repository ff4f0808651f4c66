#include "ddp/reduce/reducer.h"

#include <fmt/core.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <span>
#include <string>
#include <utility>

#include "ddp/cuda/cast.h"
#include "ddp/cuda/device_average.h"
#include "ddp/cuda/memory.h"
#include "ddp/reduce/loops.h"
#include "ddp/trace/trace.h"
#include "env/clock.h"

namespace ddp {

/// Operations on gradients in place, on the host or on a device. On a device they follow the group's stream,
/// and the host does not wait for them.
class GradientMemory {
  public:
    /// For memory from the group, which is borrowed. Collective for a device.
    GradientMemory(ProcessGroup& group, std::size_t parameters) : group_(group) {
        if (group.device().kind == Device::Kind::Cpu) return;
        gpu_ = cuda::Gpu::of(group.device().index);
        stream_ = static_cast<cuda::Stream>(group.stream());
        words_ = group.allocate_shared(parameters * sizeof(std::int32_t));
        staging_.emplace(gpu_, words_.size());
    }
    void zero(std::byte* at, std::size_t bytes) {
        if (gpu_) cuda::check(cudaMemsetAsync(at, 0, bytes, stream_), "zeroing gradients");
        else std::memset(at, 0, bytes);
    }
    void scale(const Buffer& bucket, double factor) {
        if (gpu_) cuda::scale_cast(*gpu_, bucket, bucket, static_cast<float>(factor), stream_);
        else scale_elements(bucket, factor);
    }
    /// Starts the fastest averaging of a bucket over all ranks, in place.
    Work start_average(const Buffer& bucket) {
        return gpu_ ? cuda::start_average(*group_, bucket) : group_->all_reduce(bucket, ReduceOp::Avg);
    }
    /// Replaces each of `count` numbers by its maximum over all ranks. Waits for it.
    void all_reduce_maximum(std::int32_t* values, std::size_t count) {
        if (!gpu_) return group_->all_reduce(buffer_of(std::span(values, count)), ReduceOp::Max).wait();
        const std::size_t bytes = count * sizeof(std::int32_t);
        std::memcpy(staging_->get(), values, bytes);
        cuda::copy(words_.data(), staging_->get(), bytes, stream_);
        group_->all_reduce({words_.data(), count, DType::I32, group_->device()}, ReduceOp::Max).wait();
        cuda::copy(staging_->get(), words_.data(), bytes, stream_);
        cuda::synchronize(stream_);
        std::memcpy(values, staging_->get(), bytes);
    }

  private:
    BorrowedGroup group_;
    std::shared_ptr<const cuda::Gpu> gpu_;  ///< null for the host
    cuda::Stream stream_ = nullptr;
    std::span<std::byte> words_;
    std::optional<cuda::PinnedMemory> staging_;
};

namespace {

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

/// Excludes a second thread.
class OneAtATime {
  public:
    explicit OneAtATime(std::atomic<bool>& taken)
        : taken_(taken), entered_(!taken.exchange(true, std::memory_order_acquire)) {}
    ~OneAtATime() {
        if (entered_) taken_.store(false, std::memory_order_release);
    }
    OneAtATime(const OneAtATime&) = delete;
    OneAtATime& operator=(const OneAtATime&) = delete;
    [[nodiscard]] bool entered() const { return entered_; }

  private:
    std::atomic<bool>& taken_;
    const bool entered_;
};

/// Bytes that are a small positive number in every type: its average over any number of ranks is not 0.
constexpr int kSmallNumber = 0x3c;

/// The end of the last bucket, which is padding.
std::byte* tail_of(const Buffer& bucket) {
    return static_cast<std::byte*>(bucket.data) + bucket.bytes() - FlatLayout::kTail;
}

/// True when the group can average gradients of this memory.
bool can_be_averaged(const Buffer& memory, const ProcessGroup& group) {
    return memory.device == group.device() && is_reducible(memory.dtype, ReduceOp::Avg);
}

}  // namespace

Reducer::Reducer(ProcessGroup& group, std::vector<Tensor> parameters, ReducerOptions options)
    : Reducer(group, std::move(parameters), std::move(options), nullptr) {}

Reducer::Reducer(ProcessGroup& group, std::vector<Tensor> parameters, ReducerOptions options,
                 std::unique_ptr<const ReductionPlan> plan)
    : group_(group),
      parameters_(std::move(parameters)),
      options_(std::move(options)),
      reduction_(std::move(plan)),
      active_ranks_(group.size()) {
    std::vector<GradientSpec> specs;
    for (const Tensor& parameter : parameters_) {
        if (!can_be_averaged(parameter.memory, group))
            throw InvalidInput(
                fmt::format("rank {}: gradients of parameter '{}' ({}) cannot be averaged by {}",
                            group.rank(), parameter.name, describe(parameter), group.describe()));
        specs.push_back({parameter.memory.bytes(), parameter.memory.dtype, parameter.memory.device});
    }
    if (!reduction_)
        reduction_ = std::make_unique<ReductionPlan>(
            ReductionPlan{.layout = lay_out(specs, plan_buckets(specs, options_.limits))});
    memory_ = std::make_unique<GradientMemory>(group, parameters_.size());
    ready_.resize(parameters_.size());
    locally_used_.assign(parameters_.size(), 0);
    globally_used_.assign(parameters_.size(), 1);
    allocate();
    begin_step();
}

Reducer::~Reducer() = default;

void Reducer::allocate() {
    const FlatLayout& whole = reduction_->layout;
    const bool shares = reduction_->open_buckets > 0;
    const FlatLayout here =
        shares ? in_slots(whole, reduction_->open_buckets + ReductionPlan::kInFlight) : whole;
    const int ranks = reduction_->scatters ? group_->size() : 1;
    places_ = here.tensors;
    arena_ = group_->allocate_shared(std::max(here.bytes, FlatLayout::kAlignment));
    if (shares) averages_ = group_->allocate_shared(whole.bytes / static_cast<std::size_t>(ranks));
    std::byte* average = averages_.data();
    for (std::size_t b = 0; b < here.buckets.size(); ++b) {
        const auto at = [&](std::byte* address, std::size_t bytes) {
            return Buffer{address, bytes / size_of(here.types[b]), here.types[b], group_->device()};
        };
        const Extent slice = here.slice(b, ranks > 1 ? group_->rank() : 0, ranks);
        Bucket& bucket = buckets_.emplace_back();
        bucket.buffer = at(arena_.data() + here.buckets[b].begin, here.buckets[b].bytes);
        bucket.averaged = at(shares ? average : arena_.data() + slice.begin, slice.bytes);
        average += shares ? slice.bytes : 0;
        for (const std::size_t i : here.plan[b])
            bucket.gradients.push_back({parameters_[i].name, parameters_[i].shape, gradient(i)});
    }
}

const BucketPlan& Reducer::plan() const { return reduction_->layout.plan; }

void Reducer::require_parameter(std::size_t parameter) const {
    if (parameter < parameters_.size()) return;
    throw InvalidInput(fmt::format(
        "rank {}: there is no parameter {}; the model has {}, counted from 0 (those of its construction: for "
        "others make another DistributedDataParallel)",
        group_->rank(), parameter, parameters_.size()));
}

bool Reducer::is_used(std::size_t parameter) const {
    require_parameter(parameter);
    return globally_used_[parameter] != 0;
}

void Reducer::set_hook(CommunicationHook hook) {
    if (hook && reduction_->scatters)
        throw InvalidInput(fmt::format(
            "rank {}: a communication hook needs whole gradients: leave Shard::None", group_->rank()));
    if (statistics_.steps > 0 || marked_ > 0)
        throw Error(
            fmt::format("rank {}: the communication hook must be set before the first step; {} are done",
                        group_->rank(), statistics_.steps));
    hook_ = std::move(hook);
}

Buffer Reducer::gradient(std::size_t parameter) const {
    group_.require();
    require_parameter(parameter);
    const Buffer& memory = parameters_[parameter].memory;
    return {arena_.data() + places_[parameter].begin, memory.count, memory.dtype, memory.device};
}

void Reducer::require_finished() const {
    if (marked_ > 0)
        throw Error(fmt::format(
            "rank {}: gradients of a step that is not finished: they are not averaged yet; call finish() before the "
            "optimizer's step",
            group_->rank()));
}

std::vector<Buffer> Reducer::gradients() const {
    require_finished();
    if (reduction_->scatters)
        throw Error(fmt::format(
            "rank {}: a sharded model has no whole average of a gradient: use an optimizer over the model, and its "
            "step()",
            group_->rank()));
    std::vector<Buffer> all;
    all.reserve(parameters_.size());
    for (std::size_t i = 0; i < parameters_.size(); ++i) all.push_back(is_used(i) ? gradient(i) : Buffer{});
    return all;
}

void Reducer::zero_gradients() {
    group_.require();
    memory_->zero(arena_.data(), arena_.size());
}

void Reducer::set_accumulating(bool accumulating) {
    if (accumulating && reduction_->open_buckets > 0)
        throw Error(fmt::format(
            "rank {}: no_sync: the gradients of a step share memory, so several passes cannot be added up; set "
            "ModelOptions::accumulates",
            group_->rank()));
    accumulating_ = accumulating;
}

void Reducer::begin_step() {
    for (std::size_t b = 0; b < buckets_.size(); ++b) {
        buckets_[b].missing = static_cast<std::size_t>(
            std::ranges::count_if(plan()[b], [&](std::size_t i) { return is_expected(i); }));
        buckets_[b].finish = nullptr;
        buckets_[b].work = {};
    }
    std::fill(ready_.begin(), ready_.end(), false);
    marked_ = next_ = finished_ = 0;
    if (trace::is_on()) step_began_ns_ = now_ns();
}

void Reducer::mark_ready(std::size_t parameter) {
    group_.require();
    require_parameter(parameter);
    if (!is_expected(parameter))
        throw Error(fmt::format(
            "rank {}: parameter '{}' has a gradient in this step, and had none in the first; without "
            "static_graph (find_unused_parameters) that may change",
            group_->rank(), parameters_[parameter].name));
    const OneAtATime alone(is_marking_);
    if (!alone.entered())
        throw Error(fmt::format(
            "rank {}: the gradient of parameter '{}' was marked ready by one thread while another was marking one; "
            "mark gradients from one thread, or under a lock",
            group_->rank(), parameters_[parameter].name));
    locally_used_[parameter] = 1;
    if (accumulating_) return;
    if (ready_[parameter])
        throw Error(
            fmt::format("rank {}: the gradient of parameter '{}' was marked ready twice in one step; call "
                        "finish() between steps, and no_sync() where gradients of several passes add up",
                        group_->rank(), parameters_[parameter].name));
    const std::size_t bucket = reduction_->layout.bucket_of[parameter];
    if (reduction_->open_buckets > 0 && bucket >= next_ + reduction_->open_buckets)
        throw Error(fmt::format(
            "rank {}: the gradient of parameter '{}' came before those of '{}', with which it shares memory; write "
            "gradients in the reverse of the parameters' order, or set ModelOptions::accumulates",
            group_->rank(), parameters_[parameter].name, parameters_[plan()[next_].front()].name));
    ready_[parameter] = true;
    ++marked_;
    --buckets_[bucket].missing;
    if (!reduction_->starts_in_finish) start_complete_buckets();
}

void Reducer::mark_all_ready() {
    for (std::size_t i = parameters_.size(); i-- > 0;) {
        if (is_expected(i) && !ready_[i]) mark_ready(i);
    }
}

void Reducer::start_complete_buckets() {
    if (next_ == buckets_.size() || buckets_[next_].missing > 0) return;
    const Stopwatch stopwatch(statistics_.blocked_seconds);
    while (next_ < buckets_.size() && buckets_[next_].missing == 0) start(next_++);
}

void Reducer::start(std::size_t index) {
    Bucket& bucket = buckets_[index];
    for (const std::size_t i : plan()[index]) {
        // The memory may hold the average of an earlier step, which must not count twice.
        if (locally_used_[i] == 0) memory_->zero(arena_.data() + places_[i].begin, places_[i].bytes);
    }
    if (reduction_->open_buckets > 0) zero_padding(index);
    const bool is_last = index + 1 == buckets_.size();
    if (is_last && asks_to_stop_) std::memset(tail_of(bucket.buffer), kSmallNumber, FlatLayout::kTail);
    const GradientBucket complete{index, is_last, bucket.buffer, plan()[index], bucket.gradients};
    if (hook_) bucket.finish = hook_(*group_, complete);
    else if (reduction_->scatters)
        bucket.work = group_->reduce_scatter(bucket.averaged, bucket.buffer, ReduceOp::Avg);
    else bucket.work = memory_->start_average(bucket.buffer);
    ++statistics_.buckets;
    statistics_.bytes += bucket.buffer.bytes();
    // The next gradients go where bucket index - ReductionPlan::kInFlight was.
    if (reduction_->open_buckets > 0 && index >= ReductionPlan::kInFlight)
        finish_buckets(index - ReductionPlan::kInFlight + 1);
}

/// Norms are sums over whole buckets; the memory between gradients has held those of other buckets.
void Reducer::zero_padding(std::size_t index) {
    auto* at = static_cast<std::byte*>(buckets_[index].buffer.data);
    std::byte* const end = at + buckets_[index].buffer.bytes();
    for (const std::size_t i : plan()[index]) {
        std::byte* const begin = arena_.data() + places_[i].begin;
        memory_->zero(at, static_cast<std::size_t>(begin - at));
        at = begin + places_[i].bytes;
    }
    memory_->zero(at, static_cast<std::size_t>(end - at));
}

/// Waits for the buckets before `end`.
void Reducer::finish_buckets(std::size_t end) {
    for (; finished_ < end; ++finished_) {
        Bucket& bucket = buckets_[finished_];
        if (bucket.finish) bucket.finish();
        else bucket.work.wait();
        if (active_ranks_ != group_->size())
            memory_->scale(bucket.averaged, static_cast<double>(group_->size()) / active_ranks_);
    }
}

void Reducer::handle_missing() {
    std::vector<std::size_t> missing;
    for (std::size_t i = 0; i < ready_.size(); ++i) {
        if (!ready_[i]) missing.push_back(i);
    }
    if (missing.empty()) return;
    if (!options_.find_unused_parameters && !options_.static_graph) throw_missing(missing);
    require_static_graph();
    for (Bucket& bucket : buckets_) bucket.missing = 0;
}

void Reducer::throw_missing(std::span<const std::size_t> missing) const {
    std::string names;
    for (std::size_t i = 0; i < std::min<std::size_t>(missing.size(), 4); ++i)
        names += fmt::format("{}'{}'", i > 0 ? ", " : "", parameters_[missing[i]].name);
    throw Error(fmt::format(
        "rank {}: no gradient for {} of {} parameters in this step: {}{}; if that is meant, set "
        "find_unused_parameters, or static_graph where it is the same ones in every step",
        group_->rank(), missing.size(), parameters_.size(), names, missing.size() > 4 ? ", ..." : ""));
}

void Reducer::require_static_graph() const {
    for (std::size_t i = 0; i < static_graph_.size(); ++i) {
        if (static_graph_[i] && locally_used_[i] == 0)
            throw Error(fmt::format(
                "rank {}: parameter '{}' has no gradient in this step, and had one in the first; without "
                "static_graph (find_unused_parameters) that may change",
                group_->rank(), parameters_[i].name));
    }
}

void Reducer::finish() {
    group_.require();
    if (accumulating_) return;
    handle_missing();
    start_complete_buckets();
    // Inside a Join, this rank may have shadowed steps of others before its own first step.
    // Passes in no_sync before this one count.
    if (options_.static_graph && static_graph_.empty())
        static_graph_.assign(locally_used_.begin(), locally_used_.end());
    complete_step();
}

void Reducer::shadow_step() {
    group_.require();
    std::fill(locally_used_.begin(), locally_used_.end(), 0);
    for (Bucket& bucket : buckets_) bucket.missing = 0;
    start_complete_buckets();
    complete_step();
}

void Reducer::complete_step() {
    {
        const Stopwatch stopwatch(statistics_.blocked_seconds);
        finish_buckets(buckets_.size());
        if (carries_stop()) take_stop();
        if (must_find_unused()) reduce_used();
    }
    ++statistics_.steps;
    if (trace::is_on()) trace::add_step(statistics_.steps, step_began_ns_, now_ns());
    std::fill(locally_used_.begin(), locally_used_.end(), 0);
    begin_step();
}

/// Norms are sums over whole buckets, so the padding becomes zero again.
void Reducer::take_stop() {
    std::byte* const tail = tail_of(buckets_.back().buffer);
    stop_requested_ = stop_requested_ || std::any_of(tail, tail + FlatLayout::kTail,
                                                     [](auto one) { return one != std::byte{}; });
    std::memset(tail, 0, FlatLayout::kTail);
}

bool Reducer::carries_stop() const { return !hook_ && !reduction_->scatters && group_->device() == Device{}; }

void Reducer::require_carried_stop() const {
    if (!carries_stop())
        throw Error(fmt::format(
            "rank {}: a request to stop travels with whole gradients in host memory only, without a hook: use "
            "Lifeline::should_stop, or a collective of your own",
            group_->rank()));
}

void Reducer::request_stop() {
    require_carried_stop();
    asks_to_stop_ = true;
}

bool Reducer::stop_requested() const {
    require_carried_stop();
    return stop_requested_;
}

void Reducer::reduce_used() {
    globally_used_ = locally_used_;
    memory_->all_reduce_maximum(globally_used_.data(), globally_used_.size());
}

}  // namespace ddp
