// A tile of queries by AMX tiles of bf16: 16 rows of queries at a time.
//
// Scores are computed as K Q^T: a tile of keys is 16 tokens as they lie in the cache, with no copy where a block is a multiple of 16
// tokens and a head a multiple of 32 elements. Scores are then turned, 4 rows at a time, so that the softmax of a few heads that share
// a KV head costs no more than they are, and values are interleaved in pairs of tokens, once for all rows.
#pragma once
#if defined(__AMX_BF16__)
#include <cmath>
#include <cstring>

#include "attention_rows.h"
#include "linear_tiles.h"

namespace modelworker {

// Compilers take a tile load for an instruction that reads no memory: without this, what was stored just before may come after it.
inline void finish_stores() { asm volatile("" ::: "memory"); }

// Reads 16 tokens' scores of 4 rows out of [tokens][16 rows] and turns them into 4 vectors of 16 tokens.
inline void load_four_rows(const float* scores, Vector* rows) {
  __m512 tokens[4];
  for (int i = 0; i < 4; ++i) {
    const float* from = scores + i * 16;
    __m512 lanes = _mm512_castps128_ps512(_mm_load_ps(from));
    lanes = _mm512_insertf32x4(lanes, _mm_load_ps(from + 64), 1);
    lanes = _mm512_insertf32x4(lanes, _mm_load_ps(from + 128), 2);
    tokens[i] = _mm512_insertf32x4(lanes, _mm_load_ps(from + 192), 3);
  }
  const __m512d low01 = _mm512_castps_pd(_mm512_unpacklo_ps(tokens[0], tokens[1]));
  const __m512d low23 = _mm512_castps_pd(_mm512_unpacklo_ps(tokens[2], tokens[3]));
  const __m512d high01 = _mm512_castps_pd(_mm512_unpackhi_ps(tokens[0], tokens[1]));
  const __m512d high23 = _mm512_castps_pd(_mm512_unpackhi_ps(tokens[2], tokens[3]));
  rows[0].value = _mm512_castpd_ps(_mm512_unpacklo_pd(low01, low23));
  rows[1].value = _mm512_castpd_ps(_mm512_unpackhi_pd(low01, low23));
  rows[2].value = _mm512_castpd_ps(_mm512_unpacklo_pd(high01, high23));
  rows[3].value = _mm512_castpd_ps(_mm512_unpackhi_pd(high01, high23));
}

// So many rows are summed up from registers: for the 3 or 4 heads that share a KV head in a decode step, storing interleaved values and
// loading them as tiles takes two to three times as long as their 2 x 4 dot products per row, pair of tokens and 64 elements.
constexpr int64_t kMaxDotRows = 8;

alignas(64) inline constexpr BFloat16 kZeros[kMaxHeadDim] = {};

class TileEngine {
 public:
  // What a thread needs while it uses engines.
  using Session = TileConfiguration;
  // A tile of keys must not reach over the end of a block.
  static int64_t alignment(const AttentionArguments& a) { return a.block_size % 16 == 0 ? 16 : 1; }

  TileEngine(const AttentionArguments& a, const Item& item)
      : head_dim_(a.head_dim),
        num_slices_((a.head_dim + 31) / 32),
        last_mask_(~__mmask32{0} >> (num_slices_ * 32 - a.head_dim)),
        num_rows_(item.num_tokens * (a.num_heads / a.num_kv_heads)),
        num_groups_((num_rows_ + 15) / 16),
        key_stride_(a.cache_token_stride),
        reads_keys_in_place_(a.block_size % 16 == 0 && a.head_dim % 32 == 0) {
    load_queries(a, item);
    std::memset(sums_, 0, sizeof(float) * num_groups_ * num_slices_ * 2 * 256);
    // Rows behind the last one keep weights of 0.
    for (int64_t row = num_rows_; row % 16 != 0; ++row)
      for (int64_t step = 0; step < kMaxSteps; ++step)
        _mm512_store_si512(weights_ + (row / 16 * kMaxSteps + step) * 512 + row % 16 * 32, _mm512_setzero_si512());
  }

  int64_t num_padded_rows() const { return num_groups_ * 16; }
  void multiply_keys(const Cached<BFloat16>& cached, Ahead<BFloat16>& ahead) {
    for (int64_t i = 0; i < cached.count; i += 64) {
      const BFloat16* keys[4];
      int64_t stride = key_stride_;
      for (int64_t tile = 0; tile < 4; ++tile) {
        // Tiles behind the last token are the first one again: nobody reads their scores.
        const int64_t token = i + tile * 16 < cached.count ? i + tile * 16 : i;
        keys[tile] = reads_keys_in_place_ ? cached.keys[token] : copy_keys(cached, token, tile);
        ahead.fetch(4);
      }
      if (!reads_keys_in_place_) stride = num_slices_ * 32;
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

  // Turns scores into weights: before values are interleaved, because a tile load waits until what was just stored is in the cache.
  void weigh_scores(const AttentionArguments& a, const Item& item, const Cached<BFloat16>& cached, TileRows& rows, Ahead<BFloat16>& ahead) {
    const bool is_prepared = needs_preparation(a, item, cached);
    const float factor = is_prepared ? 1.0f : a.scale * kLog2E;
    const int64_t num_steps = (cached.count + 31) / 32;
    for (int64_t row = 0; row < num_rows_; row += 4) {
      ahead.fetch(16);
      const int64_t count = num_rows_ - row < 4 ? num_rows_ - row : 4;
      Vector highest[4];
      turn_scores(a, cached, rows, row, is_prepared, num_steps, highest);
      for (int64_t r = 0; r < count; ++r) weigh_row(row + r, turned_ + r * kStepTokens, largest(highest[r]) * factor, factor, num_steps, rows);
    }
  }

  void add_values(const Cached<BFloat16>& cached, const TileRows& rows, Ahead<BFloat16>& ahead) {
    const int64_t num_steps = (cached.count + 31) / 32;
    for (int64_t group = 0; group < num_groups_; ++group) shrink_group(group, rows.shrink + group * 16);
    if (num_rows_ <= kMaxDotRows) return add_by_dot_products(cached, ahead);
    load_values(cached, num_steps, ahead);
    for (int64_t group = 0; group < num_groups_; group += 2) {
      for (int64_t part = 0; part < num_slices_ * 2; part += 2) {
        if (group + 1 < num_groups_) {
          add<2>(group, part, num_steps);
        } else {
          add<1>(group, part, num_steps);
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
  static constexpr int64_t kMaxSteps = kStepTokens / 32;
  static constexpr int64_t kMaxSlices = kMaxHeadDim / 32;

  // Elements slice * 32 .. of a row of the cache; those behind the head are 0.
  __m512i load_slice(const BFloat16* row, int64_t slice) const {
    return _mm512_maskz_loadu_epi16(slice + 1 < num_slices_ ? ~__mmask32{0} : last_mask_, row + slice * 32);
  }

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

  // Puts the scores of 4 rows into `turned_`, those behind the last token kLowest, and finds their maxima.
  void turn_scores(
      const AttentionArguments& a, const Cached<BFloat16>& cached, const TileRows& rows, int64_t row, bool is_prepared, int64_t num_steps,
      Vector* highest) {
    const float* scores = scores_ + row / 16 * 16 * kStepTokens + row % 16;
    const Vector order = {_mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)};
    for (int r = 0; r < 4; ++r) highest[r] = broadcast(kLowest);
    for (int64_t token = 0; token < num_steps * 32; token += 16) {
      Vector vectors[4];
      load_four_rows(scores + token * 16, vectors);
      const int64_t left = cached.count - token;
      for (int r = 0; r < 4; ++r) {
        if (is_prepared) {
          const Vector position = broadcast(static_cast<float>(cached.begin + token)) + order;
          vectors[r] = prepared(a, vectors[r], position, broadcast(rows.first_seen[row + r]), broadcast(rows.last_seen[row + r]));
        }
        if (left < 16) vectors[r] = score_if_seen(vectors[r], order, zero(), broadcast(static_cast<float>(left - 1)));
        highest[r] = maximum(vectors[r], highest[r]);
        store(turned_ + r * kStepTokens + token, vectors[r]);
      }
    }
  }

  // Turns a row's scores into weights of bf16 and updates the row: a running softmax (Milakov and Gimelshein, 2018). The sum is that of
  // the rounded weights, so that what rounding adds to all of them cancels.
  void weigh_row(int64_t row, const float* scores, float step_highest, float factor, int64_t num_steps, TileRows& rows) {
    const float before = rows.highest[row];
    const float highest = step_highest > before ? step_highest : before;
    const auto ones = reinterpret_cast<__m512bh>(_mm512_set1_epi16(0x3f80));
    const Vector offset = broadcast(-highest);
    Vector total = zero();
    BFloat16* weights = weights_ + row / 16 * kMaxSteps * 512 + row % 16 * 32;
    for (int64_t step = 0; step < num_steps; ++step, scores += 32, weights += 512) {
      const Vector first = weight_of<true>(multiply_add(load(scores), broadcast(factor), offset));
      const Vector second = weight_of<true>(multiply_add(load(scores + 16), broadcast(factor), offset));
      const __m512bh rounded = _mm512_cvtne2ps_pbh(second.value, first.value);
      total.value = _mm512_dpbf16_ps(total.value, rounded, ones);
      _mm512_store_si512(weights, reinterpret_cast<__m512i>(rounded));
    }
    const float shrink = std::exp2(before - highest);
    rows.highest[row] = highest;
    rows.shrink[row] = shrink;
    rows.total[row] = rows.total[row] * shrink + sum(total);
  }

  // As tiles [16 pairs of tokens][16 elements][2 tokens].
  void load_values(const Cached<BFloat16>& cached, int64_t num_steps, Ahead<BFloat16>& ahead) {
    for (int64_t step = 0; step < num_steps; ++step) {
      ahead.fetch(16);
      interleave(cached, step, values_ + step * num_slices_ * 1024);
    }
  }

  // Writes 32 tokens' values, two tiles a slice. What no query sees is 0, because 0 times NaN is NaN.
  void interleave(const Cached<BFloat16>& cached, int64_t step, BFloat16* to) const {
    const int64_t first = cached.hidden;
    const int64_t end = cached.count;
    const auto row_of = [&](int64_t token) { return token >= first && token < end ? cached.values[token] : kZeros; };
    for (int64_t pair = 0; pair < 16; ++pair, to += 32) {
      const BFloat16* even = row_of(step * 32 + pair * 2);
      const BFloat16* odd = row_of(step * 32 + pair * 2 + 1);
      for (int64_t slice = 0; slice < num_slices_; ++slice) {
        const __m512i a = load_slice(even, slice);
        const __m512i b = load_slice(odd, slice);
        _mm512_store_si512(to + slice * 1024, _mm512_unpacklo_epi16(a, b));
        _mm512_store_si512(to + slice * 1024 + 512, _mm512_unpackhi_epi16(a, b));
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

  // Adds weights times values to Groups x 16 rows of 2 x 16 elements.
  template <int Groups>
  void add(int64_t group, int64_t part, int64_t num_steps) {
    const int64_t group_stride = num_slices_ * 512;
    float* sums = sums_ + group * group_stride + part * 256;
    const BFloat16* weights = weights_ + group * kMaxSteps * 512;
    const BFloat16* values = values_ + part * 512;
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

  // The same for a few rows, from registers.
  void add_by_dot_products(const Cached<BFloat16>& cached, Ahead<BFloat16>& ahead) {
    for (int64_t slice = 0; slice < num_slices_; slice += 2) {
      for (int64_t row = 0; row < num_rows_; row += 4) {
        const int64_t num_rows = num_rows_ - row;
        if (slice + 1 < num_slices_) {
          add_pairs<2>(num_rows, cached, row, slice, ahead);
        } else {
          add_pairs<1>(num_rows, cached, row, slice, ahead);
        }
      }
    }
  }

  template <int Slices>
  void add_pairs(int64_t num_rows, const Cached<BFloat16>& cached, int64_t row, int64_t slice, Ahead<BFloat16>& ahead) {
    switch (num_rows) {
      case 1: return add_pairs_to<1, Slices>(cached, row, slice, ahead);
      case 2: return add_pairs_to<2, Slices>(cached, row, slice, ahead);
      case 3: return add_pairs_to<3, Slices>(cached, row, slice, ahead);
      default: return add_pairs_to<4, Slices>(cached, row, slice, ahead);
    }
  }

  // Adds weights times values, two tokens at a time, to Rows rows of Slices x 32 elements.
  template <int Rows, int Slices>
  void add_pairs_to(const Cached<BFloat16>& cached, int64_t row, int64_t slice, Ahead<BFloat16>& ahead) {
    float* sums = sums_ + slice * 512 + row * 16;
    __m512 totals[Rows][2 * Slices];
    for (int r = 0; r < Rows; ++r)
      for (int part = 0; part < 2 * Slices; ++part) totals[r][part] = _mm512_load_ps(sums + part * 256 + r * 16);
    const int64_t first = cached.hidden;
    const int64_t end = cached.count;
    const auto row_of = [&](int64_t token) { return token >= first && token < end ? cached.values[token] : kZeros; };
    for (int64_t token = 0; token < end; token += 2) {
      if (token % 8 == 0) ahead.fetch(4);
      const BFloat16* even = row_of(token);
      const BFloat16* odd = row_of(token + 1);
      const BFloat16* weights = weights_ + token / 32 * 512 + row * 32 + token % 32;
      __m512bh values[2 * Slices];
      for (int i = 0; i < Slices; ++i) {
        const __m512i a = load_slice(even, slice + i);
        const __m512i b = load_slice(odd, slice + i);
        values[2 * i] = reinterpret_cast<__m512bh>(_mm512_unpacklo_epi16(a, b));
        values[2 * i + 1] = reinterpret_cast<__m512bh>(_mm512_unpackhi_epi16(a, b));
      }
      for (int r = 0; r < Rows; ++r) {
        int32_t pair;
        std::memcpy(&pair, weights + r * 32, sizeof pair);
        const auto weight = reinterpret_cast<__m512bh>(_mm512_set1_epi32(pair));
        for (int part = 0; part < 2 * Slices; ++part) totals[r][part] = _mm512_dpbf16_ps(totals[r][part], values[part], weight);
      }
    }
    for (int r = 0; r < Rows; ++r)
      for (int part = 0; part < 2 * Slices; ++part) _mm512_store_ps(sums + part * 256 + r * 16, totals[r][part]);
  }

  const int64_t head_dim_;
  const int64_t num_slices_;  // of 32 elements
  const __mmask32 last_mask_;  // of the last slice's elements
  const int64_t num_rows_;
  const int64_t num_groups_;  // of 16 rows
  const int64_t key_stride_;
  const bool reads_keys_in_place_;
  alignas(64) BFloat16 queries_[kMaxTileQueries * kMaxHeadDim];  // [groups][slices][tile]
  alignas(64) BFloat16 keys_[64 * kMaxHeadDim];
  alignas(64) float scores_[kStepTokens * kMaxTileQueries];         // [groups][tokens][16 rows]
  alignas(64) float turned_[4 * kStepTokens];                       // [4 rows][tokens]
  alignas(64) BFloat16 weights_[kStepTokens * kMaxTileQueries];     // [groups][kMaxSteps][tile]
  alignas(64) BFloat16 values_[kStepTokens * kMaxHeadDim];          // [steps][slices][2 tiles]
  alignas(64) float sums_[kMaxTileQueries * kMaxHeadDim];           // [groups][slices][2 tiles]
  alignas(64) float row_[kMaxHeadDim];
};

}  // namespace modelworker
#endif
