#include "launch.h"

#include <omp.h>

#include <atomic>
#include <cstring>
#include <memory>
#include <vector>
#if defined(__x86_64__)
#include <immintrin.h>
#endif
#include <sched.h>

namespace modelworker {
namespace {

// A barrier that spins: between two bodies there are microseconds, and waking a thread takes longer than that. After a while it gives
// its core away, for a container with a smaller quota than it has threads.
class Barrier {
 public:
  explicit Barrier(int count) : count_(count) {}

  void wait() {
    const int round = round_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) == count_ - 1) {
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
  static constexpr int kSpins = 1 << 14;
  const int count_;
  std::atomic<int> arrived_{0};
  std::atomic<int> round_{0};
};

struct Recorded {
  Body body;
  std::unique_ptr<unsigned char[]> arguments;
};

class List {
 public:
  void append(const Launch& launch) {
    auto arguments = std::make_unique<unsigned char[]>(launch.num_argument_bytes);
    std::memcpy(arguments.get(), launch.arguments, launch.num_argument_bytes);
    launches_.push_back({launch.body, std::move(arguments)});
  }

  void replay() const {
    Barrier barrier(omp_get_max_threads());
#pragma omp parallel
    {
      const Team team{omp_get_thread_num(), omp_get_num_threads()};
      for (const Recorded& launch : launches_) {
        launch.body(launch.arguments.get(), team);
        barrier.wait();
      }
    }
  }

  size_t size() const { return launches_.size(); }

 private:
  std::vector<Recorded> launches_;
};

// The list that is being recorded on this thread, or null. Recording and running belong to the one engine thread.
thread_local List* recording = nullptr;

}  // namespace

void run(const Launch* launches, int count) {
  if (recording != nullptr) {
    for (int i = 0; i < count; ++i) recording->append(launches[i]);
  }
  Barrier barrier(omp_get_max_threads());
#pragma omp parallel
  {
    const Team team{omp_get_thread_num(), omp_get_num_threads()};
    for (int i = 0; i < count; ++i) {
      launches[i].body(launches[i].arguments, team);
      if (i + 1 < count) barrier.wait();
    }
  }
}

}  // namespace modelworker

// The list, for Python (ctypes).
extern "C" {
void* modelworker_list_new() { return new modelworker::List(); }
void modelworker_list_free(void* list) { delete static_cast<modelworker::List*>(list); }
// Launches of this thread are appended to the list (and still run) until recording ends.
void modelworker_record_begin(void* list) { modelworker::recording = static_cast<modelworker::List*>(list); }
void modelworker_record_end() { modelworker::recording = nullptr; }
int64_t modelworker_list_size(const void* list) { return static_cast<int64_t>(static_cast<const modelworker::List*>(list)->size()); }
void modelworker_list_replay(const void* list) { static_cast<const modelworker::List*>(list)->replay(); }
}
