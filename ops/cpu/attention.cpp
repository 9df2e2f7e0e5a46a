// softmax(q k^T * scale) v over the paged cache, in fp32: scores, a running softmax and weighted sums, step by step.
#include "attention.h"

#include <cmath>
#include <cstring>
#include <utility>

#include "attention_few_rows.h"
#include "attention_rows.h"
#include "attention_tiles.h"
#include "attention_vectors.h"

namespace modelworker {
namespace {

// The engines for a dtype at this ISA level.
template <typename T>
struct Engines {
  using FewRows = VectorEngine<T>;
  using ManyRows = VectorEngine<T>;
  static constexpr int64_t kMaxFewRows = 0;
};
#if defined(__AMX_BF16__)
template <>
struct Engines<BFloat16> {
  using FewRows = FewRowsEngine;
  using ManyRows = TileEngine;
  static constexpr int64_t kMaxFewRows = modelworker::kMaxFewRows;
};
#endif

// out = sums * factor.
template <typename T>
void write_row(const float* sums, float factor, T* out, int64_t size) {
  int64_t d = 0;
  for (; d + Vector::kWidth <= size; d += Vector::kWidth) store(out + d, load(sums + d) * broadcast(factor));
  for (; d < size; ++d) store_scalar(out + d, sums[d] * factor);
}

template <typename T>
T* output_row(const AttentionArguments& a, int64_t row, int64_t head) {
  return static_cast<T*>(a.output) + row * a.output_token_stride + head * a.output_head_stride;
}

template <typename T, typename Engine>
void finish_rows(const AttentionArguments& a, const Item& item, Engine& engine, const TileRows& rows) {
  const int64_t group = a.num_heads / a.num_kv_heads;
  for (int64_t row = 0; row < item.num_tokens * group; ++row) {
    const int64_t head = item.kv_head * group + row % group;
    const float* sums = engine.sums(row);
    if (item.part < 0) {
      write_row(sums, 1.0f / rows.total[row], output_row<T>(a, item.row + row / group, head), a.head_dim);
    } else {
      float* part = a.parts + ((item.part + row / group) * a.num_heads + head) * part_stride(a.head_dim);
      std::memcpy(part, sums, sizeof(float) * a.head_dim);
      part[a.head_dim] = rows.highest[row];
      part[a.head_dim + 1] = rows.total[row];
    }
  }
}

// `cached` holds the first step of the item, and the first step of the next one afterwards.
template <typename T, typename Engine>
void attend_item(const AttentionArguments& a, const Item& item, const Item* next, Cached<T>*& cached, Cached<T>*& following) {
  Engine engine(a, item);
  TileRows rows;
  start_rows(a, item, engine.num_padded_rows(), rows);
  for (int64_t end = item.begin; end < item.end;) {
    end += cached->count;
    if (end < item.end) {
      locate(a, item, end, *following);
    } else if (next != nullptr) {
      locate(a, *next, next->begin, *following);
    } else {
      following->count = 0;
    }
    Ahead<T> ahead(*following, a.head_dim);
    engine.multiply_keys(*cached, ahead);
    engine.weigh_scores(a, item, *cached, rows, ahead);
    engine.add_values(*cached, rows, ahead);
    ahead.fetch(kStepTokens);
    std::swap(cached, following);
  }
  finish_rows<T>(a, item, engine, rows);
}

// Merges the parts of a token's head: each is weighted by the distance of its highest score from the highest of all.
template <typename T>
void merge_row(const AttentionArguments& a, const float* first, int64_t stride, int64_t count, T* out) {
  float highest = kLowest;
  for (int64_t part = 0; part < count; ++part) highest = std::max(highest, first[part * stride + a.head_dim]);
  float sums[kMaxHeadDim] = {};
  float total = 0.0f;
  for (int64_t part = 0; part < count; ++part) {
    const float* sum = first + part * stride;
    const float factor = std::exp2(sum[a.head_dim] - highest);
    total += factor * sum[a.head_dim + 1];
    int64_t d = 0;
    for (; d + Vector::kWidth <= a.head_dim; d += Vector::kWidth) store(sums + d, multiply_add(load(sum + d), broadcast(factor), load(sums + d)));
    for (; d < a.head_dim; ++d) sums[d] += sum[d] * factor;
  }
  write_row(sums, 1.0f / total, out, a.head_dim);
}

// Fills heads of rows with 0: what lies between `begin` and `end` of all (row, head) pairs and is none of a sequence.
template <typename T>
void clear_rows(const AttentionArguments& a, Range pairs, int64_t first_row, int64_t end_row) {
  const int64_t begin = std::max(pairs.begin, first_row * a.num_heads);
  const int64_t end = std::min(pairs.end, end_row * a.num_heads);
  for (int64_t pair = begin; pair < end; ++pair)
    std::memset(static_cast<void*>(output_row<T>(a, pair / a.num_heads, pair % a.num_heads)), 0, sizeof(T) * a.head_dim);
}

}  // namespace

template <typename T>
void attend(const void* arguments, Team team) {
  using Chosen = Engines<T>;
  const auto& a = *static_cast<const AttentionArguments*>(arguments);
  [[maybe_unused]] const typename Chosen::ManyRows::Session session{};
  Cached<T> steps[2];
  Cached<T>* cached = &steps[0];
  Cached<T>* following = &steps[1];
  bool is_first = true;
  for_each_item(a, Chosen::ManyRows::alignment(a), team, [&](const Item& item, const Item* next) {
    if (is_first) locate(a, item, item.begin, *cached);
    is_first = false;
    if (item.num_tokens * (a.num_heads / a.num_kv_heads) <= Chosen::kMaxFewRows) {
      attend_item<T, typename Chosen::FewRows>(a, item, next, cached, following);
    } else {
      attend_item<T, typename Chosen::ManyRows>(a, item, next, cached, following);
    }
  });
}

template <typename T>
void merge_parts(const void* arguments, Team team) {
  const auto& a = *static_cast<const AttentionArguments*>(arguments);
  const int64_t alignment = Engines<T>::ManyRows::alignment(a);
  const Range pairs = share_of(team, a.num_tokens * a.num_heads);
  for (int64_t i = 0; i < a.num_sequences; ++i) {
    const Tiles tiles{a, sequence_at(a, i), i, alignment};
    const Sequence& s = tiles.sequence;
    clear_rows<T>(a, pairs, s.start, s.start + std::min(s.first_token(), s.query_len));
    const int64_t begin = std::max(pairs.begin, (s.start + s.first_token()) * a.num_heads);
    const int64_t end = std::min(pairs.end, (s.start + s.query_len) * a.num_heads);
    for (int64_t pair = begin; pair < end; ++pair) {
      const int64_t token = pair / a.num_heads - s.start;
      // The tile that the token was computed in says how its context was divided.
      const Span span = tiles.span_at(s.first_token() + (token - s.first_token()) / tiles.tokens * tiles.tokens);
      const int64_t size = part_tokens(s.query_len, span.end - span.begin);
      if (size >= span.end - span.begin) continue;
      const int64_t head = pair % a.num_heads;
      const float* first = a.parts + ((i * kMaxContextParts + token) * a.num_heads + head) * part_stride(a.head_dim);
      const int64_t stride = s.query_len * a.num_heads * part_stride(a.head_dim);
      merge_row(a, first, stride, (span.end - span.begin + size - 1) / size, output_row<T>(a, pair / a.num_heads, head));
    }
  }
  clear_rows<T>(a, pairs, 0, a.num_sequences > 0 ? a.query_starts[0] : a.num_tokens);
  clear_rows<T>(a, pairs, a.num_sequences > 0 ? a.query_starts[a.num_sequences] : 0, a.num_tokens);
}

template void attend<float>(const void*, Team);
template void attend<BFloat16>(const void*, Team);
template void merge_parts<float>(const void*, Team);
template void merge_parts<BFloat16>(const void*, Team);

}  // namespace modelworker
