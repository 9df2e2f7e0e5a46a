// The torch op of embedding.h.
#pragma once
#include "door.h"
#include "embedding.h"
#include "simd.h"

namespace modelworker {

inline Tensor embedding_door(const Tensor weight, const Tensor ids) {
  using torch::headeronly::ScalarType;
  const bool is_long = ids.scalar_type() == ScalarType::Long;
  STD_TORCH_CHECK(ids.dim() == 1 && ids.is_contiguous() && (is_long || ids.scalar_type() == ScalarType::Int), "expected ids [num_ids], int64 or int32");
  STD_TORCH_CHECK(weight.dim() == 2 && weight.stride(1) == 1, "expected a weight [num_rows, size] with dense rows");
  Tensor out = new_output(weight, {ids.size(0), weight.size(1)});
  const GatherRowsArguments arguments{
      .weight = weight.const_data_ptr(),
      .ids = ids.const_data_ptr(),
      .out = out.mutable_data_ptr(),
      .num_ids = ids.size(0),
      .num_rows = weight.size(0),
      .size = weight.size(1),
      .weight_stride = weight.stride(0),
      .has_long_ids = is_long,
  };
  run(is_bfloat16(weight) ? gather_rows<BFloat16> : gather_rows<float>, arguments);
  return out;
}

}  // namespace modelworker
