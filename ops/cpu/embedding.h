#pragma once
#include <cstdint>

#include "team.h"

namespace modelworker {

struct GatherRowsArguments {
  const void* weight;  // [num_rows, size], rows `weight_stride` apart
  const void* ids;     // [num_ids], int64 or int32
  void* out;           // [num_ids, size]
  int64_t num_ids;
  int64_t num_rows;
  int64_t size;
  int64_t weight_stride;
  bool has_long_ids;
};

// Rows of a matrix. A row of an id that isn't 0 .. num_rows - 1 is NaN.
template <typename T>
void gather_rows(const void* arguments, Team team);

}  // namespace modelworker
