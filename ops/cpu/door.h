// What the torch doors of the kernels share. Layers hand over what the kernels take; a door checks only what would make it read or
// write outside its tensors.
#pragma once
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <vector>

#include "launch.h"
#include "pool_tensor.h"
#include "recording.h"

namespace modelworker {

using torch::stable::Tensor;

inline bool is_bfloat16(const Tensor& tensor) {
  const auto type = tensor.scalar_type();
  STD_TORCH_CHECK(
      type == torch::headeronly::ScalarType::BFloat16 || type == torch::headeronly::ScalarType::Float, "expected bfloat16 or float32");
  return type == torch::headeronly::ScalarType::BFloat16;
}

// Number of rows of [..., size], whose last dimension is dense, and whose others could be one.
inline int64_t rows_of(const Tensor& tensor) {
  STD_TORCH_CHECK(tensor.stride(-1) == 1, "expected dense rows");
  int64_t rows = 1;
  for (int64_t dim = tensor.dim() - 2; dim >= 0; --dim) {
    STD_TORCH_CHECK(
        tensor.size(dim) <= 1 || rows == 0 || tensor.stride(dim) == rows * tensor.stride(tensor.dim() - 2), "expected rows that lie apart by one stride");
    rows *= tensor.size(dim);
  }
  return rows;
}

// Elements from one row of [rows, size] to the next.
inline int64_t row_stride_of(const Tensor& tensor) { return tensor.dim() < 2 ? tensor.size(-1) : tensor.stride(tensor.dim() - 2); }

inline std::vector<int64_t> sizes_of(const Tensor& tensor) {
  std::vector<int64_t> sizes;
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) sizes.push_back(tensor.size(dim));
  return sizes;
}

// A dense tensor that a kernel fills: in the pool, if a list is being recorded; else as torch allocates.
inline Tensor new_output(const Tensor& like, const std::vector<int64_t>& sizes, torch::headeronly::ScalarType dtype) {
  if (const List* list = recording(); list != nullptr) return pool_tensor(list->pool(), sizes, dense_strides(sizes), dtype);
  return torch::stable::new_empty(like, sizes, dtype);
}
inline Tensor new_output(const Tensor& like, const std::vector<int64_t>& sizes) { return new_output(like, sizes, like.scalar_type()); }

}  // namespace modelworker
