#pragma once
#include <cstdint>

#include "team.h"

namespace modelworker {

struct SiluAndMulArguments {
  const void* x;  // [num_rows, 2 * size], rows `x_stride` apart
  void* out;      // [num_rows, size]
  int64_t num_rows;
  int64_t size;
  int64_t x_stride;
};

template <typename T>
void silu_and_mul(const void* arguments, Team team);

}  // namespace modelworker
