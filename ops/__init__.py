"""The worker's ops, registered with torch in the namespace `modelworker`.

Importing this package registers all of them; they are called as `torch.ops.modelworker.<name>`.
"""

from modelworker.ops import activation, attention, kv_cache, norm, rotary

__all__ = ["activation", "attention", "kv_cache", "norm", "rotary"]
