// Where the keys and values of a step lie, how the next ones are fetched ahead, and the softmax of scores.
#pragma once
#include "attention_plan.h"
#include "simd.h"

namespace modelworker {

// Cached tokens that are multiplied at a time: their scores for 64 rows are 32 KiB.
constexpr int64_t kStepTokens = 128;

// The cached tokens of a step.
template <typename T>
struct Cached {
  const T* keys[kStepTokens];
  const T* values[kStepTokens];
  int64_t begin;   // position of the first one
  int64_t count;   // 0 .. kStepTokens
  int64_t hidden;  // so many of the first ones no query of the tile sees: what lies there may be anything
};

// Tokens of an item's step. A step of few rows takes as long as its reading, and the next one is fetched meanwhile: steps should be alike.
inline int64_t step_tokens(const AttentionArguments& a, const Item& item, int64_t begin) {
  const int64_t left = item.end - begin;
  if (item.num_tokens * (a.num_heads / a.num_kv_heads) > 16) return std::min(kStepTokens, left);
  const int64_t steps = (left + kStepTokens - 1) / kStepTokens;
  return std::min(((left + steps - 1) / steps + 15) / 16 * 16, left);
}

// Finds the tokens of an item from `begin` on, through the sequence's block table.
template <typename T>
void locate(const AttentionArguments& a, const Item& item, int64_t begin, Cached<T>& cached) {
  cached.begin = begin;
  cached.count = step_tokens(a, item, begin);
  const int64_t seen = a.window > 0 ? item.position - a.window + 1 : 0;
  cached.hidden = std::clamp<int64_t>(seen - begin, 0, cached.count);
  const int32_t* table = a.block_tables + item.sequence * a.table_stride;
  int64_t block = begin / a.block_size;
  int64_t offset = begin % a.block_size;
  for (int64_t i = 0; i < cached.count; ++block, offset = 0) {
    const int64_t start = table[block] * a.cache_block_stride + item.kv_head * a.cache_head_stride;
    const int64_t end = std::min(cached.count, i + a.block_size - offset);
    for (int64_t at = start + offset * a.cache_token_stride; i < end; ++i, at += a.cache_token_stride) {
      cached.keys[i] = static_cast<const T*>(a.key_cache) + at;
      cached.values[i] = static_cast<const T*>(a.value_cache) + at;
    }
  }
}

// Fetches the tokens of the following step into the L2 cache, a few at a time between the work on this one: blocks lie anywhere, so
// that no hardware prefetcher follows them, and a burst would fill the queue of outstanding lines.
template <typename T>
class Ahead {
 public:
  Ahead(const Cached<T>& cached, int64_t head_dim) : cached_(cached), row_bytes_(head_dim * static_cast<int64_t>(sizeof(T))) {}

  void fetch(int64_t tokens) {
    const int64_t end = std::min(next_ + tokens, cached_.count);
    for (; next_ < end; ++next_) {
      for (int64_t byte = 0; byte < row_bytes_; byte += 64) {
        __builtin_prefetch(reinterpret_cast<const char*>(cached_.keys[next_]) + byte, 0, 2);
        __builtin_prefetch(reinterpret_cast<const char*>(cached_.values[next_]) + byte, 0, 2);
      }
    }
  }

 private:
  const Cached<T>& cached_;
  const int64_t row_bytes_;
  int64_t next_ = 0;
};

// Fetches a part of a row into the L1 cache, shortly before it is read: 3 to 10 % of a decode step that reads its cache from memory.
template <typename T>
void fetch_into_l1(const T* row, int64_t num_bytes) {
  for (int64_t byte = 0; byte < num_bytes; byte += 64) __builtin_prefetch(reinterpret_cast<const char*>(row) + byte, 0, 3);
}

// Below every score, and finite: the difference of two infinities would be NaN.
constexpr float kLowest = -1e30f;
constexpr float kLog2E = 1.44269504f;

// 2^r for r in -1/2 .. 1/2: within 3e-6 for weights that are rounded to bf16, within 3e-9 otherwise (least maximal relative error).
template <bool Rounded>
Vector power_of_fraction(Vector r) {
  if constexpr (Rounded) {
    Vector p = broadcast(9.5701013e-3f);
    p = multiply_add(p, r, broadcast(5.5917862e-2f));
    p = multiply_add(p, r, broadcast(2.4024745e-1f));
    p = multiply_add(p, r, broadcast(6.9312181e-1f));
    return multiply_add(p, r, broadcast(9.9999926e-1f));
  } else {
    Vector p = broadcast(1.5345811e-4f);
    p = multiply_add(p, r, broadcast(1.3399931e-3f));
    p = multiply_add(p, r, broadcast(9.6184890e-3f));
    p = multiply_add(p, r, broadcast(5.5503287e-2f));
    p = multiply_add(p, r, broadcast(2.4022647e-1f));
    p = multiply_add(p, r, broadcast(6.9314721e-1f));
    return multiply_add(p, r, broadcast(1.0f));
  }
}

// 2^x for x <= 0. A NaN stays one: it is the operand that the vector minimum and maximum keep.
template <bool Rounded>
Vector weight_of(Vector x) {
#if defined(__AVX512F__)
  const Vector n = round_to_integer(x);
  return {_mm512_scalef_ps(power_of_fraction<Rounded>(x - n).value, n.value)};
#else
  x = maximum(broadcast(-126.0f), x);
  const Vector n = round_to_integer(x);
  return power_of_fraction<Rounded>(x - n) * power_of_two(n);
#endif
}

// `weight` as bf16 will hold it: the sum of weights is that of what is multiplied, so that what rounding adds to all of them cancels.
template <bool Rounded>
Vector as_multiplied(Vector weight) {
#if defined(__AVX512F__)
  if constexpr (Rounded) {
    const __m512i half_up = _mm512_add_epi32(_mm512_castps_si512(weight.value), _mm512_set1_epi32(0x8000));
    return {_mm512_castsi512_ps(_mm512_and_si512(half_up, _mm512_set1_epi32(static_cast<int>(0xffff0000))))};
  }
#endif
  return weight;
}

// `score` where first <= token <= last, else kLowest, whatever the score is.
inline Vector score_if_seen(Vector score, Vector token, Vector first, Vector last) {
#if defined(__AVX512F__)
  const __mmask16 seen = _mm512_cmp_ps_mask(token.value, first.value, _CMP_GE_OQ) & _mm512_cmp_ps_mask(token.value, last.value, _CMP_LE_OQ);
  return {_mm512_mask_blend_ps(seen, _mm512_set1_ps(kLowest), score.value)};
#elif defined(__AVX2__)
  const __m256 seen = _mm256_and_ps(_mm256_cmp_ps(token.value, first.value, _CMP_GE_OQ), _mm256_cmp_ps(token.value, last.value, _CMP_LE_OQ));
  return {_mm256_blendv_ps(_mm256_set1_ps(kLowest), score.value, seen)};
#else
  return {token.value >= first.value && token.value <= last.value ? score.value : kLowest};
#endif
}

// soft_cap * tanh(score / soft_cap), as 1 - 2 / (1 + e^2x).
inline Vector capped(Vector score, float soft_cap) {
  const Vector e = exponential(score * broadcast(2.0f / soft_cap));
  return broadcast(soft_cap) * (broadcast(1.0f) - broadcast(2.0f) / (broadcast(1.0f) + e));
}

// Rows of a tile beside their sums. Scores are in units of log 2 here, so that a weight is a power of 2.
struct alignas(64) TileRows {
  float first_seen[kMaxTileQueries];  // position of the first and the last token that the row sees
  float last_seen[kMaxTileQueries];
  float highest[kMaxTileQueries];  // score so far
  float total[kMaxTileQueries];    // of the weights
  float shrink[kMaxTileQueries];   // what earlier sums are multiplied by after a step
};

// Starts the rows of a tile; `padded` rows, those behind the real ones, see everything.
inline void start_rows(const AttentionArguments& a, const Item& item, int64_t padded, TileRows& rows) {
  const int64_t group = a.num_heads / a.num_kv_heads;
  for (int64_t row = 0; row < padded; ++row) {
    rows.first_seen[row] = 0.0f;
    rows.last_seen[row] = 1e30f;
    rows.highest[row] = kLowest;
    rows.total[row] = 0.0f;
  }
  for (int64_t token = 0; token < item.num_tokens; ++token) {
    const int64_t position = item.position + token;
    for (int64_t row = token * group; row < (token + 1) * group; ++row) {
      if (a.window > 0) rows.first_seen[row] = static_cast<float>(position - a.window + 1);
      rows.last_seen[row] = static_cast<float>(position);
    }
  }
}

// Whether some row of the tile doesn't see some token of the step.
template <typename T>
bool needs_mask(const AttentionArguments& a, const Item& item, const Cached<T>& cached) {
  const int64_t last_position = item.position + item.num_tokens - 1;
  return cached.begin + cached.count - 1 > item.position || (a.window > 0 && cached.begin < last_position - a.window + 1);
}

// Turns the scores [count][width] of a vector of rows into weights, and updates the rows: a running softmax (Milakov and Gimelshein,
// 2018).
template <bool Rounded>
void weigh(float* scores, int64_t count, float factor, int64_t row, TileRows& rows) {
  constexpr int64_t width = Vector::kWidth;
  // Four maxima, because one would wait for itself.
  Vector maxima[4];
  for (Vector& value : maxima) value = broadcast(kLowest);
  int64_t i = 0;
  for (; i + 4 <= count; i += 4)
    for (int64_t j = 0; j < 4; ++j) maxima[j] = maximum(load(scores + (i + j) * width), maxima[j]);
  for (; i < count; ++i) maxima[0] = maximum(load(scores + i * width), maxima[0]);
  const Vector before = load(rows.highest + row);
  const Vector step = maximum(maximum(maxima[0], maxima[1]), maximum(maxima[2], maxima[3])) * broadcast(factor);
  const Vector highest = maximum(step, before);
  const Vector shrink = weight_of<false>(before - highest);
  Vector total = load(rows.total + row) * shrink;
  const Vector offset = zero() - highest;
  for (i = 0; i < count; ++i) {
    const Vector weight = as_multiplied<Rounded>(weight_of<Rounded>(multiply_add(load(scores + i * width), broadcast(factor), offset)));
    total = total + weight;
    store(scores + i * width, weight);
  }
  store(rows.highest + row, highest);
  store(rows.total + row, total);
  store(rows.shrink + row, shrink);
}

// Whether the scores of a step need more than the scale: a mask, a soft cap, or a sign that would turn maxima into minima.
template <typename T>
bool needs_preparation(const AttentionArguments& a, const Item& item, const Cached<T>& cached) {
  return needs_mask(a, item, cached) || a.soft_cap > 0 || a.scale < 0;
}

// The score that a product becomes, in units of log 2: kLowest where the row doesn't see the token, whatever the product is.
inline Vector prepared(const AttentionArguments& a, Vector product, Vector token, Vector first_seen, Vector last_seen) {
  Vector score = product * broadcast(a.scale);
  if (a.soft_cap > 0) score = capped(score, a.soft_cap);
  return score_if_seen(score * broadcast(kLog2E), token, first_seen, last_seen);
}

// Prepares the scores [count][width] of a vector of rows, if they need it. Returns the factor that is left for `weigh`.
template <typename T>
float prepare_scores(const AttentionArguments& a, const Item& item, const Cached<T>& cached, int64_t row, const TileRows& rows, float* scores) {
  if (!needs_preparation(a, item, cached)) return a.scale * kLog2E;
  const Vector first_seen = load(rows.first_seen + row);
  const Vector last_seen = load(rows.last_seen + row);
  for (int64_t i = 0; i < cached.count; ++i, scores += Vector::kWidth)
    store(scores, prepared(a, load(scores), broadcast(static_cast<float>(cached.begin + i)), first_seen, last_seen));
  return 1.0f;
}

}  // namespace modelworker
