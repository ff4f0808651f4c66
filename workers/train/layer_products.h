#pragma once

#include <cstddef>

#include "compute.h"
#include "products.h"

/// Products of row-major matrices in cuBLASLt's terms.
namespace train {

inline constexpr lt::Operation kAsIs = lt::Operation::None, kTransposed = lt::Operation::Transpose;

/// to = left right, each as it is or transposed, without an epilogue.
Product product_of(const Matrix& to, const Matrix& left, lt::Operation op_left, const Matrix& right,
                   lt::Operation op_right);
/// The same with an epilogue that reads or writes a vector beside it, and one that does so with a ReLU mask.
Product with_bias(Product product, lt::Epilogue epilogue, const void* bias);
Product with_mask(Product product, lt::Epilogue epilogue, const void* mask);

/// Of the mask of a matrix.
std::size_t relu_mask_bytes(std::size_t rows, std::size_t columns);

}  // namespace train
