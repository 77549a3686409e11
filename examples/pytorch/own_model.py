"""Reaches 98 % in 5 epochs on the 10,000 digits that come with Skep: a model of your own.

    python own_model.py                                  a hive and two workers on this machine
    python own_model.py --hive http://127.0.0.1:29500    a worker of a hive that is there

Start the second line as often as you like, on any machine that has the digits: the first one
creates the run, the others join it. Any of them may be killed. The model is in cnn.py.
"""

import argparse
import multiprocessing
import sys

import torch
from torch.nn.functional import cross_entropy

import mnist
import skep
from cnn import CNN


def work(hive, folder, epochs):
    """One worker, from its first batch to the end of the run."""
    torch.set_num_threads(1)
    train, test = mnist.load("train", folder), mnist.load("test", folder)
    torch.manual_seed(0)
    model = CNN()
    run = skep.create(
        hive,
        "own-model",
        model,
        train=train,
        test=test,
        epochs=epochs,
        batch=32,
        policy="sync:2",
        optimiser=torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
        schedule="cosine",
        exist_ok=True,
    )
    for images, labels in run.batches(train, test=test, evaluate=skep.evaluate_classifier):
        loss = cross_entropy(model(images), labels)
        loss.backward()
        run.step(model, loss)
    return run.wait()["test"]


def train(hive, workers, folder, epochs):
    """Works in this process, and in others beside it."""
    task = {"target": work, "args": (hive, folder, epochs), "daemon": True}
    spawn = multiprocessing.get_context("spawn")
    others = [spawn.Process(**task) for _ in range(workers - 1)]
    for other in others:
        other.start()
    test = work(hive, folder, epochs)
    for other in others:
        other.join()
    print(f"test accuracy {100 * test['accuracy']:.2f} % on {test['samples']:,} digits")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hive", help="a hive's address; one is started here if left out")
    parser.add_argument("--workers", type=int, help="worker processes; 2, or 1 with --hive")
    parser.add_argument("--data", help="a folder with the four files of MNIST; see mnist.py")
    parser.add_argument("--epochs", type=int, default=5)
    options = parser.parse_args()
    if options.hive:
        train(options.hive, options.workers or 1, options.data, options.epochs)
    else:
        with skep.Hive() as hive:
            train(hive.url, options.workers or 2, options.data, options.epochs)


if __name__ == "__main__":
    try:
        main()
    except skep.SkepError as error:
        sys.exit(f"error: {error}")
