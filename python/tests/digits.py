"""Handwritten digits, as the program has them built in, and two models for them."""

import numpy as np
import torch
from safetensors.numpy import load
from torch import nn
from torch.nn import functional

import skep
from skep import position


class LeNet5(nn.Module):
    """The program's own `lenet5`, name by name."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 6, 5, padding=2)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.fc1 = nn.Linear(400, 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, 10)

    def forward(self, x):
        x = functional.max_pool2d(functional.relu(self.conv1(x)), 2)
        x = functional.max_pool2d(functional.relu(self.conv2(x)), 2)
        x = functional.relu(self.fc1(x.flatten(1)))
        return self.fc3(functional.relu(self.fc2(x)))


class NormNet(nn.Module):
    """Convolutions with BatchNorm: running means, variances and counters."""

    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 8, 3, stride=2, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Conv2d(8, 16, 3, stride=2, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
        )
        self.head = nn.Linear(16 * 7 * 7, 10)

    def forward(self, x):
        return self.head(self.features(x).flatten(1))


MODELS = {"lenet5": LeNet5, "norm": NormNet}


def inputs(batch):
    images = batch["image"].float().reshape(-1, 1, 28, 28)
    return (images / 255 - 0.1307) / 0.3081


def loss(model, batch):
    return functional.cross_entropy(model(inputs(batch)), batch["label"].long())


def evaluate(model, batch):
    return skep.evaluate_classifier(model, (inputs(batch), batch["label"]))


def fetch(url, run):
    """All samples of a run whose data the hive keeps: split by split, column by column."""
    client = skep.Client(url)
    manifest = client.request("GET", f"/v1/runs/{run}").json()["manifest"]
    splits = {"shards": [shard["samples"] for shard in manifest["train"]]}
    for split in ("train", "test"):
        tables = [
            load(client.request("GET", f"/v1/runs/{run}/shards/{shard['hash']}").data)
            for shard in manifest[split]
        ]
        splits[split] = {name: np.concatenate([t[name] for t in tables]) for name in tables[0]}
    return splits


def accuracy(model, table):
    """In plain PyTorch."""
    model.eval()
    with torch.no_grad():
        batch = {name: torch.from_numpy(column) for name, column in table.items()}
        answers = model(inputs(batch)).argmax(dim=1)
    return float((answers == batch["label"]).float().mean())


def train_alone(model, table, shards, epochs, batch, optimiser, schedule=None):
    """The usual loop of one process, over the samples in the order of a run with seed 0."""
    starts = np.cumsum([0, *shards])
    model.train()
    for epoch in range(epochs):
        places = position.permute(np.arange(len(shards)), len(shards), position.key(0, epoch, 0))
        order = np.concatenate(
            [starts[s] + position.samples(0, epoch, s, shards[s], 0, shards[s]) for s in places]
        )
        for start in range(0, len(order), batch):
            rows = order[start : start + batch]
            part = {name: torch.from_numpy(column[rows]) for name, column in table.items()}
            optimiser.zero_grad()
            loss(model, part).backward()
            optimiser.step()
            if schedule is not None:
                schedule.step()
