"""The other side of step.rs: the same LeNet-5 step in PyTorch, one thread.

Reads a number of steps per line and answers with the minimum and median CPU milliseconds of one.
"""

import statistics
import sys
import time

import torch
from torch import nn
from torch.nn import functional as F


class LeNet5(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 6, 5, padding=2)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.fc1 = nn.Linear(400, 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = F.relu(self.fc1(x.flatten(1)))
        return self.fc3(F.relu(self.fc2(x)))


def main():
    torch.set_num_threads(1)
    batch = int(sys.argv[1]) if len(sys.argv) > 1 else 32
    torch.manual_seed(0)
    model = LeNet5()
    images = torch.randn(batch, 1, 28, 28)
    labels = torch.randint(0, 10, (batch,))
    print(torch.__version__, flush=True)
    for line in sys.stdin:
        times = []
        for _ in range(int(line)):
            start = time.process_time_ns()
            model.zero_grad(set_to_none=True)
            F.cross_entropy(model(images), labels).backward()
            times.append((time.process_time_ns() - start) / 1e6)
        print(min(times), statistics.median(times), flush=True)


if __name__ == "__main__":
    main()
