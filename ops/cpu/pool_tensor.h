// Tensors in a pool's memory.
#pragma once
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <memory>
#include <vector>

#include "memory_pool.h"

namespace modelworker {

inline std::vector<int64_t> dense_strides(const std::vector<int64_t>& sizes) {
  std::vector<int64_t> strides(sizes.size(), 1);
  for (size_t dim = sizes.size(); dim-- > 1;) strides[dim - 1] = strides[dim] * (sizes[dim] > 1 ? sizes[dim] : 1);
  return strides;
}

inline size_t num_bytes_of(const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides, torch::headeronly::ScalarType dtype) {
  int64_t last = 0;
  for (size_t dim = 0; dim < sizes.size(); ++dim) {
    if (sizes[dim] == 0) return 0;
    last += (sizes[dim] - 1) * strides[dim];
  }
  const auto shim_dtype = torch::stable::detail::to<int32_t>(torch::stable::detail::from(dtype));
  return static_cast<size_t>(last + 1) * aoti_torch_dtype_element_size(shim_dtype);
}

// An unfilled tensor. Its memory goes back to the pool when it dies.
inline torch::stable::Tensor pool_tensor(
    const std::shared_ptr<MemoryPool>& pool, const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides,
    torch::headeronly::ScalarType dtype) {
  const torch::stable::Device cpu(torch::headeronly::DeviceType::CPU);
  void* chunk = pool->allocate(num_bytes_of(sizes, strides, dtype));
  return torch::stable::from_blob(chunk, sizes, strides, cpu, dtype, [pool](void* data) { pool->free(data); });
}

// The same elements as a tensor that doesn't keep their memory from being used again, only the pool alive.
inline torch::stable::Tensor pool_alias(const std::shared_ptr<MemoryPool>& pool, const torch::stable::Tensor& tensor) {
  const torch::stable::Device cpu(torch::headeronly::DeviceType::CPU);
  return torch::stable::from_blob(
      tensor.data_ptr(), tensor.sizes(), tensor.strides(), cpu, tensor.scalar_type(), [pool](void*) {});
}

}  // namespace modelworker
