"""Which sample stands at which position: the algorithm of docs/wire.md, in numpy.

Every client computes the same order from (seed, epoch, shard), so leases carry ranges and no
lists, and a sample is the same sample whoever works on it.
"""

from __future__ import annotations

import numpy as np

_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15


def _mix(x: int) -> int:
    x ^= x >> 30
    x = x * 0xBF58476D1CE4E5B9 & _MASK
    x ^= x >> 27
    x = x * 0x94D049BB133111EB & _MASK
    return x ^ (x >> 31)


def _mix_all(x: np.ndarray) -> np.ndarray:
    """`_mix` of every element of an array of unsigned 64-bit integers, which wrap around."""
    x = x ^ (x >> np.uint64(30))
    x = x * np.uint64(0xBF58476D1CE4E5B9)
    x = x ^ (x >> np.uint64(27))
    x = x * np.uint64(0x94D049BB133111EB)
    mixed: np.ndarray = x ^ (x >> np.uint64(31))
    return mixed


def key(seed: int, epoch: int, stream: int) -> int:
    """What one permutation is keyed by."""
    first = _mix(int(seed) + _GOLDEN & _MASK)
    second = _mix(first + int(epoch) + _GOLDEN & _MASK)
    return _mix(second + int(stream) + _GOLDEN & _MASK)


def permute(places: np.ndarray, count: int, permutation: int) -> np.ndarray:
    """Where each of the places 0 to `count - 1` goes."""
    bits = 1
    while 4**bits < count:
        bits += 1
    half, low = np.uint64(bits), np.uint64(2**bits - 1)
    rounds = [np.uint64(permutation + k * _GOLDEN & _MASK) for k in range(6)]
    result = np.array(places, dtype=np.uint64)
    # A place that leaves the range is sent on until it comes back: a cycle of the permutation.
    astray = np.ones(result.shape, dtype=bool)
    while astray.any():
        walking = result[astray]
        left, right = walking >> half, walking & low
        for offset in rounds:
            left, right = right, left ^ (_mix_all(right + offset) & low)
        result[astray] = (left << half) | right
        astray = result >= count
    return result.astype(np.int64)


def samples(seed: int, epoch: int, shard: int, count: int, offset: int, length: int) -> np.ndarray:
    """The samples at `length` offsets of a shard of `count` samples, in an epoch's order."""
    places = np.arange(offset, offset + length, dtype=np.uint64)
    return permute(places, count, key(seed, epoch, shard + 1))


def batch_seed(seed: int, epoch: int, position: int) -> int:
    """The seed of a batch's randomness, such as dropout's, by the batch's first position."""
    return _mix(key(seed, epoch, _MASK) + position * _GOLDEN & _MASK)
