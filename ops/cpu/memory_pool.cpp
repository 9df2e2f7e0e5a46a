#include "memory_pool.h"

#include <sys/mman.h>
#include <unistd.h>

#include <iterator>

namespace modelworker {
namespace {

constexpr size_t kHugePage = size_t{2} << 20;

size_t round_up(size_t value, size_t multiple) { return (value + multiple - 1) / multiple * multiple; }

// Addresses cost nothing. More than the machine's memory can't be used; a system that limits addresses may grant less.
char* reserve(size_t& num_bytes) {
  num_bytes = round_up(static_cast<size_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<size_t>(sysconf(_SC_PAGESIZE)), kHugePage);
  for (; num_bytes >= kHugePage; num_bytes = round_up(num_bytes / 2, kHugePage)) {
    void* memory = mmap(nullptr, num_bytes + kHugePage, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory != MAP_FAILED) return static_cast<char*>(memory);
    if (num_bytes == kHugePage) break;
  }
  throw std::bad_alloc();
}

}  // namespace

MemoryPool::MemoryPool() : memory_(reserve(reserved_)) {}

MemoryPool::~MemoryPool() { munmap(memory_, reserved_ + kHugePage); }

void* MemoryPool::allocate(size_t num_bytes) {
  if (num_bytes == 0) return nullptr;
  const size_t wanted = round_up(num_bytes, kAlignment);
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto find_best = [&] {
    auto best = free_.end();
    for (auto chunk = free_.begin(); chunk != free_.end(); ++chunk)
      if (chunk->second >= wanted && (best == free_.end() || chunk->second < best->second)) best = chunk;
    return best;
  };
  auto best = find_best();
  if (best == free_.end()) {
    grow(wanted);
    best = find_best();
  }
  const auto [begin, size] = *best;
  free_.erase(best);
  if (size > wanted) free_[begin + wanted] = size - wanted;
  used_[begin] = wanted;
  return start() + begin;
}

void MemoryPool::free(void* chunk) {
  if (chunk == nullptr) return;
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto used = used_.find(static_cast<size_t>(static_cast<char*>(chunk) - start()));
  add_free(used->first, used->second);
  used_.erase(used);
}

bool MemoryPool::holds(const void* address) const {
  return address >= start() && address < start() + reserved_;
}

size_t MemoryPool::num_bytes() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return size_;
}

char* MemoryPool::start() const {
  return memory_ + (kHugePage - reinterpret_cast<size_t>(memory_) % kHugePage) % kHugePage;
}

// Adds whole huge pages, so that a free chunk of `wanted` bytes lies at the end.
void MemoryPool::grow(size_t wanted) {
  const auto last = free_.empty() ? free_.end() : std::prev(free_.end());
  const size_t at_end = last != free_.end() && last->first + last->second == size_ ? last->second : 0;
  const size_t added = round_up(wanted - at_end, kHugePage);
  if (added > reserved_ - size_ || mprotect(start() + size_, added, PROT_READ | PROT_WRITE) != 0)
    throw OutOfMemory("the system gives a memory pool of " + std::to_string(size_) + " bytes no further " + std::to_string(added));
  madvise(start() + size_, added, MADV_HUGEPAGE);
  size_ += added;
  add_free(size_ - added, added);
}

void MemoryPool::add_free(size_t begin, size_t size) {
  const auto next = free_.lower_bound(begin);
  if (next != free_.end() && begin + size == next->first) {
    size += next->second;
    free_.erase(next);
  }
  const auto after = free_.lower_bound(begin);
  if (after != free_.begin()) {
    const auto before = std::prev(after);
    if (before->first + before->second == begin) {
      before->second += size;
      return;
    }
  }
  free_[begin] = size;
}

}  // namespace modelworker

// The pool, for Python (ctypes): a handle shares its ownership.
extern "C" {
void* modelworker_pool_new() {
  try {
    return new std::shared_ptr<modelworker::MemoryPool>(std::make_shared<modelworker::MemoryPool>());
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}
void modelworker_pool_free(void* pool) { delete static_cast<std::shared_ptr<modelworker::MemoryPool>*>(pool); }
size_t modelworker_pool_num_bytes(const void* pool) {
  return (*static_cast<const std::shared_ptr<modelworker::MemoryPool>*>(pool))->num_bytes();
}
bool modelworker_pool_holds(const void* pool, const void* address) {
  return (*static_cast<const std::shared_ptr<modelworker::MemoryPool>*>(pool))->holds(address);
}
}
