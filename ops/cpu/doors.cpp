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

namespace {

// An op: its schema, and the function behind it, which takes what torch's dispatcher has on its stack.
struct Door {
  const char* name;
  const char* schema;
  void (*function)(StableIValue*, uint64_t, uint64_t);
};
#define DOOR(name, signature) {#name, #name signature, TORCH_BOX(&modelworker::name##_door)}

constexpr Door kDoors[] = {
    DOOR(linear_pack, "(Tensor weight, Tensor(a!) packed) -> ()"),
    DOOR(linear_unpack, "(Tensor packed, int out_features, int in_features) -> Tensor"),
    DOOR(packed_embedding, "(Tensor ids, Tensor packed, int out_features, int in_features) -> Tensor"),
    DOOR(linear, "(Tensor x, Tensor packed, Tensor? bias, int out_features) -> Tensor"),
    DOOR(linear_float32, "(Tensor x, Tensor packed, int out_features) -> Tensor"),
    DOOR(linear_argmax, "(Tensor x, Tensor packed, int out_features) -> (Tensor, Tensor, Tensor)"),
    DOOR(rms_norm, "(Tensor x, Tensor weight, float eps) -> Tensor"),
    DOOR(fused_add_rms_norm, "(Tensor(a!) x, Tensor(b!) residual, Tensor weight, float eps) -> ()"),
    DOOR(silu_and_mul, "(Tensor x) -> Tensor"),
    DOOR(embedding, "(Tensor weight, Tensor ids) -> Tensor"),
    DOOR(rotary_embedding, "(Tensor(a!) query, Tensor(b!) key, Tensor positions, Tensor cos_sin, bool interleaved) -> ()"),
    DOOR(store_kv, "(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor slots) -> Tensor"),
    DOOR(rotary_store_kv,
         "(Tensor(a!) query, Tensor(b!) key, Tensor value, Tensor? query_norm, Tensor? key_norm, float eps, "
         "Tensor positions, Tensor cos_sin, bool interleaved, Tensor(c!) key_cache, Tensor(d!) value_cache, "
         "Tensor slots) -> Tensor"),
    DOOR(paged_attention,
         "(Tensor query, Tensor key_cache, Tensor value_cache, Tensor(a!) output, Tensor query_starts, Tensor seq_lens, "
         "Tensor block_tables, Tensor order, float scale, int window, float soft_cap) -> ()"),
    DOOR(pool_alias, "(Tensor(a) tensor) -> Tensor(a)"),
};

// It takes no tensor that would say where it runs.
constexpr Door kPoolEmpty = DOOR(pool_empty, "(int[] size, int[] stride, ScalarType dtype) -> Tensor");

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(MODELWORKER_NAMESPACE, library) {
  for (const Door& door : kDoors) library.def(door.schema);
  library.def(kPoolEmpty.schema);
}

STABLE_TORCH_LIBRARY_IMPL(MODELWORKER_NAMESPACE, CPU, library) {
  for (const Door& door : kDoors) library.impl(door.name, door.function);
}

STABLE_TORCH_LIBRARY_IMPL(MODELWORKER_NAMESPACE, CompositeExplicitAutograd, library) {
  library.impl(kPoolEmpty.name, kPoolEmpty.function);
}
