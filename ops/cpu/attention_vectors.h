// A tile of queries by vectors: scores with rows of the tile as lanes, sums with elements of the head as lanes.
#pragma once
#include <cstring>
#include <type_traits>

#include "attention_rows.h"

namespace modelworker {

#if defined(__AVX512BF16__)
constexpr bool kHasDotProducts = true;
#else
constexpr bool kHasDotProducts = false;
#endif

template <typename T>
class VectorEngine {
 public:
  struct Session {};
  // Any token can be the first of a step.
  static int64_t alignment(const AttentionArguments&) { return 1; }

  VectorEngine(const AttentionArguments& a, const Item& item)
      : head_dim_(a.head_dim), sum_stride_((a.head_dim + kWidth - 1) / kWidth * kWidth), num_rows_(item.num_tokens * (a.num_heads / a.num_kv_heads)) {
    load_queries(a, item);
    std::memset(sums_, 0, sizeof(float) * num_rows_ * sum_stride_);
  }

  int64_t num_padded_rows() const { return (num_rows_ + kWidth - 1) / kWidth * kWidth; }

  void multiply_keys(const Cached<T>& cached, Ahead<T>& ahead) {
    constexpr int64_t tokens = 8;
    const Key* keys[kStepTokens];
    find_keys(cached, keys);
    // Rows of a last, incomplete block are computed twice rather than by another loop.
    for (int64_t i = cached.count; i % tokens != 0; ++i) keys[i] = keys[cached.count - 1];
    for (int64_t i = 0; i < cached.count; i += tokens) {
      ahead.fetch(3);
      for (int64_t row = 0; row < num_rows_; row += kWidth) score_tokens<tokens>(keys + i, queries_ + row * head_dim_, scores(row) + i * kWidth);
    }
  }

  // Turns scores into weights.
  void weigh_scores(const AttentionArguments& a, const Item& item, const Cached<T>& cached, TileRows& rows, Ahead<T>& ahead) {
    for (int64_t row = 0; row < num_rows_; row += kWidth) {
      const float factor = prepare_scores(a, item, cached, row, rows, scores(row));
      weigh<false>(scores(row), cached.count, factor, row, rows);
      ahead.fetch(32);
    }
  }

  void add_values(const Cached<T>& cached, const TileRows& rows, Ahead<T>& ahead) {
    constexpr int64_t num_vectors = kWidth == 16 ? 4 : 2;
    const T* values[kStepTokens];
    find_values(cached, values);
    for (int64_t row = 0; row < num_rows_; row += 4) {
      const int64_t count = num_rows_ - row < 4 ? num_rows_ - row : 4;
      for (int64_t r = row; r < row + count; ++r) shrink_row(r, rows.shrink[r]);
      int64_t d = 0;
      for (; d + num_vectors * kWidth <= sum_stride_; d += num_vectors * kWidth) {
        add_to_rows<num_vectors>(count, values, cached.count, row, d);
        ahead.fetch(16);
      }
      for (; d < sum_stride_; d += kWidth) add_to_rows<1>(count, values, cached.count, row, d);
    }
  }

  // The weighted sums of a row: [head_dim].
  const float* sums(int64_t row) { return sums_ + row * sum_stride_; }

 private:
  static constexpr int64_t kWidth = Vector::kWidth;

  // [kStepTokens][kWidth], of kWidth rows.
  float* scores(int64_t row) { return scores_ + row * kStepTokens; }

  static constexpr bool kPairs = kHasDotProducts && std::is_same_v<T, BFloat16>;
  // A key is multiplied as it lies, in pairs of bf16 or in fp32; else it is widened first.
  using Key = std::conditional_t<kPairs, BFloat16, float>;

  // As [rows / kWidth][head_dim][kWidth], in pairs of elements where they are multiplied in pairs.
  void load_queries(const AttentionArguments& a, const Item& item) {
    const int64_t group = a.num_heads / a.num_kv_heads;
    constexpr int64_t pair = kPairs ? 2 : 1;
    std::memset(queries_, 0, sizeof(Key) * num_padded_rows() * head_dim_);
    for (int64_t row = 0; row < num_rows_; ++row) {
      const T* from = static_cast<const T*>(a.query) + (item.row + row / group) * a.query_token_stride +
                      (item.kv_head * group + row % group) * a.query_head_stride;
      Key* to = queries_ + row / kWidth * kWidth * head_dim_ + row % kWidth * pair;
      for (int64_t d = 0; d < head_dim_; ++d) {
        if constexpr (kPairs) {
          to[d / 2 * 2 * kWidth + d % 2] = from[d];
        } else {
          to[d * kWidth] = to_float(from[d]);
        }
      }
    }
  }

  void find_keys(const Cached<T>& cached, const Key** keys) {
    for (int64_t i = 0; i < cached.count; ++i) {
      if constexpr (std::is_same_v<Key, T>) {
        keys[i] = cached.keys[i];
      } else {
        float* wide = wide_keys_ + i * head_dim_;
        keys[i] = wide;
        int64_t d = 0;
        for (; d + kWidth <= head_dim_; d += kWidth) store(wide + d, load(cached.keys[i] + d));
        for (; d < head_dim_; ++d) wide[d] = to_float(cached.keys[i][d]);
      }
    }
  }

  // Where a head is no whole number of vectors, values are copied and filled with zeros.
  void find_values(const Cached<T>& cached, const T** values) {
    for (int64_t i = 0; i < cached.count; ++i) {
      values[i] = cached.values[i];
      if (head_dim_ == sum_stride_) continue;
      T* copy = values_ + i * sum_stride_;
      std::memcpy(copy, cached.values[i], sizeof(T) * head_dim_);
      std::memset(static_cast<void*>(copy + head_dim_), 0, sizeof(T) * (sum_stride_ - head_dim_));
      values[i] = copy;
    }
  }

  template <int Tokens>
  void score_tokens(const Key* const* keys, const Key* queries, float* scores) const {
    Vector sums[Tokens];
    for (Vector& value : sums) value = zero();
    if constexpr (kPairs) {
#if defined(__AVX512BF16__)
      for (int64_t d = 0; d < head_dim_; d += 2) {
        const auto query = reinterpret_cast<__m512bh>(_mm512_loadu_si512(queries + d * kWidth));
        for (int t = 0; t < Tokens; ++t) {
          int32_t pair;
          std::memcpy(&pair, keys[t] + d, sizeof pair);
          sums[t].value = _mm512_dpbf16_ps(sums[t].value, query, reinterpret_cast<__m512bh>(_mm512_set1_epi32(pair)));
        }
      }
#endif
    } else {
      for (int64_t d = 0; d < head_dim_; ++d) {
        const Vector query = load(queries + d * kWidth);
        for (int t = 0; t < Tokens; ++t) sums[t] = multiply_add(query, broadcast(keys[t][d]), sums[t]);
      }
    }
    for (int t = 0; t < Tokens; ++t) store(scores + t * kWidth, sums[t]);
  }

  void shrink_row(int64_t row, float factor) {
    if (factor == 1.0f) return;
    float* sums = sums_ + row * sum_stride_;
    for (int64_t d = 0; d < sum_stride_; d += kWidth) store(sums + d, load(sums + d) * broadcast(factor));
  }

  template <int Vectors>
  void add_to_rows(int64_t num_rows, const T* const* values, int64_t count, int64_t row, int64_t d) {
    switch (num_rows) {
      case 1: return add<1, Vectors>(values, count, row, d);
      case 2: return add<2, Vectors>(values, count, row, d);
      case 3: return add<3, Vectors>(values, count, row, d);
      default: return add<4, Vectors>(values, count, row, d);
    }
  }

  template <int Rows, int Vectors>
  void add(const T* const* values, int64_t count, int64_t row, int64_t d) {
    Vector sums[Rows][Vectors];
    const float* weights[Rows];
    for (int r = 0; r < Rows; ++r) {
      weights[r] = scores_ + (row + r) / kWidth * kWidth * kStepTokens + (row + r) % kWidth;
      for (int v = 0; v < Vectors; ++v) sums[r][v] = load(sums_ + (row + r) * sum_stride_ + d + v * kWidth);
    }
    for (int64_t i = 0; i < count; ++i) {
      Vector value[Vectors];
      for (int v = 0; v < Vectors; ++v) value[v] = load(values[i] + d + v * kWidth);
      for (int r = 0; r < Rows; ++r) {
        const Vector weight = broadcast(weights[r][i * kWidth]);
        for (int v = 0; v < Vectors; ++v) sums[r][v] = multiply_add(weight, value[v], sums[r][v]);
      }
    }
    for (int r = 0; r < Rows; ++r)
      for (int v = 0; v < Vectors; ++v) store(sums_ + (row + r) * sum_stride_ + d + v * kWidth, sums[r][v]);
  }

  const int64_t head_dim_;
  const int64_t sum_stride_;
  const int64_t num_rows_;
  alignas(64) Key queries_[kMaxTileQueries * kMaxHeadDim];
  alignas(64) float scores_[kStepTokens * kMaxTileQueries];
  alignas(64) float sums_[kMaxTileQueries * kMaxHeadDim];
  alignas(64) float wide_keys_[std::is_same_v<Key, T> ? 1 : kStepTokens * kMaxHeadDim];
  alignas(64) T values_[kStepTokens * kMaxHeadDim];
};

}  // namespace modelworker
