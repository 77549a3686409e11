"""Reaches 98 % in 10 epochs: a PyTorch worker beside Rust workers, in one run.

    skep hive mnist &              the run `mnist`, with the data
    skep worker &                  a worker in Rust
    python lenet_mixed.py          a worker in PyTorch: the same model, the same names

The samples come from the hive, so this script needs nothing but its address.
"""

import argparse
import sys

import torch
from torch import nn
from torch.nn.functional import cross_entropy, max_pool2d, relu

import skep


class LeNet5(nn.Module):
    """Names and shapes as in crates/learn/src/models/lenet5.rs."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 6, 5, padding=2)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.fc1 = nn.Linear(400, 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, 10)

    def forward(self, images):
        x = max_pool2d(relu(self.conv1(images)), 2)
        x = max_pool2d(relu(self.conv2(x)), 2)
        x = relu(self.fc1(x.flatten(1)))
        return self.fc3(relu(self.fc2(x)))


def prepare(batch):
    """The hive's columns, which are bytes, with the numbers that the Rust worker uses."""
    images = (batch["image"].float() / 255 - 0.1307) / 0.3081
    return images.unsqueeze(1), batch["label"].long()


def evaluate(model, batch):
    return skep.evaluate_classifier(model, prepare(batch))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hive", default="http://127.0.0.1:29500", help="the hive's address")
    parser.add_argument("--run", default="mnist", help="a run that `skep` has created")
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = LeNet5()
    run = skep.join(options.hive, options.run, model)
    for batch in run.batches(evaluate=evaluate):
        images, labels = prepare(batch)
        loss = cross_entropy(model(images), labels)
        loss.backward()
        run.step(model, loss)
    view = run.wait()
    print(f"test accuracy {100 * view['test']['accuracy']:.2f} %")
    for worker in view["workers"]:
        print(f"{worker['samples']:8,} samples by {worker['name']} ({worker['engine']})")


if __name__ == "__main__":
    try:
        main()
    except skep.SkepError as error:
        sys.exit(f"error: {error}")
