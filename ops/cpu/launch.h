// How bodies are run: at once, or appended to a list that is replayed as a whole.
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

constexpr int kMaxLaunches = 4;

// Runs up to kMaxLaunches launches, each when the one before is done; while a list is being recorded, also appends them to it.
void run(const Launch* launches, int count);

template <typename Arguments>
void run(Body body, const Arguments& arguments) {
  const Launch launch{body, &arguments, sizeof arguments};
  run(&launch, 1);
}

}  // namespace modelworker
