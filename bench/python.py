#!/usr/bin/env python3
"""Measures the Python client: two workers against DDP and one process, and what a step costs.

    bench/run.sh python
    SKEP_BINARY=target/release/skep PYTHONPATH=python python3 bench/python.py --json

The model is the CNN of examples/pytorch, the data its digits as tensors in memory, 32 samples to a
batch, one torch thread to a process. The single process has the two batches in one, and the better
of one and two threads. Everybody is measured for the same time, in turns, and the best of three
counts: what disturbs a machine only ever makes things slower.
"""

import argparse
import json
import multiprocessing
import os
import pathlib
import socket
import statistics
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "python"), str(ROOT / "examples" / "pytorch")]

import mnist  # noqa: E402
import skep  # noqa: E402
from cnn import CNN  # noqa: E402

BATCH = 32
WORKERS = 2
SETTINGS = {"lr": 0.01, "momentum": 0.9}


# Two workers of a hive


def work(url, name):
    """A worker of a run that is there, until it is stopped."""
    torch.set_num_threads(1)
    data, model = mnist.load("train"), CNN()
    run = skep.join(url, name, model)
    for images, labels in run.batches(data, progress=False):
        loss = cross_entropy(model(images), labels)
        loss.backward()
        run.step(model, loss)


def skep_rate(hive, seconds, policy, every):
    """Samples per second that the hive counts."""
    model, data = CNN(), mnist.load("train")
    run = skep.create(
        hive.url,
        f"rate-{time.time_ns()}",
        model,
        train=data,
        steps=0,
        batch=BATCH,
        every=every,
        policy=policy,
        optimiser=torch.optim.SGD(model.parameters(), **SETTINGS),
    )
    spawn = multiprocessing.get_context("spawn")
    workers = [spawn.Process(target=work, args=(hive.url, run.name)) for _ in range(WORKERS)]
    for worker in workers:
        worker.start()
    # Until everyone is at work, and warm.
    while len(run.view()["workers"]) < WORKERS:
        time.sleep(0.1)
    time.sleep(2)
    before, start = run.view()["samples"], time.perf_counter()
    time.sleep(seconds)
    rate = (run.view()["samples"] - before) / (time.perf_counter() - start)
    run.stop()
    for worker in workers:
        worker.join()
    return rate


# Their peers in PyTorch


def local_rate(seconds, model, batch, agree=lambda steps: steps):
    """Samples per second of a plain loop in this process."""
    images, labels = mnist.load("train").tensors
    optimiser = torch.optim.SGD(model.parameters(), **SETTINGS)
    order = torch.randperm(len(labels))

    def steps(count):
        start = time.perf_counter()
        for step in range(count):
            at = step * batch % (len(labels) - batch)
            rows = order[at : at + batch]
            optimiser.zero_grad()
            cross_entropy(model(images[rows]), labels[rows]).backward()
            optimiser.step()
        return time.perf_counter() - start

    steps(20)
    count = agree(max(1, round(100 * seconds / steps(100))))
    return count * batch / steps(count)


def rank(number, port, seconds, answers):
    """One process of DDP."""
    torch.set_num_threads(1)
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=number, world_size=WORKERS)

    def agree(steps):
        shared = torch.tensor(steps)
        dist.broadcast(shared, 0)
        return int(shared)

    rate = local_rate(seconds, DistributedDataParallel(CNN()), BATCH, agree)
    if number == 0:
        answers.put(rate * WORKERS)
    dist.destroy_process_group()


def ddp_rate(seconds):
    spawn = multiprocessing.get_context("spawn")
    answers = spawn.Queue()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    ranks = [spawn.Process(target=rank, args=(n, port, seconds, answers)) for n in range(WORKERS)]
    for process in ranks:
        process.start()
    rate = answers.get()
    for process in ranks:
        process.join()
    return rate


def one_process(seconds, answers):
    rates = []
    for threads in (1, WORKERS):
        torch.set_num_threads(threads)
        rates.append(local_rate(seconds / 2, CNN(), BATCH * WORKERS))
    answers.put(max(rates))


def one_process_rate(seconds):
    """One process that may use the cores of all workers."""
    spawn = multiprocessing.get_context("spawn")
    answers = spawn.Queue()
    process = spawn.Process(target=one_process, args=(seconds, answers))
    process.start()
    rate = answers.get()
    process.join()
    return rate


# What a step costs besides forward and backward


class LeNet5(nn.Sequential):
    def __init__(self):
        super().__init__(
            *(nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
            *(nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)),
        )


class MLP(nn.Sequential):
    def __init__(self):
        super().__init__(
            *(nn.Flatten(), nn.Linear(784, 2000), nn.ReLU()),
            *(nn.Linear(2000, 1700), nn.ReLU(), nn.Linear(1700, 10)),
        )


def overhead(hive, seconds, make):
    """Milliseconds of a step of one worker besides forward and backward: Skep's, and PyTorch's."""
    torch.set_num_threads(1)
    data, model = mnist.load("train"), make()
    optimiser = torch.optim.SGD(model.parameters(), **SETTINGS)
    run = skep.create(
        hive.url,
        f"cost-{time.time_ns()}",
        model,
        train=data,
        steps=0,
        batch=BATCH,
        policy="sync:1",
        optimiser=optimiser,
    )
    costs, end, last = [], time.perf_counter() + seconds, None
    for images, labels in run.batches(data, progress=False):
        start = time.perf_counter()
        if last is not None:
            costs.append(start - last)
        loss = cross_entropy(model(images), labels)
        loss.backward()
        last = time.perf_counter()
        if last > end:
            break
        run.step(model, loss)
    run.stop()
    images, labels = data.tensors
    theirs = []
    for step in range(100):
        rows = torch.arange(step * BATCH, (step + 1) * BATCH)
        loss = cross_entropy(model(images[rows]), labels[rows])
        loss.backward()
        start = time.perf_counter()
        optimiser.step()
        optimiser.zero_grad()
        theirs.append(time.perf_counter() - start)
    return 1e3 * statistics.median(costs), 1e3 * statistics.median(theirs)


# The table


def measure(seconds, rounds):
    """Rows of (what, Skep, peer, ratio), after everybody had their turns."""
    kinds = [("sync:2", 1), ("async", 1), ("sync:2", 4)]
    rates = {kind: [] for kind in [*kinds, "ddp", "one"]}
    models = {"LeNet-5, 62,000 parameters": LeNet5, "MLP, 5,000,000 parameters": MLP}
    costs = {name: [] for name in models}
    with skep.Hive(program=program()) as hive:
        for number in range(rounds):
            print(f"measuring: python, round {number + 1} of {rounds}", file=sys.stderr)
            for policy, every in kinds:
                rates[policy, every].append(skep_rate(hive, seconds, policy, every))
            rates["ddp"].append(ddp_rate(seconds))
            rates["one"].append(one_process_rate(seconds))
            for name, make in models.items():
                costs[name].append(overhead(hive, seconds, make))
    best = {kind: max(found) for kind, found in rates.items()}
    peers = {"DDP, gloo": best["ddp"], "one process on both cores": best["one"]}
    rows = []
    for policy, every in kinds:
        for peer, rate in peers.items():
            ours = best[policy, every]
            what = f"2 Python workers, batch {BATCH}, every {every}, policy {policy}"
            theirs = f"{peer} {rate:.0f} samples/s"
            rows.append((what, f"{ours:.0f} samples/s", theirs, ours / rate))
    for name in models:
        ours, theirs = min(costs[name])
        peer = f"optimiser.step() {theirs:.2f} ms"
        what = f"a step besides forward and backward: {name}"
        rows.append((what, f"{ours:.2f} ms", peer, ours / theirs))
    return rows


def program():
    """The release build where there is one."""
    target = pathlib.Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
    built = [target / profile / "skep" for profile in ("release", "debug")]
    found = [str(path) for path in built if path.exists()]
    return os.environ.get("SKEP_BINARY") or (found[0] if found else None)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=10, help="for each measurement")
    parser.add_argument("--rounds", type=int, default=3, help="the best one counts")
    parser.add_argument("--json", action="store_true", help="a JSON object per row, no table")
    parser.add_argument("--no-header", action="store_true", help="rows for a table begun above")
    options = parser.parse_args()
    rows = measure(options.seconds, options.rounds)
    if not options.json and not options.no_header:
        print("| what | Skep | peer or limit | ratio | target | |\n|---|---|---|---|---|---|")
    for what, ours, peer, ratio in rows:
        if options.json:
            print(json.dumps({"what": what, "skep": ours, "peer": peer, "ratio": round(ratio, 3)}))
        else:
            print(f"| {what} | {ours} | {peer} | {ratio:.2f} |  |  |")


if __name__ == "__main__":
    main()
