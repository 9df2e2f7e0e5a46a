// Attention over the paged KV cache: plain decode, prefill chunks and any mix of them, as two launches.
//
// `attend` computes tiles of queries over spans of the cache; where a sequence has few new tokens, its context is divided into parts,
// so that one long sequence keeps all threads busy, and `merge_parts` puts their results together. Everything that depends on the
// sequences is read when the bodies run. How a context is divided depends on the sequence alone: neither the rest of the batch nor the
// number of threads changes a result.
#pragma once
#include <cstdint>

#include "team.h"

namespace modelworker {

struct AttentionArguments {
  const void* query;            // [num_tokens, num_heads, head_dim]
  const void* key_cache;        // [num_blocks, num_kv_heads, block_size, head_dim], dense in its last dimension
  const void* value_cache;      // like key_cache, with the same strides
  void* output;                 // [num_tokens, num_heads, head_dim]; rows of no sequence become 0
  const int32_t* query_starts;  // [num_sequences + 1], non-decreasing
  const int32_t* seq_lens;      // [num_sequences]
  const int32_t* block_tables;  // [num_sequences, table_stride]
  float* parts;                 // [num_sequences, kMaxContextParts, num_heads, part_stride(head_dim)]
  int64_t num_tokens;
  int64_t num_sequences;
  int64_t num_heads;
  int64_t num_kv_heads;
  int64_t head_dim;
  int64_t block_size;
  int64_t query_token_stride;
  int64_t query_head_stride;
  int64_t output_token_stride;
  int64_t output_head_stride;
  int64_t cache_block_stride;
  int64_t cache_head_stride;
  int64_t cache_token_stride;
  int64_t table_stride;
  int64_t window;  // tokens that a query sees, itself included; 0 = all
  float scale;
  float soft_cap;  // 0 = off
};

// The rows of a tile: query tokens times the heads that share a KV head. Their queries, scores and sums stay in the L2 cache.
constexpr int64_t kMaxTileQueries = 64;
constexpr int64_t kMaxHeadDim = 256;
// Parts of a context times new tokens of its sequence, at most.
constexpr int64_t kMaxContextParts = 16;

// Floats of a part's result for one head: weighted sums, highest score, sum of weights.
inline int64_t part_stride(int64_t head_dim) { return (head_dim + 2 + 15) / 16 * 16; }
inline int64_t num_part_bytes(int64_t num_sequences, int64_t num_heads, int64_t head_dim) {
  return num_sequences * kMaxContextParts * num_heads * part_stride(head_dim) * static_cast<int64_t>(sizeof(float));
}

template <typename T>
void attend(const void* arguments, Team team);
template <typename T>
void merge_parts(const void* arguments, Team team);

}  // namespace modelworker
