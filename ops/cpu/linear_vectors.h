// Products by vectors: a few rows of x times a block of packed weights, 16 outputs at a time.
//
// Each step of weights is loaded once for all rows of a group, x is broadcast from the L1 cache; nothing is summed across lanes.
#pragma once
#include "linear.h"

namespace modelworker {

#if defined(__AVX512F__) && defined(__AVX512BF16__)

// 8 rows x 2 panels of 16 sums: 16 of 32 registers hide the latency of the multiply-adds.
constexpr int kGroupRows = 8;
constexpr int kPanels = 2;

using Sixteen = __m512;
inline Sixteen sixteen_zeros() { return _mm512_setzero_ps(); }
inline void store_sixteen(float* to, Sixteen sums) { _mm512_storeu_ps(to, sums); }

template <typename T>
struct Weights;
template <>
struct Weights<BFloat16> {
  __m512bh value;
  explicit Weights(const BFloat16* from) : value((__m512bh)_mm512_loadu_si512(from)) {}
};
template <>
struct Weights<float> {
  __m512 value;
  explicit Weights(const float* from) : value(_mm512_loadu_ps(from)) {}
};

template <typename T>
struct Factor;
template <>
struct Factor<BFloat16> {
  __m512bh value;
  explicit Factor(uint32_t pair) : value((__m512bh)_mm512_set1_epi32(static_cast<int>(pair))) {}
};
template <>
struct Factor<float> {
  __m512 value;
  explicit Factor(float one) : value(_mm512_set1_ps(one)) {}
};

inline Sixteen accumulate(Sixteen sums, const Weights<BFloat16>& weights, const Factor<BFloat16>& factor) {
  return _mm512_dpbf16_ps(sums, weights.value, factor.value);
}
inline Sixteen accumulate(Sixteen sums, const Weights<float>& weights, const Factor<float>& factor) {
  return _mm512_fmadd_ps(weights.value, factor.value, sums);
}

#elif defined(__AVX2__) && defined(__FMA__)

// 4 rows x 16 sums are 8 of 16 registers.
constexpr int kGroupRows = 4;
constexpr int kPanels = 1;

struct Sixteen {
  __m256 low;
  __m256 high;
};
inline Sixteen sixteen_zeros() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline void store_sixteen(float* to, Sixteen sums) {
  _mm256_storeu_ps(to, sums.low);
  _mm256_storeu_ps(to + 8, sums.high);
}

// Of 8 pairs of bf16, the first or the second as fp32.
inline __m256 first_of(__m256i pairs) { return _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16)); }
inline __m256 second_of(__m256i pairs) { return _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(-65536))); }

template <typename T>
struct Weights;
template <>
struct Weights<BFloat16> {
  __m256i low;
  __m256i high;
  explicit Weights(const BFloat16* from)
      : low(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))),
        high(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + 16))) {}
};
template <>
struct Weights<float> {
  __m256 low;
  __m256 high;
  explicit Weights(const float* from) : low(_mm256_loadu_ps(from)), high(_mm256_loadu_ps(from + 8)) {}
};

template <typename T>
struct Factor;
template <>
struct Factor<BFloat16> {
  __m256 first;
  __m256 second;
  explicit Factor(uint32_t pair) {
    const __m256i pairs = _mm256_set1_epi32(static_cast<int>(pair));
    first = first_of(pairs);
    second = second_of(pairs);
  }
};
template <>
struct Factor<float> {
  __m256 value;
  explicit Factor(float one) : value(_mm256_set1_ps(one)) {}
};

inline Sixteen accumulate(Sixteen sums, const Weights<BFloat16>& weights, const Factor<BFloat16>& factor) {
  sums.low = _mm256_fmadd_ps(first_of(weights.low), factor.first, sums.low);
  sums.high = _mm256_fmadd_ps(first_of(weights.high), factor.first, sums.high);
  sums.low = _mm256_fmadd_ps(second_of(weights.low), factor.second, sums.low);
  sums.high = _mm256_fmadd_ps(second_of(weights.high), factor.second, sums.high);
  return sums;
}
inline Sixteen accumulate(Sixteen sums, const Weights<float>& weights, const Factor<float>& factor) {
  return {_mm256_fmadd_ps(weights.low, factor.value, sums.low), _mm256_fmadd_ps(weights.high, factor.value, sums.high)};
}

#else

constexpr int kGroupRows = 1;
constexpr int kPanels = 1;

struct Sixteen {
  float values[16];
};
inline Sixteen sixteen_zeros() { return {}; }
inline void store_sixteen(float* to, const Sixteen& sums) { std::memcpy(to, sums.values, sizeof sums.values); }

template <typename T>
struct Weights {
  const T* from;
  explicit Weights(const T* from) : from(from) {}
};
template <typename T>
struct Factor;
template <>
struct Factor<BFloat16> {
  float first;
  float second;
  explicit Factor(uint32_t pair)
      : first(to_float(BFloat16{static_cast<uint16_t>(pair)})), second(to_float(BFloat16{static_cast<uint16_t>(pair >> 16)})) {}
};
template <>
struct Factor<float> {
  float value;
  explicit Factor(float one) : value(one) {}
};

inline Sixteen accumulate(Sixteen sums, const Weights<BFloat16>& weights, const Factor<BFloat16>& factor) {
  for (int i = 0; i < 16; ++i)
    sums.values[i] += to_float(weights.from[2 * i]) * factor.first + to_float(weights.from[2 * i + 1]) * factor.second;
  return sums;
}
inline Sixteen accumulate(Sixteen sums, const Weights<float>& weights, const Factor<float>& factor) {
  for (int i = 0; i < 16; ++i) sums.values[i] += weights.from[i] * factor.value;
  return sums;
}

#endif

inline Factor<float> factor_at(const float* x) { return Factor<float>(*x); }
inline Factor<BFloat16> factor_at(const BFloat16* x) {
  uint32_t pair;
  std::memcpy(&pair, x, sizeof pair);
  return Factor<BFloat16>(pair);
}
// Of a last input without a neighbour.
inline Factor<float> last_factor_at(const float* x) { return Factor<float>(*x); }
inline Factor<BFloat16> last_factor_at(const BFloat16* x) { return Factor<BFloat16>(uint32_t{x->bits}); }

// Bytes from what is multiplied to what is fetched meanwhile; blocks follow each other, so this runs ahead into the next one.
constexpr int64_t kPrefetchBytes = 4096;

// sums[row][32 outputs] = x rows times kPanels panels of a block, from `weights` on.
template <typename T, int Rows>
void multiply_group(const T* x, int64_t x_stride, const T* weights, int64_t in_features, float* sums) {
  constexpr int64_t width = kStepInputs<T>;
  constexpr int64_t panel = 16 * width;
  Sixteen totals[Rows][kPanels];
  for (int row = 0; row < Rows; ++row)
    for (int p = 0; p < kPanels; ++p) totals[row][p] = sixteen_zeros();
  const int64_t whole = in_features / width;
  for (int64_t step = 0; step < whole; ++step, weights += kBlockOutputs * width) {
    for (int p = 0; p < kPanels; ++p) __builtin_prefetch(reinterpret_cast<const char*>(weights + p * panel) + kPrefetchBytes);
    for (int row = 0; row < Rows; ++row) {
      const Factor<T> factor = factor_at(x + row * x_stride + step * width);
      for (int p = 0; p < kPanels; ++p) totals[row][p] = accumulate(totals[row][p], Weights<T>(weights + p * panel), factor);
    }
  }
  if (whole * width < in_features) {
    for (int row = 0; row < Rows; ++row) {
      const Factor<T> factor = last_factor_at(x + row * x_stride + whole * width);
      for (int p = 0; p < kPanels; ++p) totals[row][p] = accumulate(totals[row][p], Weights<T>(weights + p * panel), factor);
    }
  }
  for (int row = 0; row < Rows; ++row)
    for (int p = 0; p < kPanels; ++p) store_sixteen(sums + row * kBlockOutputs + p * 16, totals[row][p]);
}

// Multiplies up to `Rows` rows, and returns how many.
template <typename T, int Rows>
int multiply_rows(const T* x, int64_t x_stride, int64_t rows, const T* block, int64_t in_features, float* sums) {
  if constexpr (Rows > 1) {
    if (rows < Rows) return multiply_rows<T, Rows - 1>(x, x_stride, rows, block, in_features, sums);
  }
  for (int p = 0; p < 2; p += kPanels)
    multiply_group<T, Rows>(x, x_stride, block + p * 16 * kStepInputs<T>, in_features, sums + p * 16);
  return Rows;
}

// Hands blocks of sums to `epilogue(row, num_rows, column, num_columns, sums)`; rows of sums are kBlockOutputs apart.
template <typename T, typename Epilogue>
void multiply_by_vectors(const LinearArguments& a, Range blocks, const Epilogue& epilogue) {
  alignas(64) float sums[kGroupRows * kBlockOutputs];
  for (int64_t block = blocks.begin; block < blocks.end; ++block) {
    const T* weights = static_cast<const T*>(a.packed) + block * block_size<T>(a.in_features);
    const int64_t column = block * kBlockOutputs;
    const int64_t columns = a.out_features - column < kBlockOutputs ? a.out_features - column : kBlockOutputs;
    for (int64_t row = 0; row < a.num_rows;) {
      const T* x = static_cast<const T*>(a.x) + row * a.x_stride;
      const int rows = multiply_rows<T, kGroupRows>(x, a.x_stride, a.num_rows - row, weights, a.in_features, sums);
      epilogue(row, rows, column, columns, sums);
      row += rows;
    }
  }
}

}  // namespace modelworker
