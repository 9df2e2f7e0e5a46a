// Recorded lists of bodies, and the list that a thread is recording.
#pragma once
#include <cstdint>
#include <memory>
#include <vector>

#include "crew.h"
#include "launch.h"
#include "memory_pool.h"

namespace modelworker {

// Bodies with copies of their argument blocks, which are bound to the memory that they were recorded with.
class List {
 public:
  explicit List(std::shared_ptr<MemoryPool> pool) : pool_(std::move(pool)) {}

  void append(const Launch& launch);
  // Runs the bodies, each when the one before is done.
  void replay() const;
  // Runs them one by one, which costs more than `replay`. `times_ns` [size + 1], of the monotonic clock: the start, and the end of each.
  void replay_timed(int64_t* times_ns) const;
  size_t size() const { return tasks_.size(); }
  const std::shared_ptr<MemoryPool>& pool() const { return pool_; }

 private:
  // What kernels leave for each other, and what an op uses while it runs, lies in the pool.
  std::shared_ptr<MemoryPool> pool_;
  std::vector<Task> tasks_;
  std::vector<std::unique_ptr<unsigned char[]>> arguments_;
};

// The list that this thread is recording, or null.
List* recording();

}  // namespace modelworker
