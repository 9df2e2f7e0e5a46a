// A few rows of queries of bf16: the heads that share a KV head in a decode step, and the tokens of a short draft.
//
// Scores are tile products (attention_tiles.h), with most rows of a tile unused, and are turned, 4 rows at a time, into vectors of tokens.
// Values are multiplied as they lie in the cache, 16 tokens a tile, for which a tile's pairs are neighbouring elements of one token instead
// of two tokens: half the rows of the other operand hold (weight, 0) and sum up even elements, half hold (0, weight) and sum up odd ones.
// Nothing is interleaved or widened. An infinite element makes its neighbour NaN (0 times infinity), in a row that has no right value anyway.
#pragma once
#if defined(__AMX_BF16__)
#include <cmath>

#include "attention_tiles.h"

namespace modelworker {

// Each row of queries takes two of the 16 rows of a tile of weights.
constexpr int64_t kMaxFewRows = 8;

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

class FewRowsEngine : public TileScores {
 public:
  FewRowsEngine(const AttentionArguments& a, const Item& item) : TileScores(a, item) {
    std::memset(sums_, 0, sizeof(float) * num_rows_ * sum_stride());
  }

  // Turns scores into weights.
  void weigh_scores(const AttentionArguments& a, const Item& item, const Cached<BFloat16>& cached, TileRows& rows, Ahead<BFloat16>& ahead) {
    const bool is_prepared = needs_preparation(a, item, cached);
    const float factor = is_prepared ? 1.0f : a.scale * kLog2E;
    const int64_t num_tiles = (cached.count + 15) / 16;
    for (int64_t row = 0; row < num_rows_; row += 4) {
      ahead.fetch(16);
      const int64_t count = num_rows_ - row < 4 ? num_rows_ - row : 4;
      Vector highest[4];
      turn_scores(a, cached, rows, row, is_prepared, num_tiles, highest);
      for (int64_t r = 0; r < count; ++r) weigh_row(row + r, turned_ + r * kStepTokens, largest(highest[r]) * factor, factor, num_tiles, rows);
    }
  }

  void add_values(const Cached<BFloat16>& cached, const TileRows& rows, Ahead<BFloat16>& ahead) {
    int64_t slice = 0;
    for (; slice + 1 < num_slices_; slice += 2) add<2>(cached, slice, rows, ahead);
    if (slice < num_slices_) add<1>(cached, slice, rows, ahead);
  }

  // The weighted sums of a row: [head_dim].
  const float* sums(int64_t row) {
    const __m512i first = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    const __m512i second = _mm512_setr_epi32(8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
    for (int64_t slice = 0; slice < num_slices_; ++slice) {
      const float* from = sums_ + row * sum_stride() + slice * 32;
      const __m512 even = _mm512_load_ps(from);
      const __m512 odd = _mm512_load_ps(from + 16);
      _mm512_store_ps(row_ + slice * 32, _mm512_permutex2var_ps(even, first, odd));
      _mm512_store_ps(row_ + slice * 32 + 16, _mm512_permutex2var_ps(even, second, odd));
    }
    return row_;
  }

 private:
  int64_t sum_stride() const { return num_slices_ * 32; }

  // Puts the scores of 4 rows into `turned_`, those behind the last token kLowest, and finds their maxima.
  void turn_scores(
      const AttentionArguments& a, const Cached<BFloat16>& cached, const TileRows& rows, int64_t row, bool is_prepared, int64_t num_tiles,
      Vector* highest) {
    const float* scores = scores_ + row;
    const Vector order = {_mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)};
    for (int r = 0; r < 4; ++r) highest[r] = broadcast(kLowest);
    for (int64_t token = 0; token < num_tiles * 16; token += 16) {
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
  void weigh_row(int64_t row, const float* scores, float step_highest, float factor, int64_t num_tiles, TileRows& rows) {
    const float before = rows.highest[row];
    const float highest = step_highest > before ? step_highest : before;
    const Vector offset = broadcast(-highest);
    Vector total = zero();
    BFloat16* weights = weights_ + row * 32;
    for (int64_t tile = 0; tile < num_tiles; ++tile, scores += 16, weights += 512) {
      const Vector weight = weight_of<true>(multiply_add(load(scores), broadcast(factor), offset));
      const __m512i even = _mm512_cvtepu16_epi32(reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(weight.value)));
      const __m512i odd = _mm512_slli_epi32(even, 16);
      total = total + Vector{_mm512_castsi512_ps(odd)};
      _mm512_store_si512(weights, even);
      _mm512_store_si512(weights + kMaxFewRows * 32, odd);
    }
    const float shrink = std::exp2(before - highest);
    rows.highest[row] = highest;
    rows.shrink[row] = shrink;
    rows.total[row] = rows.total[row] * shrink + sum(total);
  }

  // Where the values of 16 tokens lie, from an element on; they are copied if some lie apart, or some token has none that may be read.
  const BFloat16* values_from(const Cached<BFloat16>& cached, int64_t token, int64_t slice, int64_t* stride) {
    if (reads_cache_in_place_ && token >= cached.hidden && token + 16 <= cached.count) {
      *stride = cache_stride_;
      return cached.values[token] + slice * 32;
    }
    *stride = 64;
    // A tile that was loaded from here before must have been.
    finish_stores();
    for (int64_t i = 0; i < 16; ++i) {
      const BFloat16* from = values_of(cached, token + i);
      _mm512_store_si512(copied_ + i * 64, load_slice(from, slice));
      if (slice + 1 < num_slices_) _mm512_store_si512(copied_ + i * 64 + 32, load_slice(from, slice + 1));
    }
    finish_stores();
    return copied_;
  }

  // Shrinks the sums of Slices x 32 elements and adds weights times values. Two tiles of tokens in turns have sums of their own, because
  // a tile product waits 52 cycles for the one before.
  template <int Slices>
  void add(const Cached<BFloat16>& cached, int64_t slice, const TileRows& rows, Ahead<BFloat16>& ahead) {
    finish_stores();
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t token = 0; token < cached.count; token += 32) {
      int64_t stride;
      fetch_values(cached, token + 32, slice, Slices);
      ahead.fetch(8);
      const BFloat16* values = values_from(cached, token, slice, &stride);
      _tile_loadd(4, weights_ + token * 32, 64);
      _tile_loadd(5, values, stride * 2);
      _tile_dpbf16ps(0, 4, 5);
      if constexpr (Slices == 2) {
        _tile_loadd(6, values + 32, stride * 2);
        _tile_dpbf16ps(1, 4, 6);
      }
      if (token + 16 >= cached.count) break;
      ahead.fetch(8);
      values = values_from(cached, token + 16, slice, &stride);
      _tile_loadd(4, weights_ + (token + 16) * 32, 64);
      _tile_loadd(5, values, stride * 2);
      _tile_dpbf16ps(2, 4, 5);
      if constexpr (Slices == 2) {
        _tile_loadd(6, values + 32, stride * 2);
        _tile_dpbf16ps(3, 4, 6);
      }
    }
    _tile_stored(0, added_, 64);
    _tile_stored(2, added_ + 256, 64);
    if constexpr (Slices == 2) {
      _tile_stored(1, added_ + 512, 64);
      _tile_stored(3, added_ + 768, 64);
    }
    for (int64_t row = 0; row < num_rows_; ++row) {
      const Vector shrink = broadcast(rows.shrink[row]);
      for (int part = 0; part < 2 * Slices; ++part) {
        float* sums = sums_ + row * sum_stride() + slice * 32 + part * 16;
        const float* added = added_ + part / 2 * 512 + part % 2 * kMaxFewRows * 16 + row * 16;
        store(sums, multiply_add(load(sums), shrink, load(added) + load(added + 256)));
      }
    }
  }

  static void fetch_values(const Cached<BFloat16>& cached, int64_t token, int64_t slice, int64_t count) {
    const int64_t end = token + 32 < cached.count ? token + 32 : cached.count;
    for (; token < end; ++token) fetch_into_l1(cached.values[token] + slice * 32, count * 64);
  }

  alignas(64) float turned_[4 * kStepTokens];  // [4 rows][tokens]
  // [tiles of 16 tokens][(weight, 0), (0, weight)][kMaxFewRows][tokens]. Rows of no query hold anything: nobody reads their sums.
  alignas(64) BFloat16 weights_[kStepTokens * 32];
  alignas(64) BFloat16 copied_[16 * 64];               // [tokens][2 slices]
  alignas(64) float added_[2 * 512];                   // [slices][turns][even, odd][kMaxFewRows][16]
  alignas(64) float sums_[kMaxFewRows * kMaxHeadDim];  // [rows][slices][even, odd][16]
  alignas(64) float row_[kMaxHeadDim];
};

}  // namespace modelworker
#endif
