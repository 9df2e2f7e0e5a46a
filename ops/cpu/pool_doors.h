// The torch ops of pool_tensor.h, for the recording of calls that are not this library's.
#pragma once
#include <torch/headeronly/util/Exception.h>

#include "pool_tensor.h"
#include "recording.h"

namespace modelworker {

inline const std::shared_ptr<MemoryPool>& recording_pool() {
  const List* list = recording();
  STD_TORCH_CHECK(list != nullptr, "this thread records no list");
  return list->pool();
}

inline torch::stable::Tensor pool_empty_door(
    const std::vector<int64_t> sizes, const std::vector<int64_t> strides, torch::headeronly::ScalarType dtype) {
  return pool_tensor(recording_pool(), sizes, strides, dtype);
}

inline torch::stable::Tensor pool_alias_door(const torch::stable::Tensor tensor) {
  STD_TORCH_CHECK(recording_pool()->holds(tensor.data_ptr()), "expected a tensor in the memory of the list that is recorded");
  return pool_alias(recording_pool(), tensor);
}

}  // namespace modelworker
