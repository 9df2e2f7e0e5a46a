// The threads that run bodies.
//
// A thread takes a share of a body when it is there to compute it, and nobody waits for a thread that holds none: where another process
// has its core, the others compute its shares, too. With OpenMP, whose threads all have to arrive before a region begins and ends, one
// busy neighbour makes every op wait for the scheduler: a step of 300 ops was seen to take 4 s instead of 30 ms.
#pragma once
#include <cstddef>

#include "team.h"

namespace modelworker {

struct Task {
  Body body;
  const void* arguments;
};

// Runs tasks in order: every share of one is computed before any of the next begins. The shares are as many as the calling thread has
// OpenMP threads (torch.set_num_threads), whoever computes them, so that results do not depend on who does.
void run_tasks(const Task* tasks, size_t count);

}  // namespace modelworker
