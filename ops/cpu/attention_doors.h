// The torch op of attention.h.
#pragma once
#include "attention.h"
#include "door.h"
#include "simd.h"
#include "workspace.h"

namespace modelworker {

inline void check_heads(const Tensor& tensor, int64_t dims, const char* expected) {
  STD_TORCH_CHECK(tensor.dim() == dims && tensor.stride(-1) == 1, "expected ", expected, " with dense heads");
}

inline void check_caches(const Tensor& key_cache, const Tensor& value_cache) {
  check_heads(key_cache, 4, "a cache [num_blocks, num_kv_heads, block_size, head_dim]");
  STD_TORCH_CHECK(value_cache.dim() == 4 && value_cache.scalar_type() == key_cache.scalar_type(), "expected a value cache like the key cache");
  for (int64_t dim = 0; dim < 4; ++dim) {
    STD_TORCH_CHECK(
        value_cache.size(dim) == key_cache.size(dim) && value_cache.stride(dim) == key_cache.stride(dim),
        "expected a value cache of the key cache's sizes and strides");
  }
}

inline void check_indices(const Tensor& tensor, int64_t dims, const char* name) {
  STD_TORCH_CHECK(
      tensor.scalar_type() == torch::headeronly::ScalarType::Int && tensor.dim() == dims && (tensor.numel() == 0 || tensor.stride(-1) == 1),
      "expected dense int32 ", name);
}

inline AttentionArguments attention_arguments(
    const Tensor& query, const Tensor& key_cache, const Tensor& value_cache, Tensor& output, const Tensor& query_starts,
    const Tensor& seq_lens, const Tensor& block_tables, const Workspace& parts) {
  return {
      .query = query.const_data_ptr(),
      .key_cache = key_cache.const_data_ptr(),
      .value_cache = value_cache.const_data_ptr(),
      .output = output.mutable_data_ptr(),
      .query_starts = query_starts.const_data_ptr<int32_t>(),
      .seq_lens = seq_lens.const_data_ptr<int32_t>(),
      .block_tables = block_tables.const_data_ptr<int32_t>(),
      .parts = static_cast<float*>(parts.data()),
      .num_tokens = output.size(0),
      .num_sequences = seq_lens.size(0),
      .num_heads = query.size(1),
      .num_kv_heads = key_cache.size(1),
      .head_dim = query.size(2),
      .block_size = key_cache.size(2),
      .query_token_stride = query.stride(0),
      .query_head_stride = query.stride(1),
      .output_token_stride = output.stride(0),
      .output_head_stride = output.stride(1),
      .cache_block_stride = key_cache.stride(0),
      .cache_head_stride = key_cache.stride(1),
      .cache_token_stride = key_cache.stride(2),
      .table_stride = block_tables.stride(0),
  };
}

inline void paged_attention_door(
    const Tensor query, const Tensor key_cache, const Tensor value_cache, Tensor output, const Tensor query_starts, const Tensor seq_lens,
    const Tensor block_tables, const Tensor /*order*/, double scale, int64_t window, double soft_cap) {
  check_heads(query, 3, "queries [num_tokens, num_heads, head_dim]");
  check_heads(output, 3, "an output [num_tokens, num_heads, head_dim]");
  check_caches(key_cache, value_cache);
  check_indices(query_starts, 1, "query starts");
  check_indices(seq_lens, 1, "sequence lengths");
  check_indices(block_tables, 2, "block tables");
  const bool is_bf16 = is_bfloat16(query);
  STD_TORCH_CHECK(
      key_cache.scalar_type() == query.scalar_type() && output.scalar_type() == query.scalar_type(), "expected caches and output of the query's dtype");
  STD_TORCH_CHECK(
      output.size(0) == query.size(0) && output.size(1) == query.size(1) && output.size(2) == query.size(2), "expected an output of the query's sizes");
  const int64_t head_dim = query.size(2);
  STD_TORCH_CHECK(
      head_dim == key_cache.size(3) && head_dim % 2 == 0 && head_dim >= 2 && head_dim <= kMaxHeadDim,
      "expected heads of the caches' size, an even number up to ", kMaxHeadDim, "; found ", head_dim);
  const int64_t num_heads = query.size(1);
  STD_TORCH_CHECK(
      key_cache.size(1) > 0 && num_heads % key_cache.size(1) == 0 && num_heads / key_cache.size(1) <= kMaxTileQueries,
      "expected a multiple of ", key_cache.size(1), " heads, at most ", kMaxTileQueries, " times as many; found ", num_heads);
  STD_TORCH_CHECK(
      query_starts.size(0) == seq_lens.size(0) + 1 && block_tables.size(0) == seq_lens.size(0), "expected starts, lengths and tables of as many sequences");
  const Workspace parts(num_part_bytes(seq_lens.size(0), num_heads, head_dim));
  AttentionArguments arguments = attention_arguments(query, key_cache, value_cache, output, query_starts, seq_lens, block_tables, parts);
  arguments.window = window;
  arguments.scale = static_cast<float>(scale);
  arguments.soft_cap = static_cast<float>(soft_cap);
  const Launch launches[] = {
      {is_bf16 ? attend<BFloat16> : attend<float>, &arguments, sizeof arguments},
      {is_bf16 ? merge_parts<BFloat16> : merge_parts<float>, &arguments, sizeof arguments},
  };
  run(launches, 2);
}

}  // namespace modelworker
