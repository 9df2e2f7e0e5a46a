// y = x W^T on packed weights, and the greedy token of a head without its logits.
#include "linear.h"

#include <limits>

#include "linear_tiles.h"
#include "linear_vectors.h"

namespace modelworker {
namespace {

// Adds the bias and rounds once.
template <typename T, typename Out>
struct StoreSums {
  const LinearArguments& a;

  // Fetches the lines that will be written, while tiles are multiplied.
  void prepare(int64_t row, int64_t rows, int64_t column) const {
    for (int64_t r = 0; r < rows; ++r) __builtin_prefetch(static_cast<Out*>(a.out) + (row + r) * a.out_features + column, 1);
  }

  void operator()(int64_t row, int64_t rows, int64_t column, int64_t columns, const float* sums) const {
    const T* bias = a.bias == nullptr ? nullptr : static_cast<const T*>(a.bias) + column;
    for (int64_t r = 0; r < rows; ++r, sums += kBlockOutputs) {
      Out* out = static_cast<Out*>(a.out) + (row + r) * a.out_features + column;
      int64_t i = 0;
      for (; i + Vector::kWidth <= columns; i += Vector::kWidth)
        store(out + i, bias == nullptr ? load(sums + i) : load(sums + i) + load(bias + i));
      for (; i < columns; ++i) store_scalar(out + i, bias == nullptr ? sums[i] : sums[i] + to_float(bias[i]));
    }
  }
};

// Keeps the largest logit of each row, with the lowest id among equals.
struct KeepLargest {
  const ArgmaxArguments& a;
  int64_t part;

  void prepare(int64_t, int64_t, int64_t) const {}

  void operator()(int64_t row, int64_t rows, int64_t column, int64_t columns, const float* sums) const {
    for (int64_t r = 0; r < rows; ++r, sums += kBlockOutputs) {
      Candidate& candidate = a.candidates[(row + r) * a.num_parts + part];
      // A NaN loses against the second operand, and products with 0 tell of it and of infinity.
      Vector bests = broadcast(-std::numeric_limits<float>::infinity());
      Vector products = zero();
      int64_t next = 0;
      for (; next + Vector::kWidth <= columns; next += Vector::kWidth) {
        bests = maximum(load(sums + next), bests);
        products = multiply_add(load(sums + next), zero(), products);
      }
      float best = largest(bests);
      float zeros = sum(products);
      for (; next < columns; ++next) {
        best = sums[next] > best ? sums[next] : best;
        zeros += sums[next] * 0.0f;
      }
      if (zeros != 0.0f) candidate.is_finite = 0;
      if (!(best > candidate.logit)) continue;
      int64_t i = 0;
      while (sums[i] != best) ++i;
      candidate.logit = best;
      candidate.id = static_cast<int32_t>(column + i);
    }
  }
};

template <typename T, typename Epilogue>
void multiply(const LinearArguments& a, Range blocks, const Epilogue& epilogue) {
#if defined(__AMX_BF16__)
  if (a.tiles != nullptr) return multiply_by_tiles(a, blocks, epilogue);
#endif
  multiply_by_vectors<T>(a, blocks, epilogue);
}

}  // namespace

template <typename T, typename Out>
void linear(const void* arguments, Team team) {
  const auto& a = *static_cast<const LinearArguments*>(arguments);
  const Range blocks = share_of(team, num_blocks(a.out_features));
  if (blocks.begin < blocks.end) multiply<T>(a, blocks, StoreSums<T, Out>{a});
}

void tile_rows(const void* arguments, Team team) {
  const auto& a = *static_cast<const TileRowsArguments*>(arguments);
  constexpr int64_t height = 16;
  const int64_t k_tiles = round_up(a.in_features, kTileInputs) / kTileInputs;
  const Range rows = share_of(team, round_up(a.num_rows, height));
  for (int64_t row = rows.begin; row < rows.end; ++row) {
    BFloat16* to = a.tiles + (row / height * k_tiles * height + row % height) * kTileInputs;
    const BFloat16* from = a.x + row * a.x_stride;
    for (int64_t tile = 0; tile < k_tiles; ++tile, to += height * kTileInputs) {
      const int64_t left = row < a.num_rows ? a.in_features - tile * kTileInputs : 0;
      const int64_t count = left < kTileInputs ? left : kTileInputs;
      if (count == kTileInputs) {
        std::memcpy(to, from + tile * kTileInputs, kTileInputs * sizeof(BFloat16));
      } else {
        for (int64_t i = 0; i < kTileInputs; ++i) to[i] = i < count ? from[tile * kTileInputs + i] : BFloat16{};
      }
    }
  }
}

template <typename T>
void find_candidates(const void* arguments, Team team) {
  const auto& a = *static_cast<const ArgmaxArguments*>(arguments);
  const int64_t blocks = num_blocks(a.linear.out_features);
  const Range parts = share_of(team, a.num_parts);
  for (int64_t part = parts.begin; part < parts.end; ++part) {
    const Range range{blocks * part / a.num_parts, blocks * (part + 1) / a.num_parts};
    const auto first = static_cast<int32_t>(range.begin * kBlockOutputs);
    for (int64_t row = 0; row < a.linear.num_rows; ++row)
      a.candidates[row * a.num_parts + part] = {-std::numeric_limits<float>::infinity(), first, 1};
    multiply<T>(a.linear, range, KeepLargest{a, part});
  }
}

void find_best_candidate(const void* arguments, Team team) {
  const auto& a = *static_cast<const BestCandidateArguments*>(arguments);
  const Range rows = share_of(team, a.num_rows);
  for (int64_t row = rows.begin; row < rows.end; ++row) {
    const Candidate* candidates = a.candidates + row * a.num_parts;
    Candidate best = candidates[0];
    for (int64_t part = 1; part < a.num_parts; ++part) {
      best.is_finite &= candidates[part].is_finite;
      if (candidates[part].logit > best.logit) {
        best.logit = candidates[part].logit;
        best.id = candidates[part].id;
      }
    }
    a.ids[row] = best.id;
    a.logits[row] = best.logit;
    a.is_finite[row] = best.is_finite != 0;
  }
}

template void linear<float, float>(const void*, Team);
template void linear<BFloat16, BFloat16>(const void*, Team);
template void linear<BFloat16, float>(const void*, Team);
template void find_candidates<float>(const void*, Team);
template void find_candidates<BFloat16>(const void*, Team);

}  // namespace modelworker
