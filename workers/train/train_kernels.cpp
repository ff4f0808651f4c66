// What cuBLASLt has no epilogue for. Rows are as many elements apart as their stride says.
#include "ddp/cuda/kernel_dialect.h"

using namespace ddp::device;

namespace {

DDP_DEVICE U64 row_at(const U32* order, U64 row) { return order != nullptr ? order[row] : row; }

/// Calls `body.run<kPack>(row, column)` for whole packs of the rows of a matrix, `body.run<1>(row, column)`
/// for what is left over at their ends, or for everything unless `together`. Neighbouring threads take
/// neighbouring packs. A thread divides once, not once for each pack: 64-bit divisions would take longer than
/// the memory.
template <class Body>
DDP_DEVICE void for_rows(U64 rows, U64 columns, bool together, const Body& body) {
    const U64 packs = (columns + kPack - 1) / kPack;
    const U64 rows_on = threads() / packs, packs_on = threads() % packs;
    U64 row = thread() / packs, pack = thread() % packs;
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

/// Whether packs of every row are aligned to 16 bytes.
template <class T>
DDP_DEVICE bool has_aligned_rows(const T* matrix, U64 stride) {
    return is_aligned(matrix) && stride * sizeof(T) % 16 == 0;
}

/// Float32 rows without gaps, in some order, rounded into rows with a stride.
template <class T>
struct Stage {
    const float* from;
    const U32* order;
    T* to;
    U64 columns, stride;
    template <int N>
    DDP_DEVICE void run(U64 row, U64 column) const {
        store(to + row * stride + column, load<N>(from + row_at(order, row) * columns + column));
    }
};
template <class T>
DDP_DEVICE void stage(const float* from, const U32* order, T* to, U64 rows, U64 columns, U64 stride) {
    const bool together = has_aligned_rows(from, columns) && has_aligned_rows(to, stride);
    for_rows(rows, columns, together, Stage<T>{from, order, to, columns, stride});
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
struct AddBias {
    T* output;
    const T* bias;
    U64 stride;
    bool relu;
    template <int N>
    DDP_DEVICE void run(U64 row, U64 column) const {
        T* const at = output + row * stride + column;
        Floats<N> sums = load<N>(at);
        const Floats<N> added = load<N>(bias + column);
        for (int k = 0; k < N; ++k) {
            const float sum = sums.of[k] + added.of[k];
            sums.of[k] = relu && sum < 0 ? 0.0F : sum;
        }
        store(at, sums);
    }
};
template <class T>
DDP_DEVICE void add_bias(T* output, U64 stride, const T* bias, U64 rows, U64 columns, I32 relu) {
    for_rows(rows, columns, has_aligned_rows(output, stride) && is_aligned(bias),
             AddBias<T>{output, bias, stride, relu != 0});
}

/// delta = 0 where the output is
template <class T>
struct ReluGradient {
    T* delta;
    const T* output;
    U64 stride;
    template <int N>
    DDP_DEVICE void run(U64 row, U64 column) const {
        T* const at = delta + row * stride + column;
        Floats<N> values = load<N>(at);
        const Floats<N> outputs = load<N>(output + row * stride + column);
        for (int k = 0; k < N; ++k) values.of[k] = outputs.of[k] > 0 ? values.of[k] : 0.0F;
        store(at, values);
    }
};
template <class T>
DDP_DEVICE void relu_gradient(T* delta, const T* output, U64 stride, U64 rows, U64 columns) {
    for_rows(rows, columns, has_aligned_rows(delta, stride) && is_aligned(output),
             ReluGradient<T>{delta, output, stride});
}

/// Adds one pack of each row to `total`, in the order of the rows. Four are read before the first is needed:
/// it is the memory that is waited for.
template <class T>
DDP_DEVICE void add_packs(const T* from, U64 stride, U64 rows, Floats<kPack>& total) {
    constexpr int kAhead = 4;
    U64 row = 0;
    for (; row + kAhead <= rows; row += kAhead) {
        Floats<kPack> read[kAhead];
        for (int r = 0; r < kAhead; ++r) read[r] = load<kPack>(from + (row + static_cast<U64>(r)) * stride);
        for (int r = 0; r < kAhead; ++r)
            for (int k = 0; k < kPack; ++k) total.of[k] += read[r].of[k];
    }
    for (; row < rows; ++row) {
        const Floats<kPack> read = load<kPack>(from + row * stride);
        for (int k = 0; k < kPack; ++k) total.of[k] += read.of[k];
    }
}
/// The same for a pack that is not aligned, or of fewer columns.
template <class T>
DDP_DEVICE void add_columns(const T* from, U64 stride, U64 rows, U64 width, Floats<kPack>& total) {
    for (U64 row = 0; row < rows; ++row)
        for (U64 k = 0; k < kPack; ++k)
            if (k < width) total.of[k] += to_float(from[row * stride + k]);
}

/// Sums of each column over each of `parts` runs of rows; rows of `sums` are whole packs. Each thread takes
/// one pack of one run, neighbours take neighbouring packs.
template <class T>
DDP_DEVICE void column_sums(const T* delta, U64 stride, U64 rows, U64 columns, float* sums, U64 parts) {
    const U64 packs = (columns + kPack - 1) / kPack, length = (rows + parts - 1) / parts;
    const bool together = has_aligned_rows(delta, stride);
    for (U64 i = thread(); i < parts * packs; i += threads()) {
        const U64 first = i / packs * length, column = i % packs * kPack;
        const U64 left = first < rows ? rows - first : 0;
        const U64 count = left < length ? left : length;
        const T* const from = delta + first * stride + column;
        Floats<kPack> total{};
        if (together && column + kPack <= columns) add_packs(from, stride, count, total);
        else add_columns(from, stride, count, columns - column, total);
        store(sums + i * kPack, total);
    }
}
/// What column_sums has left, each pack by one warp.
template <class T>
DDP_DEVICE void sum_parts(const float* sums, U64 parts, U64 columns, T* to) {
    const U64 packs = (columns + kPack - 1) / kPack;
    for (U64 pack = warp(); pack < packs; pack += warps()) {
        Floats<kPack> total{};
        for (U64 part = lane(); part < parts; part += kLanes) {
            const Floats<kPack> read = load<kPack>(sums + (part * packs + pack) * kPack);
            for (int k = 0; k < kPack; ++k) total.of[k] += read.of[k];
        }
        for (int k = 0; k < kPack; ++k) {
            const float sum = warp_sum(total.of[k]);
            const U64 column = pack * kPack + static_cast<U64>(k);
            if (lane() == 0 && column < columns) to[column] = rounded_to<T>(sum);
        }
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
