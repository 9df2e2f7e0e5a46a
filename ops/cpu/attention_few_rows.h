// A few rows of queries of bf16: the heads that share a KV head in a decode step, and the tokens of a short draft.
//
// Scores are tile products (attention_tiles.h), with most rows of a tile unused. From there on only real rows cost: scores are turned, 4
// rows at a time, into vectors of tokens, and values are added up from registers by dot products of pairs of tokens. In the cache, at 3
// heads of 64 elements, that takes 0.75 x the time of tiles.
#pragma once
#if defined(__AMX_BF16__)
#include <cmath>

#include "attention_tiles.h"

namespace modelworker {

// More rows are left to tiles: by then their dot products take as long.
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
  FewRowsEngine(const AttentionArguments& a, const Item& item) : TileScores(a, item), sum_stride_(num_slices_ * 32) {
    std::memset(sums_, 0, sizeof(float) * num_rows_ * sum_stride_);
  }

  // Turns scores into weights.
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
    for (int64_t slice = 0; slice < num_slices_; slice += 2) {
      for (int64_t row = 0; row < num_rows_; row += 4) {
        if (slice + 1 < num_slices_) {
          add_to_rows<2>(cached, row, slice, rows, ahead);
        } else {
          add_to_rows<1>(cached, row, slice, rows, ahead);
        }
      }
    }
  }

  // The weighted sums of a row: [head_dim].
  const float* sums(int64_t row) {
    // Pairs were interleaved within lanes of 128 bits: two vectors hold elements 0-3, 8-11, ... and 4-7, 12-15, ...
    const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i second = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
    for (int64_t slice = 0; slice < num_slices_; ++slice) {
      const float* from = sums_ + row * sum_stride_ + slice * 32;
      const __m512 low = _mm512_load_ps(from);
      const __m512 high = _mm512_load_ps(from + 16);
      _mm512_store_ps(row_ + slice * 32, _mm512_permutex2var_ps(low, first, high));
      _mm512_store_ps(row_ + slice * 32 + 16, _mm512_permutex2var_ps(low, second, high));
    }
    return row_;
  }

 private:
  // Puts the scores of 4 rows into `turned_`, those behind the last token kLowest, and finds their maxima.
  void turn_scores(
      const AttentionArguments& a, const Cached<BFloat16>& cached, const TileRows& rows, int64_t row, bool is_prepared, int64_t num_steps,
      Vector* highest) {
    const float* scores = scores_ + row;
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
    BFloat16* weights = weights_ + row * kStepTokens;
    for (int64_t step = 0; step < num_steps; ++step, scores += 32, weights += 32) {
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

  template <int Slices>
  void add_to_rows(const Cached<BFloat16>& cached, int64_t row, int64_t slice, const TileRows& rows, Ahead<BFloat16>& ahead) {
    switch (num_rows_ - row) {
      case 1: return add<1, Slices>(cached, row, slice, rows, ahead);
      case 2: return add<2, Slices>(cached, row, slice, rows, ahead);
      case 3: return add<3, Slices>(cached, row, slice, rows, ahead);
      default: return add<4, Slices>(cached, row, slice, rows, ahead);
    }
  }

  // Shrinks the sums of Rows rows of Slices x 32 elements and adds weights times values, two tokens at a time.
  template <int Rows, int Slices>
  void add(const Cached<BFloat16>& cached, int64_t row, int64_t slice, const TileRows& rows, Ahead<BFloat16>& ahead) {
    float* sums = sums_ + row * sum_stride_ + slice * 32;
    __m512 totals[Rows][2 * Slices];
    for (int r = 0; r < Rows; ++r)
      for (int part = 0; part < 2 * Slices; ++part)
        totals[r][part] = _mm512_mul_ps(_mm512_load_ps(sums + r * sum_stride_ + part * 16), _mm512_set1_ps(rows.shrink[row + r]));
    for (int64_t token = 0; token < cached.count; token += 2) {
      if (token % 8 == 0) ahead.fetch(4);
      if (token + kTokensAhead + 2 <= cached.count)
        for (int64_t next = 0; next < 2; ++next) fetch_into_l1(cached.values[token + kTokensAhead + next] + slice * 32, Slices * 64);
      const BFloat16* even = values_of(cached, token);
      const BFloat16* odd = values_of(cached, token + 1);
      __m512bh values[2 * Slices];
      for (int i = 0; i < Slices; ++i) {
        const __m512i a = load_slice(even, slice + i);
        const __m512i b = load_slice(odd, slice + i);
        values[2 * i] = reinterpret_cast<__m512bh>(_mm512_unpacklo_epi16(a, b));
        values[2 * i + 1] = reinterpret_cast<__m512bh>(_mm512_unpackhi_epi16(a, b));
      }
      for (int r = 0; r < Rows; ++r) {
        int32_t pair;
        std::memcpy(&pair, weights_ + (row + r) * kStepTokens + token, sizeof pair);
        const auto weight = reinterpret_cast<__m512bh>(_mm512_set1_epi32(pair));
        for (int part = 0; part < 2 * Slices; ++part) totals[r][part] = _mm512_dpbf16_ps(totals[r][part], values[part], weight);
      }
    }
    for (int r = 0; r < Rows; ++r)
      for (int part = 0; part < 2 * Slices; ++part) _mm512_store_ps(sums + r * sum_stride_ + part * 16, totals[r][part]);
  }

  // From the values that are added to those that are fetched into the L1 cache.
  static constexpr int64_t kTokensAhead = 16;

  const int64_t sum_stride_;
  alignas(64) float turned_[4 * kStepTokens];               // [4 rows][tokens]
  alignas(64) BFloat16 weights_[kMaxFewRows * kStepTokens];  // [rows][tokens]
  alignas(64) float sums_[kMaxFewRows * kMaxHeadDim];        // [rows][slices][2 vectors]
  alignas(64) float row_[kMaxHeadDim];
};

}  // namespace modelworker
#endif
