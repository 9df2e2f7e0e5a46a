// y = x / sqrt(mean(x^2) + eps) * weight, in fp32, rounded once; alone, or of a sum that goes into the residual.
#include "norm.h"

#include "simd.h"

namespace modelworker {
namespace {

template <typename T>
void scale_row(const float* row, const T* weight, T* out, int64_t size, float factor) {
  int64_t i = 0;
  for (; i + Vector::kWidth <= size; i += Vector::kWidth) store(out + i, load(row + i) * broadcast(factor) * load(weight + i));
  for (; i < size; ++i) store_scalar(out + i, row[i] * factor * to_float(weight[i]));
}

// Widens a row into `row`, adding `other` where there is one, and returns the sum of squares.
template <typename T>
float widen_row(const T* x, const T* other, float* row, int64_t size) {
  Vector squares = zero();
  int64_t i = 0;
  for (; i + Vector::kWidth <= size; i += Vector::kWidth) {
    const Vector value = other == nullptr ? load(x + i) : load(x + i) + load(other + i);
    store(row + i, value);
    squares = multiply_add(value, value, squares);
  }
  float total = sum(squares);
  for (; i < size; ++i) {
    row[i] = to_float(x[i]) + (other == nullptr ? 0.0f : to_float(other[i]));
    total += row[i] * row[i];
  }
  return total;
}

template <typename T>
void narrow_row(const float* row, T* out, int64_t size) {
  int64_t i = 0;
  for (; i + Vector::kWidth <= size; i += Vector::kWidth) store(out + i, load(row + i));
  for (; i < size; ++i) store_scalar(out + i, row[i]);
}

}  // namespace

template <typename T>
void rms_norm(const void* arguments, Team team) {
  const auto& a = *static_cast<const RmsNormArguments*>(arguments);
  const Range rows = share_of(team, a.num_rows);
  float row[kMaxHiddenSize];
  for (int64_t i = rows.begin; i < rows.end; ++i) {
    const T* x = static_cast<const T*>(a.x) + i * a.x_stride;
    const float squares = widen_row<T>(x, nullptr, row, a.hidden_size);
    const float factor = 1.0f / std::sqrt(squares / static_cast<float>(a.hidden_size) + a.eps);
    scale_row(row, static_cast<const T*>(a.weight), static_cast<T*>(a.out) + i * a.hidden_size, a.hidden_size, factor);
  }
}

template <typename T>
void add_rms_norm(const void* arguments, Team team) {
  const auto& a = *static_cast<const AddRmsNormArguments*>(arguments);
  const Range rows = share_of(team, a.num_rows);
  float row[kMaxHiddenSize];
  for (int64_t i = rows.begin; i < rows.end; ++i) {
    T* x = static_cast<T*>(a.x) + i * a.x_stride;
    T* residual = static_cast<T*>(a.residual) + i * a.residual_stride;
    const float squares = widen_row<T>(x, residual, row, a.hidden_size);
    narrow_row(row, residual, a.hidden_size);
    const float factor = 1.0f / std::sqrt(squares / static_cast<float>(a.hidden_size) + a.eps);
    scale_row(row, static_cast<const T*>(a.weight), x, a.hidden_size, factor);
  }
}

template void rms_norm<float>(const void*, Team);
template void rms_norm<BFloat16>(const void*, Team);
template void add_rms_norm<float>(const void*, Team);
template void add_rms_norm<BFloat16>(const void*, Team);

}  // namespace modelworker
