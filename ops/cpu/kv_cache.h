// Writing keys and values into the paged cache; alone, or with queries and keys normalised and rotated in the same pass.
#pragma once
#include <cstdint>

#include "team.h"

namespace modelworker {

// Heads of tokens: [num_tokens, num_heads, head_dim], dense in the last dimension.
struct Heads {
  void* data;
  int64_t num_heads;
  int64_t token_stride;
  int64_t head_stride;
};

struct StoreKvArguments {
  Heads key;
  Heads value;
  void* key_cache;       // [num_blocks, num_kv_heads, block_size, head_dim], dense in its last dimension
  void* value_cache;     // like key_cache, with the same strides
  const int64_t* slots;  // [num_tokens]: block * block_size + offset in the block; negative: the token is dropped
  int64_t num_tokens;
  int64_t head_dim;
  int64_t block_size;
  int64_t cache_block_stride;
  int64_t cache_head_stride;
  int64_t cache_token_stride;
};

struct RotaryStoreArguments {
  StoreKvArguments store;
  Heads query;              // rotated in place, as store.key is
  const void* query_norm;   // [head_dim], or null: heads aren't normalised
  const void* key_norm;     // like query_norm
  const float* cos_sin;     // [num_positions, rotary_dim]: cosines, then sines
  const void* positions;    // [num_tokens], int64 or int32
  int64_t cos_sin_stride;
  int64_t rotary_dim;
  bool has_long_positions;
  bool is_interleaved;
  bool stores;  // false: only rotates
  float eps;
};

constexpr int64_t kMaxRotatedHeadDim = 512;

template <typename T>
void store_kv(const void* arguments, Team team);
template <typename T>
void rotary_store_kv(const void* arguments, Team team);

}  // namespace modelworker
