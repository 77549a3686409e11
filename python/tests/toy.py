"""A small model and dataset."""

import numpy as np
import torch
from torch import nn


class Points:
    """A map-style dataset: points, and which of three cones they lie in."""

    def __init__(self, count=1000):
        random = np.random.default_rng(0)
        self.places = random.normal(size=(count, 8)).astype(np.float32)
        self.labels = (self.places @ random.normal(size=(8, 3))).argmax(axis=1)

    def __len__(self):
        return len(self.places)

    def __getitem__(self, at):
        return self.places[at], int(self.labels[at])


def build(dropout=0.0, width=16):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Dropout(dropout), nn.Linear(width, 3))


class WithNorm(nn.Module):
    """BatchNorm in the trunk, and a head."""

    def __init__(self, width=16, dropout=0.0):
        super().__init__()
        torch.manual_seed(2)
        self.trunk = nn.Sequential(
            nn.Linear(8, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(dropout)
        )
        self.head = nn.Linear(width, 3)

    def forward(self, places):
        return self.head(self.trunk(places))
