"""torch's optimisers as settings."""

import unittest

import skep
from skep import optimiser

from .support import needs_torch, torch

if torch is not None:
    from .toy import WithNorm


@needs_torch
class Settings(unittest.TestCase):
    def of(self, kind, **settings):
        model = WithNorm()
        return optimiser.settings(kind(model.parameters(), **settings), model)[0]

    def test_each_kind(self):
        self.assertEqual(self.of(torch.optim.SGD, lr=0.1), {"kind": "sgd", "rate": 0.1})
        self.assertEqual(
            self.of(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-4),
            {
                "kind": "sgd",
                "rate": 0.1,
                "momentum": 0.9,
                "nesterov": True,
                "weight_decay": 1e-4,
            },
        )
        self.assertEqual(
            self.of(torch.optim.AdamW, lr=0.01, betas=(0.8, 0.9)),
            {
                "kind": "adamw",
                "rate": 0.01,
                "betas": [0.8, 0.9],
                "epsilon": 1e-8,
                "weight_decay": 0.01,
            },
        )
        self.assertEqual(
            self.of(torch.optim.RMSprop, lr=0.01, centered=True),
            {"kind": "rmsprop", "rate": 0.01, "alpha": 0.99, "epsilon": 1e-8, "centred": True},
        )

    def test_groups_become_roles(self):
        model = WithNorm()
        groups = [
            {"params": model.trunk.parameters()},
            {"params": model.head.parameters(), "lr": 0.5, "weight_decay": 0.1},
        ]
        chosen, roles = optimiser.settings(torch.optim.SGD(groups, lr=0.1), model)
        self.assertEqual(chosen["groups"], {"group1": {"rate": 0.5, "weight_decay": 0.1}})
        self.assertEqual(
            roles, {"head.weight": "trainable:group1", "head.bias": "trainable:group1"}
        )

    def test_what_the_hive_cannot_do_is_refused(self):
        model = WithNorm()
        for wrong, message in (
            (torch.optim.Adagrad(model.parameters()), "no optimiser like Adagrad"),
            (torch.optim.SGD(model.head.parameters(), lr=0.1), "does not have `trunk.0.weight`"),
            (torch.optim.SGD(model.parameters(), lr=0.1, maximize=True), "maximize"),
        ):
            with self.assertRaisesRegex(skep.Misuse, message):
                optimiser.settings(wrong, model)


class Policies(unittest.TestCase):
    def test_texts_are_those_of_the_command_line(self):
        self.assertEqual(optimiser.policy("batch:4"), {"kind": "batch", "size": 4})
        self.assertEqual(optimiser.policy("async"), {"kind": "async"})
        self.assertEqual(
            optimiser.policy("async:max_staleness=2,damping=0.5"),
            {"kind": "async", "max_staleness": 2, "damping": 0.5},
        )
        self.assertEqual(
            optimiser.policy("sync:4,backup=1"), {"kind": "sync", "slots": 4, "backup": 1}
        )
        self.assertEqual(optimiser.policy({"kind": "async"}), {"kind": "async"})
        for wrong in ("batch:many", "async:4"):
            with self.assertRaises(skep.Misuse):
                optimiser.policy(wrong)


if __name__ == "__main__":
    unittest.main()
