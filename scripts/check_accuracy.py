#!/usr/bin/env python3
"""Measures a trained model with plain PyTorch, knowing nothing of Skep but its files.

    python3 scripts/check_accuracy.py STORE RUN [--expect ACCURACY] [--split test]

Loads STORE/runs/RUN/model.safetensors into the torch module of its kind, runs it over all samples of the split
(the shards that the run's manifest names) and prints the accuracy. With --expect it exits with 1
unless the two agree to 0.0005. Needs torch and numpy alone: safetensors files are simple enough to
be read in ten lines.
"""

import argparse
import json
import pathlib
import struct
import sys

import numpy
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import rnn


def load_file(path):
    """The tensors of a safetensors file."""
    data = pathlib.Path(path).read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    dtypes = {"F32": "<f4", "I64": "<i8", "U8": "u1", "U16": "<u2"}
    tensors = {}
    for name, info in header.items():
        if name == "__metadata__":
            continue
        start, end = (8 + length + offset for offset in info["data_offsets"])
        flat = numpy.frombuffer(data[start:end], dtype=dtypes[info["dtype"]])
        if info["dtype"] == "U16":  # older versions of torch have no such type
            flat = flat.astype("<i8")
        tensors[name] = torch.from_numpy(flat.reshape(info["shape"]).copy())
    return tensors


class LeNet5(nn.Module):
    def __init__(self, _tensors):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 6, 5, padding=2)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.fc1 = nn.Linear(400, 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, 10)

    def forward(self, table):
        x = ((table["image"].float() / 255 - 0.1307) / 0.3081).unsqueeze(1)
        x = functional.max_pool2d(functional.relu(self.conv1(x)), 2)
        x = functional.max_pool2d(functional.relu(self.conv2(x)), 2)
        x = functional.relu(self.fc1(x.flatten(1)))
        x = functional.relu(self.fc2(x))
        return self.fc3(x)


class TextAverage(nn.Module):
    def __init__(self, tensors):
        super().__init__()
        words, dimension = tensors["embedding.weight"].shape
        self.embedding = nn.Embedding(words, dimension)
        self.fc = nn.Linear(dimension, 2)

    def forward(self, table):
        tokens = table["tokens"]
        mask = (tokens != 0).unsqueeze(2)
        return self.fc((self.embedding(tokens) * mask).sum(1) / mask.sum(1))


class TextBigru(nn.Module):
    def __init__(self, tensors):
        super().__init__()
        words, dimension = tensors["embedding.weight"].shape
        hidden = tensors["gru1.weight_hh_l0"].shape[1]
        self.embedding = nn.Embedding(words, dimension)
        self.gru1 = nn.GRU(dimension, hidden, batch_first=True, bidirectional=True)
        self.gru2 = nn.GRU(2 * hidden, hidden, batch_first=True, bidirectional=True)
        self.fc = nn.Linear(2 * hidden, 2)

    def forward(self, table):
        lengths = (table["tokens"] != 0).sum(1)
        words = self.embedding(table["tokens"])
        packed = rnn.pack_padded_sequence(words, lengths, batch_first=True, enforce_sorted=False)
        states, _ = self.gru2(self.gru1(packed)[0])
        states, _ = rnn.pad_packed_sequence(states, batch_first=True)
        return self.fc(states.sum(1) / lengths.unsqueeze(1))


MODELS = {"lenet5": LeNet5, "text-average": TextAverage, "text-bigru": TextBigru}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("store", type=pathlib.Path)
    parser.add_argument("run")
    parser.add_argument("--expect", type=float)
    parser.add_argument("--split", default="test")
    options = parser.parse_args()
    folder = options.store / "runs" / options.run
    spec = json.loads((folder / "run.json").read_text())["spec"]
    tensors = load_file(folder / "model.safetensors")
    model = MODELS[spec["job"]["model"]["kind"]](tensors)
    model.load_state_dict(tensors)
    model.eval()
    correct = total = 0
    with torch.no_grad():
        for shard in spec["manifest"][options.split]:
            table = load_file(options.store / "shards" / f"{shard['hash']}.safetensors")
            answers = model(table).argmax(1)
            correct += int((answers == table["label"].long()).sum())
            total += len(answers)
    accuracy = correct / total
    print(f"{accuracy:.4f} ({correct} of {total})")
    if options.expect is not None and abs(accuracy - options.expect) > 0.0005:
        sys.exit(f"expected {options.expect:.4f}")


if __name__ == "__main__":
    main()
