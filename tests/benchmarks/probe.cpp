// What this machine can do at most: bytes read a second, and bf16 or fp32 operations a second.
#include <omp.h>

#include <cstdint>
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace {

// Reads a range once, in order. Returns something of every byte, so that no read is left out.
uint64_t read_range(const char* from, int64_t num_bytes) {
#if defined(__AVX512F__)
  __m512i a = _mm512_setzero_si512(), b = a, c = a, d = a;
  for (int64_t i = 0; i < num_bytes; i += 256) {
    const char* p = from + i;
    for (int line = 0; line < 4; ++line) _mm_prefetch(p + 4096 + 64 * line, _MM_HINT_T0);
    a = _mm512_xor_si512(a, _mm512_loadu_si512(p));
    b = _mm512_xor_si512(b, _mm512_loadu_si512(p + 64));
    c = _mm512_xor_si512(c, _mm512_loadu_si512(p + 128));
    d = _mm512_xor_si512(d, _mm512_loadu_si512(p + 192));
  }
  return static_cast<uint64_t>(_mm512_reduce_or_epi64(_mm512_xor_si512(_mm512_xor_si512(a, b), _mm512_xor_si512(c, d))));
#else
  uint64_t lanes[32] = {};
  const auto* words = reinterpret_cast<const uint64_t*>(from);
  for (int64_t i = 0; i < num_bytes / 8; i += 32) {
    for (int64_t lane = 0; lane < 32; ++lane) lanes[lane] ^= words[i + lane];
  }
  uint64_t all = 0;
  for (const uint64_t lane : lanes) all |= lane;
  return all;
#endif
}

}  // namespace

// Reads a buffer with all threads; its size is a multiple of 256 bytes. Returns the seconds that it took.
extern "C" double probe_read_seconds(const char* buffer, int64_t num_bytes, uint64_t* sink) {
  double begun = 0;
  double ended = 0;
  uint64_t all = 0;
#pragma omp parallel reduction(^ : all)
  {
#pragma omp barrier
#pragma omp master
    begun = omp_get_wtime();
    const int64_t lines = num_bytes / 256;
    const int64_t first = lines * omp_get_thread_num() / omp_get_num_threads();
    const int64_t last = lines * (omp_get_thread_num() + 1) / omp_get_num_threads();
    all ^= read_range(buffer + first * 256, (last - first) * 256);
#pragma omp barrier
#pragma omp master
    ended = omp_get_wtime();
  }
  *sink = all;
  return ended - begun;
}
