// The torch ops of norm.h.
#pragma once
#include "door.h"
#include "norm.h"
#include "simd.h"

namespace modelworker {

inline void check_norm(const Tensor& x, const Tensor& weight) {
  STD_TORCH_CHECK(x.dim() > 0 && x.size(-1) <= kMaxHiddenSize, "expected rows of at most ", kMaxHiddenSize, " elements");
  STD_TORCH_CHECK(
      weight.dim() == 1 && weight.size(0) == x.size(-1) && weight.is_contiguous() && weight.scalar_type() == x.scalar_type(),
      "expected a weight [", x.size(-1), "] of x's dtype");
}

inline Tensor rms_norm_door(const Tensor x, const Tensor weight, double eps) {
  check_norm(x, weight);
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
  check_norm(x, weight);
  STD_TORCH_CHECK(
      residual.scalar_type() == x.scalar_type() && sizes_of(residual) == sizes_of(x) && rows_of(residual) == rows_of(x),
      "expected a residual of x's sizes and dtype");
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
