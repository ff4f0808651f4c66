#include "layer_products.h"

namespace train {
namespace {

/// Bits from one row of a mask to the next: cuBLASLt wants a multiple of 128.
std::size_t mask_stride(std::size_t columns) {
    constexpr std::size_t kMultiple = 128;
    return (columns + kMultiple - 1) / kMultiple * kMultiple;
}

}  // namespace

Product product_of(const Matrix& to, const Matrix& left, lt::Operation op_left, const Matrix& right,
                   lt::Operation op_right) {
    // To cuBLASLt a row-major matrix is its transpose, so to^T = right^T left^T is asked for.
    Product product;
    product.kind = {.op_a = op_right,
                    .op_b = op_left,
                    .m = to.columns,
                    .n = to.rows,
                    .k = op_left == kAsIs ? left.columns : left.rows,
                    .lda = right.stride,
                    .ldb = left.stride,
                    .ldd = to.stride};
    product.a = right.data;
    product.b = left.data;
    product.d = to.data;
    return product;
}

Product with_bias(Product product, lt::Epilogue epilogue, const void* bias) {
    product.kind.epilogue = epilogue;
    product.bias = bias;
    return product;
}

Product with_mask(Product product, lt::Epilogue epilogue, const void* mask) {
    product.kind.epilogue = epilogue;
    product.kind.aux_bits = mask_stride(product.kind.m);
    product.aux = mask;
    return product;
}

std::size_t relu_mask_bytes(std::size_t rows, std::size_t columns) { return rows * mask_stride(columns) / 8; }

}  // namespace train
