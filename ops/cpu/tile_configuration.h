// The AMX tiles of a thread.
#pragma once
#if defined(__AMX_BF16__)
#include <immintrin.h>

#include <cstdint>

namespace modelworker {

// GCC 12 takes `_tile_loadconfig` and `_tile_loadd` for instructions that read no memory: without this, what was stored just before
// may be stored after them, or never, and what is stored behind them before.
inline void finish_stores() { asm volatile("" ::: "memory"); }

// The tiles of a thread while this lives: all have 16 rows of 64 bytes.
class TileConfiguration {
 public:
  TileConfiguration() {
    struct alignas(64) {
      uint8_t palette = 1;
      uint8_t start_row = 0;
      uint8_t reserved[14] = {};
      uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } configuration;
    finish_stores();
    _tile_loadconfig(&configuration);
  }
  ~TileConfiguration() { _tile_release(); }
  TileConfiguration(const TileConfiguration&) = delete;
  TileConfiguration& operator=(const TileConfiguration&) = delete;
};

}  // namespace modelworker
#endif
