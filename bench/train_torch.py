"""Trains LeNet-5 in one PyTorch process: samples per second with the better of 1 and 2 threads.

Same model, batch and optimiser as `skep train mnist`; the data is random, in memory and normalised
beforehand, so that nothing but the training is measured.
"""

import time

import torch
from torch import nn
from torch.nn import functional

BATCH = 32
STEPS = 600


class LeNet5(nn.Module):
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
        x = functional.relu(self.fc2(x))
        return self.fc3(x)


def rate(threads):
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    model = LeNet5()
    optimiser = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9, weight_decay=0.0005)
    images = torch.randn(4096, 1, 28, 28)
    labels = torch.randint(0, 10, (4096,))
    for step in range(STEPS + 50):
        if step == 50:
            start = time.perf_counter()
        at = step * BATCH % 4096
        optimiser.zero_grad(set_to_none=True)
        loss = functional.cross_entropy(model(images[at : at + BATCH]), labels[at : at + BATCH])
        loss.backward()
        optimiser.step()
    return STEPS * BATCH / (time.perf_counter() - start)


print(max(rate(1), rate(2)))
