"""Counter-based random numbers: a draw depends on its seed and position alone, never on the batch or on earlier draws.

Philox 4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011): key = seed, counter = (position, 0).
"""

import numpy as np
import numpy.typing as npt

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_KEY_INCREMENTS = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_NUM_ROUNDS = 10


def philox(seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Returns the four 32-bit words of each (seed, position): [4, n]."""
    key_0, key_1 = seeds & _LOW, seeds >> _HALF
    word_0, word_1 = positions & _LOW, positions >> _HALF
    word_2 = word_3 = np.zeros_like(positions)
    for _ in range(_NUM_ROUNDS):
        product_0, product_1 = _MULTIPLIERS[0] * word_0, _MULTIPLIERS[1] * word_2
        word_0, word_1, word_2, word_3 = (
            (product_1 >> _HALF) ^ word_1 ^ key_0,
            product_1 & _LOW,
            (product_0 >> _HALF) ^ word_3 ^ key_1,
            product_0 & _LOW,
        )
        key_0, key_1 = (key_0 + _KEY_INCREMENTS[0]) & _LOW, (key_1 + _KEY_INCREMENTS[1]) & _LOW
    return np.stack((word_0, word_1, word_2, word_3))


def uniforms(seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.uint64]) -> npt.NDArray[np.float64]:
    """Returns one number in [0, 1) for each (seed, position), with 53 random bits: [n], fp64."""
    words = philox(seeds, positions)
    random_bits: npt.NDArray[np.uint64] = (words[0] << _HALF | words[1]) >> np.uint64(11)
    return random_bits.astype(np.float64) * 2.0**-53
