#include <fmt/core.h>

#include <algorithm>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "ddp/cuda/cast.h"
#include "ddp/cuda/device_average.h"
#include "ddp/cuda/memory.h"
#include "ddp/ddp.h"
#include "ddp/reduce/loops.h"
#include "env/clock.h"

namespace ddp {

/// Operations on gradients in place, on the host or on a device. On a device they follow the group's stream,
/// and the host does not wait for them.
class GradientMemory {
  public:
    virtual ~GradientMemory() = default;
    virtual void zero(std::byte* at, std::size_t bytes) = 0;
    virtual void copy(std::byte* to, const std::byte* from, std::size_t bytes) = 0;
    virtual void scale(const Buffer& bucket, double factor) = 0;
    /// Memory of the same kind, for one rebuild of the buckets. May wait.
    virtual std::shared_ptr<std::byte> temporary(std::size_t bytes) = 0;
    /// Starts the fastest averaging of a bucket over all ranks.
    virtual Work start_average(const Buffer& bucket) = 0;
    /// Replaces each of `count` numbers by its maximum over all ranks. Waits for it.
    virtual void all_reduce_maximum(std::int32_t* values, std::size_t count) = 0;
};

namespace {

/// One cache line, and the widest vector: no two gradients share one.
constexpr std::size_t kBucketAlignment = 64;

constexpr std::size_t padded_bucket(std::size_t bytes) {
    return (bytes + kBucketAlignment - 1) / kBucketAlignment * kBucketAlignment;
}

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

class HostGradients final : public GradientMemory {
  public:
    explicit HostGradients(ProcessGroup& group) : group_(group) {}
    void zero(std::byte* at, std::size_t bytes) override { std::memset(at, 0, bytes); }
    void copy(std::byte* to, const std::byte* from, std::size_t bytes) override {
        std::memcpy(to, from, bytes);
    }
    void scale(const Buffer& bucket, double factor) override { scale_elements(bucket, factor); }
    std::shared_ptr<std::byte> temporary(std::size_t bytes) override {
        const auto all = std::make_shared<std::vector<std::byte>>(bytes);
        return {all, all->data()};
    }
    Work start_average(const Buffer& bucket) override { return group_->all_reduce(bucket, ReduceOp::Avg); }
    void all_reduce_maximum(std::int32_t* values, std::size_t count) override {
        group_->all_reduce(buffer_of(std::span(values, count)), ReduceOp::Max).wait();
    }

  private:
    BorrowedGroup group_;
};

class DeviceGradients final : public GradientMemory {
  public:
    DeviceGradients(ProcessGroup& group, std::size_t parameters)
        : group_(group),
          gpu_(cuda::Gpu::of(group.device().index)),
          stream_(static_cast<cuda::Stream>(group.stream())),
          words_(group.allocate_shared(parameters * sizeof(std::int32_t))),
          staging_(gpu_, words_.size()) {}

    void zero(std::byte* at, std::size_t bytes) override {
        cuda::check(cudaMemsetAsync(at, 0, bytes, stream_), "zeroing gradients");
    }
    void copy(std::byte* to, const std::byte* from, std::size_t bytes) override {
        cuda::copy(to, from, bytes, stream_);
    }
    void scale(const Buffer& bucket, double factor) override {
        cuda::scale_cast(*gpu_, bucket, bucket, static_cast<float>(factor), stream_);
    }
    std::shared_ptr<std::byte> temporary(std::size_t bytes) override {
        const auto memory = std::make_shared<cuda::DeviceMemory>(gpu_, bytes);
        return {memory, memory->get()};
    }
    Work start_average(const Buffer& bucket) override { return cuda::start_average(*group_, bucket); }
    void all_reduce_maximum(std::int32_t* values, std::size_t count) override {
        const std::size_t bytes = count * sizeof(std::int32_t);
        std::memcpy(staging_.get(), values, bytes);
        copy(words_.data(), staging_.get(), bytes);
        group_->all_reduce({words_.data(), count, DType::I32, group_->device()}, ReduceOp::Max).wait();
        copy(staging_.get(), words_.data(), bytes);
        cuda::synchronize(stream_);
        std::memcpy(values, staging_.get(), bytes);
    }

  private:
    BorrowedGroup group_;
    std::shared_ptr<const cuda::Gpu> gpu_;
    cuda::Stream stream_;
    std::span<std::byte> words_;
    cuda::PinnedMemory staging_;
};

/// For memory from the group, which is borrowed. Collective for a device.
std::unique_ptr<GradientMemory> make_gradient_memory(ProcessGroup& group, std::size_t parameters) {
    if (group.device().kind == Device::Kind::Cpu) return std::make_unique<HostGradients>(group);
    return std::make_unique<DeviceGradients>(group, parameters);
}

/// True when the group can average gradients of this memory.
bool can_be_averaged(const Buffer& memory, const ProcessGroup& group) {
    return memory.device == group.device() && is_reducible(memory.dtype, ReduceOp::Avg);
}

}  // namespace

Reducer::Reducer(ProcessGroup& group, std::vector<Tensor> parameters, ReducerOptions options)
    : group_(group),
      parameters_(std::move(parameters)),
      options_(std::move(options)),
      active_ranks_(group.size()) {
    std::size_t total = 0;
    for (const Tensor& parameter : parameters_) {
        if (!can_be_averaged(parameter.memory, group))
            throw InvalidInput(
                fmt::format("rank {}: gradients of parameter '{}' ({}) cannot be averaged by {}",
                            group.rank(), parameter.name, describe(parameter), group.describe()));
        specs_.push_back({parameter.memory.bytes(), parameter.memory.dtype, parameter.memory.device});
        total += padded_bucket(parameter.memory.bytes());
    }
    memory_ = make_gradient_memory(group, parameters_.size());
    arena_ = group.allocate_shared(std::max(total, kBucketAlignment));
    offset_of_.resize(parameters_.size());
    bucket_of_.resize(parameters_.size());
    ready_.resize(parameters_.size());
    locally_used_.assign(parameters_.size(), 0);
    globally_used_.assign(parameters_.size(), 1);
    lay_out(plan_buckets(specs_, options_.limits));
    begin_step();
}

Reducer::~Reducer() = default;

void Reducer::lay_out(BucketPlan plan) {
    plan_ = std::move(plan);
    buckets_.assign(plan_.size(), {});
    std::size_t offset = 0;
    for (std::size_t b = 0; b < plan_.size(); ++b) {
        const std::size_t begin = offset;
        for (const std::size_t parameter : plan_[b]) {
            offset_of_[parameter] = offset;
            bucket_of_[parameter] = b;
            offset += padded_bucket(specs_[parameter].bytes);
            buckets_[b].gradients.push_back(
                {parameters_[parameter].name, parameters_[parameter].shape, gradient(parameter)});
        }
        const DType dtype = specs_[plan_[b].front()].dtype;
        buckets_[b].buffer = {arena_.data() + begin, (offset - begin) / size_of(dtype), dtype,
                              group_->device()};
    }
}

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
    if (statistics_.steps > 0 || !arrival_.empty())
        throw Error(
            fmt::format("rank {}: the communication hook must be set before the first step; {} are done",
                        group_->rank(), statistics_.steps));
    hook_ = std::move(hook);
}

Buffer Reducer::gradient(std::size_t parameter) const {
    group_.require();
    require_parameter(parameter);
    const Buffer& memory = parameters_[parameter].memory;
    return {arena_.data() + offset_of_[parameter], memory.count, memory.dtype, memory.device};
}

std::vector<Buffer> Reducer::gradients() const {
    if (!arrival_.empty())
        throw Error(fmt::format(
            "rank {}: gradients of a step that is not finished: they are not averaged yet; call finish() before the "
            "optimizer's step",
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

void Reducer::begin_step() {
    for (std::size_t b = 0; b < buckets_.size(); ++b) {
        buckets_[b].missing = plan_[b].size();
        buckets_[b].finish = nullptr;
        buckets_[b].work = {};
    }
    std::fill(ready_.begin(), ready_.end(), false);
    arrival_.clear();
    next_ = 0;
}

void Reducer::mark_ready(std::size_t parameter) {
    group_.require();
    require_parameter(parameter);
    if (!static_graph_.empty() && !static_graph_[parameter])
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
                                  plan_[bucket], buckets_[bucket].gradients};
    if (hook_) buckets_[bucket].finish = hook_(*group_, complete);
    else buckets_[bucket].work = memory_->start_average(complete.buffer);
    ++statistics_.buckets;
    statistics_.bytes += complete.buffer.bytes();
}

void Reducer::handle_missing() {
    std::vector<std::size_t> missing;
    for (std::size_t i = 0; i < ready_.size(); ++i) {
        if (!ready_[i]) missing.push_back(i);
    }
    if (missing.empty()) return;
    if (!options_.find_unused_parameters && !options_.static_graph) throw_missing(missing);
    require_static_graph();
    for (const std::size_t i : missing) {
        // The memory may hold the average of an earlier step, which must not count twice.
        if (locally_used_[i] == 0) memory_->zero(arena_.data() + offset_of_[i], specs_[i].bytes);
        --buckets_[bucket_of_[i]].missing;
    }
    start_complete_buckets();
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
        if (static_graph_[i] && !ready_[i])
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
    // Inside a Join, this rank may have shadowed steps of others before its own first step.
    if (options_.static_graph && static_graph_.empty()) static_graph_ = ready_;
    complete_step();
}

void Reducer::shadow_step() {
    zero_gradients();
    for (Bucket& bucket : buckets_) bucket.missing = 0;
    start_complete_buckets();
    complete_step();
}

void Reducer::complete_step() {
    {
        const Stopwatch stopwatch(statistics_.blocked_seconds);
        for (Bucket& bucket : buckets_) {
            if (bucket.finish) bucket.finish();
            else bucket.work.wait();
            if (active_ranks_ != group_->size())
                memory_->scale(bucket.buffer, static_cast<double>(group_->size()) / active_ranks_);
        }
        if (must_find_unused()) reduce_used();
    }
    ++statistics_.steps;
    std::fill(locally_used_.begin(), locally_used_.end(), 0);
    if (options_.rebuild && (!options_.find_unused_parameters || options_.static_graph) && !rebuilt_)
        rebuild();
    begin_step();
}

void Reducer::reduce_used() {
    globally_used_ = locally_used_;
    memory_->all_reduce_maximum(globally_used_.data(), globally_used_.size());
}

/// The order on the lowest rank that saw gradients arrive, because rank 0 may have no samples left (Join);
/// parameters without a gradient come last. That rank contributes its order, the others -1, and the maximum
/// reaches all ranks.
std::vector<std::size_t> Reducer::first_order_of_arrival() {
    const std::vector<std::string> saw_any = group_->all_gather_bytes(arrival_.empty() ? "" : "+");
    const auto lowest = std::find(saw_any.begin(), saw_any.end(), "+") - saw_any.begin();
    std::vector<std::int32_t> order(parameters_.size(), -1);
    if (lowest == group_->rank() || lowest == group_->size()) {
        std::vector<bool> arrived(parameters_.size());
        auto next = order.begin();
        for (const std::size_t i : arrival_) {
            *next++ = static_cast<std::int32_t>(i);
            arrived[i] = true;
        }
        for (std::size_t i = 0; i < parameters_.size(); ++i) {
            if (!arrived[i]) *next++ = static_cast<std::int32_t>(i);
        }
    }
    memory_->all_reduce_maximum(order.data(), order.size());
    return {order.begin(), order.end()};
}

void Reducer::rebuild() {
    rebuilt_ = true;
    BucketPlan plan = plan_buckets(specs_, first_order_of_arrival(), options_.limits);
    if (plan == plan_) return;

    // The arena is kept, because padded sizes have the same sum in any order. No other rank uses it: the last
    // reduction of the step has ended on all ranks (or will, before later work on the stream).
    const std::shared_ptr<std::byte> old = memory_->temporary(arena_.size());
    memory_->copy(old.get(), arena_.data(), arena_.size());
    const std::vector<std::size_t> old_offset = offset_of_;
    lay_out(std::move(plan));
    zero_gradients();
    for (std::size_t i = 0; i < parameters_.size(); ++i)
        memory_->copy(arena_.data() + offset_of_[i], old.get() + old_offset[i], specs_[i].bytes);
}

}  // namespace ddp
