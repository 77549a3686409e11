"""Reaches 94 % on the digits 5 to 9 with a trunk that has seen 0 to 4 only: a frozen trunk.

    python fine_tune.py --make-init trunk.pth     pretrains on 0 to 4 with plain PyTorch, 10 s
    python fine_tune.py --init trunk.pth          trains a new head on 5 to 9, with Skep

Frozen tensors travel once, to each worker that joins; after that only the head does.
"""

import argparse
import sys

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import mnist
import skep
from cnn import CNN


def digits(split, first, folder):
    """Five digits from `first` on, as the classes 0 to 4."""
    images, labels = mnist.load(split, folder).tensors
    chosen = (labels >= first) & (labels < first + 5)
    return TensorDataset(images[chosen], labels[chosen] - first)


def make_init(path, folder):
    """A trunk that knows the digits 0 to 4."""
    model = CNN(classes=5)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for _ in range(3):
        for images, labels in DataLoader(digits("train", 0, folder), batch_size=64, shuffle=True):
            optimiser.zero_grad()
            cross_entropy(model(images), labels).backward()
            optimiser.step()
    torch.save(model.trunk.state_dict(), path)
    print(f"made {path}")


def fine_tune(hive, path, folder):
    train, test = digits("train", 5, folder), digits("test", 5, folder)
    model = CNN(classes=5)
    model.trunk.load_state_dict(torch.load(path))
    model.trunk.requires_grad_(False)
    model.trunk.eval()  # BatchNorm keeps the statistics it was trained with
    optimiser = torch.optim.SGD(model.head.parameters(), lr=0.05, momentum=0.9)
    run = skep.create(
        hive,
        "fine-tune",
        model,
        train=train,
        test=test,
        epochs=5,
        policy="sync:1",
        optimiser=optimiser,
        exist_ok=True,
    )
    for images, labels in run.batches(train, test=test, evaluate=skep.evaluate_classifier):
        loss = cross_entropy(model(images), labels)
        loss.backward()
        run.step(model, loss)
    whole, head, steps = size(model), size(model.head), run.contributions
    print(f"test accuracy {100 * run.wait()['test']['accuracy']:.2f} %")
    print(f"the model has {whole:,} bytes, its head {head:,}")
    print(f"pushed in each of {steps} steps: {run.bytes_pushed / steps:,.0f} bytes")
    print(f"pulled in each, after {whole:,} once: {(run.bytes_pulled - whole) / steps:,.0f} bytes")


def size(module):
    """The bytes of a module's parameters and buffers."""
    return sum(value.numel() * value.element_size() for value in module.state_dict().values())


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--make-init", metavar="FILE", help="pretrain a trunk and save it")
    what.add_argument("--init", metavar="FILE", help="the trunk to start from")
    parser.add_argument("--hive", help="a hive's address; one is started here if left out")
    parser.add_argument("--data", help="a folder with the four files of MNIST; see mnist.py")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if options.make_init:
        make_init(options.make_init, options.data)
    elif options.hive:
        fine_tune(options.hive, options.init, options.data)
    else:
        with skep.Hive() as hive:
            fine_tune(hive.url, options.init, options.data)


if __name__ == "__main__":
    try:
        main()
    except (skep.SkepError, FileNotFoundError) as error:
        sys.exit(f"error: {error}")
