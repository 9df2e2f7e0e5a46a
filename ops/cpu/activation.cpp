// silu(gate) * up of rows gate | up, in fp32, rounded once.
#include "activation.h"

#include "simd.h"

namespace modelworker {
namespace {

inline Vector silu(Vector gate) { return gate / (broadcast(1.0f) + exponential(zero() - gate)); }

template <typename T>
void silu_and_mul_range(const T* gate, const T* up, T* out, int64_t size) {
  constexpr int64_t width = Vector::kWidth;
  int64_t i = 0;
  for (; i + width <= size; i += width) store(out + i, silu(load(gate + i)) * load(up + i));
  if (i == size) return;
  float rest[2][width] = {};
  for (int64_t j = 0; i + j < size; ++j) {
    rest[0][j] = to_float(gate[i + j]);
    rest[1][j] = to_float(up[i + j]);
  }
  store(rest[0], silu(load(rest[0])) * load(rest[1]));
  for (int64_t j = 0; i + j < size; ++j) store_scalar(out + i + j, rest[0][j]);
}

}  // namespace

template <typename T>
void silu_and_mul(const void* arguments, Team team) {
  const auto& a = *static_cast<const SiluAndMulArguments*>(arguments);
  // Pieces of 64 elements: the one row of a decode step is work for all threads.
  constexpr int64_t grain = 64;
  const int64_t pieces = (a.size + grain - 1) / grain;
  const Range share = share_of(team, a.num_rows * pieces);
  for (int64_t at = share.begin; at < share.end;) {
    const int64_t row = at / pieces;
    const int64_t row_end = (row + 1) * pieces < share.end ? (row + 1) * pieces : share.end;
    const int64_t begin = at % pieces * grain;
    const int64_t end = (row_end - row * pieces) * grain < a.size ? (row_end - row * pieces) * grain : a.size;
    const T* gate = static_cast<const T*>(a.x) + row * a.x_stride;
    silu_and_mul_range(gate + begin, gate + a.size + begin, static_cast<T*>(a.out) + row * a.size + begin, end - begin);
    at = row_end;
  }
}

template void silu_and_mul<float>(const void*, Team);
template void silu_and_mul<BFloat16>(const void*, Team);

}  // namespace modelworker
