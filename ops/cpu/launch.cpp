#include "launch.h"

#include <array>

#include "crew.h"
#include "recording.h"

namespace modelworker {

void run(const Launch* launches, int count) {
  if (List* list = recording(); list != nullptr) {
    for (int i = 0; i < count; ++i) list->append(launches[i]);
  }
  std::array<Task, kMaxLaunches> tasks;
  for (int i = 0; i < count; ++i) tasks[static_cast<size_t>(i)] = {launches[i].body, launches[i].arguments};
  run_tasks(tasks.data(), static_cast<size_t>(count));
}

}  // namespace modelworker
