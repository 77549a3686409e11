"""The digits of the other examples: MNIST's idx files as a dataset of tensors.

Without a folder these are the 10,000 training and 2,000 test digits that come with Skep. All of
MNIST (60,000 and 10,000) is at https://ossci-datasets.s3.amazonaws.com/mnist/; Fashion-MNIST and
KMNIST have the same four files, and do as well. `torchvision.datasets.MNIST` has them, too.
"""

import gzip
import pathlib
import struct

import numpy
import torch
from torch.utils.data import TensorDataset

SAMPLE = pathlib.Path(__file__).resolve().parents[2] / "crates" / "data" / "assets"


def load(split, folder=None):
    """`train` or `test`: images [count, 1, 28, 28] of mean 0 and deviation 1, and their labels."""
    stem = {"train": "train", "test": "t10k"}[split]
    images = _idx(folder or SAMPLE, f"{stem}-images-idx3-ubyte")
    labels = _idx(folder or SAMPLE, f"{stem}-labels-idx1-ubyte")
    return TensorDataset((images.float().unsqueeze(1) / 255 - 0.1307) / 0.3081, labels.long())


def _idx(folder, name):
    """One idx file, raw or compressed: a magic number, the dimensions, the bytes."""
    path = pathlib.Path(folder) / name
    packed = path.with_name(f"{name}.gz")
    if packed.exists():
        content = gzip.decompress(packed.read_bytes())
    elif path.exists():
        content = path.read_bytes()
    else:
        raise SystemExit(f"error: neither {path} nor {packed} is there")
    dimensions = content[3]
    shape = struct.unpack(f">{dimensions}I", content[4 : 4 + 4 * dimensions])
    values = numpy.frombuffer(content, dtype=numpy.uint8, offset=4 + 4 * dimensions)
    return torch.from_numpy(values.reshape(shape).copy())
