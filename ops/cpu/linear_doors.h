// The torch ops of packed.h and linear.h.
#pragma once
#include <optional>
#include <tuple>

#include "door.h"
#include "linear.h"
#include "packed.h"
#include "simd.h"
#include "workspace.h"

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
  STD_TORCH_CHECK(weight.dim() == 2, "expected a weight [out_features, in_features]");
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
  Tensor weight = new_output(packed, {out_features, in_features});
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
  Tensor out = new_output(packed, {ids.size(0), in_features});
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

inline int64_t tile_bytes_of(const Tensor& x) { return num_tile_bytes(rows_of(x), x.size(-1), element_size_of(x)); }

// Calls `launch_piece(piece, first row)` for x in pieces of as many rows as are tiled at a time, or for all of it where it is read
// in place. `tiles`: memory of `tile_bytes_of(x)`.
template <typename Launch>
void for_each_piece(const Tensor& x, const Tensor& packed, int64_t out_features, void* tiles, const Launch& launch_piece) {
  check_packed(packed, out_features, x.size(-1));
  STD_TORCH_CHECK(x.scalar_type() == packed.scalar_type(), "expected a weight of x's dtype");
  const int64_t num_rows = rows_of(x);
  const int64_t in_features = x.size(-1);
  const int64_t stride = row_stride_of(x);
  const int64_t element_size = element_size_of(x);
  const bool is_tiled = uses_tiles(num_rows, element_size);
  const int64_t piece_rows = is_tiled ? kMaxTileRows : num_rows;
  for (int64_t row = 0; row < num_rows; row += piece_rows) {
    const LinearArguments piece{
        .x = static_cast<const char*>(x.const_data_ptr()) + row * stride * element_size,
        .tiles = is_tiled ? static_cast<const BFloat16*>(tiles) : nullptr,
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
  std::vector<int64_t> sizes = sizes_of(x);
  sizes.back() = out_features;
  return sizes;
}

inline Tensor linear_into(
    const Tensor& x, const Tensor& packed, const void* bias, int64_t out_features, ScalarType dtype, Body body) {
  Tensor out = new_output(x, output_sizes(x, out_features), dtype);
  const int64_t out_size = dtype == ScalarType::BFloat16 ? 2 : 4;
  const Workspace tiles(tile_bytes_of(x));
  for_each_piece(x, packed, out_features, tiles.data(), [&](LinearArguments piece, int64_t row) {
    piece.bias = bias;
    piece.out = static_cast<char*>(out.mutable_data_ptr()) + row * out_features * out_size;
    run_on_rows(body, piece, piece);
  });
  return out;
}

inline Tensor linear_door(const Tensor x, const Tensor packed, const std::optional<Tensor> bias, int64_t out_features) {
  STD_TORCH_CHECK(
      !bias.has_value() || (bias->is_contiguous() && bias->numel() == out_features && bias->scalar_type() == x.scalar_type()),
      "expected a bias [", out_features, "] of x's dtype");
  const void* bias_data = bias.has_value() ? bias->const_data_ptr() : nullptr;
  const Body body = is_bfloat16(x) ? linear<BFloat16, BFloat16> : linear<float, float>;
  return linear_into(x, packed, bias_data, out_features, x.scalar_type(), body);
}

inline Tensor linear_float32_door(const Tensor x, const Tensor packed, int64_t out_features) {
  const Body body = is_bfloat16(x) ? linear<BFloat16, float> : linear<float, float>;
  return linear_into(x, packed, nullptr, out_features, ScalarType::Float, body);
}

inline std::tuple<Tensor, Tensor, Tensor> linear_argmax_door(const Tensor x, const Tensor packed, int64_t out_features) {
  const int64_t num_rows = rows_of(x);
  Tensor ids = new_output(x, {num_rows}, ScalarType::Long);
  Tensor logits = new_output(x, {num_rows}, ScalarType::Float);
  Tensor is_finite = new_output(x, {num_rows}, ScalarType::Bool);
  const int64_t tile_bytes = tile_bytes_of(x);
  const Workspace memory(tile_bytes + num_candidate_bytes(num_rows, out_features));
  auto* candidates = reinterpret_cast<Candidate*>(static_cast<char*>(memory.data()) + tile_bytes);
  const int64_t parts = num_vocabulary_parts(out_features);
  const Body body = is_bfloat16(x) ? find_candidates<BFloat16> : find_candidates<float>;
  for_each_piece(x, packed, out_features, memory.data(), [&](const LinearArguments& piece, int64_t row) {
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
