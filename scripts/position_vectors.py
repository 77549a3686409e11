#!/usr/bin/env python3
"""Prints the test vectors of the order of samples.

Written from the description at the top of crates/core/src/position.rs, not from its code: plain
integers, one line per line of the description. The numbers it prints are those of the tests there,
and any client in another language must reproduce them.
"""

U64 = 2**64 - 1
G = 0x9E3779B97F4A7C15


def mix(x):
    x ^= x >> 30
    x = x * 0xBF58476D1CE4E5B9 & U64
    x ^= x >> 27
    x = x * 0x94D049BB133111EB & U64
    return x ^ (x >> 31)


def key(seed, epoch, stream):
    return mix(mix(mix(seed + G & U64) + epoch + G & U64) + stream + G & U64)


def permute(i, n, key):
    b = 1
    while 2 ** (2 * b) < n:
        b += 1
    while True:
        left, right = divmod(i, 2**b)
        for k in range(6):
            left, right = right, left ^ (mix(key + k * G + right & U64) % 2**b)
        i = left * 2**b + right
        if i < n:
            return i


def sample(seed, epoch, shard, samples, offset):
    return permute(offset, samples, key(seed, epoch, shard + 1))


def shards(seed, epoch, count):
    return [permute(place, count, key(seed, epoch, 0)) for place in range(count)]


def main():
    for x in (0, 1, U64):
        print(f"mix({x:#x}) = {mix(x):#018x}")
    for arguments in ((0, 0, 0), (1, 2, 3), (U64, U64, U64)):
        print(f"key{arguments} = {key(*arguments):#018x}")
    for seed, epoch, shard, n, first in (
        (0, 0, 0, 10, 10),
        (7, 3, 1, 10, 10),
        (0, 0, 0, 1, 1),
        (0, 0, 0, 16, 16),
        (42, 1, 5, 17, 17),
        (0, 0, 0, 60_000, 5),
        (2**63, 9, 11, 60_000, 5),
        (1, 1, 1, 2**32 + 1, 5),
    ):
        order = [sample(seed, epoch, shard, n, offset) for offset in range(first)]
        print(f"samples ({seed}, {epoch}, {shard}, {n}): {order}")
        if n <= 60_000:
            assert sorted(sample(seed, epoch, shard, n, o) for o in range(n)) == list(range(n))
    for seed, epoch, count in ((0, 1, 4), (3, 0, 7)):
        print(f"shards ({seed}, {epoch}, {count}): {shards(seed, epoch, count)}")


if __name__ == "__main__":
    main()
