// What cuBLASLt has no epilogue for. Rows are as many elements apart as their stride says.
#include "ddp/cuda/kernel_dialect.h"

using namespace ddp::device;

namespace {

DDP_DEVICE U64 row_at(const U32* order, U64 row) { return order != nullptr ? order[row] : row; }

/// Float32 rows without gaps, in some order, rounded into rows with a stride.
template <class T>
DDP_DEVICE void stage(const float* from, const U32* order, T* to, U64 rows, U64 columns, U64 stride) {
    const bool whole_packs =
        columns % kPack == 0 && stride % kPack == 0 && is_aligned(from) && is_aligned(to);
    if (whole_packs) {
        const U64 packs = columns / kPack;
        for (U64 p = thread(); p < rows * packs; p += threads()) {
            const U64 row = p / packs, at = p % packs * kPack;
            store(to + row * stride + at, load<kPack>(from + row_at(order, row) * columns + at));
        }
        return;
    }
    for (U64 i = thread(); i < rows * columns; i += threads())
        to[i / columns * stride + i % columns] =
            rounded_to<T>(from[row_at(order, i / columns) * columns + i % columns]);
}

/// Where the labels of a batch are, and what is asked of it.
struct Loss {
    const I32* labels;
    U64 rows, classes;
    const float* scale;  ///< null: 1
};

/// One row by one warp: its delta, its loss, and whether the label won.
template <class T>
DDP_DEVICE float row_loss(const T* logits, T* delta, U32 label, const Loss& batch, bool& hit) {
    const float nothing = -float_of(0x7F800000U);
    float best = nothing;
    for (U64 c = lane(); c < batch.classes; c += kLanes) {
        const float logit = to_float(logits[c]);
        best = logit > best ? logit : best;
    }
    best = warp_max(best);
    // The largest logit is taken off first: the exponential cannot overflow.
    float total = 0;
    U32 winner = ~0U;
    for (U64 c = lane(); c < batch.classes; c += kLanes) {
        const float logit = to_float(logits[c]);
        total += exponential(logit - best);
        if (logit == best && winner == ~0U) winner = static_cast<U32>(c);
    }
    total = warp_sum(total);
    winner = warp_min(winner);
    const float share = 1.0F / static_cast<float>(batch.rows);
    const float scale = batch.scale != nullptr ? share * *batch.scale : share;
    for (U64 c = lane(); c < batch.classes; c += kLanes) {
        const float probability = exponential(to_float(logits[c]) - best) * (scale / total);
        delta[c] = rounded_to<T>(c == label ? probability - scale : probability);
    }
    hit = winner == label;
    return logarithm(total) + best - to_float(logits[label]);
}

/// Row r adds to slot r % slots: sums do not depend on how many threads there are.
template <class T>
DDP_DEVICE void cross_entropy(const T* logits, U64 stride, T* delta, U64 delta_stride, const Loss& batch,
                              double* losses, U64* hits, U64 slots) {
    for (U64 slot = warp(); slot < slots; slot += warps()) {
        double loss = 0;
        U64 count = 0;
        for (U64 row = slot; row < batch.rows; row += slots) {
            bool hit = false;
            loss += static_cast<double>(row_loss(logits + row * stride, delta + row * delta_stride,
                                                 static_cast<U32>(batch.labels[row]), batch, hit));
            count += hit ? 1 : 0;
        }
        if (lane() == 0 && slot < batch.rows) {
            losses[slot] += loss;
            hits[slot] += count;
        }
    }
}

/// output = activation(output + bias)
template <class T>
DDP_DEVICE void add_bias(T* output, U64 stride, const T* bias, U64 rows, U64 columns, I32 relu) {
    for (U64 i = thread(); i < rows * columns; i += threads()) {
        T& at = output[i / columns * stride + i % columns];
        const float sum = to_float(at) + to_float(bias[i % columns]);
        at = rounded_to<T>(relu != 0 && sum < 0 ? 0.0F : sum);
    }
}

/// delta = 0 where the output is
template <class T>
DDP_DEVICE void relu_gradient(T* delta, const T* output, U64 stride, U64 rows, U64 columns) {
    for (U64 i = thread(); i < rows * columns; i += threads()) {
        const U64 at = i / columns * stride + i % columns;
        if (!(to_float(output[at]) > 0)) delta[at] = rounded_to<T>(0.0F);
    }
}

/// Sums of each column over each of `parts` runs of rows.
template <class T>
DDP_DEVICE void column_sums(const T* delta, U64 stride, U64 rows, U64 columns, float* sums, U64 parts) {
    const U64 length = (rows + parts - 1) / parts;
    for (U64 i = thread(); i < parts * columns; i += threads()) {
        const U64 begin = i / columns * length;
        const U64 end = begin + length < rows ? begin + length : rows;
        float sum = 0;
        for (U64 row = begin; row < end; ++row) sum += to_float(delta[row * stride + i % columns]);
        sums[i] = sum;
    }
}
template <class T>
DDP_DEVICE void sum_parts(const float* sums, U64 parts, U64 columns, T* to) {
    for (U64 column = thread(); column < columns; column += threads()) {
        float sum = 0;
        for (U64 part = 0; part < parts; ++part) sum += sums[part * columns + column];
        to[column] = rounded_to<T>(sum);
    }
}

}  // namespace

#define KERNELS_OF(suffix, T)                                                                                \
    DDP_KERNEL(train_stage_##suffix, const float* from, const U32* order, T* to, U64 rows, U64 columns,      \
               U64 stride) {                                                                                 \
        stage(from, order, to, rows, columns, stride);                                                       \
    }                                                                                                        \
    DDP_KERNEL(train_cross_entropy_##suffix, const T* logits, U64 stride, const I32* labels, T* delta,       \
               U64 delta_stride, U64 rows, U64 classes, const float* scale, double* losses, U64* hits,       \
               U64 slots) {                                                                                  \
        cross_entropy(logits, stride, delta, delta_stride, Loss{labels, rows, classes, scale}, losses, hits, \
                      slots);                                                                                \
    }                                                                                                        \
    DDP_KERNEL(train_add_bias_##suffix, T* output, U64 stride, const T* bias, U64 rows, U64 columns,         \
               I32 relu) {                                                                                   \
        add_bias(output, stride, bias, rows, columns, relu);                                                 \
    }                                                                                                        \
    DDP_KERNEL(train_relu_gradient_##suffix, T* delta, const T* output, U64 stride, U64 rows, U64 columns) { \
        relu_gradient(delta, output, stride, rows, columns);                                                 \
    }                                                                                                        \
    DDP_KERNEL(train_column_sums_##suffix, const T* delta, U64 stride, U64 rows, U64 columns, float* sums,   \
               U64 parts) {                                                                                  \
        column_sums(delta, stride, rows, columns, sums, parts);                                              \
    }                                                                                                        \
    DDP_KERNEL(train_sum_parts_##suffix, const float* sums, U64 parts, U64 columns, T* to) {                 \
        sum_parts(sums, parts, columns, to);                                                                 \
    }

KERNELS_OF(f32, float)
KERNELS_OF(bf16, Bf16)
KERNELS_OF(f16, F16)

DDP_KERNEL(train_stage_labels, const I32* from, const U32* order, I32* to, U64 count) {
    for (U64 i = thread(); i < count; i += threads()) to[i] = from[row_at(order, i)];
}
