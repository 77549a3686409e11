"""Workers together reach what PyTorch reaches alone, on real digits."""

import math
import os
import shutil
import subprocess
import unittest

import skep

from .support import WithHive, needs_hive, needs_torch, torch

if torch is not None:
    from safetensors.torch import load_file

    from . import digits

EPOCHS = 4


@needs_hive
@needs_torch
class Accuracy(WithHive):
    def setUp(self):
        torch.set_num_threads(1)

    def alone(self, network, data, rate, **settings):
        """Accuracy of the usual loop from the same start: batches of 64, a cosine."""
        optimiser = torch.optim.SGD(network.parameters(), lr=rate, momentum=0.9, **settings)
        steps = EPOCHS * math.ceil(len(data["train"]["label"]) / 64)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
        digits.train_alone(network, data["train"], data["shards"], EPOCHS, 64, optimiser, schedule)
        return digits.accuracy(network, data["test"])

    def together(self, run, workers):
        for worker in workers:
            code, said = worker.end(300)
            self.assertEqual(code, 0, said)
        view = run.wait(30)
        self.assertEqual(view["state"], "done")
        return view

    def check(self, view, model, data, alone):
        """The hive's number is plain PyTorch's, on the file, and close to the one alone."""
        network = digits.MODELS[model]()
        network.load_state_dict(load_file(view["model"]))
        accuracy = digits.accuracy(network, data["test"])
        print(f"{model}: {accuracy:.4f} together, {alone:.4f} alone")
        self.assertAlmostEqual(accuracy, view["test"]["accuracy"], delta=0.0005)
        self.assertGreaterEqual(accuracy, alone - 0.005)
        self.assertGreaterEqual(accuracy, 0.96)

    def test_rust_and_pytorch_workers_in_one_run(self):
        hive = self.hive(arguments=["mnist", "--epochs", str(EPOCHS), "--policy", "sync:2"])
        data = digits.fetch(hive.url, "mnist")
        model = digits.LeNet5()
        run = skep.join(hive.url, "mnist", model)
        run.pull()
        program = os.environ.get("SKEP_BINARY") or shutil.which("skep")
        workers = [self.worker("digits", hive.url, "mnist", "lenet5") for _ in range(2)]
        rust = None
        try:
            shares = {}
            while run.view()["state"] == "running":
                for worker in run.view()["workers"]:
                    shares[worker["engine"].split()[0]] = worker["samples"]
                if rust is None and shares.get("skep-python"):
                    command = [program, "worker", "--hive", hive.url]
                    rust = subprocess.Popen(command, stderr=subprocess.DEVNULL)
            view = self.together(run, workers)
            self.assertEqual(rust.wait(30), 0)
        finally:
            if rust is not None and rust.poll() is None:
                rust.kill()
        print("samples by engine:", shares)
        self.assertEqual(set(shares), {"skep", "skep-python"})
        self.assertTrue(all(samples > 0 for samples in shares.values()), shares)
        alone = self.alone(model, data, 0.03, weight_decay=5e-4)
        self.check(view, "lenet5", data, alone)

    def test_batch_norm_by_two_workers(self):
        hive = self.hive(arguments=["mnist"])
        data = digits.fetch(hive.url, "mnist")
        torch.manual_seed(0)
        model = digits.NormNet()
        run = skep.create(
            hive.url,
            "norm",
            model,
            train=data["train"],
            test=data["test"],
            upload=True,
            epochs=EPOCHS,
            batch=32,
            policy="sync:2",
            job={
                "optimiser": {
                    "kind": "sgd",
                    "rate": 0.05,
                    "momentum": 0.9,
                    "schedule": {"kind": "cosine"},
                }
            },
        )
        workers = [self.worker("digits", hive.url, "norm", "norm") for _ in range(2)]
        view = self.together(run, workers)
        data = digits.fetch(hive.url, "norm")
        self.check(view, "norm", data, self.alone(model, data, 0.05))


if __name__ == "__main__":
    unittest.main()
