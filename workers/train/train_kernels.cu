// The kernels of train, written as those in ddp/cuda/kernels.cu.
#if defined(__CUDACC__)
#include "ddp/cuda/launch.cuh"
#endif

#include <cmath>

#include "train_kernels.h"

namespace train::kernels {
namespace {

using namespace ddp::device;
using U64 = std::uint64_t;

DDP_BOTH inline U64 row_at(const std::uint32_t* order, U64 row) {
    return order != nullptr ? order[row] : row;
}

/// True when packs of every row are aligned.
template <class T>
DDP_BOTH bool has_aligned_rows(const T* matrix, U64 stride) {
    return is_aligned(matrix) && stride % kPack == 0;
}

/// Calls `body.run<kPack>(row, column)` for whole packs of the rows of a matrix, `body.run<1>(row, column)`
/// for the rest at their ends, or for all elements unless `together`. Neighbouring threads take neighbouring
/// packs. A thread divides once, not once per pack: 64-bit divisions would take longer than the memory
/// access.
template <class Body>
DDP_BOTH void for_rows(U64 thread, U64 threads, U64 rows, U64 columns, bool together, const Body& body) {
    const U64 packs = (columns + kPack - 1) / kPack;
    const U64 rows_on = threads / packs, packs_on = threads % packs;
    U64 row = thread / packs, pack = thread % packs;
    while (row < rows) {
        const U64 column = pack * kPack;
        if (together && column + kPack <= columns) {
            body.template run<kPack>(row, column);
        } else {
            for (U64 c = column; c < columns && c < column + kPack; ++c) body.template run<1>(row, c);
        }
        row += rows_on;
        pack += packs_on;
        if (pack >= packs) {
            pack -= packs;
            ++row;
        }
    }
}

template <class T>
struct Stage {
    const float* from;
    const std::uint32_t* order;
    Rows to;

    template <int N>
    DDP_BOTH void run(U64 row, U64 column) const {
        store(static_cast<T*>(to.data) + row * to.stride + column,
              load<N>(from + row_at(order, row) * to.columns + column));
    }
    DDP_BOTH void operator()(U64 thread, U64 threads, unsigned) const {
        const bool together =
            has_aligned_rows(from, to.columns) && has_aligned_rows(static_cast<const T*>(to.data), to.stride);
        for_rows(thread, threads, to.rows, to.columns, together, *this);
    }
};

struct StageLabels {
    const std::int32_t* from;
    const std::uint32_t* order;
    std::int32_t* to;
    U64 count;
    DDP_BOTH void operator()(U64 thread, U64 threads, unsigned) const {
        for (U64 i = thread; i < count; i += threads) to[i] = from[row_at(order, i)];
    }
};

/// One warp computes one row.
template <class T>
struct SoftmaxLoss {
    CrossEntropy loss;

    /// Writes the row's delta; returns its loss and whether the label won.
    template <class Lanes>
    DDP_BOTH float row_loss(U64 row, Lanes lanes, bool& hit) const {
        const U64 classes = loss.logits.columns, label = static_cast<U64>(loss.labels[row]);
        const T* const logits = static_cast<const T*>(loss.logits.data) + row * loss.logits.stride;
        T* const delta = static_cast<T*>(loss.delta.data) + row * loss.delta.stride;
        float best = -INFINITY;
        for (U64 c = lanes.mine(); c < classes; c += Lanes::count) {
            const float logit = to_float(logits[c]);
            best = logit > best ? logit : best;
        }
        best = lanes.max(best);
        // Subtract the largest logit first, so that the exponential cannot overflow.
        float total = 0;
        std::uint32_t winner = ~0U;
        for (U64 c = lanes.mine(); c < classes; c += Lanes::count) {
            const float logit = to_float(logits[c]);
            total += expf(logit - best);
            if (logit == best && winner == ~0U) winner = static_cast<std::uint32_t>(c);
        }
        total = lanes.sum(total);
        winner = lanes.min(winner);
        const float share = 1.0F / static_cast<float>(loss.logits.rows * loss.batches);
        const float scale = loss.scale != nullptr ? share * *loss.scale : share;
        for (U64 c = lanes.mine(); c < classes; c += Lanes::count) {
            const float probability = expf(to_float(logits[c]) - best) * (scale / total);
            round_to(c == label ? probability - scale : probability, delta[c]);
        }
        hit = winner == label;
        return logf(total) + best - to_float(logits[label]);
    }
    template <class Lanes>
    DDP_BOTH void operator()(U64 warp, U64 warps, Lanes lanes) const {
        for (U64 slot = warp; slot < loss.slots && slot < loss.logits.rows; slot += warps) {
            double sum = 0;
            unsigned long long count = 0;
            for (U64 row = slot; row < loss.logits.rows; row += loss.slots) {
                bool hit = false;
                sum += static_cast<double>(row_loss(row, lanes, hit));
                count += hit ? 1 : 0;
            }
            if (lanes.mine() == 0) {
                loss.losses[slot] += sum;
                loss.hits[slot] += count;
            }
        }
    }
};

template <class T>
struct AddBias {
    Rows output;
    const T* bias;
    bool relu;

    template <int N>
    DDP_BOTH void run(U64 row, U64 column) const {
        T* const at = static_cast<T*>(output.data) + row * output.stride + column;
        Floats<N> sums = load<N>(at);
        const Floats<N> added = load<N>(bias + column);
        for (int k = 0; k < N; ++k) {
            const float sum = sums.of[k] + added.of[k];
            sums.of[k] = relu && sum < 0 ? 0.0F : sum;
        }
        store(at, sums);
    }
    DDP_BOTH void operator()(U64 thread, U64 threads, unsigned) const {
        const bool together =
            has_aligned_rows(static_cast<const T*>(output.data), output.stride) && is_aligned(bias);
        for_rows(thread, threads, output.rows, output.columns, together, *this);
    }
};

template <class T>
struct ReluGradient {
    Rows delta;
    const T* output;

    template <int N>
    DDP_BOTH void run(U64 row, U64 column) const {
        T* const at = static_cast<T*>(delta.data) + row * delta.stride + column;
        Floats<N> values = load<N>(at);
        const Floats<N> outputs = load<N>(output + row * delta.stride + column);
        for (int k = 0; k < N; ++k) values.of[k] = outputs.of[k] > 0 ? values.of[k] : 0.0F;
        store(at, values);
    }
    DDP_BOTH void operator()(U64 thread, U64 threads, unsigned) const {
        const bool together =
            has_aligned_rows(static_cast<const T*>(delta.data), delta.stride) && is_aligned(output);
        for_rows(thread, threads, delta.rows, delta.columns, together, *this);
    }
};

}  // namespace

cudaError_t stage(const LaunchConfig& config, const float* from, const std::uint32_t* order, const Rows& to) {
    return with_type(config.type, [&](auto type) {
        return launch(Stage<decltype(type)>{from, order, to}, config.blocks, 1, config.stream);
    });
}
cudaError_t stage_labels(const LaunchConfig& config, const std::int32_t* from, const std::uint32_t* order,
                         std::int32_t* to, std::uint64_t count) {
    return launch(StageLabels{from, order, to, count}, config.blocks, 1, config.stream);
}
cudaError_t cross_entropy(const LaunchConfig& config, const CrossEntropy& loss) {
    return with_type(config.type, [&](auto type) {
        return launch_rows(SoftmaxLoss<decltype(type)>{loss}, config.blocks, config.stream);
    });
}
cudaError_t add_bias(const LaunchConfig& config, const Rows& output, const void* bias, bool relu) {
    return with_type(config.type, [&](auto type) {
        return launch(AddBias<decltype(type)>{output, static_cast<const decltype(type)*>(bias), relu},
                      config.blocks, 1, config.stream);
    });
}
cudaError_t relu_gradient(const LaunchConfig& config, const Rows& delta, const void* output) {
    return with_type(config.type, [&](auto type) {
        return launch(ReluGradient<decltype(type)>{delta, static_cast<const decltype(type)*>(output)},
                      config.blocks, 1, config.stream);
    });
}

}  // namespace train::kernels
