#pragma once

#include <algorithm>
#include <array>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ddp/checkpoint.h"
#include "ddp/optimizer.h"
#include "ddp/process_group.h"

namespace ddp::testing {

/// Tensors in one flat array of floats, of which each rank has an equal slice (or, not sharded, all), and a
/// count that is whole on every rank.
class Sharded {
  public:
    using Shapes = std::vector<std::pair<std::string, std::vector<std::int64_t>>>;
    Sharded(const ProcessGroup& group, bool sharded, Shapes shapes) {
        std::size_t all = 0;
        for (const auto& [name, shape] : shapes) all += elements_in(shape);
        const auto rank = static_cast<std::size_t>(group.rank()),
                   ranks = static_cast<std::size_t>(group.size());
        const std::size_t first = sharded ? all * rank / ranks : 0,
                          last = sharded ? all * (rank + 1) / ranks : all;
        values_.resize(last - first);
        begin_ = first;
        std::size_t at = 0;
        for (const auto& [name, shape] : shapes) {
            const std::size_t end = at + elements_in(shape);
            const std::size_t from = std::clamp(at, first, last), to = std::clamp(end, first, last);
            tensors_.push_back({name, shape, {values_.data() + (from - first), to - from, DType::F32, {}}});
            if (sharded) tensors_.back().part_begin = from == to ? 0 : from - at;
            at = end;
        }
    }
    /// The tensors, and the count.
    std::vector<Tensor> tensors() const {
        std::vector<Tensor> all = tensors_;
        all.push_back({"count", {}, {&count_, 1, DType::I64, {}}});
        return all;
    }
    void fill(float value) {
        for (std::size_t i = 0; i < values_.size(); ++i) values_[i] = value_at(value, i);
        count_ = static_cast<std::int64_t>(value);
    }
    bool holds(float value) const {
        for (std::size_t i = 0; i < values_.size(); ++i) {
            if (values_[i] != value_at(value, i)) return false;
        }
        return count_ == static_cast<std::int64_t>(value);
    }
    void rename(const std::string& name, const std::string& to) { find(name).name = to; }
    void move_part(const std::string& name, int by) {
        std::size_t& begin = find(name).part_begin.value();
        begin = static_cast<std::size_t>(static_cast<std::ptrdiff_t>(begin) + by);
    }

  private:
    static std::size_t elements_in(const std::vector<std::int64_t>& shape) {
        std::size_t elements = 1;
        for (const std::int64_t extent : shape) elements *= static_cast<std::size_t>(extent);
        return elements;
    }
    float value_at(float value, std::size_t i) const {
        return value * 10'000 + static_cast<float>(begin_ + i);
    }
    Tensor& find(const std::string& name) {
        return *std::find_if(tensors_.begin(), tensors_.end(),
                             [&](const Tensor& t) { return t.name == name; });
    }

    std::vector<float> values_;
    std::size_t begin_ = 0;  ///< of values_ in the flat array
    std::vector<Tensor> tensors_;
    mutable std::int64_t count_ = 0;
};

/// A model and an optimizer whose state is sharded; nothing is trained.
struct ShardedJob {
    struct Model final : Stateful, Sharded {
        Model(const ProcessGroup& group, bool sharded)
            : Sharded(group, sharded,
                      {{"embedding", {12, 50}}, {"bias", {7}}, {"none", {0, 5}}, {"wide", {511}}}) {}
        std::vector<Tensor> state() const override { return tensors(); }
        void state_loaded() override { ++loads; }
        int loads = 0;
    };
    struct Momentum final : Optimizer, Sharded {
        Momentum(const ProcessGroup& group, bool sharded)
            : Optimizer({}, std::array{0.1}),
              Sharded(group, sharded, {{"m.wide", {511}}, {"m.embedding", {12, 50}}}) {}
        std::string_view name() const override { return "momentum"; }
        std::vector<Tensor> state() const override { return tensors(); }
        std::uint64_t steps() const override { return step; }
        void state_loaded() override { ++loads; }
        int loads = 0;
        std::uint64_t step = 7;

      protected:
        bool takes_gradient(DType, DType) const override { return true; }
        void update(std::span<const Buffer>) override {}
    };

    explicit ShardedJob(ProcessGroup& group, bool sharded = true)
        : model(group, sharded),
          momentum(group, sharded),
          sampler(100, group.size(), group.rank(), {.seed = 1}) {}
    Training training() { return {model, momentum, sampler}; }
    void fill(float value) {
        model.fill(value);
        momentum.fill(-value);
    }
    bool holds(float value) const { return model.holds(value) && momentum.holds(-value); }
    int loads() const { return model.loads + momentum.loads; }

    Model model;
    Momentum momentum;
    DistributedSampler sampler;
};

}  // namespace ddp::testing
