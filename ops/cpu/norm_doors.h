// The torch ops of norm.h.
#pragma once
#include "door.h"
#include "norm.h"
#include "simd.h"

namespace modelworker {

inline Tensor rms_norm_door(const Tensor x, const Tensor weight, double eps) {
  Tensor out = new_output(x, sizes_of(x));
  const RmsNormArguments arguments{
      .x = x.const_data_ptr(),
      .weight = weight.const_data_ptr(),
      .out = out.mutable_data_ptr(),
      .num_rows = rows_of(x),
      .hidden_size = x.size(-1),
      .x_stride = row_stride_of(x),
      .eps = static_cast<float>(eps),
  };
  run(is_bfloat16(x) ? rms_norm<BFloat16> : rms_norm<float>, arguments);
  return out;
}

inline void fused_add_rms_norm_door(Tensor x, Tensor residual, const Tensor weight, double eps) {
  const AddRmsNormArguments arguments{
      .x = x.mutable_data_ptr(),
      .residual = residual.mutable_data_ptr(),
      .weight = weight.const_data_ptr(),
      .num_rows = rows_of(x),
      .hidden_size = x.size(-1),
      .x_stride = row_stride_of(x),
      .residual_stride = row_stride_of(residual),
      .eps = static_cast<float>(eps),
  };
  run(is_bfloat16(x) ? add_rms_norm<BFloat16> : add_rms_norm<float>, arguments);
}

}  // namespace modelworker
