// The memory of recorded lists: what their kernels leave for each other.
//
// While a list is recorded, a tensor's memory goes back to the pool when the tensor dies, and the next one takes it, as with any
// allocator; the kernels keep the addresses and run in the same order later. Lists that never run at the same time share a pool: the
// largest is recorded first, and the others fit into its memory.
#pragma once
#include <cstddef>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <string>

namespace modelworker {

// A std::bad_alloc, which arrives in Python as a MemoryError, with what was asked for.
class OutOfMemory : public std::bad_alloc {
 public:
  explicit OutOfMemory(const std::string& message) : message_(std::make_shared<const std::string>(message)) {}
  const char* what() const noexcept override { return message_->c_str(); }

 private:
  std::shared_ptr<const std::string> message_;  // copied without an allocation, as exceptions may be
};

// One range of addresses, so that neighbours always merge; the system backs it as far as it was ever needed. A request takes the
// smallest free chunk that holds it, which keeps large ones whole for large requests.
//
// Whoever uses its memory shares its ownership, so that it lives until the last of them is gone. Threads may free at any time.
class MemoryPool {
 public:
  static constexpr size_t kAlignment = 64;

  // Throws std::bad_alloc where the system doesn't give the addresses.
  MemoryPool();
  ~MemoryPool();
  MemoryPool(const MemoryPool&) = delete;
  MemoryPool& operator=(const MemoryPool&) = delete;

  // Null for no bytes. Throws OutOfMemory where the system has no more.
  void* allocate(size_t num_bytes);
  void free(void* chunk);
  bool holds(const void* address) const;
  // Taken from the system so far.
  size_t num_bytes() const;

 private:
  char* start() const;
  void grow(size_t wanted);
  void add_free(size_t begin, size_t size);

  mutable std::mutex mutex_;
  char* memory_;  // PROT_NONE but for the first size_ bytes from start() on, a huge page boundary
  size_t reserved_;
  size_t size_ = 0;
  // Where chunks begin, and their sizes.
  std::map<size_t, size_t> free_;
  std::map<size_t, size_t> used_;
};

}  // namespace modelworker
