#include "kv_cache.h"

#include <cmath>
#include <cstring>

#include "simd.h"

namespace modelworker {
namespace {

template <typename T>
T* head_of(const Heads& heads, int64_t token, int64_t head) {
  return static_cast<T*>(heads.data) + token * heads.token_stride + head * heads.head_stride;
}

// Copies a head to the token's slot, if it has one.
template <typename T>
void store_head(const StoreKvArguments& a, void* cache, int64_t token, int64_t head, const T* from) {
  const int64_t slot = a.slots[token];
  if (slot < 0) return;
  T* to = static_cast<T*>(cache) + slot / a.block_size * a.cache_block_stride + head * a.cache_head_stride +
          slot % a.block_size * a.cache_token_stride;
  std::memcpy(static_cast<void*>(to), from, sizeof(T) * a.head_dim);
}

template <typename T>
void widen(const T* from, float* to, int64_t size) {
  int64_t i = 0;
  for (; i + Vector::kWidth <= size; i += Vector::kWidth) store(to + i, load(from + i));
  for (; i < size; ++i) to[i] = to_float(from[i]);
}

template <typename T>
void narrow(const float* from, T* to, int64_t size) {
  int64_t i = 0;
  for (; i + Vector::kWidth <= size; i += Vector::kWidth) store(to + i, load(from + i));
  for (; i < size; ++i) store_scalar(to + i, from[i]);
}

template <typename T>
void normalise(float* head, const T* weight, int64_t size, float eps) {
  Vector squares = zero();
  int64_t i = 0;
  for (; i + Vector::kWidth <= size; i += Vector::kWidth) squares = multiply_add(load(head + i), load(head + i), squares);
  float total = sum(squares);
  for (; i < size; ++i) total += head[i] * head[i];
  const float factor = 1.0f / std::sqrt(total / static_cast<float>(size) + eps);
  for (i = 0; i + Vector::kWidth <= size; i += Vector::kWidth) store(head + i, load(head + i) * broadcast(factor) * load(weight + i));
  for (; i < size; ++i) head[i] = head[i] * factor * to_float(weight[i]);
}

// Pairs (i, i + pairs): (a, b) becomes (a cos - b sin, b cos + a sin).
void rotate_halves(float* head, const float* cos, const float* sin, int64_t pairs) {
  float* other = head + pairs;
  int64_t i = 0;
  for (; i + Vector::kWidth <= pairs; i += Vector::kWidth) {
    const Vector a = load(head + i), b = load(other + i), c = load(cos + i), s = load(sin + i);
    store(head + i, a * c - b * s);
    store(other + i, multiply_add(b, c, a * s));
  }
  for (; i < pairs; ++i) {
    const float a = head[i], b = other[i];
    head[i] = a * cos[i] - b * sin[i];
    other[i] = b * cos[i] + a * sin[i];
  }
}

// Pairs (2i, 2i + 1).
void rotate_neighbours(float* head, const float* cos, const float* sin, int64_t pairs) {
  for (int64_t i = 0; i < pairs; ++i) {
    const float a = head[2 * i], b = head[2 * i + 1];
    head[2 * i] = a * cos[i] - b * sin[i];
    head[2 * i + 1] = b * cos[i] + a * sin[i];
  }
}

// Normalises where there is a weight, rotates, and rounds once.
template <typename T>
void rotate_head(const RotaryStoreArguments& a, const void* norm, int64_t token, T* head) {
  alignas(64) float wide[kMaxRotatedHeadDim];
  const int64_t size = a.store.head_dim;
  const int64_t touched = norm == nullptr ? a.rotary_dim : size;
  widen(head, wide, touched);
  if (norm != nullptr) normalise(wide, static_cast<const T*>(norm), size, a.eps);
  const int64_t position =
      a.has_long_positions ? static_cast<const int64_t*>(a.positions)[token] : static_cast<const int32_t*>(a.positions)[token];
  const float* cos = a.cos_sin + position * a.cos_sin_stride;
  const int64_t pairs = a.rotary_dim / 2;
  (a.is_interleaved ? rotate_neighbours : rotate_halves)(wide, cos, cos + pairs, pairs);
  narrow(wide, head, touched);
}

}  // namespace

template <typename T>
void store_kv(const void* arguments, Team team) {
  const auto& a = *static_cast<const StoreKvArguments*>(arguments);
  const Range units = share_of(team, a.num_tokens * a.key.num_heads);
  for (int64_t unit = units.begin; unit < units.end; ++unit) {
    const int64_t token = unit / a.key.num_heads, head = unit % a.key.num_heads;
    store_head(a, a.key_cache, token, head, head_of<const T>(a.key, token, head));
    store_head(a, a.value_cache, token, head, head_of<const T>(a.value, token, head));
  }
}

template <typename T>
void rotary_store_kv(const void* arguments, Team team) {
  const auto& a = *static_cast<const RotaryStoreArguments*>(arguments);
  // Of each token: its heads of queries, then those of keys, with their values.
  const int64_t num_heads = a.query.num_heads + a.store.key.num_heads;
  const Range units = share_of(team, a.store.num_tokens * num_heads);
  for (int64_t unit = units.begin; unit < units.end; ++unit) {
    const int64_t token = unit / num_heads;
    int64_t head = unit % num_heads;
    if (head < a.query.num_heads) {
      rotate_head(a, a.query_norm, token, head_of<T>(a.query, token, head));
      continue;
    }
    head -= a.query.num_heads;
    T* key = head_of<T>(a.store.key, token, head);
    rotate_head(a, a.key_norm, token, key);
    if (!a.stores) continue;
    store_head(a.store, a.store.key_cache, token, head, static_cast<const T*>(key));
    store_head(a.store, a.store.value_cache, token, head, head_of<const T>(a.store.value, token, head));
  }
}

template void store_kv<float>(const void*, Team);
template void store_kv<BFloat16>(const void*, Team);
template void rotary_store_kv<float>(const void*, Team);
template void rotary_store_kv<BFloat16>(const void*, Team);

}  // namespace modelworker
