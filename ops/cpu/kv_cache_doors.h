// The torch ops of kv_cache.h.
#pragma once
#include <optional>

#include "attention_doors.h"
#include "door.h"
#include "kv_cache.h"
#include "simd.h"

namespace modelworker {

inline Heads heads_of(const Tensor& tensor, int64_t num_tokens, int64_t head_dim) {
  check_heads(tensor, 3, "heads [num_tokens, num_heads, head_dim]");
  STD_TORCH_CHECK(
      tensor.size(0) == num_tokens && tensor.size(2) == head_dim, "expected heads of ", num_tokens, " tokens and ", head_dim, " elements");
  return {const_cast<void*>(tensor.const_data_ptr()), tensor.size(1), tensor.stride(0), tensor.stride(1)};
}

inline StoreKvArguments store_arguments(
    const Tensor& key, const Tensor& value, Tensor& key_cache, Tensor& value_cache, const Tensor& slots) {
  check_caches(key_cache, value_cache);
  const int64_t num_tokens = key.size(0);
  const int64_t head_dim = key_cache.size(3);
  STD_TORCH_CHECK(
      slots.scalar_type() == torch::headeronly::ScalarType::Long && slots.dim() == 1 && slots.is_contiguous() && slots.size(0) == num_tokens,
      "expected slots [", num_tokens, "], int64");
  STD_TORCH_CHECK(
      key.scalar_type() == key_cache.scalar_type() && value.scalar_type() == key_cache.scalar_type(), "expected keys and values of the cache's dtype");
  STD_TORCH_CHECK(
      key.size(1) == key_cache.size(1) && value.size(1) == key_cache.size(1), "expected ", key_cache.size(1), " heads of keys and values");
  return {
      .key = heads_of(key, num_tokens, head_dim),
      .value = heads_of(value, num_tokens, head_dim),
      .key_cache = key_cache.mutable_data_ptr(),
      .value_cache = value_cache.mutable_data_ptr(),
      .slots = slots.const_data_ptr<int64_t>(),
      .num_tokens = num_tokens,
      .head_dim = head_dim,
      .block_size = key_cache.size(2),
      .cache_block_stride = key_cache.stride(0),
      .cache_head_stride = key_cache.stride(1),
      .cache_token_stride = key_cache.stride(2),
  };
}

inline Tensor store_kv_door(const Tensor key, const Tensor value, Tensor key_cache, Tensor value_cache, const Tensor slots) {
  const StoreKvArguments arguments = store_arguments(key, value, key_cache, value_cache, slots);
  run(is_bfloat16(key) ? store_kv<BFloat16> : store_kv<float>, arguments);
  return new_output(key, {0});
}

inline const void* norm_weight(const std::optional<Tensor>& weight, const Tensor& heads) {
  if (!weight.has_value()) return nullptr;
  STD_TORCH_CHECK(
      weight->is_contiguous() && weight->numel() == heads.size(2) && weight->scalar_type() == heads.scalar_type(),
      "expected a norm weight [", heads.size(2), "] of the heads' dtype");
  return weight->const_data_ptr();
}

inline void set_rotation(
    RotaryStoreArguments& arguments, const Tensor& query, const Tensor& key, const Tensor& positions, const Tensor& cos_sin, bool interleaved) {
  using torch::headeronly::ScalarType;
  const int64_t num_tokens = query.size(0);
  const bool is_long = positions.scalar_type() == ScalarType::Long;
  STD_TORCH_CHECK(
      positions.dim() == 1 && positions.size(0) == num_tokens && positions.is_contiguous() && (is_long || positions.scalar_type() == ScalarType::Int),
      "expected positions [", num_tokens, "], int64 or int32");
  STD_TORCH_CHECK(
      cos_sin.dim() == 2 && cos_sin.scalar_type() == ScalarType::Float && cos_sin.stride(1) == 1 && cos_sin.size(1) % 2 == 0 &&
          cos_sin.size(1) <= query.size(2) && query.size(2) <= kMaxRotatedHeadDim,
      "expected a table [num_positions, rotary_dim], fp32, for heads of ", query.size(2), " elements, at most ", kMaxRotatedHeadDim);
  STD_TORCH_CHECK(query.scalar_type() == key.scalar_type(), "expected queries and keys of one dtype");
  arguments.query = heads_of(query, num_tokens, query.size(2));
  arguments.store.key = heads_of(key, num_tokens, query.size(2));
  arguments.store.num_tokens = num_tokens;
  arguments.store.head_dim = query.size(2);
  arguments.cos_sin = cos_sin.const_data_ptr<float>();
  arguments.positions = positions.const_data_ptr();
  arguments.cos_sin_stride = cos_sin.stride(0);
  arguments.rotary_dim = cos_sin.size(1);
  arguments.has_long_positions = is_long;
  arguments.is_interleaved = interleaved;
}

inline void rotary_embedding_door(Tensor query, Tensor key, const Tensor positions, const Tensor cos_sin, bool interleaved) {
  RotaryStoreArguments arguments{};
  set_rotation(arguments, query, key, positions, cos_sin, interleaved);
  run(is_bfloat16(query) ? rotary_store_kv<BFloat16> : rotary_store_kv<float>, arguments);
}

inline Tensor rotary_store_kv_door(
    Tensor query, Tensor key, const Tensor value, const std::optional<Tensor> query_norm, const std::optional<Tensor> key_norm, double eps,
    const Tensor positions, const Tensor cos_sin, bool interleaved, Tensor key_cache, Tensor value_cache, const Tensor slots) {
  RotaryStoreArguments arguments{};
  arguments.store = store_arguments(key, value, key_cache, value_cache, slots);
  STD_TORCH_CHECK(query.dim() == 3 && query.size(2) == key.size(2), "expected queries and keys of one head_dim");
  set_rotation(arguments, query, key, positions, cos_sin, interleaved);
  arguments.query_norm = norm_weight(query_norm, query);
  arguments.key_norm = norm_weight(key_norm, key);
  arguments.stores = true;
  arguments.eps = static_cast<float>(eps);
  run(is_bfloat16(query) ? rotary_store_kv<BFloat16> : rotary_store_kv<float>, arguments);
  return new_output(key, {0});
}

}  // namespace modelworker
