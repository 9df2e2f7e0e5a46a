// Memory that an op uses while it runs and nobody reads afterwards.
#pragma once
#include <cstddef>
#include <memory>

#include "memory_pool.h"

namespace modelworker {

// Memory on a boundary of 64 bytes for as long as this lives: of the pool, if a list is being recorded; else the calling thread's own,
// which stays as large as its largest op needed, and serves one op at a time.
class Workspace {
 public:
  explicit Workspace(size_t num_bytes);
  ~Workspace();
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;

  void* data() const { return data_; }

 private:
  std::shared_ptr<MemoryPool> pool_;  // null: the thread's own memory
  void* data_;
};

}  // namespace modelworker
