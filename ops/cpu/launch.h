// How bodies are run: at once in a parallel region of their own, or appended to a list that is replayed in one region.
#pragma once
#include <cstddef>
#include <cstdint>

#include "team.h"

namespace modelworker {

struct Launch {
  Body body;
  const void* arguments;
  size_t num_argument_bytes;
};

// Runs launches in order, with a barrier between them, in one parallel region; while a list is being recorded, also appends them to it.
void run(const Launch* launches, int count);

template <typename Arguments>
void run(Body body, const Arguments& arguments) {
  const Launch launch{body, &arguments, sizeof arguments};
  run(&launch, 1);
}

}  // namespace modelworker
