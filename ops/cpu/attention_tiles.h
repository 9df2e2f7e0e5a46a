// A tile of queries by AMX tiles of bf16: 16 rows of queries at a time.
//
// Scores are computed as K Q^T: a tile of keys is 16 tokens as they lie in the cache, with no copy where a block is a multiple of 16
// tokens and a head a multiple of 32 elements, and the softmax goes down the tokens with 16 rows as lanes. Weights are then transposed in
// registers, and values interleaved in pairs of tokens, once for all rows.
#pragma once
#if defined(__AMX_BF16__)
#include <cstring>

#include "attention_rows.h"
#include "tile_configuration.h"

namespace modelworker {

// Writes weights [32 tokens][16 rows] as a tile [16 rows][32 tokens] of bf16.
inline void transpose_weights(const float* weights, BFloat16* tile) {
  const auto pair = [&](int64_t low, int64_t high) {
    return reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(_mm512_load_ps(weights + high * 16), _mm512_load_ps(weights + low * 16)));
  };
  __m512i halves[2][8];
  for (int half = 0; half < 2; ++half) {
    // Each 128-bit lane is an 8 x 8 transposition of its own: lanes 0 and 2 of the result are rows 0 .. 7, lanes 1 and 3 are rows 8 .. 15.
    __m512i a[8], b[8];
    for (int i = 0; i < 8; ++i) a[i] = pair(half * 16 + i, half * 16 + 8 + i);
    for (int i = 0; i < 4; ++i) {
      b[2 * i] = _mm512_unpacklo_epi16(a[2 * i], a[2 * i + 1]);
      b[2 * i + 1] = _mm512_unpackhi_epi16(a[2 * i], a[2 * i + 1]);
    }
    for (int i = 0; i < 2; ++i) {
      for (int j = 0; j < 2; ++j) {
        a[4 * i + 2 * j] = _mm512_unpacklo_epi32(b[4 * i + j], b[4 * i + 2 + j]);
        a[4 * i + 2 * j + 1] = _mm512_unpackhi_epi32(b[4 * i + j], b[4 * i + 2 + j]);
      }
    }
    for (int i = 0; i < 4; ++i) {
      halves[half][2 * i] = _mm512_unpacklo_epi64(a[i], a[4 + i]);
      halves[half][2 * i + 1] = _mm512_unpackhi_epi64(a[i], a[4 + i]);
    }
  }
  for (int row = 0; row < 8; ++row) {
    _mm512_store_si512(tile + row * 32, _mm512_shuffle_i32x4(halves[0][row], halves[1][row], 0x88));
    _mm512_store_si512(tile + (8 + row) * 32, _mm512_shuffle_i32x4(halves[0][row], halves[1][row], 0xdd));
  }
}

alignas(64) inline constexpr BFloat16 kZeros[kMaxHeadDim] = {};

// What is the same for few and many rows: queries, scores, and how rows of the cache are read.
class TileScores {
 public:
  // What a thread needs while it computes.
  using Session = TileConfiguration;
  // A tile of keys must not reach over the end of a block.
  static int64_t alignment(const AttentionArguments& a) { return a.block_size % 16 == 0 ? 16 : 1; }

  TileScores(const AttentionArguments& a, const Item& item)
      : head_dim_(a.head_dim),
        num_slices_((a.head_dim + 31) / 32),
        last_mask_(~__mmask32{0} >> (num_slices_ * 32 - a.head_dim)),
        num_rows_(item.num_tokens * (a.num_heads / a.num_kv_heads)),
        num_groups_((num_rows_ + 15) / 16),
        cache_stride_(a.cache_token_stride),
        reads_cache_in_place_(a.block_size % 16 == 0 && a.head_dim % 32 == 0) {
    load_queries(a, item);
  }

  int64_t num_padded_rows() const { return num_groups_ * 16; }

  void multiply_keys(const Cached<BFloat16>& cached, Ahead<BFloat16>& ahead) {
    for (int64_t i = 0; i < cached.count; i += kGroupTokens) {
      const BFloat16* keys[4];
      int64_t stride = cache_stride_;
      for (int64_t tile = 0; tile < 4; ++tile) {
        // Tiles behind the last token are the first one again: nobody reads their scores.
        const int64_t token = i + tile * 16 < cached.count ? i + tile * 16 : i;
        keys[tile] = reads_cache_in_place_ ? cached.keys[token] : copy_keys(cached, token, tile);
        ahead.fetch(4);
        if (token + kGroupTokens + 16 <= cached.count)
          for (int64_t next = 0; next < 16; ++next) fetch_into_l1(cached.keys[token + kGroupTokens + next], head_dim_ * 2);
      }
      if (!reads_cache_in_place_) stride = num_slices_ * 32;
      for (int64_t group = 0; group < num_groups_; group += 2) {
        if (group + 1 < num_groups_) {
          score<2, 2>(keys, stride, group, i);
          score<2, 2>(keys + 2, stride, group, i + 32);
        } else {
          score<4, 1>(keys, stride, group, i);
        }
      }
    }
  }

 protected:
  static constexpr int64_t kMaxSteps = kStepTokens / 32;
  // Tokens of four tiles of keys.
  static constexpr int64_t kGroupTokens = 64;

  // Elements slice * 32 .. of a row of the cache; those behind the head are 0.
  __m512i load_slice(const BFloat16* row, int64_t slice) const {
    return _mm512_maskz_loadu_epi16(slice + 1 < num_slices_ ? ~__mmask32{0} : last_mask_, row + slice * 32);
  }

  // Where a token's values lie; zeros for those that no query sees, because 0 times NaN is NaN.
  static const BFloat16* values_of(const Cached<BFloat16>& cached, int64_t token) {
    return token >= cached.hidden && token < cached.count ? cached.values[token] : kZeros;
  }

  const int64_t head_dim_;
  const int64_t num_slices_;   // of 32 elements
  const __mmask32 last_mask_;  // of the last slice's elements
  const int64_t num_rows_;
  const int64_t num_groups_;                                 // of 16 rows
  const int64_t cache_stride_;                               // between tokens of a block
  const bool reads_cache_in_place_;                          // 16 tokens from a multiple of 16 on are a tile as they lie
  alignas(64) float scores_[kStepTokens * kMaxTileQueries];  // [groups][tokens][16 rows]

 private:
  // As tiles [16 pairs of elements][16 rows][2 elements].
  void load_queries(const AttentionArguments& a, const Item& item) {
    const int64_t group = a.num_heads / a.num_kv_heads;
    std::memset(static_cast<void*>(queries_), 0, sizeof(BFloat16) * num_groups_ * num_slices_ * 512);
    for (int64_t row = 0; row < num_rows_; ++row) {
      const auto* from = static_cast<const BFloat16*>(a.query) + (item.row + row / group) * a.query_token_stride +
                         (item.kv_head * group + row % group) * a.query_head_stride;
      BFloat16* to = queries_ + row / 16 * num_slices_ * 512 + row % 16 * 2;
      for (int64_t d = 0; d < head_dim_; d += 2) std::memcpy(static_cast<void*>(to + d * 16), from + d, 2 * sizeof(BFloat16));
    }
  }

  // Tokens of a step that lie apart, or whose heads are no whole tiles.
  const BFloat16* copy_keys(const Cached<BFloat16>& cached, int64_t token, int64_t tile) {
    BFloat16* copy = keys_ + tile * 16 * num_slices_ * 32;
    for (int64_t i = 0; i < 16 && token + i < cached.count; ++i)
      for (int64_t slice = 0; slice < num_slices_; ++slice)
        _mm512_store_si512(copy + (i * num_slices_ + slice) * 32, load_slice(cached.keys[token + i], slice));
    return copy;
  }

  // Scores of KeyTiles x 16 tokens for Groups x 16 rows.
  template <int KeyTiles, int Groups>
  void score(const BFloat16* const* keys, int64_t key_stride, int64_t group, int64_t token) {
    const BFloat16* queries = queries_ + group * num_slices_ * 512;
    finish_stores();
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t slice = 0; slice < num_slices_; ++slice, queries += 512) {
      const int64_t at = slice * 32;
      _tile_loadd(4, queries, 64);
      if constexpr (Groups == 2) {
        _tile_loadd(5, queries + num_slices_ * 512, 64);
        _tile_loadd(6, keys[0] + at, key_stride * 2);
        _tile_loadd(7, keys[1] + at, key_stride * 2);
        _tile_dpbf16ps(0, 6, 4);
        _tile_dpbf16ps(1, 7, 4);
        _tile_dpbf16ps(2, 6, 5);
        _tile_dpbf16ps(3, 7, 5);
      } else {
        _tile_loadd(5, keys[0] + at, key_stride * 2);
        _tile_dpbf16ps(0, 5, 4);
        _tile_loadd(6, keys[1] + at, key_stride * 2);
        _tile_dpbf16ps(1, 6, 4);
        _tile_loadd(7, keys[2] + at, key_stride * 2);
        _tile_dpbf16ps(2, 7, 4);
        _tile_loadd(5, keys[3] + at, key_stride * 2);
        _tile_dpbf16ps(3, 5, 4);
      }
    }
    float* first = scores_ + (group * kStepTokens + token) * 16;
    float* second = Groups == 2 ? first + kStepTokens * 16 : first + 512;
    _tile_stored(0, first, 64);
    _tile_stored(1, first + 256, 64);
    _tile_stored(2, second, 64);
    _tile_stored(3, second + 256, 64);
  }

  alignas(64) BFloat16 queries_[kMaxTileQueries * kMaxHeadDim];  // [groups][slices][tile]
  alignas(64) BFloat16 keys_[64 * kMaxHeadDim];
};

// Many rows: prompts.
class TileEngine : public TileScores {
 public:
  TileEngine(const AttentionArguments& a, const Item& item) : TileScores(a, item) {
    std::memset(sums_, 0, sizeof(float) * num_groups_ * num_slices_ * 512);
  }

  // Turns scores into weights, as tiles [16 rows][32 tokens].
  void weigh_scores(const AttentionArguments& a, const Item& item, const Cached<BFloat16>& cached, TileRows& rows, Ahead<BFloat16>& ahead) {
    const int64_t num_steps = (cached.count + 31) / 32;
    for (int64_t group = 0; group < num_groups_; ++group) {
      float* weights = scores_ + group * 16 * kStepTokens;
      const float factor = prepare_scores(a, item, cached, group * 16, rows, weights);
      weigh<true>(weights, cached.count, factor, group * 16, rows);
      std::memset(weights + cached.count * 16, 0, sizeof(float) * (num_steps * 32 - cached.count) * 16);
      for (int64_t step = 0; step < num_steps; ++step) transpose_weights(weights + step * 512, weights_ + (group * kMaxSteps + step) * 512);
      ahead.fetch(16);
    }
  }

  void add_values(const Cached<BFloat16>& cached, const TileRows& rows, Ahead<BFloat16>& ahead) {
    const int64_t num_steps = (cached.count + 31) / 32;
    for (int64_t group = 0; group < num_groups_; ++group) shrink_group(group, rows.shrink + group * 16);
    load_values(cached, num_steps, ahead);
    for (int64_t group = 0; group < num_groups_; group += 2) {
      for (int64_t slice = 0; slice < num_slices_; ++slice) {
        if (group + 1 < num_groups_) {
          add<2>(group, slice, num_steps);
        } else {
          add<1>(group, slice, num_steps);
        }
      }
    }
  }

  // The weighted sums of a row: [head_dim].
  const float* sums(int64_t row) {
    // Values were interleaved within lanes of 128 bits: a pair of tiles holds elements 0-3, 8-11, ... and 4-7, 12-15, ...
    const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i second = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
    for (int64_t slice = 0; slice < num_slices_; ++slice) {
      const float* tiles = sums_ + (row / 16 * num_slices_ + slice) * 512 + row % 16 * 16;
      const __m512 low = _mm512_load_ps(tiles);
      const __m512 high = _mm512_load_ps(tiles + 256);
      _mm512_store_ps(row_ + slice * 32, _mm512_permutex2var_ps(low, first, high));
      _mm512_store_ps(row_ + slice * 32 + 16, _mm512_permutex2var_ps(low, second, high));
    }
    return row_;
  }

 private:
  // As tiles [16 pairs of tokens][16 elements][2 tokens], two for each slice of 32 elements.
  void load_values(const Cached<BFloat16>& cached, int64_t num_steps, Ahead<BFloat16>& ahead) {
    for (int64_t pair = 0; pair < num_steps * 16; ++pair) {
      if (pair % 16 == 0) ahead.fetch(16);
      const BFloat16* even = values_of(cached, 2 * pair);
      const BFloat16* odd = values_of(cached, 2 * pair + 1);
      BFloat16* to = values_ + pair / 16 * num_slices_ * 1024 + pair % 16 * 32;
      for (int64_t slice = 0; slice < num_slices_; ++slice, to += 1024) {
        const __m512i a = load_slice(even, slice);
        const __m512i b = load_slice(odd, slice);
        _mm512_store_si512(to, _mm512_unpacklo_epi16(a, b));
        _mm512_store_si512(to + 512, _mm512_unpackhi_epi16(a, b));
      }
    }
  }

  void shrink_group(int64_t group, const float* factors) {
    const int64_t count = std::min<int64_t>(num_rows_ - group * 16, 16);
    for (int64_t row = 0; row < count; ++row) {
      if (factors[row] == 1.0f) continue;
      const __m512 factor = _mm512_set1_ps(factors[row]);
      float* sums = sums_ + group * num_slices_ * 512 + row * 16;
      for (int64_t part = 0; part < num_slices_ * 2; ++part, sums += 256) _mm512_store_ps(sums, _mm512_mul_ps(_mm512_load_ps(sums), factor));
    }
  }

  // Adds weights times values to Groups x 16 rows of 32 elements.
  template <int Groups>
  void add(int64_t group, int64_t slice, int64_t num_steps) {
    const int64_t group_stride = num_slices_ * 512;
    float* sums = sums_ + group * group_stride + slice * 512;
    const BFloat16* weights = weights_ + group * kMaxSteps * 512;
    const BFloat16* values = values_ + slice * 1024;
    finish_stores();
    _tile_loadd(0, sums, 64);
    _tile_loadd(1, sums + 256, 64);
    if constexpr (Groups == 2) {
      _tile_loadd(2, sums + group_stride, 64);
      _tile_loadd(3, sums + group_stride + 256, 64);
    }
    for (int64_t step = 0; step < num_steps; ++step, weights += 512, values += num_slices_ * 1024) {
      _tile_loadd(4, weights, 64);
      _tile_loadd(6, values, 64);
      _tile_loadd(7, values + 512, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
      if constexpr (Groups == 2) {
        _tile_loadd(5, weights + kMaxSteps * 512, 64);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
      }
    }
    _tile_stored(0, sums, 64);
    _tile_stored(1, sums + 256, 64);
    if constexpr (Groups == 2) {
      _tile_stored(2, sums + group_stride, 64);
      _tile_stored(3, sums + group_stride + 256, 64);
    }
  }

  alignas(64) BFloat16 weights_[kStepTokens * kMaxTileQueries];  // [groups][kMaxSteps][tile]
  alignas(64) BFloat16 values_[kStepTokens * kMaxHeadDim];       // [steps][slices][2 tiles]
  alignas(64) float sums_[kMaxTileQueries * kMaxHeadDim];        // [groups][slices][2 tiles]
  alignas(64) float row_[kMaxHeadDim];
};

}  // namespace modelworker
#endif
