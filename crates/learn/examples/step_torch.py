"""The other side of step.rs: the same step in PyTorch, as people write it, on one thread.

Takes the model and, for each sample of the batch, its length in words. Reads a number of steps per
line and answers with the minimum and median CPU milliseconds of one.
"""

import statistics
import sys
import time

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import rnn

WORDS, DIMENSION, HIDDEN = 20_000, 16, 16


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


class TextAverage(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, DIMENSION)
        self.fc = nn.Linear(DIMENSION, 2)

    def forward(self, words):
        mask = (words != 0).unsqueeze(2)
        return self.fc((self.embedding(words) * mask).sum(1) / mask.sum(1))


class TextBigru(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, DIMENSION)
        self.gru1 = nn.GRU(DIMENSION, HIDDEN, batch_first=True, bidirectional=True)
        self.gru2 = nn.GRU(2 * HIDDEN, HIDDEN, batch_first=True, bidirectional=True)
        self.fc = nn.Linear(2 * HIDDEN, 2)

    def forward(self, words):
        lengths = (words != 0).sum(1)
        x = self.embedding(words)
        x = rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        x, _ = self.gru2(self.gru1(x)[0])
        x, _ = rnn.pad_packed_sequence(x, batch_first=True)
        return self.fc(x.sum(1) / lengths.unsqueeze(1))


def reviews(lengths):
    """Texts of these lengths, frequent words more often than rare ones."""
    words = torch.zeros(len(lengths), max(lengths), dtype=torch.long)
    for row, length in enumerate(lengths):
        words[row, :length] = (1.0 + float(WORDS - 2) ** torch.rand(length)).long()
    return words


def main():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    lengths = [int(text) for text in sys.argv[2:]]
    if sys.argv[1] == "lenet5":
        model, inputs = LeNet5(), torch.randn(len(lengths), 1, 28, 28)
        labels = torch.randint(0, 10, (len(lengths),))
    else:
        model = {"text-average": TextAverage, "text-bigru": TextBigru}[sys.argv[1]]()
        inputs, labels = reviews(lengths), torch.randint(0, 2, (len(lengths),))
    print(torch.__version__, flush=True)
    for line in sys.stdin:
        times = []
        for _ in range(int(line)):
            start = time.process_time_ns()
            model.zero_grad(set_to_none=True)
            F.cross_entropy(model(inputs), labels).backward()
            times.append((time.process_time_ns() - start) / 1e6)
        print(min(times), statistics.median(times), flush=True)


if __name__ == "__main__":
    main()
