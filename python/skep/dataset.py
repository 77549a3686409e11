"""Where a worker's samples come from, and how the rows of a lease become a batch.

A run's data is either kept by its hive, in shards that any worker can fetch, or known to it by
name and length only: then each worker brings a dataset of its own.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Optional, Protocol

import numpy as np

from .binding import Binding, default_collate
from .client import Client, run_path
from .errors import Mismatch, Misuse, SkepError

Collate = Optional[Callable[[Sequence[Any]], Any]]


class Shards(dict):  # type: ignore[type-arg]
    """Several datasets by name, for data of which each worker can read only some.

    `create(train=Shards(north=a, south=b))` makes a run of two shards; a worker with
    `batches(Shards(north=a))` gets leases on the first one alone.
    """


class Source(Protocol):
    """The samples of one split."""

    #: Names of the shards that can be read; None for all.
    only: list[str] | None

    def rows(self, shard: int, rows: np.ndarray) -> Any: ...


def length(dataset: Any) -> int:
    """How many samples a dataset has."""
    if isinstance(dataset, Mapping):
        lengths = {name: len(column) for name, column in dataset.items()}
        if len(set(lengths.values())) != 1:
            raise Misuse(f"the columns are not equally long: {lengths}")
        return next(iter(lengths.values()))
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        raise Misuse(
            f"a {type(dataset).__name__} has no length or cannot be asked for a sample by number",
            "pass a map-style dataset (with __getitem__ and __len__), a dict of arrays, or nothing "
            "to read what the hive keeps",
        )
    return len(dataset)


class Rows:
    """Batches of any dataset that can be asked for a sample by its number."""

    def __init__(self, dataset: Any, collate: Collate) -> None:
        self.dataset = dataset
        self.collate = collate or default_collate()
        #: Datasets that are tensors or arrays give a batch in one go.
        self.whole = collate is None and (
            isinstance(dataset, Mapping) or type(dataset).__name__ == "TensorDataset"
        )

    def take(self, rows: np.ndarray) -> Any:
        if self.whole:
            if isinstance(self.dataset, Mapping):
                return {name: column[rows] for name, column in self.dataset.items()}
            import torch

            return self.dataset[torch.from_numpy(rows)]
        numbers = rows.tolist()
        if hasattr(self.dataset, "__getitems__"):
            return self.collate(self.dataset.__getitems__(numbers))
        return self.collate([self.dataset[number] for number in numbers])


class Own:
    """Datasets of the worker's own, by the names in the manifest."""

    def __init__(
        self, given: Any, shards: Sequence[Mapping[str, Any]], split: str, collate: Collate
    ) -> None:
        names = [shard.get("name") for shard in shards]
        if isinstance(given, Shards):
            unknown = sorted(set(given) - set(names))
            if unknown:
                raise Mismatch(f"the run has no {split} shard `{unknown[0]}`; it has {names}")
            by_name = dict(given)
        elif len(shards) == 1:
            by_name = {names[0]: given}
        else:
            raise Misuse(
                f"the run's {split} data has {len(shards)} shards: {names}",
                "pass skep.Shards(name=dataset, …) with those you can read",
            )
        self.only: list[str] | None = None if len(by_name) == len(shards) else list(by_name)
        self._rows: dict[int, Rows] = {}
        for at, shard in enumerate(shards):
            name = shard.get("name")
            if name not in by_name:
                continue
            here = length(by_name[name])
            if here != shard["samples"]:
                raise Mismatch(
                    f"the {split} dataset has {here} samples, the run has {shard['samples']}",
                    "every worker needs the same dataset, in the same order",
                )
            self._rows[at] = Rows(by_name[name], collate)

    def rows(self, shard: int, rows: np.ndarray) -> Any:
        return self._rows[shard].take(rows)


class Kept:
    """Shards that the hive keeps, fetched once and held up to a number of bytes."""

    only: list[str] | None = None

    def __init__(
        self,
        client: Client,
        run: str,
        shards: Sequence[Mapping[str, Any]],
        binding: Binding,
        most_bytes: int,
    ) -> None:
        self._client = client
        self._run = run
        self._shards = shards
        self._binding = binding
        self._most_bytes = most_bytes
        self._held: OrderedDict[int, dict[str, np.ndarray]] = OrderedDict()

    def hashes(self) -> list[str]:
        """What is at hand, so that the hive can prefer it."""
        return [str(self._shards[at]["hash"]) for at in self._held]

    def rows(self, shard: int, rows: np.ndarray) -> Any:
        columns = self._columns(shard)
        return self._binding.batch({name: column[rows] for name, column in columns.items()})

    def _columns(self, at: int) -> dict[str, np.ndarray]:
        if at in self._held:
            self._held.move_to_end(at)
            return self._held[at]
        from safetensors.numpy import load

        wanted = self._shards[at]["hash"]
        answer = self._client.request("GET", run_path(self._run, f"/shards/{wanted}"))
        found = hashlib.sha256(answer.data).hexdigest()
        if found != wanted:
            raise SkepError(f"shard {wanted} came damaged: its hash is {found}")
        columns: dict[str, np.ndarray] = load(answer.data)
        self._held[at] = columns
        while len(self._held) > 1 and self._bytes() > self._most_bytes:
            self._held.popitem(last=False)
        return columns

    def _bytes(self) -> int:
        return sum(column.nbytes for table in self._held.values() for column in table.values())


class Joined:
    """A dataset of the worker's own in place of the shards that the hive keeps."""

    only: list[str] | None = None

    def __init__(
        self, given: Any, shards: Sequence[Mapping[str, Any]], split: str, collate: Collate
    ) -> None:
        total = sum(shard["samples"] for shard in shards)
        if length(given) != total:
            raise Mismatch(
                f"the {split} dataset has {length(given)} samples, the hive keeps {total}",
                "leave the dataset out: the samples then come from the hive",
            )
        self._starts = np.cumsum([0, *(shard["samples"] for shard in shards)])
        self._rows = Rows(given, collate)

    def rows(self, shard: int, rows: np.ndarray) -> Any:
        return self._rows.take(rows + self._starts[shard])
