"""A worker's whole life against a real hive."""

import os
import signal
import socket
import tempfile
import threading
import time
import unittest
import warnings
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

import skep
from skep import position

from .support import WithHive, needs_hive, needs_torch, torch, until

if torch is not None:
    from torch.nn import functional

    from .toy import Points, WithNorm, build

SAMPLES = 256


def unit():
    return {"x": np.zeros(SAMPLES, np.float32)}


def numbers(count=SAMPLES):
    return {"index": np.arange(count)}


def gradient(batch):
    mean = np.zeros(SAMPLES, np.float32)
    mean[batch["index"]] = 1 / len(batch["index"])
    return {"x": mean}


def unit_run(url, name="unit", **settings):
    """A run whose coordinates count how often their samples were applied."""
    chosen = {
        "train": numbers(),
        "epochs": 2,
        "batch": 16,
        "policy": "batch:1",
        "optimiser": {"kind": "sgd", "rate": 1.0},
        **settings,
    }
    return skep.create(url, name, unit(), **chosen)


def free_port():
    """Below the range that the system gives out by itself, so that no client takes it."""
    for port in range(21000 + os.getpid() % 5000, 31000):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
                return port
            except OSError:
                continue
    raise AssertionError("no free port")


class Quick(WithHive):
    def work(self, run, **settings):
        for batch in run.batches(numbers(), progress=False, **settings):
            run.step(gradient(batch), 1.0)

    def assert_each(self, view, expected):
        """Every coordinate was moved by the same amount."""
        x = load_file(view["model"])["x"]
        self.assertTrue((x == np.float32(expected)).all(), x)


@needs_hive
class Life(Quick):
    def test_every_sample_counts_once_in_every_epoch(self):
        run = unit_run(self.hive().url)
        self.work(run)
        view = run.wait(30)
        self.assertEqual((view["state"], view["samples"]), ("done", 2 * SAMPLES))
        self.assert_each(view, -2 / 16)
        self.assertEqual(run.contributions, 32)

    def test_short_last_batches_and_several_batches_to_a_contribution(self):
        # 250 positions in chunks of 48 (three batches of 16): the last has 10.
        run = unit_run(
            self.hive().url, train=numbers(250), epochs=1, every=3, policy="async:damping=0"
        )
        sizes = []
        for batch in run.batches(numbers(250), progress=False):
            sizes.append(len(batch["index"]))
            run.step(gradient(batch), 1.0)
        self.assertEqual(sum(sizes), 250)
        self.assertEqual(sorted(set(sizes)), [10, 16])
        view = run.wait(30)
        x = load_file(view["model"])["x"]
        # Each contribution is the mean over its own samples.
        self.assertEqual(int(np.count_nonzero(x)), 250)
        self.assertEqual(sorted({round(1 / -v) for v in x if v}), [10, 48])

    def test_half_as_many_bytes_travel_as_bf16(self):
        hive = self.hive()
        wide, half = unit_run(hive.url, "wide"), unit_run(hive.url, "half", encoding="bf16")
        for run in (wide, half):
            self.work(run)
            self.assert_each(run.wait(30), -2 / 16)
        self.assertLess(half.bytes_pushed, 0.65 * wide.bytes_pushed)
        self.assertLess(half.bytes_pulled, 0.65 * wide.bytes_pulled)

    def test_data_can_be_sent_to_the_hive(self):
        hive = self.hive()
        run = unit_run(hive.url, upload=True)
        elsewhere = skep.join(hive.url, "unit", unit())
        for batch in elsewhere.batches(progress=False):
            elsewhere.step(gradient(batch), 1.0)
        self.assert_each(run.wait(30), -2 / 16)

    def test_a_worker_gets_only_the_shards_it_can_read(self):
        low, high = np.arange(128), np.arange(128, 256)
        parts = skep.Shards(north={"index": low}, south={"index": high})
        hive = self.hive()
        held_out = skep.Shards(near=numbers(20), far=numbers(30))
        run = unit_run(hive.url, train=parts, test=held_out, epochs=1)
        got, measured = [], []
        reader = skep.join(hive.url, "unit", unit())

        def evaluate(_, batch):
            measured.append(len(batch["index"]))
            return 1.0, len(batch["index"])

        for batch in reader.batches(
            skep.Shards(north=parts["north"]),
            test=skep.Shards(near=held_out["near"]),
            evaluate=evaluate,
            progress=False,
        ):
            got.extend(batch["index"].tolist())
            reader.step(gradient(batch), 1.0)
            if len(got) == 128:
                break
        self.assertEqual(sorted(got), low.tolist())
        self.assertEqual(measured, [], "what it cannot read it does not measure")
        for batch in run.batches(parts, test=held_out, evaluate=evaluate, progress=False):
            self.assertTrue((batch["index"] >= 128).all())
            run.step(gradient(batch), 1.0)
        view = run.wait(30)
        self.assertEqual(view["test"]["samples"], 50)
        self.assertEqual(sum(measured), 50)
        self.assert_each(view, -1 / 16)

    def test_evaluations(self):
        run = unit_run(self.hive().url, validation=numbers(40), test=numbers(100))
        seen = []

        def evaluate(model, batch):
            seen.append((model["x"].copy(), len(batch["index"])))
            return 2.0 * len(batch["index"]), int((batch["index"] % 4 == 0).sum())

        self.work(run, validation=numbers(40), test=numbers(100), evaluate=evaluate)
        view = run.wait(30)
        self.assertEqual(view["test"]["samples"], 100)
        self.assertEqual(view["test"]["loss"], 2.0)
        self.assertEqual(view["test"]["accuracy"], 0.25)
        self.assertEqual(view["validation"]["samples"], 40)
        final, _ = seen[-1]
        self.assertTrue((final == np.float32(-2 / 16)).all(), "measured on the final version")

    def test_a_worker_without_evaluate_leaves_that_to_others(self):
        hive = self.hive()
        run = unit_run(hive.url, test=numbers(100))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer = threading.Thread(target=self.work, args=(run,))
            trainer.start()
            view = until("training to end", lambda: run.view()["samples"] == 2 * SAMPLES)
        self.assertTrue(view)
        self.assertIn("evaluate=", str(caught[0].message))
        other = skep.join(hive.url, "unit", unit())
        count = 0
        for _ in other.batches(
            numbers(),
            test=numbers(100),
            evaluate=lambda _, batch: (1.0, len(batch["index"])),
            progress=False,
        ):
            count += 1
        trainer.join(30)
        self.assertFalse(trainer.is_alive())
        self.assertEqual(count, 0, "there was nothing left to train")
        self.assertEqual(run.wait(30)["test"]["accuracy"], 1.0)

    def test_runs_are_joined_if_they_are_there(self):
        hive = self.hive()
        unit_run(hive.url)
        again = unit_run(hive.url, exist_ok=True, epochs=9)
        self.assertEqual(again.job["run"]["epochs"], 2, "the run's own settings hold")
        with self.assertRaises(skep.Refused) as caught:
            unit_run(hive.url)
        self.assertEqual(caught.exception.code, "exists")

    def test_minutes_end_a_worker_and_nothing_is_lost(self):
        hive = self.hive()
        run = unit_run(hive.url)
        for batch in run.batches(numbers(), progress=False, minutes=0.002):
            time.sleep(0.03)
            run.step(gradient(batch), 1.0)
        self.assertLess(run.contributions, 32)
        self.work(skep.join(hive.url, "unit", unit()))
        self.assert_each(run.wait(30), -2 / 16)


@needs_hive
class Faults(Quick):
    def test_the_hive_restarts_and_nothing_is_lost_or_doubled(self):
        with tempfile.TemporaryDirectory() as store:
            listen = f"127.0.0.1:{free_port()}"
            first = skep.Hive(store=store, listen=listen)
            run = unit_run(
                first.url, epochs=8, job={"checkpoint": {"seconds": 0.05}, "lease": {"seconds": 2}}
            )
            hives = [first]
            for count, batch in enumerate(run.batches(numbers(), progress=False)):
                if count in (20, 60):
                    hives[-1].process.kill()
                    hives[-1].close()
                    hives.append(skep.Hive(store=store, listen=listen))
                run.step(gradient(batch), 1.0)
            view = run.wait(30)
            self.assertEqual(view["version"].split(".")[0], "3")
            self.assert_each(view, -8 / 16)
            hives[-1].close()

    def test_a_hive_that_stays_away_is_said_so_and_nothing_is_lost(self):
        with tempfile.TemporaryDirectory() as store:
            listen = f"127.0.0.1:{free_port()}"
            hive = skep.Hive(store=store, listen=listen)
            run = unit_run(hive.url, patience=1.0)
            with self.assertRaises(skep.Unreachable) as caught:
                for count, batch in enumerate(run.batches(numbers(), progress=False)):
                    if count == 5:
                        hive.close()
                    run.step(gradient(batch), 1.0)
            self.assertIn("patience", str(caught.exception))
            with skep.Hive(store=store, listen=listen) as again:
                self.work(skep.join(again.url, "unit", unit()))
                self.assert_each(run.wait(30), -2 / 16)

    def test_a_loss_that_is_not_finite_is_given_back(self):
        run = unit_run(self.hive().url)
        bad = [3, 7]
        caught = []
        for count, batch in enumerate(run.batches(numbers(), progress=False)):
            loss, mean = (float("nan") if count == bad[0] else 1.0), gradient(batch)
            if count == bad[1]:
                mean["x"][0] = np.inf
            try:
                run.step(mean, loss)
            except skep.NotFinite as error:
                caught.append(str(error))
        self.assertEqual(len(caught), 2)
        self.assertIn("the loss is nan", caught[0])
        self.assertIn("the gradient of `x`", caught[1])
        self.assertIn("hint: the batch was given back", caught[0])
        self.assert_each(run.wait(30), -2 / 16)

    def test_leaving_the_loop_gives_the_lease_back(self):
        hive = self.hive()
        run = unit_run(hive.url, epochs=1)
        for error in (KeyboardInterrupt, ZeroDivisionError):
            with self.assertRaises(error):
                for _ in run.batches(numbers(), progress=False):
                    raise error
        start = time.monotonic()
        self.work(run)
        self.assertLess(time.monotonic() - start, 5, "nobody waited for a lease to lapse")
        self.assert_each(run.wait(30), -1 / 16)

    def test_a_batch_that_was_not_stepped_is_a_mistake(self):
        run = unit_run(self.hive().url)
        with self.assertRaisesRegex(skep.Misuse, "not stepped"):
            for _ in run.batches(numbers(), progress=False):
                pass
        with self.assertRaisesRegex(skep.Misuse, "without a batch"):
            run.step({"x": np.zeros(SAMPLES, np.float32)}, 1.0)

    def test_sigterm_pushes_or_gives_back_and_ends_with_143(self):
        hive = self.hive()
        run = unit_run(hive.url, epochs=4)
        worker = self.worker("unit", hive.url, f"unit:{SAMPLES}", 20)
        until("the worker to work", lambda: run.view()["samples"] >= 64)
        worker.process.send_signal(signal.SIGTERM)
        code, said = worker.end()
        self.assertEqual(code, 143, said)
        lines = skep.Client(hive.url).request("GET", "/v1/runs/unit/logs").json()
        self.assertIn("given back", lines[-1]["message"])
        start = time.monotonic()
        self.work(run)
        self.assertLess(time.monotonic() - start, 8, "nobody waited for a lease to lapse")
        self.assert_each(run.wait(30), -4 / 16)

    def test_ctrl_c_gives_back(self):
        hive = self.hive()
        run = unit_run(hive.url, epochs=4)
        worker = self.worker("unit", hive.url, f"unit:{SAMPLES}", 20)
        until("the worker to work", lambda: run.view()["samples"] >= 64)
        worker.process.send_signal(signal.SIGINT)
        code, said = worker.end()
        self.assertIn("KeyboardInterrupt", said)
        self.assertNotEqual(code, 0)
        start = time.monotonic()
        self.work(run)
        self.assertLess(time.monotonic() - start, 8, "nobody waited for a lease to lapse")
        self.assert_each(run.wait(30), -4 / 16)

    def test_a_lease_lives_as_long_as_the_work_and_no_longer_than_the_worker(self):
        hive = self.hive()
        # A lease lapses after 0.6 s of silence; a batch takes longer than that once.
        run = unit_run(hive.url, epochs=1, job={"lease": {"seconds": 0.6}})
        for count, batch in enumerate(run.batches(numbers(), progress=False)):
            if count == 2:
                time.sleep(1.5)
            run.step(gradient(batch), 1.0)
        view = run.wait(30)
        self.assertEqual(run.contributions, SAMPLES // 16, "no lease lapsed")
        self.assert_each(view, -1 / 16)

    def test_a_run_that_is_stopped_ends_the_loop(self):
        hive = self.hive()
        run = unit_run(hive.url, epochs=1000)
        for count, batch in enumerate(run.batches(numbers(), progress=False)):
            if count == 10:
                skep.join(hive.url, "unit", unit()).stop()
            run.step(gradient(batch), 1.0)
        self.assertEqual(run.view()["state"], "stopped")


@needs_hive
class Access(Quick):
    def secured(self, folder):
        key = Path(folder) / "admin.key"
        arguments = ["--key-file", str(key), "--tls", "auto", "--tls-dir", f"{folder}/tls"]
        hive = self.hive(store=f"{folder}/store", arguments=arguments)
        pins = until(
            "the join line", lambda: [w for w in hive.log.split() if w.startswith("sha256:")]
        )
        pin = pins[0]
        return hive, key.read_text().strip(), pin

    def test_keys_and_tls(self):
        with tempfile.TemporaryDirectory() as folder:
            hive, admin, pin = self.secured(folder)
            with self.assertRaises(skep.SkepError) as caught:
                skep.join(hive.url, "unit", unit(), key=admin)
            self.assertIn("pin=", str(caught.exception))
            with self.assertRaises(skep.SkepError):
                skep.join(hive.url, "unit", unit(), key=admin, pin="sha256:" + "0" * 64)
            for key, code in ((None, "unauthorised"), ("skep_0_wrong", "unauthorised")):
                with self.assertRaises(skep.KeyRefused) as refused:
                    skep.join(hive.url, "unit", unit(), key=key, pin=pin)
                self.assertEqual(refused.exception.code, code)
                self.assertIn("SKEP_KEY", str(refused.exception))
            run = unit_run(hive.url, key=admin, pin=pin)
            issued = skep.Client(hive.url, key=admin, pin=pin).request(
                "POST", "/v1/keys", message={"role": "worker", "run": "unit"}
            )
            worker_key = issued.json()["key"]
            with self.assertRaises(skep.KeyRefused) as refused:
                unit_run(hive.url, "other", key=worker_key, pin=pin)
            self.assertEqual(refused.exception.code, "forbidden")
            self.work(skep.join(hive.url, "unit", unit(), key=worker_key, pin=pin))
            self.assert_each(run.wait(30), -2 / 16)
            authority = f"{folder}/tls/hive.crt"
            url = hive.url.replace("127.0.0.1", "localhost")
            skep.join(url, "unit", unit(), key=worker_key, ca=authority)
            hive.close()

    def test_a_program_that_is_not_there(self):
        with self.assertRaisesRegex(skep.Misuse, "SKEP_BINARY"):
            skep.Hive(program="/nowhere/skep")

    def test_bad_addresses(self):
        with self.assertRaisesRegex(skep.Misuse, "is not a hive's address"):
            skep.join("localhost:29500", "unit", unit())
        with self.assertRaisesRegex(skep.Unreachable, "is the hive running there"):
            skep.join(f"http://127.0.0.1:{free_port()}", "unit", unit(), patience=0.2)
        with self.assertRaisesRegex(skep.Misuse, "is not a pin"):
            skep.join("https://127.0.0.1:1", "unit", unit(), pin="12")
        with self.assertRaisesRegex(skep.Misuse, "has no run `unit`"):
            skep.join(self.hive().url, "unit", unit())


@needs_hive
class BadInput(Quick):
    def test_data_and_run_differ(self):
        hive = self.hive()
        run = unit_run(hive.url)
        with self.assertRaisesRegex(skep.Mismatch, "has 255 samples, the run has 256"):
            next(run.batches(numbers(255)))
        with self.assertRaisesRegex(skep.Misuse, "does not keep the train data"):
            next(run.batches())
        with self.assertRaisesRegex(skep.Misuse, "generator has no length"):
            next(run.batches(i for i in range(3)))
        with self.assertRaisesRegex(skep.Mismatch, "no train shard `west`"):
            next(run.batches(skep.Shards(west=numbers())))

    def test_model_and_run_differ(self):
        hive = self.hive()
        unit_run(hive.url)
        with self.assertRaisesRegex(skep.Mismatch, r"`x` is \[3\] here, \[256\] in the run"):
            skep.join(hive.url, "unit", {"x": np.zeros(3, np.float32)})

    def test_settings_are_checked_by_the_hive(self):
        url = self.hive().url
        for settings, message in (
            ({"epochs": 0}, "epochs"),
            ({"policy": "often"}, "often"),
            ({"optimiser": {"kind": "sgd", "speed": 1}}, "speed"),
            ({"job": {"run": {"epocs": 3}}}, "epocs"),
        ):
            with self.assertRaisesRegex(skep.Refused, message):
                unit_run(url, **settings)

    def test_version_0_must_be_finite(self):
        with self.assertRaisesRegex(skep.Misuse, "`x` is not finite"):
            skep.create(
                self.hive().url,
                "nan",
                {"x": np.full(3, np.nan, np.float32)},
                train=numbers(),
            )


@needs_hive
@needs_torch
class WithTorch(WithHive):
    def setUp(self):
        torch.set_num_threads(1)

    def create(self, url, name, model, **settings):
        chosen = {
            "train": Points(),
            "epochs": 2,
            "batch": 20,
            "policy": "sync:2",
            "optimiser": torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
            **settings,
        }
        return skep.create(url, name, model, **chosen)

    def train(self, run, model):
        for places, labels in run.batches(Points(), progress=False):
            loss = functional.cross_entropy(model(places), labels)
            loss.backward()
            run.step(model, loss)

    def test_it_is_the_training_of_one_process(self):
        """Two slots of 20 are batches of 40, in the run's own order, in plain PyTorch."""
        model, alone = build(), build()
        run = self.create(self.hive().url, "points", model, seed=5)
        self.train(run, model)
        trained = load_file(run.wait(30)["model"])
        points = Points()
        optimiser = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
        for epoch in range(2):
            order = position.samples(5, epoch, 0, len(points), 0, len(points))
            for start in range(0, len(points), 40):
                rows = order[start : start + 40]
                places = torch.from_numpy(points.places[rows])
                labels = torch.from_numpy(points.labels[rows])
                optimiser.zero_grad()
                functional.cross_entropy(alone(places), labels).backward()
                optimiser.step()
        for name, tensor in alone.state_dict().items():
            difference = np.abs(trained[name] - tensor.numpy()).max()
            self.assertLess(difference, 1e-5, name)

    def test_same_seed_same_bits_however_many_workers(self):
        """Randomness (dropout) comes with the position, buffers (BatchNorm) with the version."""
        hive = self.hive()
        files = []
        for name, count in (("one", 1), ("three", 3)):
            run = self.create(hive.url, name, WithNorm(dropout=0.5))
            workers = [self.worker("network", hive.url, name, 0.5) for _ in range(count)]
            for worker in workers:
                code, said = worker.end()
                self.assertEqual(code, 0, said)
            view = run.wait(30)
            self.assertEqual(view["state"], "done")
            files.append(load_file(view["model"]))
        for name, tensor in files[0].items():
            self.assertTrue(np.array_equal(tensor, files[1][name]), name)

    def test_only_the_head_of_a_frozen_trunk_travels(self):
        model = WithNorm(width=512)
        model.trunk.requires_grad_(False)
        model.trunk.eval()
        before = {name: t.clone() for name, t in model.trunk.state_dict().items()}
        head = sum(p.numel() * 4 for p in model.head.parameters())
        whole = sum(t.numel() * t.element_size() for t in model.state_dict().values())
        optimiser = torch.optim.SGD(model.head.parameters(), lr=0.1)
        run = self.create(self.hive().url, "tune", model, optimiser=optimiser, policy="batch:1")
        self.train(run, model)
        view = run.wait(30)
        steps = run.contributions
        self.assertEqual(steps, 100)
        # Headers of a few hundred bytes aside: the head with each step, the trunk once.
        self.assertLess(run.bytes_pushed, steps * (head + 600))
        self.assertLess(run.bytes_pulled, steps * (head + 600) + whole + 1000)
        trained = load_file(view["model"])
        for name, tensor in before.items():
            self.assertTrue(np.array_equal(trained[f"trunk.{name}"], tensor.numpy()), name)
        self.assertFalse(np.array_equal(trained["head.bias"], np.zeros(3)))

    def test_a_frozen_trunk_in_training_mode_does_not_drift(self):
        model = WithNorm()
        model.trunk.requires_grad_(False)
        optimiser = torch.optim.SGD(model.head.parameters(), lr=0.1)
        run = self.create(self.hive().url, "drift", model, optimiser=optimiser, epochs=1)
        means = []
        for places, labels in run.batches(Points(), progress=False):
            means.append(float(model.trunk[1].running_mean.abs().max()))
            loss = functional.cross_entropy(model(places), labels)
            self.assertGreater(model.trunk[1].running_mean.abs().max(), 0.0)
            loss.backward()
            run.step(model, loss)
        self.assertEqual(set(means), {0.0})

    def test_buffers_come_home(self):
        model = WithNorm()
        run = self.create(self.hive().url, "norm", model, policy="batch:1", epochs=1)
        self.train(run, model)
        trained = load_file(run.wait(30)["model"])
        self.assertEqual(int(trained["trunk.1.num_batches_tracked"]), 50)
        self.assertTrue(np.abs(trained["trunk.1.running_mean"]).max() > 0.01)
        model.load_state_dict({name: torch.from_numpy(t) for name, t in trained.items()})

    def test_groups_have_their_own_rates(self):
        model = WithNorm()
        optimiser = torch.optim.SGD(
            [{"params": model.trunk.parameters()}, {"params": model.head.parameters(), "lr": 0.0}],
            lr=0.1,
        )
        before = model.head.weight.detach().clone().numpy()
        trunk = model.trunk[0].weight.detach().clone().numpy()
        run = self.create(self.hive().url, "groups", model, optimiser=optimiser, epochs=1)
        self.train(run, model)
        trained = load_file(run.wait(30)["model"])
        self.assertTrue(np.array_equal(trained["head.weight"], before))
        self.assertFalse(np.array_equal(trained["trunk.0.weight"], trunk))

    def test_evaluation_leaves_the_mode_of_each_part_as_it_was(self):
        model = WithNorm()
        model.trunk.eval()
        run = self.create(self.hive().url, "modes", model, test=Points(100), epochs=1)
        modes = set()
        for places, labels in run.batches(
            Points(), test=Points(100), evaluate=skep.evaluate_classifier, progress=False
        ):
            modes.add((model.training, model.trunk.training, model.trunk[1].training))
            functional.cross_entropy(model(places), labels).backward()
            run.step(model, 1.0)
        self.assertEqual(modes, {(True, False, False)})
        self.assertEqual(run.wait(30)["test"]["samples"], 100)

    def test_a_forgotten_backward_pass_is_said_so(self):
        model = build()
        run = self.create(self.hive().url, "forgotten", model)
        with self.assertRaisesRegex(skep.Misuse, r"call loss\.backward\(\)"):
            for places, labels in run.batches(Points(), progress=False):
                run.step(model, functional.cross_entropy(model(places), labels))

    def test_columns_are_not_guessed(self):
        with self.assertRaisesRegex(skep.Misuse, "got a dict with"):
            skep.evaluate_classifier(build(), {"x": torch.zeros(1, 8), "y": torch.zeros(1)})

    def test_settings_that_torch_keeps_elsewhere(self):
        run = self.create(self.hive().url, "more", build(), schedule="cosine", clip_norm=0.5)
        settings = run.job["optimiser"]
        self.assertEqual(settings["schedule"], {"kind": "cosine"})
        self.assertEqual(settings["clip_norm"], 0.5)
        self.assertEqual(settings["momentum"], 0.9)

    def test_mixed_precision_is_the_users(self):
        model = build()
        run = self.create(self.hive().url, "mixed", model, epochs=1)
        for places, labels in run.batches(Points(), progress=False):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = functional.cross_entropy(model(places).float(), labels)
            loss.backward()
            run.step(model, loss)
        self.assertEqual(run.wait(30)["state"], "done")

    def test_a_batch_may_be_cut_into_smaller_ones(self):
        """Two backward passes before a step are one batch, if the losses are weighted."""
        files = []
        hive = self.hive()
        for name, cuts in (("whole", 1), ("halves", 2)):
            model = build()
            run = self.create(hive.url, name, model, epochs=1)
            for places, labels in run.batches(Points(), progress=False):
                total = 0.0
                for part, wanted in zip(places.chunk(cuts), labels.chunk(cuts)):
                    loss = functional.cross_entropy(model(part), wanted) * len(part) / len(places)
                    loss.backward()
                    total += float(loss)
                run.step(model, total)
            files.append(load_file(run.wait(30)["model"]))
        for name, tensor in files[0].items():
            self.assertTrue(np.allclose(tensor, files[1][name], atol=1e-5), name)

    def test_wrong_dtype_is_refused_at_creation(self):
        model = build()
        with self.assertRaisesRegex(skep.Misuse, "float32"):
            self.create(self.hive().url, "half", model.double())


if __name__ == "__main__":
    unittest.main()
