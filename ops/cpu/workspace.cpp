#include "workspace.h"

#include <algorithm>
#include <memory>
#include <new>

#include "recording.h"

namespace modelworker {
namespace {

constexpr std::align_val_t kPage{4096};
constexpr size_t kLeastBytes = 1 << 16;

struct FreePages {
  void operator()(void* memory) const { ::operator delete(memory, kPage); }
};

// Of a thread: two engines in one process don't share it.
void* workspace(size_t num_bytes) {
  thread_local std::unique_ptr<void, FreePages> memory;
  thread_local size_t size = 0;
  if (num_bytes > size || memory == nullptr) {
    // At least twice as much as before: growing batches take memory a few times, not at every step.
    const size_t wanted = std::max({num_bytes, 2 * size, kLeastBytes});
    memory.reset();
    size = 0;
    memory.reset(::operator new(wanted, kPage));
    size = wanted;
  }
  return memory.get();
}

}  // namespace

Workspace::Workspace(size_t num_bytes) {
  if (const List* list = recording(); list != nullptr) {
    pool_ = list->pool();
    data_ = pool_->allocate(num_bytes);
  } else {
    data_ = workspace(num_bytes);
  }
}

Workspace::~Workspace() {
  if (pool_ != nullptr) pool_->free(data_);
}

}  // namespace modelworker
