"""A run from a worker's side: leases, batches, steps.

One batch's way: `batches` takes a lease, pulls the version it is for into the model and yields
batches in the run's order of samples; `step` gathers their gradients and, when a contribution is
complete, pushes it. The answer brings the next version along.
"""

from __future__ import annotations

import atexit
import json
import logging
import math
import os
import platform
import secrets
import socket
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Optional

from . import __about__, position
from .binding import Binding, Model, bind, check_specs
from .client import Answer, Client, run_path
from .dataset import Collate, Joined, Kept, Own, Source
from .errors import Misuse, NotFinite, Refused, RunFailed, SkepError, Terminated
from .frame import Frame, Layout, specs_of
from .heartbeat import Heartbeat
from .progress import Progress, progress_for
from .signals import CallOff

log = logging.getLogger("skep")

#: Sum of the losses of a batch, and how many samples were answered correctly (or None).
Counts = tuple[float, Optional[int]]
Evaluate = Optional[Callable[[Any, Any], Counts]]

#: Refusals that mean: somebody else has the work now, or nobody needs it.
_LOST = ("lease_gone", "other_generation", "too_stale", "not_running", "not_found")


class Version(NamedTuple):
    """`generation.number`."""

    generation: int
    number: int

    @classmethod
    def parse(cls, text: str) -> Version:
        generation, number = text.split(".")
        return cls(int(generation), int(number))

    def __str__(self) -> str:
        return f"{self.generation}.{self.number}"


class _Held:
    """A lease and how far it has been worked through."""

    def __init__(self, view: Mapping[str, Any]) -> None:
        self.id: str = view["id"]
        self.kind: str = view["kind"]
        self.base = Version.parse(view["base"])
        self.split: str = view["split"]
        self.epoch: int = view["epoch"]
        self.shard: int = view["shard"]
        self.first: int = view["first"]
        self.count: int = view["count"]
        self.offset: int = view["offset"]
        self.chunk: int = view["chunk"]
        self.renew: float = view["renew_seconds"]
        #: Positions pushed, and contributions.
        self.pushed = 0
        self.sequence = 0
        self.over = False


class _Making:
    """The contribution in the making."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.done = 0
        self.loss = 0.0


class Run:
    """One run, and this process as a worker of it. Made by `join` and `create`."""

    def __init__(self, client: Client, view: Mapping[str, Any], model: Model) -> None:
        self._client = client
        self.name: str = view["name"]
        #: Settings: the tables of a job file.
        self.job: dict[str, Any] = view["job"]
        self._manifest: dict[str, Any] = view["manifest"]
        exchange = self.job["run"]["exchange"]
        if exchange != "gradients":
            raise Misuse(
                f"run `{self.name}` exchanges {exchange}; this client brings home gradients"
            )
        self.model = model
        self._binding: Binding = bind(model)
        self._specs = specs_of(view["schema"])
        check_specs(self._binding.specs(None), self._specs, self.name)
        self._encoding: str = self.job["train"]["encoding"]
        self._batch: int = self.job["train"]["batch"]
        changing = [spec for spec in self._specs if spec.kind != "frozen"]
        brought = [spec for spec in self._specs if spec.kind in ("trainable", "buffer")]
        #: Layouts of pulls, by encoding and whether frozen tensors are in.
        self._layouts = {
            (encoding, whole): Layout(self._specs if whole else changing, encoding)
            for encoding in ("f32", "bf16")
            for whole in (True, False)
        }
        self._gradient = Frame.zeros(Layout(brought))
        self._narrow_layout = Layout(brought, "bf16")
        self.worker = _made_up_name()
        self._pid = os.getpid()
        self._loaded: tuple[Version, str] | None = None
        self._has_frozen = False
        self._held: _Held | None = None
        self._making: _Making | None = None
        #: Samples of the batch that was yielded and not stepped yet.
        self._outstanding = 0
        self._heartbeat: Heartbeat | None = None
        self._call_off = CallOff()
        self._client.check = self._call_off.check
        self._busy = self._waited = 0.0
        self._mark = time.monotonic()
        #: The seed of the present batch's randomness.
        self.seed = 0
        #: Bytes of parameters pulled and of contributions pushed by this worker.
        self.bytes_pulled = 0
        self.bytes_pushed = 0
        #: Steps this worker pushed that counted.
        self.contributions = 0

    def __repr__(self) -> str:
        return f"<skep run `{self.name}` at {self._client.url}>"

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Looking

    def view(self) -> dict[str, Any]:
        """The run as its hive shows it: state, version, samples, loss, accuracy, workers…"""
        view: dict[str, Any] = self._ask("GET").json()
        return view

    @property
    def version(self) -> str | None:
        """The version that the model holds."""
        return str(self._loaded[0]) if self._loaded else None

    def pull(self) -> str:
        """Loads the newest version, in full precision, into the model."""
        self._pull(None, "f32")
        return str(self.version)

    def wait(self, seconds: float = math.inf) -> dict[str, Any]:
        """Waits until the run has ended and its model is written, and gives its last view."""
        start = time.monotonic()
        while True:
            view = self.view()
            ended = view["state"] not in ("running", "paused")
            if ended and (view["model"] or view["state"] == "failed"):
                return view
            if time.monotonic() - start > seconds:
                raise SkepError(f"run `{self.name}` has not ended after {seconds:.0f} s")
            self._call_off.check()
            time.sleep(0.1)

    def log(self, message: str, level: str = "info") -> None:
        """Says something in the run's log at the hive (`skep logs`)."""
        line = {"time": 0, "worker": self.worker, "level": level, "message": message}
        try:
            self._client.once("POST", run_path(self.name, "/logs"), message=[line], deadline=2.0)
        except SkepError as error:
            log.debug("log: %s", error.message)

    def stop(self) -> None:
        """Ends the run for everyone, keeping what there is. Needs an admin key."""
        self._ask("PATCH", message={"action": "stop"})

    def close(self) -> None:
        """Gives back what is held, and stops the heartbeat. `batches` does so by itself."""
        # A forked child has a copy of this object, but the lease is its parent's.
        if os.getpid() != self._pid:
            return
        held, self._held = self._held, None
        if self._heartbeat is not None:
            self._heartbeat.close()
            self._heartbeat = None
        if held is not None and not held.over:
            left = self._outstanding and not self._call_off.interrupted
            self._give_back(held, "the worker left in the middle of a batch" if left else None)
        self._outstanding = 0
        self._making = None
        self._binding.clear()
        self._call_off.leave()
        atexit.unregister(self.close)

    # Working

    def batches(
        self,
        train: Any = None,
        *,
        validation: Any = None,
        test: Any = None,
        evaluate: Evaluate = None,
        collate: Collate = None,
        progress: bool | None = None,
        reseed: bool = True,
        cache_bytes: int = 256 << 20,
        minutes: float | None = None,
    ) -> Iterator[Any]:
        """Batches to train on, until the run is done. Call `step` after each one's backward pass.

        `train`, `validation` and `test` are map-style datasets, dicts of arrays or `Shards`; leave
        them out where the hive keeps the data. `evaluate(model, batch)` gives the sum of the losses
        of a batch and how many samples were right; with it this worker also takes evaluations.
        `collate` makes a batch of a list of samples; torch's default if it is left out.

        `progress` shows the run's progress: in a terminal or notebook unless it is False, in plain
        lines if it is True. `reseed` seeds torch for each batch by the run's seed and the batch's
        position, so that dropout does not depend on who computes. `cache_bytes` bounds the shards
        that are held. After `minutes` the worker gives back what it has and ends.
        """
        if self._heartbeat is not None:
            raise Misuse("batches() of this run is already at work", "leave that loop first")
        sources = {"train": self._source("train", train, collate, cache_bytes)}
        measured = [split for split in ("validation", "test") if self._manifest[split]]
        if evaluate is not None:
            for split, given in (("validation", validation), ("test", test)):
                if self._manifest[split]:
                    sources[split] = self._source(split, given, collate, cache_bytes)
        elif measured:
            warnings.warn(
                f"run `{self.name}` has {' and '.join(measured)} data to be measured on, and this "
                "worker leaves that to others: pass evaluate= to batches(), such as "
                "skep.evaluate_classifier",
                stacklevel=2,
            )
        until = None if minutes is None else time.monotonic() + 60.0 * minutes
        self._call_off.watch()
        self._heartbeat = Heartbeat(self._client, self.name)
        atexit.register(self.close)
        display = progress_for(progress, self._client, self.name)
        try:
            self.log(f"joined at version {self.view()['version']}")
            yield from self._work(sources, evaluate, reseed, until, display)
        except Terminated:
            self.log("called off; what was held is given back")
            raise
        finally:
            self.close()
            display.close()

    def step(self, given: Any, loss: Any) -> None:
        """Counts the batch that `batches` gave last.

        `given` is the model whose gradients `loss.backward()` has filled (they are read and
        cleared), or for numpy a dict of gradients. They are means over the batch, as `loss` is. A
        loss or gradient that is not finite raises `NotFinite`: the batch is then given back.
        """
        held, making, samples = self._held, self._making, self._outstanding
        if held is None or making is None or not samples:
            raise Misuse(
                "step() without a batch", "call it once for each batch that batches() gives"
            )
        self._outstanding = 0
        # torch warns of a number made from what still has a graph.
        value = float(loss.detach() if hasattr(loss, "detach") else loss)
        if held.over or (self._heartbeat is not None and self._heartbeat.is_lost()):
            self._drop(held)
            return
        first = making.done == 0
        try:
            if not math.isfinite(value):
                raise NotFinite(f"the loss is {value}", _NOT_FINITE_HINT)
            self._binding.add(given, self._gradient, samples / making.size, first)
            name = self._gradient.unfinite()
            if name is not None:
                raise NotFinite(f"the gradient of `{name}` is not finite", _NOT_FINITE_HINT)
        except SkepError as error:
            self._drop(held)
            self._give_back(held, error.message)
            raise
        making.done += samples
        making.loss += value * samples
        self._busy += self._lap()
        if making.done == making.size:
            self._push(held, making)

    # One lease after the other

    def _work(
        self,
        sources: Mapping[str, Source],
        evaluate: Evaluate,
        reseed: bool,
        until: float | None,
        display: Progress,
    ) -> Iterator[Any]:
        while True:
            self._call_off.check()
            self._lap()
            left = None if until is None else until - time.monotonic()
            if left is not None and left <= 0:
                return
            answer = self._lease(sources, evaluate is not None, left)
            self._waited += self._lap()
            kind = None if answer is None else answer["answer"]
            if answer is None or kind in ("done", "stopped"):
                self._ended(answer)
                return
            if kind == "wait":
                display.say(answer["reason"])
                time.sleep(min(max(answer["seconds"], 0.01), 2.0))
                continue
            held = self._held = _Held(answer)
            assert self._heartbeat is not None
            self._heartbeat.hold(held.id, held.renew)
            try:
                if held.kind == "evaluate":
                    assert evaluate is not None
                    self._evaluate(held, sources[held.split], evaluate)
                else:
                    yield from self._train(held, sources["train"], reseed, until)
            except Refused as refused:
                if refused.code not in _LOST:
                    raise
                self._drop(held)
            finally:
                if self._heartbeat is not None:
                    self._heartbeat.release()
            if held.over:
                self._held = None
            else:
                self._give_back(held, None)
                self._held = None

    def _lease(
        self, sources: Mapping[str, Source], evaluates: bool, left: float | None
    ) -> dict[str, Any] | None:
        train = sources["train"]
        all_time = self._busy + self._waited
        request: dict[str, Any] = {
            "worker": self.worker,
            "engine": f"skep-python {__about__.VERSION}, {self._binding.engine}",
            # Short, so that a signal is noticed soon.
            "wait": 2.0 if left is None else min(2.0, left),
            "waiting": self._waited / all_time if all_time else 0.0,
        }
        if all_time > 10.0:
            self._busy, self._waited = self._busy / 2, self._waited / 2
        if left is not None:
            request["seconds_left"] = left
        if not evaluates and (self._manifest["validation"] or self._manifest["test"]):
            request["kinds"] = ["train"]
        if any(source.only is not None for source in sources.values()):
            request["only"] = [
                shard_id
                for split, source in sources.items()
                for shard_id in source.only or map(_shard_id, self._manifest[split])
            ]
        if isinstance(train, Kept):
            request["has"] = train.hashes()
        try:
            answer: dict[str, Any] = self._ask("POST", "/leases", message=request).json()
        except Refused as refused:
            # The run was deleted.
            if refused.code == "not_found":
                return None
            raise
        return answer

    def _ended(self, answer: Mapping[str, Any] | None) -> None:
        self.log("the run has ended")
        if (
            answer is not None
            and answer["answer"] == "stopped"
            and self.view()["state"] == "failed"
        ):
            raise RunFailed(f"run `{self.name}` failed: {answer['reason']}")

    def _train(
        self, held: _Held, source: Source, reseed: bool, until: float | None
    ) -> Iterator[Any]:
        samples = self._manifest["train"][held.shard]["samples"]
        seed: int = self.job["run"]["seed"]
        order = position.samples(seed, held.epoch, held.shard, samples, held.offset, held.count)
        self._binding.clear()
        while held.pushed < held.count and not held.over:
            if (
                self._loaded is None
                or self._is_older(held.base)
                or self._loaded[1] != self._encoding
            ):
                self._pull(None, self._encoding)
            making = self._making = _Making(min(held.chunk, held.count - held.pushed))
            self._binding.begin()
            while making.done < making.size and not held.over:
                self._call_off.check()
                if until is not None and time.monotonic() > until:
                    return
                size = min(self._batch, making.size - making.done)
                start = held.pushed + making.done
                batch = source.rows(held.shard, order[start : start + size])
                self.seed = position.batch_seed(seed, held.epoch, held.first + start)
                if reseed:
                    self._binding.reseed(self.seed)
                self._outstanding = size
                yield batch
                if self._outstanding:
                    raise Misuse(
                        "a batch was not stepped", "call run.step(model, loss) for each batch"
                    )

    def _push(self, held: _Held, making: _Making) -> None:
        """Brings home the gradient of a complete contribution."""
        assert self._loaded is not None
        frame = self._gradient
        if self._encoding == "bf16":
            frame = frame.narrowed(self._narrow_layout)
        headers = self._envelope(held, "gradient", making.size)
        headers["skep-encoding"] = self._encoding
        headers["skep-loss"] = repr(making.loss / making.size)
        headers["skep-want"] = self._encoding
        headers["skep-have"] = str(self._loaded[0])
        headers["skep-without"] = "frozen"
        try:
            answer = self._ask(
                "POST", "/contributions", headers=headers, body=memoryview(frame.buffer)
            )
        except Refused as refused:
            if refused.code == "not_finite":
                self._drop(held)
                self._give_back(held, refused.message)
                raise NotFinite(refused.message, _NOT_FINITE_HINT) from refused
            if refused.code not in _LOST:
                raise
            self._drop(held)
            return
        self._waited += self._lap()
        self.bytes_pushed += len(frame.buffer)
        self.contributions += 1
        held.pushed += making.size
        held.sequence += 1
        held.over = held.pushed == held.count
        self._making = None
        if answer.data:
            self._load(answer, self._encoding, whole=False)

    def _evaluate(
        self, held: _Held, source: Source, evaluate: Callable[[Any, Any], Counts]
    ) -> None:
        """Brings home the counts of a slice on exactly the lease's version."""
        if self._loaded != (held.base, "f32"):
            self._pull(held.base, "f32")
        self._lap()
        import numpy as np

        loss_sum, correct = 0.0, 0
        counted = True
        with _evaluating(self.model):
            for start in range(0, held.count, self._batch):
                self._call_off.check()
                size = min(self._batch, held.count - start)
                rows = np.arange(held.offset + start, held.offset + start + size)
                loss, right = evaluate(self.model, source.rows(held.shard, rows))
                loss_sum += float(loss)
                counted = counted and right is not None
                correct += int(right) if right is not None else 0
        self._busy += self._lap()
        if not math.isfinite(loss_sum):
            self._drop(held)
            self._give_back(held, f"the loss is {loss_sum}")
            return
        body = json.dumps({"loss_sum": loss_sum, "correct": correct if counted else None}).encode()
        headers = self._envelope(held, "evaluation", held.count)
        self._ask("POST", "/contributions", headers=headers, body=body)
        held.over = True

    def _envelope(self, held: _Held, kind: str, count: int) -> dict[str, str]:
        assert self._loaded is not None
        return {
            "skep-lease": held.id,
            "skep-sequence": str(held.sequence),
            "skep-first": str(held.first + held.pushed),
            "skep-count": str(count),
            "skep-base": str(self._loaded[0]),
            "skep-kind": kind,
        }

    # Parameters

    def _is_older(self, base: Version) -> bool:
        """Whether what the model holds is too old for a lease."""
        assert self._loaded is not None
        mine = self._loaded[0]
        return mine.generation != base.generation or mine.number < base.number

    def _pull(self, version: Version | None, encoding: str) -> None:
        self._lap()
        query = {"encoding": encoding}
        whole = not self._has_frozen
        if not whole:
            query["without"] = "frozen"
        if version is not None:
            query["version"] = str(version)
        answer = self._ask("GET", "/parameters", query=query)
        self._load(answer, encoding, whole)
        self._waited += self._lap()

    def _load(self, answer: Answer, encoding: str, whole: bool) -> None:
        frame = Frame.read(self._layouts[encoding, whole], answer.data)
        self._binding.load(frame)
        # Frozen tensors never change, in no generation: they travel once.
        self._has_frozen = True
        self._loaded = (Version.parse(answer.headers["skep-version"]), encoding)
        self.bytes_pulled += len(answer.data)

    # Small things

    def _source(self, split: str, given: Any, collate: Collate, cache_bytes: int) -> Source:
        shards = self._manifest[split]
        kept = all(shard.get("hash") for shard in shards)
        if given is None and not kept:
            raise Misuse(
                f"the hive does not keep the {split} data of run `{self.name}`",
                f"pass the dataset that it was created with: batches({split}=…)",
            )
        if given is None:
            return Kept(self._client, self.name, shards, self._binding, cache_bytes)
        return (Joined if kept else Own)(given, shards, split, collate)

    def _drop(self, held: _Held) -> None:
        """Forgets a lease, and the work under it."""
        held.over = True
        self._outstanding = 0
        self._making = None
        self._binding.clear()

    def _give_back(self, held: _Held, failure: str | None) -> None:
        """Tried once: a lease that cannot be given back lapses by itself."""
        held.over = True
        try:
            path = run_path(self.name, f"/leases/{held.id}")
            self._client.once("DELETE", path, message={"failure": failure}, deadline=5.0)
        except SkepError as error:
            log.debug("give back: %s", error.message)

    def _ask(self, method: str, rest: str = "", **request: Any) -> Answer:
        return self._client.request(method, run_path(self.name, rest), **request)

    def _lap(self) -> float:
        """Seconds since the last call."""
        now = time.monotonic()
        since, self._mark = now - self._mark, now
        return since


_NOT_FINITE_HINT = (
    "the batch was given back and nothing was sent. Lower the rate, clip (clip_norm in the "
    "optimiser's settings), or unscale the gradients if you use a GradScaler"
)


class _evaluating:
    """A torch module in evaluation mode, without gradients; other models as they are."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._is_torch = hasattr(model, "eval") and hasattr(model, "train")

    def __enter__(self) -> None:
        if self._is_torch:
            import torch

            self._modes = [(module, module.training) for module in self._model.modules()]
            self._model.eval()
            self._no_grad = torch.no_grad()
            self._no_grad.__enter__()

    def __exit__(self, *error: Any) -> None:
        if self._is_torch:
            self._no_grad.__exit__(*error)
            # As each part was: a frozen trunk may be in evaluation mode while the rest trains.
            for module, training in self._modes:
                module.training = training


def evaluate_classifier(model: Any, batch: Any) -> Counts:
    """Cross-entropy and the number of right answers, for batches of (inputs, labels)."""
    import torch

    if isinstance(batch, Mapping):
        raise Misuse(
            f"evaluate_classifier got a dict with {sorted(batch)}",
            "it takes (inputs, labels); pass evaluate=lambda model, batch: "
            "skep.evaluate_classifier(model, (batch['image'].float(), batch['label']))",
        )
    inputs, labels = batch
    device = next(model.parameters()).device
    logits = model(inputs.to(device))
    labels = labels.to(device)
    loss = torch.nn.functional.cross_entropy(logits, labels.long(), reduction="sum")
    return float(loss), int((logits.argmax(dim=1) == labels).sum())


def _shard_id(shard: Mapping[str, Any]) -> str:
    """What a request for a lease calls a shard."""
    return str(shard.get("hash") or shard["name"])


def _made_up_name() -> str:
    """A name nobody else has: where, which process, and some randomness."""
    host = "".join(c for c in socket.gethostname() if c.isascii() and c.isalnum())[:32]
    return f"{host or 'worker'}-py{platform.python_version()}-{os.getpid()}-{secrets.token_hex(3)}"
