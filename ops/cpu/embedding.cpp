#include "embedding.h"

#include <cstring>
#include <limits>

#include "simd.h"

namespace modelworker {

template <typename T>
void gather_rows(const void* arguments, Team team) {
  const auto& a = *static_cast<const GatherRowsArguments*>(arguments);
  const Range rows = share_of(team, a.num_ids);
  for (int64_t i = rows.begin; i < rows.end; ++i) {
    const int64_t id = a.has_long_ids ? static_cast<const int64_t*>(a.ids)[i] : static_cast<const int32_t*>(a.ids)[i];
    T* to = static_cast<T*>(a.out) + i * a.size;
    if (id >= 0 && id < a.num_rows) {
      std::memcpy(static_cast<void*>(to), static_cast<const T*>(a.weight) + id * a.weight_stride, sizeof(T) * a.size);
    } else {
      for (int64_t j = 0; j < a.size; ++j) store_scalar(to + j, std::numeric_limits<float>::quiet_NaN());
    }
  }
}

template void gather_rows<float>(const void*, Team);
template void gather_rows<BFloat16>(const void*, Team);

}  // namespace modelworker
