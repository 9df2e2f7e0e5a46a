// A kernel is an SPMD body: it is called once for every index of a team, with the same arguments, and computes that share of the work.
//
// A body neither starts threads nor waits for others: what comes next begins when all of its shares are done (crew.h). So the same
// body serves two doors: a torch op that runs it alone, and a recorded list of bodies that is run as a whole.
#pragma once
#include <cstdint>

namespace modelworker {

struct Team {
  int index;
  int count;
};

// `arguments` points to the kernel's argument block: plain data that may be copied and outlives the call that recorded it.
using Body = void (*)(const void* arguments, Team team);

struct Range {
  int64_t begin;
  int64_t end;
};

// A thread's share of `count` items, in whole multiples of `grain` but for the last share.
inline Range share_of(Team team, int64_t count, int64_t grain = 1) {
  const int64_t units = (count + grain - 1) / grain;
  const int64_t begin = units * team.index / team.count * grain;
  const int64_t end = units * (team.index + 1) / team.count * grain;
  return {begin < count ? begin : count, end < count ? end : count};
}

}  // namespace modelworker
