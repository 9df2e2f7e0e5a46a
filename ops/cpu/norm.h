#pragma once
#include <cstdint>

#include "team.h"

namespace modelworker {

// Rows are widened on the stack: the longest that a model has today is 18,432 elements.
constexpr int64_t kMaxHiddenSize = 32768;

struct RmsNormArguments {
  const void* x;       // [num_rows, hidden_size], rows `x_stride` apart
  const void* weight;  // [hidden_size]
  void* out;           // [num_rows, hidden_size]
  int64_t num_rows;
  int64_t hidden_size;
  int64_t x_stride;
  float eps;
};

struct AddRmsNormArguments {
  void* x;             // [num_rows, hidden_size]: becomes the norm of the sum
  void* residual;      // [num_rows, hidden_size]: becomes the sum
  const void* weight;  // [hidden_size]
  int64_t num_rows;
  int64_t hidden_size;
  int64_t x_stride;
  int64_t residual_stride;
  float eps;
};

template <typename T>
void rms_norm(const void* arguments, Team team);
template <typename T>
void add_rms_norm(const void* arguments, Team team);

}  // namespace modelworker
