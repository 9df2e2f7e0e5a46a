#include "recording.h"

#include <chrono>
#include <cstring>
#include <new>

namespace modelworker {
namespace {

thread_local List* recorded_list = nullptr;

int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace

List* recording() { return recorded_list; }

void List::append(const Launch& launch) {
  auto arguments = std::make_unique<unsigned char[]>(launch.num_argument_bytes);
  std::memcpy(arguments.get(), launch.arguments, launch.num_argument_bytes);
  tasks_.push_back({launch.body, arguments.get()});
  arguments_.push_back(std::move(arguments));
}

void List::replay() const { run_tasks(tasks_.data(), tasks_.size()); }

void List::replay_timed(int64_t* times_ns) const {
  *times_ns = now_ns();
  for (const Task& task : tasks_) {
    run_tasks(&task, 1);
    *++times_ns = now_ns();
  }
}

}  // namespace modelworker

// Lists, for Python (ctypes).
extern "C" {
void* modelworker_list_new(const void* pool) {
  try {
    return new modelworker::List(*static_cast<const std::shared_ptr<modelworker::MemoryPool>*>(pool));
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}
void modelworker_list_free(void* list) { delete static_cast<modelworker::List*>(list); }
// Launches of this thread are appended to the list (and still run) until recording ends. False: the thread records another list.
bool modelworker_record_begin(void* list) {
  if (modelworker::recorded_list != nullptr) return false;
  modelworker::recorded_list = static_cast<modelworker::List*>(list);
  return true;
}
void modelworker_record_end() { modelworker::recorded_list = nullptr; }
size_t modelworker_list_size(const void* list) { return static_cast<const modelworker::List*>(list)->size(); }
void modelworker_list_replay(const void* list) { static_cast<const modelworker::List*>(list)->replay(); }
void modelworker_list_replay_timed(const void* list, int64_t* times_ns) {
  static_cast<const modelworker::List*>(list)->replay_timed(times_ns);
}
}
