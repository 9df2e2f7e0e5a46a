// All torch ops of this library in one translation unit, because torch's headers take longer to compile than everything else.
//
// They are registered through torch's stable ABI, whose headers take 2 s where torch/extension.h takes 30 s. The namespace carries
// the ISA level, so that libraries of several levels can be loaded into one process.
#include <torch/csrc/stable/library.h>

#include "activation_doors.h"
#include "attention_doors.h"
#include "embedding_doors.h"
#include "kv_cache_doors.h"
#include "linear_doors.h"
#include "norm_doors.h"
#include "pool_doors.h"

STABLE_TORCH_LIBRARY_FRAGMENT(MODELWORKER_NAMESPACE, library) {
  library.def("linear_pack(Tensor weight, Tensor(a!) packed) -> ()");
  library.def("linear_unpack(Tensor packed, int out_features, int in_features) -> Tensor");
  library.def("packed_embedding(Tensor ids, Tensor packed, int out_features, int in_features) -> Tensor");
  library.def("linear(Tensor x, Tensor packed, Tensor? bias, int out_features) -> Tensor");
  library.def("linear_float32(Tensor x, Tensor packed, int out_features) -> Tensor");
  library.def("linear_argmax(Tensor x, Tensor packed, int out_features) -> (Tensor, Tensor, Tensor)");
  library.def("rms_norm(Tensor x, Tensor weight, float eps) -> Tensor");
  library.def("fused_add_rms_norm(Tensor(a!) x, Tensor(b!) residual, Tensor weight, float eps) -> ()");
  library.def("silu_and_mul(Tensor x) -> Tensor");
  library.def("embedding(Tensor weight, Tensor ids) -> Tensor");
  library.def("rotary_embedding(Tensor(a!) query, Tensor(b!) key, Tensor positions, Tensor cos_sin, bool interleaved) -> ()");
  library.def(
      "store_kv(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor slots) -> Tensor");
  library.def(
      "rotary_store_kv(Tensor(a!) query, Tensor(b!) key, Tensor value, Tensor? query_norm, Tensor? key_norm, float eps, "
      "Tensor positions, Tensor cos_sin, bool interleaved, Tensor(c!) key_cache, Tensor(d!) value_cache, Tensor slots) -> Tensor");
  library.def(
      "paged_attention(Tensor query, Tensor key_cache, Tensor value_cache, Tensor(a!) output, Tensor query_starts, "
      "Tensor seq_lens, Tensor block_tables, Tensor order, float scale, int window, float soft_cap) -> ()");
  library.def("pool_empty(int[] size, int[] stride, ScalarType dtype) -> Tensor");
  library.def("pool_alias(Tensor(a) tensor) -> Tensor(a)");
}

STABLE_TORCH_LIBRARY_IMPL(MODELWORKER_NAMESPACE, CPU, library) {
  library.impl("linear_pack", TORCH_BOX(&modelworker::linear_pack_door));
  library.impl("linear_unpack", TORCH_BOX(&modelworker::linear_unpack_door));
  library.impl("packed_embedding", TORCH_BOX(&modelworker::packed_embedding_door));
  library.impl("linear", TORCH_BOX(&modelworker::linear_door));
  library.impl("linear_float32", TORCH_BOX(&modelworker::linear_float32_door));
  library.impl("linear_argmax", TORCH_BOX(&modelworker::linear_argmax_door));
  library.impl("rms_norm", TORCH_BOX(&modelworker::rms_norm_door));
  library.impl("fused_add_rms_norm", TORCH_BOX(&modelworker::fused_add_rms_norm_door));
  library.impl("silu_and_mul", TORCH_BOX(&modelworker::silu_and_mul_door));
  library.impl("embedding", TORCH_BOX(&modelworker::embedding_door));
  library.impl("rotary_embedding", TORCH_BOX(&modelworker::rotary_embedding_door));
  library.impl("store_kv", TORCH_BOX(&modelworker::store_kv_door));
  library.impl("rotary_store_kv", TORCH_BOX(&modelworker::rotary_store_kv_door));
  library.impl("paged_attention", TORCH_BOX(&modelworker::paged_attention_door));
  library.impl("pool_alias", TORCH_BOX(&modelworker::pool_alias_door));
}

// It takes no tensor that would say where it runs.
STABLE_TORCH_LIBRARY_IMPL(MODELWORKER_NAMESPACE, CompositeExplicitAutograd, library) {
  library.impl("pool_empty", TORCH_BOX(&modelworker::pool_empty_door));
}
