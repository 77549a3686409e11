"""Join a Skep hive from Python: train a model of your own on machines that come and go.

    run = skep.join("http://127.0.0.1:29500", "digits", model)
    for images, labels in run.batches(dataset):
        loss = cross_entropy(model(images), labels)
        loss.backward()
        run.step(model, loss)

`create` makes a run from a model and a dataset; `join` joins one that is there. The book's page on
this is docs/python.md.
"""

from .__about__ import VERSION as __version__
from .client import Client
from .create import create, join
from .dataset import Shards
from .errors import (
    KeyRefused,
    Mismatch,
    Misuse,
    NotFinite,
    Refused,
    RunFailed,
    SkepError,
    Terminated,
    Unreachable,
)
from .hive import Hive
from .run import Run, evaluate_classifier

__all__ = [
    "Client",
    "Hive",
    "KeyRefused",
    "Mismatch",
    "Misuse",
    "NotFinite",
    "Refused",
    "Run",
    "RunFailed",
    "Shards",
    "SkepError",
    "Terminated",
    "Unreachable",
    "__version__",
    "create",
    "evaluate_classifier",
    "join",
]
