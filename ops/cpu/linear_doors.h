// The torch ops of packed.h and linear.h.
#pragma once
#include <optional>
#include <tuple>
#include <vector>

#include "door.h"
#include "linear.h"
#include "packed.h"
#include "simd.h"

namespace modelworker {

using torch::headeronly::ScalarType;

inline int64_t element_size_of(const Tensor& tensor) { return is_bfloat16(tensor) ? 2 : 4; }

// A packed weight is [blocks, steps, 32, inputs per step].
inline void check_packed(const Tensor& packed, int64_t out_features, int64_t in_features) {
  const int64_t steps = is_bfloat16(packed) ? num_steps<BFloat16>(in_features) : num_steps<float>(in_features);
  STD_TORCH_CHECK(
      packed.is_contiguous() && packed.dim() == 4 && packed.size(0) == num_blocks(out_features) && packed.size(1) == steps &&
          packed.size(2) == kBlockOutputs && packed.size(3) * element_size_of(packed) == 4,
      "expected a weight [", out_features, ", ", in_features, "] packed by linear_pack");
}

inline void linear_pack_door(const Tensor weight, Tensor packed) {
  check_packed(packed, weight.size(0), weight.size(1));
  STD_TORCH_CHECK(weight.scalar_type() == packed.scalar_type(), "expected a packed weight of the weight's dtype");
  rows_of(weight);
  const PackArguments arguments{
      .weight = weight.const_data_ptr(),
      .packed = packed.mutable_data_ptr(),
      .out_features = weight.size(0),
      .in_features = weight.size(1),
      .weight_stride = row_stride_of(weight),
  };
  run(is_bfloat16(weight) ? pack_weight<BFloat16> : pack_weight<float>, arguments);
}

inline Tensor linear_unpack_door(const Tensor packed, int64_t out_features, int64_t in_features) {
  check_packed(packed, out_features, in_features);
  Tensor weight = torch::stable::new_empty(packed, {out_features, in_features});
  const UnpackArguments arguments{packed.const_data_ptr(), weight.mutable_data_ptr(), out_features, in_features};
  run(is_bfloat16(packed) ? unpack_weight<BFloat16> : unpack_weight<float>, arguments);
  return weight;
}

inline Tensor packed_embedding_door(const Tensor ids, const Tensor packed, int64_t out_features, int64_t in_features) {
  check_packed(packed, out_features, in_features);
  const bool is_long = ids.scalar_type() == ScalarType::Long;
  STD_TORCH_CHECK(
      ids.dim() == 1 && ids.is_contiguous() && (is_long || ids.scalar_type() == ScalarType::Int),
      "expected ids [num_ids], int64 or int32");
  Tensor out = torch::stable::new_empty(packed, {ids.size(0), in_features});
  const EmbeddingArguments arguments{
      .packed = packed.const_data_ptr(),
      .ids = ids.const_data_ptr(),
      .out = out.mutable_data_ptr(),
      .num_ids = ids.size(0),
      .out_features = out_features,
      .in_features = in_features,
  };
  if (is_bfloat16(packed)) {
    run(is_long ? embed<BFloat16, int64_t> : embed<BFloat16, int32_t>, arguments);
  } else {
    run(is_long ? embed<float, int64_t> : embed<float, int32_t>, arguments);
  }
  return out;
}

// Calls `launch_piece(piece, first row)` for x in pieces of as many rows as are tiled at a time, or for all of it where it is read
// in place.
template <typename Launch>
void for_each_piece(const Tensor& x, const Tensor& packed, int64_t out_features, Tensor& scratch, const Launch& launch_piece) {
  check_packed(packed, out_features, x.size(-1));
  STD_TORCH_CHECK(x.scalar_type() == packed.scalar_type(), "expected a weight of x's dtype");
  const int64_t num_rows = rows_of(x);
  const int64_t in_features = x.size(-1);
  const int64_t stride = row_stride_of(x);
  const int64_t element_size = element_size_of(x);
  const bool tiles = uses_tiles(num_rows, element_size);
  const int64_t tile_bytes = num_tile_bytes(num_rows, in_features, element_size);
  STD_TORCH_CHECK(
      scratch.is_contiguous() && scratch.scalar_type() == ScalarType::Byte && scratch.numel() >= tile_bytes,
      "expected a scratch of at least ", tile_bytes, " bytes");
  const int64_t piece_rows = tiles ? kMaxTileRows : num_rows;
  for (int64_t row = 0; row < num_rows; row += piece_rows) {
    const LinearArguments piece{
        .x = static_cast<const char*>(x.const_data_ptr()) + row * stride * element_size,
        .tiles = tiles ? static_cast<const BFloat16*>(scratch.const_data_ptr()) : nullptr,
        .packed = packed.const_data_ptr(),
        .bias = nullptr,
        .out = nullptr,
        .num_rows = num_rows - row < piece_rows ? num_rows - row : piece_rows,
        .in_features = in_features,
        .out_features = out_features,
        .x_stride = stride,
    };
    launch_piece(piece, row);
  }
}

inline TileRowsArguments tile_rows_arguments(const LinearArguments& linear) {
  return {
      .x = static_cast<const BFloat16*>(linear.x),
      .tiles = const_cast<BFloat16*>(linear.tiles),
      .num_rows = linear.num_rows,
      .in_features = linear.in_features,
      .x_stride = linear.x_stride,
  };
}

// Runs a body on the product's arguments, after tiling its rows where it takes tiles.
template <typename Arguments>
void run_on_rows(Body body, const Arguments& arguments, const LinearArguments& linear) {
  if (linear.tiles == nullptr) return run(body, arguments);
  const TileRowsArguments rows = tile_rows_arguments(linear);
  const Launch launches[] = {{tile_rows, &rows, sizeof rows}, {body, &arguments, sizeof arguments}};
  run(launches, 2);
}

inline std::vector<int64_t> output_sizes(const Tensor& x, int64_t out_features) {
  std::vector<int64_t> sizes;
  for (int64_t dim = 0; dim + 1 < x.dim(); ++dim) sizes.push_back(x.size(dim));
  sizes.push_back(out_features);
  return sizes;
}

inline Tensor linear_into(
    const Tensor& x, const Tensor& packed, const void* bias, int64_t out_features, Tensor& scratch, ScalarType dtype, Body body) {
  Tensor out = torch::stable::new_empty(x, output_sizes(x, out_features), dtype);
  const int64_t out_size = dtype == ScalarType::BFloat16 ? 2 : 4;
  for_each_piece(x, packed, out_features, scratch, [&](LinearArguments piece, int64_t row) {
    piece.bias = bias;
    piece.out = static_cast<char*>(out.mutable_data_ptr()) + row * out_features * out_size;
    run_on_rows(body, piece, piece);
  });
  return out;
}

inline Tensor linear_door(
    const Tensor x, const Tensor packed, const std::optional<Tensor> bias, int64_t out_features, Tensor scratch) {
  STD_TORCH_CHECK(
      !bias.has_value() || (bias->is_contiguous() && bias->numel() == out_features && bias->scalar_type() == x.scalar_type()),
      "expected a bias [", out_features, "] of x's dtype");
  const void* bias_data = bias.has_value() ? bias->const_data_ptr() : nullptr;
  const Body body = is_bfloat16(x) ? linear<BFloat16, BFloat16> : linear<float, float>;
  return linear_into(x, packed, bias_data, out_features, scratch, x.scalar_type(), body);
}

inline Tensor linear_float32_door(const Tensor x, const Tensor packed, int64_t out_features, Tensor scratch) {
  const Body body = is_bfloat16(x) ? linear<BFloat16, float> : linear<float, float>;
  return linear_into(x, packed, nullptr, out_features, scratch, ScalarType::Float, body);
}

inline std::tuple<Tensor, Tensor, Tensor> linear_argmax_door(
    const Tensor x, const Tensor packed, int64_t out_features, Tensor scratch) {
  const int64_t num_rows = rows_of(x);
  Tensor ids = torch::stable::new_empty(x, {num_rows}, ScalarType::Long);
  Tensor logits = torch::stable::new_empty(x, {num_rows}, ScalarType::Float);
  Tensor is_finite = torch::stable::new_empty(x, {num_rows}, ScalarType::Bool);
  const int64_t tile_bytes = num_tile_bytes(num_rows, x.size(-1), element_size_of(x));
  STD_TORCH_CHECK(
      scratch.numel() >= tile_bytes + num_candidate_bytes(num_rows, out_features), "expected a scratch of at least ",
      tile_bytes + num_candidate_bytes(num_rows, out_features), " bytes");
  auto* candidates = reinterpret_cast<Candidate*>(static_cast<char*>(scratch.mutable_data_ptr()) + tile_bytes);
  const int64_t parts = num_vocabulary_parts(out_features);
  const Body body = is_bfloat16(x) ? find_candidates<BFloat16> : find_candidates<float>;
  for_each_piece(x, packed, out_features, scratch, [&](const LinearArguments& piece, int64_t row) {
    run_on_rows(body, ArgmaxArguments{piece, candidates + row * parts, parts}, piece);
  });
  const BestCandidateArguments best{
      .candidates = candidates,
      .ids = ids.mutable_data_ptr<int64_t>(),
      .logits = logits.mutable_data_ptr<float>(),
      .is_finite = is_finite.mutable_data_ptr<bool>(),
      .num_rows = num_rows,
      .num_parts = parts,
  };
  if (num_rows > 0) run(find_best_candidate, best);
  return {ids, logits, is_finite};
}

}  // namespace modelworker
