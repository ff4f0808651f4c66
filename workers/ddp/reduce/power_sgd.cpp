
#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "ddp/ddp.h"
#include "ddp/reduce/loops.h"

namespace ddp {

float dot(const float* __restrict__ a, const float* __restrict__ b, std::size_t count) {
    constexpr std::size_t kLanes = 16;
    std::array<float, kLanes> sums = {};
    std::size_t i = 0;
    for (; i + kLanes <= count; i += kLanes) {
        for (std::size_t lane = 0; lane < kLanes; ++lane) sums[lane] += a[i + lane] * b[i + lane];
    }
    float sum = 0;
    for (; i < count; ++i) sum += a[i] * b[i];
    for (const float partial : sums) sum += partial;
    return sum;
}
void add_scaled(float* __restrict__ to, const float* __restrict__ from, float factor, std::size_t count) {
    for (std::size_t i = 0; i < count; ++i) to[i] += factor * from[i];
}

namespace {

/// Pseudorandom in [-1, 1), the same on all ranks. Any start direction works that is not orthogonal to the
/// solution.
float start_value(std::uint32_t seed, std::uint32_t i) {
    std::uint32_t z = seed * 0x9E3779B9U + i * 0x85EBCA6BU + 0x1234567U;
    z = (z ^ (z >> 16)) * 0x7FEB352DU;
    z = (z ^ (z >> 15)) * 0x846CA68BU;
    z ^= z >> 16;
    return static_cast<float>(z >> 8) * 0x1p-23F - 1;
}

/// A gradient as the product P Q^T of two narrow matrices, whose columns are stored one after the other.
struct Factors {
    std::size_t rows = 0, columns = 0, rank = 0;
    std::vector<float> q;      ///< [rank][columns]; a zero vector gets a new random start
    std::vector<float> error;  ///< part of this rank's gradient that the last step did not send; empty
                               ///< without error feedback
};

/// Gram-Schmidt over `rank` vectors, twice: one pass leaves rounding errors along the other vectors. A vector
/// that depends on earlier ones becomes zero, because its remainder is only rounding errors.
void orthogonalize(float* vectors, std::size_t rank, std::size_t length) {
    constexpr float kDependent = 1e-5F;  // relative to a vector's length
    for (std::size_t k = 0; k < rank; ++k) {
        float* const mine = vectors + k * length;
        const float before = std::sqrt(dot(mine, mine, length));
        for (int pass = 0; pass < 2; ++pass) {
            for (std::size_t other = 0; other < k; ++other)
                add_scaled(mine, vectors + other * length, -dot(mine, vectors + other * length, length),
                           length);
        }
        const float norm = std::sqrt(dot(mine, mine, length));
        const bool is_dependent = norm <= kDependent * before;
        for (std::size_t i = 0; i < length; ++i) mine[i] = is_dependent ? 0 : mine[i] / norm;
    }
}

bool all_finite(const std::vector<float>& values) {
    return std::all_of(values.begin(), values.end(), [](float value) { return std::isfinite(value); });
}

/// The state of one bucket between start and finish.
struct Step {
    std::vector<Tensor> low_rank, whole;
    std::vector<Factors*> factors;  ///< factors of `low_rank`
    std::vector<float> sums;        ///< all P, then all gradients that are sent whole
    Work work;
};

}  // namespace

struct PowerSgd::Impl {
  public:
    Impl(std::span<const Tensor> parameters, const PowerSgdOptions& options) : options_(options) {
        if (options_.rank == 0) throw InvalidInput("power_sgd: the rank is 0");
        if (!(options_.min_compression_rate > 0))
            throw InvalidInput("power_sgd: the least compression rate is not positive");
        for (std::size_t i = 0; i < parameters.size(); ++i) {
            const Factors shape = shape_of(parameters[i]);
            if (parameters[i].memory.dtype != DType::F32 || !is_compressible(shape)) continue;
            factors_.emplace(i, shape);
            names_.emplace(i, parameters[i].name);
        }
    }

    std::vector<Tensor> state() {
        std::vector<Tensor> all = {{"steps", {}, {&steps_, 1, DType::I64, {}}}};
        for (const auto& [parameter, name] : names_) {
            Factors& f = factors_.at(parameter);
            const auto side = [](std::size_t length) { return static_cast<std::int64_t>(length); };
            all.push_back(tensor_of("q." + name, std::span(f.q), {side(f.rank), side(f.columns)}));
            if (options_.error_feedback)
                all.push_back(
                    tensor_of("error." + name, std::span(f.error), {side(f.rows), side(f.columns)}));
        }
        return all;
    }
    /// Only the sum of the ranks' errors affects later steps, so each rank may continue with the average.
    void average_errors(ProcessGroup& group) {
        if (!options_.error_feedback) return;
        for (const auto& [parameter, name] : names_)
            group.all_reduce(buffer_of(std::span(factors_.at(parameter).error)), ReduceOp::Avg).wait();
    }

    FinishReduction start(ProcessGroup& group, const GradientBucket& bucket) {
        const bool compresses =
            static_cast<std::uint64_t>(steps_) >= options_.start_step && bucket.buffer.dtype == DType::F32;
        if (bucket.is_last) ++steps_;
        group.refuse_recovery("power_sgd: each rank has errors of its own, which change inside a unit");
        if (!compresses)
            return [work = group.all_reduce(bucket.buffer, ReduceOp::Avg)]() mutable { work.wait(); };
        if (group.device() != Device{})
            throw InvalidInput("power_sgd: the gradients are on a CUDA device; it needs host memory");
        const auto step = std::make_shared<Step>(divide(bucket));
        for (std::size_t i = 0; i < step->low_rank.size(); ++i)
            begin(step->low_rank[i], *step->factors[i], step->sums);
        for (const Tensor& gradient : step->whole) {
            const auto* values = static_cast<const float*>(gradient.memory.data);
            step->sums.insert(step->sums.end(), values, values + gradient.memory.count);
        }
        step->work = group.all_reduce(buffer_of(std::span(step->sums)), ReduceOp::Sum);
        return [this, &group, step] { finish(group, *step); };
    }

  private:
    [[nodiscard]] Factors shape_of(const Tensor& gradient) const {
        Factors factors;
        factors.rows = gradient.shape.empty() ? 1 : static_cast<std::size_t>(gradient.shape.front());
        factors.columns = factors.rows == 0 ? 0 : gradient.memory.count / factors.rows;
        factors.rank = std::min({factors.rows, factors.columns, options_.rank});
        if (!is_compressible(factors)) return factors;
        factors.q.resize(factors.rank * factors.columns);
        if (options_.error_feedback) factors.error.resize(factors.rows * factors.columns);
        return factors;
    }
    [[nodiscard]] bool is_compressible(const Factors& f) const {
        return static_cast<double>((f.rows + f.columns) * f.rank) * options_.min_compression_rate <
               static_cast<double>(f.rows * f.columns);
    }
    static void require_shape(const Factors& known, const Tensor& gradient) {
        const bool is_same =
            (gradient.shape.empty() ? 1U : static_cast<std::size_t>(gradient.shape.front())) == known.rows &&
            gradient.memory.count == known.rows * known.columns;
        if (!is_same)
            throw InvalidInput(
                "power_sgd: '" + gradient.name + "' is " + describe(gradient) +
                ", and this hook has seen a gradient of another shape in its place: make a hook for "
                "each model");
    }
    Step divide(const GradientBucket& bucket) {
        Step step;
        for (std::size_t i = 0; i < bucket.gradients.size(); ++i) {
            const Tensor& gradient = bucket.gradients[i];
            // Pointers into the map stay valid.
            auto known = factors_.find(bucket.parameters[i]);
            if (known == factors_.end())
                known = factors_.emplace(bucket.parameters[i], shape_of(gradient)).first;
            require_shape(known->second, gradient);
            if (!is_compressible(known->second)) {
                step.whole.push_back(gradient);
                continue;
            }
            step.low_rank.push_back(gradient);
            step.factors.push_back(&known->second);
        }
        return step;
    }

    /// Adds the error of the last step, and appends P = M Q.
    void begin(const Tensor& gradient, Factors& f, std::vector<float>& sums) {
        auto* const m = static_cast<float*>(gradient.memory.data);
        if (options_.error_feedback) {
            add_scaled(m, f.error.data(), 1, gradient.memory.count);
            f.error.assign(m, m + gradient.memory.count);
        }
        restart_zero_vectors(f);
        orthogonalize(f.q.data(), f.rank, f.columns);
        const std::size_t at = sums.size();
        sums.resize(at + f.rank * f.rows);
        for (std::size_t k = 0; k < f.rank; ++k) {
            for (std::size_t i = 0; i < f.rows; ++i)
                sums[at + k * f.rows + i] = dot(m + i * f.columns, f.q.data() + k * f.columns, f.columns);
        }
    }
    /// Restarts vectors of Q that are zero (after a gradient of zeros): they would stay zero. Q is the same
    /// on all ranks.
    void restart_zero_vectors(Factors& f) const {
        const std::uint64_t drawn = options_.warm_start ? 0 : static_cast<std::uint64_t>(steps_);
        const auto seed = static_cast<std::uint32_t>(options_.seed + drawn);
        for (std::size_t k = 0; k < f.rank; ++k) {
            float* const mine = f.q.data() + k * f.columns;
            if (options_.warm_start && dot(mine, mine, f.columns) > 0) continue;
            for (std::size_t j = 0; j < f.columns; ++j)
                mine[j] = start_value(seed, static_cast<std::uint32_t>(j * f.rank + k));
        }
    }

    void finish(ProcessGroup& group, Step& step) const {
        step.work.wait();
        std::vector<float> all_q;
        float* p = step.sums.data();
        for (std::size_t i = 0; i < step.low_rank.size(); ++i) {
            const Factors& f = *step.factors[i];
            orthogonalize(p, f.rank, f.rows);
            const auto* const m = static_cast<const float*>(step.low_rank[i].memory.data);
            const std::size_t at = all_q.size();
            all_q.resize(at + f.rank * f.columns);  // Q = M^T P
            for (std::size_t k = 0; k < f.rank; ++k) {
                for (std::size_t row = 0; row < f.rows; ++row)
                    add_scaled(all_q.data() + at + k * f.columns, m + row * f.columns, p[k * f.rows + row],
                               f.columns);
            }
            p += f.rank * f.rows;
        }
        for (const Tensor& gradient : step.whole) {
            auto* const values = static_cast<float*>(gradient.memory.data);
            for (std::size_t i = 0; i < gradient.memory.count; ++i)
                values[i] = p[i] / static_cast<float>(group.size());
            p += gradient.memory.count;
        }
        group.all_reduce(buffer_of(std::span(all_q)), ReduceOp::Avg).wait();
        p = step.sums.data();
        const float* q = all_q.data();
        for (std::size_t i = 0; i < step.low_rank.size(); ++i) {
            Factors& f = *step.factors[i];
            f.q.assign(q, q + f.rank * f.columns);
            multiply(p, f, static_cast<float*>(step.low_rank[i].memory.data));
            p += f.rank * f.rows;
            q += f.rank * f.columns;
        }
    }
    /// Computes M = P Q^T, and the error of that approximation.
    static void multiply(const float* p, Factors& f, float* m) {
        std::fill_n(m, f.rows * f.columns, 0.0F);
        for (std::size_t k = 0; k < f.rank; ++k) {
            for (std::size_t row = 0; row < f.rows; ++row)
                add_scaled(m + row * f.columns, f.q.data() + k * f.columns, p[k * f.rows + row], f.columns);
        }
        if (!f.error.empty()) add_scaled(f.error.data(), m, -1, f.error.size());
        if (all_finite(f.q)) return;
        // A gradient that is not finite must not affect later steps.
        std::fill(f.q.begin(), f.q.end(), 0.0F);
        std::fill(f.error.begin(), f.error.end(), 0.0F);
    }

    const PowerSgdOptions options_;
    std::int64_t steps_ = 0;
    std::map<std::size_t, Factors> factors_;    ///< by parameter; includes uncompressed ones once seen
    std::map<std::size_t, std::string> names_;  ///< by parameter: names in state()
};

PowerSgd::PowerSgd(std::span<const Tensor> parameters, PowerSgdOptions options)
    : impl_(std::make_shared<Impl>(parameters, options)) {}

CommunicationHook PowerSgd::hook() const {
    return [impl = impl_](ProcessGroup& group, const GradientBucket& bucket) {
        return impl->start(group, bucket);
    };
}
std::vector<Tensor> PowerSgd::state() const { return impl_->state(); }
void PowerSgd::prepare_to_save(ProcessGroup& group) { impl_->average_errors(group); }

CommunicationHook power_sgd(PowerSgdOptions options) { return PowerSgd({}, options).hook(); }

}  // namespace ddp
