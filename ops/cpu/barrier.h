#pragma once
#include <sched.h>

#include <atomic>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace modelworker {

// A barrier that spins: between two bodies there are microseconds, and waking a thread takes longer than that. After a while it gives
// its core away, for a container with a smaller quota than it has threads.
class Barrier {
 public:
  // Returns when `count` threads wait.
  void wait(int count) {
    const int round = round_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) == count - 1) {
      arrived_.store(0, std::memory_order_relaxed);
      round_.store(round + 1, std::memory_order_release);
      return;
    }
    for (int spins = 0; round_.load(std::memory_order_acquire) == round; ++spins) {
      if (spins < kSpins) {
#if defined(__x86_64__)
        _mm_pause();
#endif
      } else {
        sched_yield();
      }
    }
  }

 private:
  static constexpr int kSpins = 1 << 9;
  std::atomic<int> arrived_{0};
  std::atomic<int> round_{0};
};

}  // namespace modelworker
