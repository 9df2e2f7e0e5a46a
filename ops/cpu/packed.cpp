// Packing, unpacking, and reading single rows of packed weights.
#include "packed.h"

#include <limits>

namespace modelworker {
namespace {

// A row's elements lie 128 bytes apart, `kStepInputs` of them together. Calls visit(input, element of the block, count).
template <typename T, typename Visit>
void visit_row(int64_t lane, int64_t in_features, Visit visit) {
  constexpr int64_t width = kStepInputs<T>;
  int64_t k = 0;
  for (; k + width <= in_features; k += width) visit(k, k * kBlockOutputs + lane * width, width);
  if (k < in_features) visit(k, k * kBlockOutputs + lane * width, in_features - k);
}

template <typename T>
void copy_row(const T* block, int64_t lane, T* row, int64_t in_features) {
  visit_row<T>(lane, in_features, [&](int64_t k, int64_t at, int64_t count) {
    for (int64_t i = 0; i < count; ++i) row[k + i] = block[at + i];
  });
}

}  // namespace

template <typename T>
void pack_weight(const void* arguments, Team team) {
  const auto& a = *static_cast<const PackArguments*>(arguments);
  constexpr int64_t width = kStepInputs<T>;
  const int64_t steps = num_steps<T>(a.in_features);
  const Range blocks = share_of(team, num_blocks(a.out_features));
  for (int64_t block = blocks.begin; block < blocks.end; ++block) {
    T* to = static_cast<T*>(a.packed) + block * block_size<T>(a.in_features);
    for (int64_t step = 0; step < steps; ++step) {
      for (int64_t lane = 0; lane < kBlockOutputs; ++lane) {
        const int64_t row = block * kBlockOutputs + lane;
        const T* from = static_cast<const T*>(a.weight) + row * a.weight_stride;
        for (int64_t i = 0; i < width; ++i) {
          const int64_t k = step * width + i;
          *to++ = row < a.out_features && k < a.in_features ? from[k] : T{};
        }
      }
    }
  }
}

template <typename T>
void unpack_weight(const void* arguments, Team team) {
  const auto& a = *static_cast<const UnpackArguments*>(arguments);
  const Range rows = share_of(team, a.out_features);
  for (int64_t row = rows.begin; row < rows.end; ++row) {
    const T* block = static_cast<const T*>(a.packed) + row / kBlockOutputs * block_size<T>(a.in_features);
    copy_row(block, row % kBlockOutputs, static_cast<T*>(a.weight) + row * a.in_features, a.in_features);
  }
}

template <typename T, typename Id>
void embed(const void* arguments, Team team) {
  const auto& a = *static_cast<const EmbeddingArguments*>(arguments);
  const Range tokens = share_of(team, a.num_ids);
  for (int64_t token = tokens.begin; token < tokens.end; ++token) {
    const int64_t id = static_cast<const Id*>(a.ids)[token];
    T* row = static_cast<T*>(a.out) + token * a.in_features;
    if (id < 0 || id >= a.out_features) {
      for (int64_t i = 0; i < a.in_features; ++i) store_scalar(row + i, std::numeric_limits<float>::quiet_NaN());
      continue;
    }
    const T* block = static_cast<const T*>(a.packed) + id / kBlockOutputs * block_size<T>(a.in_features);
    copy_row(block, id % kBlockOutputs, row, a.in_features);
  }
}

template void pack_weight<float>(const void*, Team);
template void pack_weight<BFloat16>(const void*, Team);
template void unpack_weight<float>(const void*, Team);
template void unpack_weight<BFloat16>(const void*, Team);
template void embed<float, int32_t>(const void*, Team);
template void embed<float, int64_t>(const void*, Team);
template void embed<BFloat16, int32_t>(const void*, Team);
template void embed<BFloat16, int64_t>(const void*, Team);

}  // namespace modelworker
