"""Creating and joining runs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from . import __about__
from . import optimiser as optimisers
from .binding import Model, Roles, bind, check_specs
from .client import Client, run_path
from .dataset import Shards, length
from .errors import Misuse, Refused
from .frame import specs_of
from .run import Run


def join(
    url: str,
    run: str,
    model: Model,
    *,
    key: str | None = None,
    pin: str | None = None,
    ca: str | None = None,
    patience: float = 60.0,
) -> Run:
    """Joins a run as a worker. `model` is built as the run's is; its values come from the hive.

    `key` is a worker's key where the hive has keys; `pin` or `ca` say whom to trust where it has
    TLS (docs/security.md). Left out, they come from SKEP_KEY or SKEP_KEY_FILE, SKEP_PIN and
    SKEP_CA.
    `patience` is how many seconds to go on trying when the hive does not answer.
    """
    client = Client(url, key=key, pin=pin, ca=ca, patience=patience)
    try:
        view = client.request("GET", run_path(run)).json()
    except Refused as refused:
        if refused.code != "not_found":
            raise
        raise Misuse(
            f"the hive at {url} has no run `{run}`", "create it first: skep.create(…)"
        ) from refused
    return Run(client, view, model)


def create(
    url: str,
    run: str,
    model: Model,
    *,
    train: Any,
    validation: Any = None,
    test: Any = None,
    epochs: int | None = None,
    steps: int | None = None,
    batch: int | None = None,
    every: int | None = None,
    optimiser: Any = None,
    schedule: Any = None,
    clip_norm: float | None = None,
    policy: Any = None,
    seed: int | None = None,
    encoding: str | None = None,
    job: Mapping[str, Any] | None = None,
    kind: str = "python",
    roles: Roles = None,
    upload: bool = False,
    exist_ok: bool = False,
    key: str | None = None,
    pin: str | None = None,
    ca: str | None = None,
    patience: float = 60.0,
) -> Run:
    """Creates a run from a model and its data, and joins it. Needs an admin key.

    Version 0 is what the model holds now. `train`, `validation` and `test` are map-style datasets,
    dicts of arrays, or `Shards`; the hive learns their lengths only, unless `upload` sends it dicts
    of arrays to keep, so that workers elsewhere need nothing but the hive.

    `optimiser` is a `torch.optim.Optimizer` (SGD, Adam, AdamW, RMSprop) whose settings the hive
    takes over, or the `[optimiser]` table of a job file as a dict; `schedule` is "cosine" or a
    table of that name, `clip_norm` limits the norm of a version's gradient; `policy` is "sync:2" or
    "batch:4". `job` has any other settings, in the tables of a job file (docs/job.md). `kind` names
    the model for Rust workers that have the same one, such as "lenet5". `roles` changes what
    tensors are, by patterns of names: `{"position": "frozen", "head.*": "trainable:head"}`.

    With `exist_ok` a run of this name is joined if it is there: then all workers can be the same
    script.
    """
    client = Client(url, key=key, pin=pin, ca=ca, patience=patience)
    if exist_ok:
        try:
            return Run(client, client.request("GET", run_path(run)).json(), model)
        except Refused as refused:
            if refused.code != "not_found":
                raise
    tables = {name: dict(table) for name, table in (job or {}).items()}
    if optimiser is not None:
        settings, grouped = optimisers.settings(optimiser, model)
        tables["optimiser"] = {**tables.get("optimiser", {}), **settings}
        roles = {**(roles or {}), **grouped}
    if policy is not None:
        tables["policy"] = optimisers.policy(policy)
    given: dict[str, dict[str, Any]] = {
        "run": {"epochs": epochs, "steps": steps, "seed": seed},
        "train": {"batch": batch, "every": every, "encoding": encoding},
        "model": {"kind": kind},
        "optimiser": {
            "schedule": {"kind": schedule} if isinstance(schedule, str) else schedule,
            "clip_norm": clip_norm,
        },
    }
    for table, values in given.items():
        chosen = {name: value for name, value in values.items() if value is not None}
        tables[table] = {**tables.get(table, {}), **chosen}
    binding = bind(model)
    specs = binding.specs(roles)
    splits = {"train": train, "validation": validation, "test": test}
    shards = {
        split: _shards(client, run, split, data, upload)
        for split, data in splits.items()
        if data is not None
    }
    tables["data"] = {"source": shards["train"][0].get("name", run), **tables.get("data", {})}
    spec = {
        "name": run,
        "job": tables,
        "schema": [tensor.to_json() for tensor in specs],
        "manifest": {"source": tables["data"]["source"], **shards},
        "made_by": f"skep-python {__about__.VERSION}, {binding.engine}",
    }
    values = binding.initial()
    try:
        view = client.request("POST", "/v1/runs", body=_file(specs, values, spec)).json()
    except Refused as refused:
        if refused.code != "exists" or not exist_ok:
            raise
        # Another worker was faster.
        view = client.request("GET", run_path(run)).json()
    check_specs(specs, specs_of(view["schema"]), run)
    return Run(client, view, model)


def _file(specs: Any, values: Mapping[str, np.ndarray], spec: Mapping[str, Any]) -> bytes:
    """Version 0 as a safetensors file with the run's description in its metadata."""
    from safetensors.numpy import save

    for name, value in values.items():
        if value.dtype.kind == "f" and not np.isfinite(value).all():
            raise Misuse(f"`{name}` is not finite", "version 0 is what the model holds now")
    return bytes(save(dict(values), metadata={"skep.run": json.dumps(spec)}))


def _shards(client: Client, run: str, split: str, data: Any, upload: bool) -> list[dict[str, Any]]:
    if not upload:
        if isinstance(data, Shards):
            return [{"name": name, "samples": length(part)} for name, part in data.items()]
        return [{"name": f"{run}/{split}", "samples": length(data)}]
    if not isinstance(data, Mapping) or isinstance(data, Shards):
        raise Misuse(
            f"{split} is a {type(data).__name__}, and only dicts of arrays can be sent to a hive",
            "pass {'image': images, 'label': labels}, or leave upload out",
        )
    from safetensors.numpy import save

    count = length(data)
    if count == 0:
        raise Misuse(f"{split} has no samples")
    columns = {name: np.ascontiguousarray(column) for name, column in data.items()}
    per_sample = sum(column.nbytes for column in columns.values()) / count
    rows = max(1, int((1 << 20) / max(per_sample, 1)))
    sent = []
    for start in range(0, count, rows):
        part = {name: column[start : start + rows].copy() for name, column in columns.items()}
        content = bytes(save(part))
        digest = hashlib.sha256(content).hexdigest()
        client.request("PUT", f"/v1/shards/{digest}", body=content)
        samples = min(rows, count - start)
        sent.append({"hash": digest, "samples": samples, "bytes": len(content)})
    return sent
