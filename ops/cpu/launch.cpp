#include "launch.h"

#include <omp.h>

#include "barrier.h"
#include "recording.h"

namespace modelworker {

void run(const Launch* launches, int count) {
  if (List* list = recording(); list != nullptr) {
    for (int i = 0; i < count; ++i) list->append(launches[i]);
  }
  Barrier barrier;
#pragma omp parallel
  {
    const Team team{omp_get_thread_num(), omp_get_num_threads()};
    for (int i = 0; i < count; ++i) {
      launches[i].body(launches[i].arguments, team);
      if (i + 1 < count) barrier.wait(team.count);
    }
  }
}

}  // namespace modelworker
