"""The worker's ops.

Importing this package registers all of them: with torch, in the namespace `modelworker` (`torch.ops.modelworker.<name>`), and under
the names of `custom_ops` the classes that layers run. `catalog` has every op with its contract, and says how one is added.
"""

from modelworker.ops import activation, attention, embedding, kv_cache, linear, norm, rotary, rotary_store_kv, sampling

__all__ = ["activation", "attention", "embedding", "kv_cache", "linear", "norm", "rotary", "rotary_store_kv", "sampling"]
