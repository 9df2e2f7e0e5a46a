// y = x W^T on packed weights (packed.h), summed in fp32.
#pragma once
#include <cstdint>

#include "packed.h"
#include "team.h"

namespace modelworker {

struct LinearArguments {
  const void* x;          // [num_rows, in_features], rows `x_stride` apart
  const BFloat16* tiles;  // x as `tile_rows` left it, or null: x is read in place
  const void* packed;
  const void* bias;  // [out_features], or null
  void* out;         // [num_rows, out_features]
  int64_t num_rows;
  int64_t in_features;
  int64_t out_features;
  int64_t x_stride;
};

struct TileRowsArguments {
  const BFloat16* x;  // [num_rows, in_features], rows `x_stride` apart
  BFloat16* tiles;    // [num_rows / 16][in_features / 32][16 rows][32 inputs], both rounded up and filled with zeros
  int64_t num_rows;
  int64_t in_features;
  int64_t x_stride;
};

// The largest logit of a row within one part of the vocabulary.
struct Candidate {
  float logit;
  int32_t id;
  int32_t is_finite;  // whether all logits of the part are
};

struct ArgmaxArguments {
  LinearArguments linear;  // `bias` and `out` are null
  Candidate* candidates;   // [num_rows, num_parts]
  int64_t num_parts;
};

struct BestCandidateArguments {
  const Candidate* candidates;  // [num_rows, num_parts]
  int64_t* ids;                 // [num_rows]: ties go to the lowest id
  float* logits;                // [num_rows]
  bool* is_finite;              // [num_rows]: false if any logit of the row is infinite or NaN
  int64_t num_rows;
  int64_t num_parts;
};

#if defined(__AMX_BF16__)
constexpr bool kHasTiles = true;
#else
constexpr bool kHasTiles = false;
#endif

// Fewer rows than this are multiplied by dot products, which read x in place. All products of a 135M decode, CPU time of one thread
// that reads 15.9 GB/s: by dot products 1 row 18.2 ms and 2 rows 20.1, by tiles 4 rows 21.1 and 16 rows 22.1. Three rows were
// measured by dot products only as 2 + 1, in two passes: 26.6.
constexpr int64_t kMinTileRows = 3;
// Rows that are tiled at a time: 256 of them at 2,048 inputs are 1 MiB, half of a core's L2 cache.
constexpr int64_t kMaxTileRows = 256;

// Parts of the vocabulary whose maxima are found independently, so that the result doesn't depend on the number of threads.
constexpr int64_t kMaxVocabularyParts = 128;
inline int64_t num_vocabulary_parts(int64_t out_features) {
  const int64_t blocks = num_blocks(out_features);
  return blocks < kMaxVocabularyParts ? blocks : kMaxVocabularyParts;
}

inline bool uses_tiles(int64_t num_rows, int64_t element_size) {
  return kHasTiles && element_size == 2 && num_rows >= kMinTileRows;
}

inline int64_t num_tile_bytes(int64_t num_rows, int64_t in_features, int64_t element_size) {
  if (!uses_tiles(num_rows, element_size)) return 0;
  return round_up(num_rows < kMaxTileRows ? num_rows : kMaxTileRows, 16) * round_up(in_features, kTileInputs) * element_size;
}
inline int64_t num_candidate_bytes(int64_t num_rows, int64_t out_features) {
  return num_rows * num_vocabulary_parts(out_features) * static_cast<int64_t>(sizeof(Candidate));
}

template <typename T, typename Out>
void linear(const void* arguments, Team team);
void tile_rows(const void* arguments, Team team);
template <typename T>
void find_candidates(const void* arguments, Team team);
void find_best_candidate(const void* arguments, Team team);

}  // namespace modelworker
