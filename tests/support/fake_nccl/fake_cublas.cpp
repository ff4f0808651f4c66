// The entry points of cuBLAS that train calls, over host memory and the streams of fake_cuda. Products are
// plain loops. Calls that train never makes are refused with a line on stderr.
//
// FAKE_CUBLAS=refuse   every product fails to start
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <vector>

#include "ddp/cuda/numbers.h"
#include "tests/support/fake_nccl/fake_cuda.h"
#include "train/cublas_api.h"

namespace fake {

namespace blas = train::cublas;
using blas::Code;
using blas::DataType;
using blas::Operation;

namespace {

constexpr auto kRefusedValue = static_cast<Code>(7), kRefused = static_cast<Code>(15);

struct Handle {
    void* stream = nullptr;
    bool has_workspace = false, adds_in_float32 = false;
};
Handle& handle_of(blas::Handle handle) { return *reinterpret_cast<Handle*>(handle); }

Code refuse(Code code, const char* why) {
    std::fprintf(stderr, "fake cuBLAS: %s\n", why);
    return code;
}

/// A column-major matrix in memory.
struct Operand {
    const void* data;
    DataType type;
    int leading;
    bool transposed;

    /// The element after transposition.
    [[nodiscard]] float at(int row, int column) const {
        const int along = transposed ? row : column, down = transposed ? column : row;
        const auto i = static_cast<std::size_t>(along) * static_cast<std::size_t>(leading) +
                       static_cast<std::size_t>(down);
        using namespace ddp::device;
        switch (type) {
            case DataType::F32: return static_cast<const float*>(data)[i];
            case DataType::BF16: return to_float(static_cast<const Bf16*>(data)[i]);
            case DataType::F16: return to_float(static_cast<const F16*>(data)[i]);
        }
        return 0;
    }
    [[nodiscard]] bool holds(int rows) const { return leading >= (rows > 1 ? rows : 1); }
};

void store_at(void* memory, DataType type, std::size_t at, float value) {
    using namespace ddp::device;
    switch (type) {
        case DataType::F32: static_cast<float*>(memory)[at] = value; return;
        case DataType::BF16: round_to(value, static_cast<Bf16*>(memory)[at]); return;
        case DataType::F16: round_to(value, static_cast<F16*>(memory)[at]); return;
    }
}

/// Rounds to the 10 fraction bits of a TF32 product.
float to_tf32(float value) {
    using namespace ddp::device;
    return float_of((bits_of(value) + 0x1000U) & ~0x1FFFU);
}

struct Product {
    int m, n, k;
    Operand a, b;
    void* c;
    int ldc;
    bool tf32, adds;

    /// Each sum runs in order; a column is summed at once, so that the compiler can vectorize.
    void run() const {
        const auto rows = static_cast<std::size_t>(m);
        const auto seen = [this](float value) { return tf32 ? to_tf32(value) : value; };
        std::vector<float> left;
        for (int x = 0; x < k; ++x)
            for (int row = 0; row < m; ++row) left.push_back(seen(a.at(row, x)));
        for (int column = 0; column < n; ++column) {
            std::vector<float> sums(rows);
            for (std::size_t row = 0; adds && row < rows; ++row)
                sums[row] = Operand{c, a.type, ldc, false}.at(static_cast<int>(row), column);
            for (int x = 0; x < k; ++x) {
                const float right = seen(b.at(x, column));
                const float* const of_x = left.data() + static_cast<std::size_t>(x) * rows;
                for (std::size_t row = 0; row < rows; ++row) sums[row] += of_x[row] * right;
            }
            for (std::size_t row = 0; row < rows; ++row)
                store_at(c, a.type, static_cast<std::size_t>(column) * static_cast<std::size_t>(ldc) + row,
                         sums[row]);
        }
    }
};

}  // namespace
}  // namespace fake

extern "C" {

using fake::Code;
namespace blas = train::cublas;

Code cublasCreate_v2(blas::Handle* handle) {
    return *handle = reinterpret_cast<blas::Handle>(new fake::Handle), Code::Success;
}
Code cublasDestroy_v2(blas::Handle handle) { return delete &fake::handle_of(handle), Code::Success; }
Code cublasGetVersion_v2(blas::Handle, int* version) { return *version = 130100, Code::Success; }
Code cublasSetStream_v2(blas::Handle handle, ddp::cuda::Stream stream) {
    // The workspace becomes the library's own, as in cuBLAS.
    return fake::handle_of(handle) = {stream, false, fake::handle_of(handle).adds_in_float32}, Code::Success;
}
Code cublasSetWorkspace_v2(blas::Handle handle, void* workspace, std::size_t bytes) {
    if (reinterpret_cast<std::uintptr_t>(workspace) % 256 != 0 || bytes == 0)
        return fake::refuse(fake::kRefusedValue, "the workspace is empty, or not aligned");
    return fake::handle_of(handle).has_workspace = true, Code::Success;
}
Code cublasSetMathMode(blas::Handle handle, blas::MathMode mode) {
    fake::handle_of(handle).adds_in_float32 = mode == blas::MathMode::NoReducedPrecisionReduction;
    return Code::Success;
}

Code cublasGemmEx(blas::Handle handle, blas::Operation op_a, blas::Operation op_b, int m, int n, int k,
                  const void* alpha, const void* a, blas::DataType type_a, int lda, const void* b,
                  blas::DataType type_b, int ldb, const void* beta, void* c, blas::DataType type_c, int ldc,
                  blas::ComputeType compute, blas::Algorithm algorithm) {
    if (std::getenv("FAKE_CUBLAS") != nullptr) return fake::kRefused;
    const fake::Handle& mine = fake::handle_of(handle);
    const fake::Product product{m,
                                n,
                                k,
                                {a, type_a, lda, op_a == blas::Operation::Transposed},
                                {b, type_b, ldb, op_b == blas::Operation::Transposed},
                                c,
                                ldc,
                                compute == blas::ComputeType::Tf32,
                                *static_cast<const float*>(beta) == 1};
    if (m < 1 || n < 1 || k < 1) return fake::refuse(fake::kRefusedValue, "a size is 0");
    if (!product.a.holds(product.a.transposed ? k : m) || !product.b.holds(product.b.transposed ? n : k) ||
        ldc < m)
        return fake::refuse(fake::kRefusedValue, "columns overlap");
    if (type_a != type_b || type_a != type_c)
        return fake::refuse(fake::kRefused, "the types of A, B and C differ");
    if (*static_cast<const float*>(alpha) != 1 || (!product.adds && *static_cast<const float*>(beta) != 0))
        return fake::refuse(fake::kRefused, "anything but C = A B and C = A B + C");
    if (algorithm != blas::Algorithm::Default) return fake::refuse(fake::kRefused, "unknown algorithm");
    if (type_c != blas::DataType::F32 && !mine.adds_in_float32)
        return fake::refuse(fake::kRefusedValue, "pieces of sums could be rounded to 16 bits");
    const std::shared_ptr<fake::Stream> on = fake::stream_of(mine.stream);
    if (on->capture() && !mine.has_workspace)
        return fake::refuse(fake::kRefused, "the library would allocate in a capture");
    on->post([product] { product.run(); });
    return Code::Success;
}

const char* cublasGetStatusString(Code code) {
    if (code == Code::Success) return "CUBLAS_STATUS_SUCCESS";
    return code == fake::kRefusedValue ? "CUBLAS_STATUS_INVALID_VALUE" : "CUBLAS_STATUS_NOT_SUPPORTED";
}

}  // extern "C"
