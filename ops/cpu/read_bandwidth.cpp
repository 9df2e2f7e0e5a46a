// How fast this machine reads memory: the limit of kernels that read weights, keys and values once.
#include <chrono>
#include <cstdint>
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#include "crew.h"

namespace {

constexpr int64_t kPieceBytes = 256;

// Reads whole pieces once, in order. Returns something of every byte, so that no read is left out.
uint64_t read_pieces(const char* from, int64_t num_pieces) {
#if defined(__AVX512F__)
  __m512i a = _mm512_setzero_si512(), b = a, c = a, d = a;
  for (const char* p = from; p < from + num_pieces * kPieceBytes; p += kPieceBytes) {
    for (int line = 0; line < 4; ++line) _mm_prefetch(p + 4096 + 64 * line, _MM_HINT_T0);
    a = _mm512_xor_si512(a, _mm512_loadu_si512(p));
    b = _mm512_xor_si512(b, _mm512_loadu_si512(p + 64));
    c = _mm512_xor_si512(c, _mm512_loadu_si512(p + 128));
    d = _mm512_xor_si512(d, _mm512_loadu_si512(p + 192));
  }
  return static_cast<uint64_t>(_mm512_reduce_or_epi64(_mm512_xor_si512(_mm512_xor_si512(a, b), _mm512_xor_si512(c, d))));
#else
  constexpr int64_t lanes = kPieceBytes / sizeof(uint64_t);
  uint64_t sums[lanes] = {};
  const auto* words = reinterpret_cast<const uint64_t*>(from);
  for (int64_t piece = 0; piece < num_pieces; ++piece, words += lanes) {
    for (int64_t lane = 0; lane < lanes; ++lane) sums[lane] ^= words[lane];
  }
  uint64_t all = 0;
  for (const uint64_t sum : sums) all |= sum;
  return all;
#endif
}

struct ReadArguments {
  const char* buffer;
  int64_t num_pieces;
};

void read_share(const void* arguments, modelworker::Team team) {
  const auto& a = *static_cast<const ReadArguments*>(arguments);
  const modelworker::Range pieces = modelworker::share_of(team, a.num_pieces);
  const uint64_t read = read_pieces(a.buffer + pieces.begin * kPieceBytes, pieces.end - pieces.begin);
  asm volatile("" : : "r"(read));
}

}  // namespace

// For Python (ctypes): reads a buffer with all threads, each a range of its own, and returns the seconds that it took. The buffer starts
// on a boundary of 8 bytes; bytes behind its last whole 256 are left out.
extern "C" double modelworker_read_seconds(const char* buffer, int64_t num_bytes) {
  const ReadArguments arguments{buffer, num_bytes / kPieceBytes};
  const modelworker::Task task{read_share, &arguments};
  const auto begun = std::chrono::steady_clock::now();
  modelworker::run_tasks(&task, 1);
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begun).count();
}
