// Who computes what: the tiles of queries and the spans of their context, divided among threads by their cost.
#pragma once
#include <algorithm>

#include "attention.h"

namespace modelworker {

struct Sequence {
  int64_t start;      // row of its first new token
  int64_t query_len;  // new tokens
  int64_t length;     // tokens in the cache, the new ones included

  int64_t position(int64_t token) const { return length - query_len + token; }
  // New tokens before this one would stand before the start of the sequence: a length that says so belongs to no real row.
  int64_t first_token() const { return query_len > length ? query_len - length : 0; }
};

inline Sequence sequence_at(const AttentionArguments& a, int64_t index) {
  const int64_t start = a.query_starts[index];
  return {start, a.query_starts[index + 1] - start, a.seq_lens[index]};
}

// Cached tokens that new tokens of a sequence see.
struct Span {
  int64_t begin;
  int64_t end;
};

inline Span span_of(const AttentionArguments& a, const Sequence& s, int64_t first, int64_t count) {
  const int64_t begin = a.window > 0 ? s.position(first) - a.window + 1 : 0;
  return {begin > 0 ? begin : 0, s.position(first + count - 1) + 1};
}

// Tokens of a part of a span. A context of fewer than 256 tokens is not divided: what starting a part costs, and what it writes and reads
// again (num_heads rows in fp32), is more than idle threads lose. Parts are about as long as each other, for threads to share them evenly,
// and begin where a tile of 16 tokens may.
inline int64_t part_tokens(int64_t query_len, int64_t span) {
  const int64_t most = query_len > kMaxContextParts ? 1 : kMaxContextParts / query_len;
  const int64_t parts = std::clamp<int64_t>(span / (span < 1024 ? 128 : 256), 1, most);
  return span < 256 ? std::max<int64_t>(span, 1) : ((span + parts - 1) / parts + 15) / 16 * 16;
}

// A tile of queries and the part of the cache that it attends to, for one KV head.
struct Item {
  int64_t sequence;
  int64_t kv_head;
  int64_t row;         // of the first query token
  int64_t num_tokens;  // query tokens
  int64_t position;    // of the first one
  int64_t begin;       // cached tokens begin .. end - 1
  int64_t end;
  int64_t part;  // of the first query token: its row of `parts`; -1: the result goes to the output
};

// The tiles of a sequence. `alignment`: cached tokens of a tile begin at a multiple of it.
struct Tiles {
  const AttentionArguments& a;
  Sequence sequence;
  int64_t index;
  int64_t alignment;
  int64_t tokens = kMaxTileQueries / (a.num_heads / a.num_kv_heads);

  int64_t count_at(int64_t first) const { return std::min(tokens, sequence.query_len - first); }
  Span span_at(int64_t first) const {
    const Span span = span_of(a, sequence, first, count_at(first));
    return {span.begin / alignment * alignment, span.end};
  }
  // Cost of cached tokens for a tile: reading them, and multiplying them by 16 rows at a time.
  int64_t cost(int64_t first, int64_t num_cached) const {
    return num_cached * (1 + (count_at(first) * (a.num_heads / a.num_kv_heads) + 15) / 16);
  }
  // Of one KV head.
  int64_t total_cost() const {
    int64_t total = 0;
    for (int64_t first = sequence.first_token(); first < sequence.query_len; first += tokens) {
      const Span span = span_at(first);
      total += cost(first, span.end - span.begin);
    }
    return total;
  }
  // Calls visit(item, cost) for one KV head, from the first cached token on.
  template <typename Visit>
  void visit_items(int64_t kv_head, const Visit& visit) const {
    for (int64_t first = sequence.first_token(); first < sequence.query_len; first += tokens) {
      const Span span = span_at(first);
      const int64_t size = part_tokens(sequence.query_len, span.end - span.begin);
      const bool is_split = size < span.end - span.begin;
      int64_t part = index * kMaxContextParts + first;
      for (int64_t begin = span.begin; begin < span.end; begin += size, part += sequence.query_len) {
        const int64_t end = std::min(begin + size, span.end);
        visit(
            Item{index, kv_head, sequence.start + first, count_at(first), sequence.position(first), begin, end, is_split ? part : -1},
            cost(first, end - begin));
      }
    }
  }
};

// Calls visit(item, next item or null) for a thread's share of all items. An item belongs to the thread whose share of the cost holds
// the item's middle.
template <typename Visit>
void for_each_item(const AttentionArguments& a, int64_t alignment, Team team, const Visit& visit) {
  int64_t total = 0;
  for (int64_t i = 0; i < a.num_sequences; ++i) total += a.num_kv_heads * Tiles{a, sequence_at(a, i), i, alignment}.total_cost();
  const int64_t begin = total * team.index / team.count;
  const int64_t end = total * (team.index + 1) / team.count;
  Item held{};
  bool is_held = false;
  int64_t at = 0;
  for (int64_t i = 0; i < a.num_sequences && at < end; ++i) {
    const Tiles tiles{a, sequence_at(a, i), i, alignment};
    const int64_t head_cost = tiles.total_cost();
    for (int64_t kv_head = 0; kv_head < a.num_kv_heads; ++kv_head) {
      if (at + head_cost <= begin || at >= end) {
        at += head_cost;
        continue;
      }
      tiles.visit_items(kv_head, [&](const Item& item, int64_t cost) {
        const int64_t middle = at + cost / 2;
        at += cost;
        if (middle < begin || middle >= end) return;
        if (is_held) visit(held, &item);
        held = item;
        is_held = true;
      });
    }
  }
  if (is_held) visit(held, nullptr);
}

}  // namespace modelworker
