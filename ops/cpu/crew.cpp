#include "crew.h"

#include <omp.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <mutex>
#include <system_error>
#include <thread>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace modelworker {
namespace {

inline void pause() {
#if defined(__x86_64__)
  _mm_pause();
#endif
}

// One job at a time: tasks of as many shares each. A ticket stands for a share: ticket t is share t % num_shares of task t / num_shares.
class Crew {
 public:
  // Runs a job on the calling thread and its helpers, or returns false at once if another thread's job is running.
  bool run(const Task* tasks, size_t count, int num_shares) {
    const std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
    if (!lock.owns_lock()) return false;
    while (num_helpers_ < num_shares - 1 && start_helper(num_helpers_)) ++num_helpers_;
    const uint32_t job = ++num_jobs_;
    const uint64_t first = static_cast<uint64_t>(job) << 32;
    // A helper that is still looking at the job before must not take a share while this one is being written down.
    next_.store(first | kNoTicket, std::memory_order_release);
    tasks_.store(tasks, std::memory_order_release);
    num_shares_.store(num_shares, std::memory_order_release);
    num_tickets_.store(static_cast<uint32_t>(count * static_cast<size_t>(num_shares)), std::memory_order_release);
    num_done_.store(0, std::memory_order_release);
    next_.store(first, std::memory_order_release);
    called_.store(job);
    called_.notify_all();
    work();
    // Shares that helpers have taken.
    const uint32_t total = num_tickets_.load(std::memory_order_relaxed);
    for (int spins = 0; num_done_.load(std::memory_order_acquire) < total; ++spins) wait(spins);
    return true;
  }

 private:
  // Takes and computes shares until the job has none left.
  void work() {
    int spins = 0;
    for (;;) {
      uint64_t next = next_.load(std::memory_order_acquire);
      const auto ticket = static_cast<uint32_t>(next);
      if (ticket >= num_tickets_.load(std::memory_order_acquire)) return;
      const auto num_shares = static_cast<uint32_t>(num_shares_.load(std::memory_order_acquire));
      const Task* tasks = tasks_.load(std::memory_order_acquire);
      const uint32_t task = ticket / num_shares;
      // A share is taken only when it can be computed: a thread that waits holds nothing that others would have to wait for.
      if (num_done_.load(std::memory_order_acquire) < task * num_shares) {
        wait(spins++);
        continue;
      }
      // The job's number is part of what is compared: what was read above belongs to this job, or this fails.
      if (!next_.compare_exchange_weak(next, next + 1, std::memory_order_acq_rel, std::memory_order_relaxed)) continue;
      spins = 0;
      tasks[task].body(tasks[task].arguments, {static_cast<int>(ticket % num_shares), static_cast<int>(num_shares)});
      num_done_.fetch_add(1, std::memory_order_acq_rel);
    }
  }

  void help(int index) {
    uint32_t seen = 0;
    for (;;) {
      called_.wait(seen);
      // Between the ops of a step, and between steps, there are microseconds: waking up takes longer.
      for (int spins = 0; spins < kIdleSpins; ++spins) {
        const uint32_t job = called_.load(std::memory_order_acquire);
        if (job != seen) {
          seen = job;
          spins = 0;
          if (index < num_shares_.load(std::memory_order_relaxed) - 1) work();
        }
        pause();
      }
    }
  }

  // Returns whether there is one more. Where the system gives no more threads, those that there are compute all shares.
  bool start_helper(int index) {
    if (!can_start_) return false;
    // Signals are for the threads that know of them.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    try {
      std::thread helper([this, index] {
        use_all_cores();
        help(index);
      });
#if defined(__linux__)
      pthread_setname_np(helper.native_handle(), "modelworker-cpu");
#endif
      helper.detach();
    } catch (const std::system_error&) {
      can_start_ = false;
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    return can_start_;
  }

  // The thread that starts a helper may be bound to one core (OMP_PROC_BIND): the helper gets those of the process's first thread.
  static void use_all_cores() {
#if defined(__linux__)
    cpu_set_t cores;
    if (sched_getaffinity(getpid(), sizeof cores, &cores) == 0) sched_setaffinity(0, sizeof cores, &cores);
#endif
  }

  static void wait(int spins) {
    if (spins < kBusySpins) {
      pause();
    } else {
      sched_yield();
    }
  }

  static constexpr uint32_t kNoTicket = 0xffffffff;
  static constexpr int kIdleSpins = 4000;
  static constexpr int kBusySpins = 512;

  std::mutex mutex_;
  int num_helpers_ = 0;
  bool can_start_ = true;
  uint32_t num_jobs_ = 0;
  alignas(64) std::atomic<uint64_t> next_{0};  // the job's number, and its next ticket
  std::atomic<const Task*> tasks_{nullptr};
  std::atomic<int> num_shares_{1};
  std::atomic<uint32_t> num_tickets_{0};
  alignas(64) std::atomic<uint32_t> num_done_{0};
  alignas(64) std::atomic<uint32_t> called_{0};  // the number of the last job
};

// It is never destroyed: its threads end with the process.
Crew& crew() {
  static Crew& instance = *new Crew();
  return instance;
}

}  // namespace

void run_tasks(const Task* tasks, size_t count) {
  const int num_shares = omp_get_max_threads();
  if (num_shares > 1 && crew().run(tasks, count, num_shares)) return;
  for (size_t task = 0; task < count; ++task) {
    for (int share = 0; share < num_shares; ++share) tasks[task].body(tasks[task].arguments, {share, num_shares});
  }
}

}  // namespace modelworker
