"""Workers that the tests start as processes of their own, to be stopped and killed.

python -m tests.workers unit URL RUN:SAMPLES [MILLISECONDS]
python -m tests.workers network URL RUN [DROPOUT]
python -m tests.workers digits URL RUN MODEL
"""

import sys
import time

import numpy as np

import skep


def unit(url, run, pause="0"):
    """The gradient of sample i is the i-th unit vector; see crates/skep/examples/unit_task.rs."""
    name, samples = run.split(":")
    x = {"x": np.zeros(int(samples), np.float32)}
    joined = skep.join(url, name, x)
    # Where the hive keeps the data it has a column `index`; else the dataset is the numbers.
    kept = "hash" in joined.view()["manifest"]["train"][0]
    data = None if kept else {"index": np.arange(int(samples))}
    held_out = None if kept else {"index": np.arange(16)}

    def evaluate(_, batch):
        return float(len(batch["index"])), len(batch["index"])

    batches = joined.batches(
        data, validation=held_out, test=held_out, evaluate=evaluate, progress=False
    )
    for batch in batches:
        time.sleep(int(pause) / 1000)
        gradient = np.zeros(int(samples), np.float32)
        np.add.at(gradient, batch["index"], np.float32(1 / len(batch["index"])))
        joined.step({"x": gradient}, 1.0)


def network(url, run, dropout="0"):
    """Two layers on made-up points, with dropout and BatchNorm; by one or several workers."""
    import torch

    from tests.toy import Points, WithNorm

    torch.set_num_threads(1)
    model = WithNorm(dropout=float(dropout))
    joined = skep.join(url, run, model)
    points = Points()
    for places, labels in joined.batches(points, progress=False):
        loss = torch.nn.functional.cross_entropy(model(places), labels)
        loss.backward()
        joined.step(model, loss)


def digits(url, run, model):
    """A model of tests.digits on the digits that the hive keeps."""
    import torch

    from tests import digits

    torch.set_num_threads(1)
    network = digits.MODELS[model]()
    joined = skep.join(url, run, network)
    for batch in joined.batches(evaluate=digits.evaluate, progress=False):
        loss = digits.loss(network, batch)
        loss.backward()
        joined.step(network, loss)


if __name__ == "__main__":
    {"unit": unit, "network": network, "digits": digits}[sys.argv[1]](*sys.argv[2:])
