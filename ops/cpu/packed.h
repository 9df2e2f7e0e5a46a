// How the weights of products lie in memory: one copy that every path reads in streaming order.
//
// 32 outputs are a block; a block is a sequence of steps of 128 bytes. A step holds, for each of the 32 outputs, two neighbouring
// inputs in bf16 or one in fp32:
//
//     bf16: [out_features / 32][in_features / 2][32 outputs][2 inputs]        fp32: [out_features / 32][in_features][32 outputs]
//
// A step of bf16 is what a bf16 dot product multiplies with one broadcast pair of inputs, and 16 steps are two AMX tiles. The last
// block is filled with zeros; so are the last steps of bf16 blocks, which are whole tiles (in_features rounded up to 32).
#pragma once
#include <cstdint>

#include "simd.h"
#include "team.h"

namespace modelworker {

constexpr int64_t kBlockOutputs = 32;
constexpr int64_t kTileInputs = 32;

// Inputs per step.
template <typename T>
constexpr int64_t kStepInputs = 4 / static_cast<int64_t>(sizeof(T));

inline int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

template <typename T>
int64_t num_steps(int64_t in_features) {
  return sizeof(T) == 2 ? round_up(in_features, kTileInputs) / kStepInputs<T> : in_features;
}

// Elements of a block.
template <typename T>
int64_t block_size(int64_t in_features) {
  return num_steps<T>(in_features) * kStepInputs<T> * kBlockOutputs;
}

inline int64_t num_blocks(int64_t out_features) { return (out_features + kBlockOutputs - 1) / kBlockOutputs; }

struct PackArguments {
  const void* weight;  // [out_features, in_features], rows `weight_stride` apart
  void* packed;
  int64_t out_features;
  int64_t in_features;
  int64_t weight_stride;
};

struct UnpackArguments {
  const void* packed;
  void* weight;  // [out_features, in_features]
  int64_t out_features;
  int64_t in_features;
};

struct EmbeddingArguments {
  const void* packed;
  const void* ids;  // [num_ids], int64 or int32
  void* out;        // [num_ids, in_features]
  int64_t num_ids;
  int64_t out_features;
  int64_t in_features;
};

template <typename T>
void pack_weight(const void* arguments, Team team);
template <typename T>
void unpack_weight(const void* arguments, Team team);
// Rows of the packed matrix. A row of an id that isn't 0 .. out_features - 1 is NaN.
template <typename T, typename Id>
void embed(const void* arguments, Team team);

}  // namespace modelworker
