// Vectors of fp32 over bf16 and fp32 memory, as wide as the ISA that this library is compiled for.
//
// One library is compiled per ISA level, all of it with that level's flags, so nothing here is chosen at run time.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace modelworker {

// bf16 as it lies in memory: the upper half of an fp32.
struct BFloat16 {
  uint16_t bits;
};

inline float to_float(BFloat16 value) {
  const uint32_t bits = static_cast<uint32_t>(value.bits) << 16;
  float result;
  std::memcpy(&result, &bits, sizeof result);
  return result;
}
inline float to_float(float value) { return value; }

// Rounds to the nearest even; a NaN stays one.
inline void store_scalar(BFloat16* to, float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  to->bits = value != value ? static_cast<uint16_t>((bits >> 16) | 0x40)
                            : static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
inline void store_scalar(float* to, float value) { *to = value; }

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512BF16__)

struct Vector {
  static constexpr int kWidth = 16;
  __m512 value;
};
inline Vector zero() { return {_mm512_setzero_ps()}; }
inline Vector broadcast(float value) { return {_mm512_set1_ps(value)}; }
inline Vector load(const float* from) { return {_mm512_loadu_ps(from)}; }
inline Vector load(const BFloat16* from) {
  const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16))};
}
inline void store(float* to, Vector v) { _mm512_storeu_ps(to, v.value); }
inline void store(BFloat16* to, Vector v) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(v.value)));
}
inline Vector operator+(Vector a, Vector b) { return {_mm512_add_ps(a.value, b.value)}; }
inline Vector operator-(Vector a, Vector b) { return {_mm512_sub_ps(a.value, b.value)}; }
inline Vector operator*(Vector a, Vector b) { return {_mm512_mul_ps(a.value, b.value)}; }
inline Vector operator/(Vector a, Vector b) { return {_mm512_div_ps(a.value, b.value)}; }
inline Vector multiply_add(Vector a, Vector b, Vector c) { return {_mm512_fmadd_ps(a.value, b.value, c.value)}; }
inline Vector maximum(Vector a, Vector b) { return {_mm512_max_ps(a.value, b.value)}; }
inline Vector minimum(Vector a, Vector b) { return {_mm512_min_ps(a.value, b.value)}; }
inline float sum(Vector v) { return _mm512_reduce_add_ps(v.value); }
inline float largest(Vector v) { return _mm512_reduce_max_ps(v.value); }
inline Vector round_to_integer(Vector v) { return {_mm512_roundscale_ps(v.value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
// 2^v for whole numbers v in -126 .. 127; infinity for 128.
inline Vector power_of_two(Vector v) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(v.value), _mm512_set1_epi32(127)), 23))};
}

#elif defined(__AVX2__) && defined(__FMA__)

struct Vector {
  static constexpr int kWidth = 8;
  __m256 value;
};
inline Vector zero() { return {_mm256_setzero_ps()}; }
inline Vector broadcast(float value) { return {_mm256_set1_ps(value)}; }
inline Vector load(const float* from) { return {_mm256_loadu_ps(from)}; }
inline Vector load(const BFloat16* from) {
  const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16))};
}
inline void store(float* to, Vector v) { _mm256_storeu_ps(to, v.value); }
inline void store(BFloat16* to, Vector v) {
  const __m256i bits = _mm256_castps_si256(v.value);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
  const __m256i quiet = _mm256_or_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(0x40));
  const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(v.value, v.value, _CMP_UNORD_Q));
  const __m256i halves = _mm256_blendv_epi8(rounded, quiet, is_nan);
  const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(halves, halves), 0x08);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_castsi256_si128(packed));
}
inline Vector operator+(Vector a, Vector b) { return {_mm256_add_ps(a.value, b.value)}; }
inline Vector operator-(Vector a, Vector b) { return {_mm256_sub_ps(a.value, b.value)}; }
inline Vector operator*(Vector a, Vector b) { return {_mm256_mul_ps(a.value, b.value)}; }
inline Vector operator/(Vector a, Vector b) { return {_mm256_div_ps(a.value, b.value)}; }
inline Vector multiply_add(Vector a, Vector b, Vector c) { return {_mm256_fmadd_ps(a.value, b.value, c.value)}; }
inline Vector maximum(Vector a, Vector b) { return {_mm256_max_ps(a.value, b.value)}; }
inline Vector minimum(Vector a, Vector b) { return {_mm256_min_ps(a.value, b.value)}; }
inline float sum(Vector v) {
  __m128 half = _mm_add_ps(_mm256_castps256_ps128(v.value), _mm256_extractf128_ps(v.value, 1));
  half = _mm_add_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
}
inline float largest(Vector v) {
  __m128 half = _mm_max_ps(_mm256_castps256_ps128(v.value), _mm256_extractf128_ps(v.value, 1));
  half = _mm_max_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_max_ss(half, _mm_movehdup_ps(half)));
}
inline Vector round_to_integer(Vector v) { return {_mm256_round_ps(v.value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
inline Vector power_of_two(Vector v) {
  return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(v.value), _mm256_set1_epi32(127)), 23))};
}

#else

struct Vector {
  static constexpr int kWidth = 1;
  float value;
};
inline Vector zero() { return {0.0f}; }
inline Vector broadcast(float value) { return {value}; }
inline Vector load(const float* from) { return {*from}; }
inline Vector load(const BFloat16* from) { return {to_float(*from)}; }
inline void store(float* to, Vector v) { *to = v.value; }
inline void store(BFloat16* to, Vector v) { store_scalar(to, v.value); }
inline Vector operator+(Vector a, Vector b) { return {a.value + b.value}; }
inline Vector operator-(Vector a, Vector b) { return {a.value - b.value}; }
inline Vector operator*(Vector a, Vector b) { return {a.value * b.value}; }
inline Vector operator/(Vector a, Vector b) { return {a.value / b.value}; }
inline Vector multiply_add(Vector a, Vector b, Vector c) { return {a.value * b.value + c.value}; }
inline Vector maximum(Vector a, Vector b) { return {a.value > b.value ? a.value : b.value}; }
inline Vector minimum(Vector a, Vector b) { return {a.value < b.value ? a.value : b.value}; }
inline float sum(Vector v) { return v.value; }
inline float largest(Vector v) { return v.value; }
inline Vector round_to_integer(Vector v) { return {std::nearbyint(v.value)}; }
inline Vector power_of_two(Vector v) { return {std::ldexp(1.0f, static_cast<int>(v.value))}; }

#endif

// e^x within 2 units in the last place: 2^n e^r with n = round(x / ln 2), r reduced in two steps, e^r by a polynomial of degree 6
// (Cephes, expf). Above 88.37, a little before the largest number, the result is infinity; below -87.3 it is the smallest normal number's
// neighbourhood, which a softmax can't tell from 0. NaN stays NaN: the ISA's minimum and maximum keep their second operand.
inline Vector exponential(Vector x) {
  x = maximum(broadcast(-87.3f), minimum(broadcast(89.0f), x));
  const Vector n = round_to_integer(x * broadcast(1.44269504f));
  Vector r = multiply_add(n, broadcast(-0.693359375f), x);
  r = multiply_add(n, broadcast(2.12194440e-4f), r);
  Vector p = broadcast(1.9875691500e-4f);
  p = multiply_add(p, r, broadcast(1.3981999507e-3f));
  p = multiply_add(p, r, broadcast(8.3334519073e-3f));
  p = multiply_add(p, r, broadcast(4.1665795894e-2f));
  p = multiply_add(p, r, broadcast(1.6666665459e-1f));
  p = multiply_add(p, r, broadcast(5.0000001201e-1f));
  p = multiply_add(p, r * r, r + broadcast(1.0f));
  return p * power_of_two(n);
}

}  // namespace modelworker
