"""Memory that the attention kernels are given."""

import ctypes

from modelworker.ops.cpu.library import CpuLibrary


def attention_scratch_bytes(library: CpuLibrary, num_sequences: int, num_heads: int, head_dim: int) -> int:
    """Returns how large the scratch of `paged_attention` must be, for up to so many sequences.

    Only the part that long contexts with few new tokens need is touched.
    """
    function = library.functions.modelworker_attention_scratch_bytes
    function.restype, function.argtypes = ctypes.c_int64, [ctypes.c_int64] * 3
    return int(function(num_sequences, num_heads, head_dim))
