"""Ranges of flat arrays, many at once."""

import numpy as np
import numpy.typing as npt

from modelworker.worker.batch import IndexArray

_Integers = npt.NDArray[np.int32] | npt.NDArray[np.intp]


def starts_of(counts: _Integers) -> IndexArray:
    """[n + 1]: where each owner's entries start in a flat array; the last entry is the number of all."""
    starts = np.zeros(len(counts) + 1, np.intp)
    np.cumsum(counts, out=starts[1:])
    return starts


def ranges(starts: _Integers, lengths: _Integers) -> tuple[IndexArray, IndexArray]:
    """Enumerates the ranges starts[i] .. starts[i] + lengths[i] - 1, one after the other.

    Returns:
        [sum of lengths] each: which range an entry belongs to, and the entry.
    """
    owners = np.repeat(np.arange(len(lengths)), lengths)
    offsets = starts - (np.cumsum(lengths, dtype=np.intp) - lengths)
    return owners, np.arange(len(owners)) + np.repeat(offsets, lengths)
