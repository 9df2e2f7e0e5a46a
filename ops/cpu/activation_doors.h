// The torch op of activation.h.
#pragma once
#include "activation.h"
#include "door.h"
#include "simd.h"

namespace modelworker {

inline Tensor silu_and_mul_door(const Tensor x) {
  STD_TORCH_CHECK(x.dim() > 0 && x.size(-1) % 2 == 0, "expected rows gate | up");
  std::vector<int64_t> sizes = sizes_of(x);
  sizes.back() /= 2;
  Tensor out = new_output(x, sizes);
  const SiluAndMulArguments arguments{
      .x = x.const_data_ptr(),
      .out = out.mutable_data_ptr(),
      .num_rows = rows_of(x),
      .size = sizes.back(),
      .x_stride = row_stride_of(x),
  };
  run(is_bfloat16(x) ? silu_and_mul<BFloat16> : silu_and_mul<float>, arguments);
  return out;
}

}  // namespace modelworker
