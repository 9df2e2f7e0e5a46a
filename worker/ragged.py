"""Ranges of flat arrays, many at once."""

import numpy as np

from modelworker.worker.arrays import IndexArray, Int32Array, Int64Array

_Integers = Int32Array | Int64Array | IndexArray


def starts_of(counts: _Integers) -> IndexArray:
    """[n + 1]: where each owner's entries start in a flat array; the last entry is the number of all."""
    starts = np.zeros(len(counts) + 1, np.intp)
    np.cumsum(counts, dtype=np.intp, out=starts[1:])
    return starts


def ranges(starts: _Integers, lengths: _Integers) -> tuple[IndexArray, IndexArray]:
    """Enumerates the ranges starts[i] .. starts[i] + lengths[i] - 1, one after the other.

    Returns:
        [sum of lengths] each: which range an entry belongs to, and the entry.
    """
    owners = np.repeat(np.arange(len(lengths)), lengths)
    offsets = starts - (np.cumsum(lengths, dtype=np.intp) - lengths)
    return owners, np.arange(len(owners)) + np.repeat(offsets, lengths)
