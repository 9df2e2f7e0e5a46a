// Products by AMX tiles: 32 rows of x times a block of 32 outputs are 2 x 2 tiles of sums, 32 inputs at a time.
#pragma once
#if defined(__AMX_BF16__)
#include <immintrin.h>

#include "linear.h"
#include "tile_configuration.h"

namespace modelworker {

constexpr int64_t kTileRows = 16;
constexpr int64_t kTileElements = kTileRows * kTileInputs;
// Rows that share each load of a weight tile.
constexpr int64_t kPairRows = 2 * kTileRows;
// Inputs that are multiplied before the next block of outputs is: 256 rows of x at 2,048 inputs stay in the L2 cache.
constexpr int64_t kChunkTiles = 64;
// Blocks whose sums are kept between chunks of inputs.
constexpr int64_t kGroupBlocks = 4;
// Bytes from what is multiplied to what is fetched, where each weight is used once. All products of a 135M decode in multiples of
// their bytes at the read bandwidth, one run each: 4 rows 1.21 with 4,096 and 1.15 with 16,384; 16 rows 1.23 and 1.18.
constexpr int64_t kTilePrefetchBytes = 16384;
constexpr int64_t kLineBytes = 64;
constexpr int64_t kSumBytes = kBlockOutputs * sizeof(float);

// Lines that are fetched into the L2 cache while tiles are multiplied.
struct Prefetch {
  const char* next;
  int64_t lines_per_step;

  void step() {
    for (int64_t i = 0; i < lines_per_step; ++i, next += kLineBytes) _mm_prefetch(next, _MM_HINT_T1);
  }
};

// sums[32 or 16 rows][32 outputs] (+)= tiles of x times a part of a block. The second 16 rows lie `x_stride` elements behind the
// first.
template <bool TwoTiles>
void multiply_tiles(
    const BFloat16* x, int64_t x_stride, const BFloat16* weights, int64_t steps, float* sums, bool is_first, Prefetch prefetch) {
  finish_stores();
  if (is_first) {
    _tile_zero(0);
    _tile_zero(1);
    if constexpr (TwoTiles) {
      _tile_zero(2);
      _tile_zero(3);
    }
  } else {
    _tile_loadd(0, sums, kSumBytes);
    _tile_loadd(1, sums + 16, kSumBytes);
    if constexpr (TwoTiles) {
      _tile_loadd(2, sums + kTileRows * kBlockOutputs, kSumBytes);
      _tile_loadd(3, sums + kTileRows * kBlockOutputs + 16, kSumBytes);
    }
  }
  for (int64_t step = 0; step < steps; ++step) {
    prefetch.step();
    // A hint that weights won't be read again soon, so that x stays in the caches: 0 to 3 % of a product.
    _tile_stream_loadd(6, weights, 2 * kLineBytes);
    _tile_stream_loadd(7, weights + kTileInputs, 2 * kLineBytes);
    _tile_loadd(4, x, kLineBytes);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    if constexpr (TwoTiles) {
      _tile_loadd(5, x + x_stride, kLineBytes);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    x += kTileElements;
    weights += 2 * kTileElements;
  }
  _tile_stored(0, sums, kSumBytes);
  _tile_stored(1, sums + 16, kSumBytes);
  if constexpr (TwoTiles) {
    _tile_stored(2, sums + kTileRows * kBlockOutputs, kSumBytes);
    _tile_stored(3, sums + kTileRows * kBlockOutputs + 16, kSumBytes);
  }
}

// Hands blocks of sums to `epilogue(row, num_rows, column, num_columns, sums)`; rows of sums are kBlockOutputs apart.
//
// While a block is multiplied by all pairs of row tiles, the next one is fetched, a share of it by each pair: so memory is read all
// the time rather than during the first pair only.
template <typename Epilogue>
void multiply_by_tiles(const LinearArguments& a, Range blocks, const Epilogue& epilogue) {
  alignas(64) float sums[kGroupBlocks][kMaxTileRows * kBlockOutputs];
  const TileConfiguration configuration;
  const int64_t k_tiles = round_up(a.in_features, kTileInputs) / kTileInputs;
  const int64_t x_stride = k_tiles * kTileElements;
  const int64_t elements = block_size<BFloat16>(a.in_features);
  const int64_t pairs = (a.num_rows + kPairRows - 1) / kPairRows;
  const int64_t group_blocks = k_tiles > kChunkTiles ? kGroupBlocks : 1;
  for (int64_t group = blocks.begin; group < blocks.end; group += group_blocks) {
    const int64_t group_end = group + group_blocks < blocks.end ? group + group_blocks : blocks.end;
    for (int64_t k = 0; k < k_tiles; k += kChunkTiles) {
      const int64_t steps = k_tiles - k < kChunkTiles ? k_tiles - k : kChunkTiles;
      const bool is_last = k + steps == k_tiles;
      for (int64_t block = group; block < group_end; ++block) {
        const BFloat16* weights = static_cast<const BFloat16*>(a.packed) + block * elements + k * 2 * kTileElements;
        const int64_t column = block * kBlockOutputs;
        const int64_t columns = a.out_features - column < kBlockOutputs ? a.out_features - column : kBlockOutputs;
        const char* ahead = reinterpret_cast<const char*>(weights) + (pairs == 1 ? kTilePrefetchBytes : elements * 2);
        for (int64_t pair = 0; pair < pairs; ++pair) {
          const int64_t row = pair * kPairRows;
          const int64_t rows = a.num_rows - row < kPairRows ? a.num_rows - row : kPairRows;
          const BFloat16* x = a.tiles + pair * 2 * x_stride + k * kTileElements;
          float* block_sums = sums[block - group] + row * kBlockOutputs;
          const Prefetch prefetch{ahead + pair * (32 / pairs) * steps * kLineBytes, 32 / pairs};
          if (is_last) epilogue.prepare(row, rows, column);
          if (rows > kTileRows) {
            multiply_tiles<true>(x, x_stride, weights, steps, block_sums, k == 0, prefetch);
          } else {
            multiply_tiles<false>(x, x_stride, weights, steps, block_sums, k == 0, prefetch);
          }
          if (is_last) epilogue(row, rows, column, columns, block_sums);
        }
      }
    }
  }
}

}  // namespace modelworker
#endif
