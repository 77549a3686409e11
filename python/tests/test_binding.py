"""Roles, differences, gradients: what a module is to a run."""

import unittest

import numpy as np

import skep
from skep.binding import bind, check_specs
from skep.frame import Frame, Layout

from .support import needs_torch, torch

if torch is not None:
    from torch import nn

    from .toy import WithNorm, build


def roles(model, given=None):
    kinds = {}
    for spec in bind(model).specs(given):
        rest = spec.role.get("group") or spec.role.get("merge") or ""
        kinds[spec.name] = f"{spec.kind}:{rest}".rstrip(":")
    return kinds


@needs_torch
class Roles(unittest.TestCase):
    def test_parameters_are_trained_and_buffers_brought_home(self):
        found = roles(WithNorm())
        self.assertEqual(found["trunk.0.weight"], "trainable:default")
        self.assertEqual(found["trunk.1.running_mean"], "buffer:mean")
        self.assertEqual(found["trunk.1.num_batches_tracked"], "buffer:max")

    def test_a_frozen_trunk_keeps_its_buffers(self):
        model = WithNorm()
        model.trunk.requires_grad_(False)
        found = roles(model)
        trunk = {kind for name, kind in found.items() if name.startswith("trunk.")}
        self.assertEqual(trunk, {"frozen"})
        self.assertEqual(found["head.weight"], "trainable:default")

    def test_buffers_of_a_part_without_parameters_go_with_what_is_around_it(self):
        model = nn.Sequential(
            nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, affine=False)), nn.Linear(4, 2)
        )
        self.assertEqual(roles(model)["0.1.running_mean"], "buffer:mean")
        model[0][0].requires_grad_(False)
        self.assertEqual(roles(model)["0.1.running_mean"], "frozen")

    def test_what_is_not_in_the_state_dict_does_not_travel(self):
        model = build()
        model.register_buffer("mask", torch.ones(3), persistent=False)
        model.register_buffer("kept", torch.ones(3))
        found = roles(model)
        self.assertNotIn("mask", found)
        self.assertEqual(found["kept"], "buffer:mean")
        self.assertEqual(roles(model, {"ke*": "frozen"})["kept"], "frozen")
        self.assertEqual(roles(model, {"3.*": "trainable:head"})["3.bias"], "trainable:head")

    def test_a_role_that_is_none_is_refused(self):
        with self.assertRaisesRegex(skep.Misuse, "`trained` is not a role for `0.weight`"):
            roles(build(), {"0.weight": "trained"})

    def test_half_precision_parameters_are_refused(self):
        with self.assertRaisesRegex(skep.Misuse, "float32"):
            roles(build().half())


@needs_torch
class Differences(unittest.TestCase):
    def check(self, mine, theirs):
        check_specs(bind(mine).specs(None), bind(theirs).specs(None), "run")

    def test_equal_models_are_equal(self):
        self.check(WithNorm(), WithNorm())

    def test_each_difference_is_named(self):
        with self.assertRaisesRegex(skep.Mismatch, r"`0.weight` is \[16, 8\] here, \[32, 8\]"):
            self.check(build(), build(width=32))
        with self.assertRaisesRegex(skep.Mismatch, "`0.weight` is not in the run"):
            self.check(build(), WithNorm())
        frozen = WithNorm()
        frozen.trunk.requires_grad_(False)
        with self.assertRaisesRegex(skep.Mismatch, "frozen here, the run trains it"):
            self.check(frozen, WithNorm())
        with self.assertRaisesRegex(skep.Mismatch, "is F64 here, F32 in the run"):
            other = build()
            other.register_buffer("b", torch.zeros(1, dtype=torch.float64))
            same = build()
            same.register_buffer("b", torch.zeros(1))
            self.check(other, same)


@needs_torch
class Gradients(unittest.TestCase):
    def frame(self, model):
        specs = [s for s in bind(model).specs(None) if s.kind in ("trainable", "buffer")]
        return Frame.zeros(Layout(specs))

    def test_parts_of_a_batch_add_up_to_the_whole(self):
        model = build()
        places, labels = torch.randn(50, 8), torch.randint(0, 3, (50,))
        loss = nn.functional.cross_entropy

        loss(model(places), labels).backward()
        whole = {name: p.grad.clone() for name, p in model.named_parameters()}
        model.zero_grad()

        binding, frame = bind(model), self.frame(model)
        for start, stop in ((0, 20), (20, 40), (40, 50)):
            loss(model(places[start:stop]), labels[start:stop]).backward()
            binding.add(model, frame, (stop - start) / 50, start == 0)
        for place in frame.layout.places:
            expected = whole[place.spec.name].numpy()
            self.assertTrue(np.allclose(frame.array(place), expected, rtol=1e-5, atol=1e-7))
        self.assertTrue(all(p.grad is None for p in model.parameters()))

    def test_what_got_no_gradient_is_zero(self):
        model = WithNorm()
        binding, frame = bind(model), self.frame(model)
        model.head(torch.randn(4, 16)).sum().backward()
        for place in frame.layout.places:
            frame.array(place)[...] = 7
        binding.add(model, frame, 1.0, True)
        arrays = {place.spec.name: frame.array(place) for place in frame.layout.places}
        self.assertTrue((arrays["trunk.0.weight"] == 0).all())
        self.assertTrue((arrays["head.bias"] == 4).all())
        self.assertTrue((arrays["trunk.1.running_var"] == 1).all(), "a buffer has its value")

    def test_a_version_is_loaded_in_place(self):
        model, other = WithNorm(), WithNorm()
        with torch.no_grad():
            for tensor in other.state_dict().values():
                tensor.add_(3)
        specs = bind(model).specs(None)
        for encoding in ("f32", "bf16"):
            frame = Frame.zeros(Layout(specs))
            for place in frame.layout.places:
                frame.array(place)[...] = other.state_dict()[place.spec.name].numpy()
            if encoding == "bf16":
                frame = frame.narrowed(Layout(specs, "bf16"))
            same = model.head.weight
            bind(model).load(frame)
            self.assertIs(model.head.weight, same)
            for name, tensor in model.state_dict().items():
                expected = other.state_dict()[name]
                close = torch.allclose(tensor.float(), expected.float(), rtol=1e-2)
                exact = torch.equal(tensor, expected)
                self.assertTrue(close if encoding == "bf16" else exact, name)

    def test_a_parameter_may_be_brought_home_as_a_value(self):
        model = build()
        binding = bind(model)
        frame = Frame.zeros(Layout(binding.specs({"0.bias": "buffer:last"})))
        model(torch.randn(4, 8)).sum().backward()
        binding.add(model, frame, 1.0, True)
        arrays = {place.spec.name: frame.array(place) for place in frame.layout.places}
        self.assertTrue(np.array_equal(arrays["0.bias"], model[0].bias.detach().numpy()))

    def test_another_model_is_refused(self):
        model = build()
        with self.assertRaisesRegex(skep.Misuse, "another model"):
            bind(model).add(build(), self.frame(model), 1.0, True)


class Arrays(unittest.TestCase):
    def test_gradients_are_dicts_by_name(self):
        model = {"w": np.zeros((2, 2), np.float32), "fixed": np.arange(3)}
        binding = bind(model)
        specs = binding.specs(None)
        self.assertEqual([spec.kind for spec in specs], ["trainable", "frozen"])
        frame = Frame.zeros(Layout([spec for spec in specs if spec.kind == "trainable"]))
        binding.add({"w": np.ones((2, 2))}, frame, 0.25, True)
        binding.add({"w": np.ones((2, 2))}, frame, 0.75, False)
        self.assertTrue((frame.array(frame.layout.places[0]) == 1).all())
        for wrong, message in (
            ({"w": np.ones(3)}, "is \\(3,\\)"),
            ({"v": np.ones(3)}, "`v` is not"),
            ([1], "dict of arrays"),
        ):
            with self.assertRaisesRegex(skep.SkepError, message):
                binding.add(wrong, frame, 1.0, True)

    def test_what_cannot_be_trained_is_refused(self):
        with self.assertRaisesRegex(skep.Misuse, "a list cannot be trained"):
            bind([1, 2])
        with self.assertRaisesRegex(skep.Misuse, "`w` is float64"):
            bind({"w": np.zeros(2)}).specs({"w": "trainable"})


if __name__ == "__main__":
    unittest.main()
