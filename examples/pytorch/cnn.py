"""The model of the other examples: a small CNN with BatchNorm, 20,698 parameters."""

from torch import nn


class CNN(nn.Module):
    def __init__(self, classes=10):
        super().__init__()
        self.trunk = nn.Sequential(
            *(nn.Conv2d(1, 8, 5), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(8, 16, 5), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Linear(256, 64), nn.BatchNorm1d(64), nn.ReLU()),
        )
        self.head = nn.Linear(64, classes)

    def forward(self, images):
        return self.head(self.trunk(images))
