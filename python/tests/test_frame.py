"""Frames are safetensors files, to the byte."""

import unittest

import numpy as np
from safetensors.numpy import load, save

from skep.errors import SkepError
from skep.frame import Frame, Layout, Spec, narrow, widen

TRAINED = {"role": "trainable", "group": "default"}


def spec(name, dtype, *shape):
    return Spec(name, dtype, shape, TRAINED)


SPECS = [
    spec("b.weight", "F32", 2, 3),
    spec("counter", "I64"),
    spec("a.bias", "F32", 5),
    spec("flags", "U8", 3),
    spec("grüße", "F32", 2),
]


class Frames(unittest.TestCase):
    def filled(self):
        frame = Frame.zeros(Layout(SPECS))
        for at, place in enumerate(frame.layout.places):
            frame.array(place)[...] = at + 1
        return frame

    def test_the_file_is_what_safetensors_itself_would_write(self):
        frame = self.filled()
        arrays = {place.spec.name: frame.array(place) for place in frame.layout.places}
        theirs = save({name: np.array(array) for name, array in arrays.items()})
        self.assertEqual(bytes(theirs), bytes(frame.buffer))
        for name, array in load(bytes(frame.buffer)).items():
            self.assertTrue(np.array_equal(array, arrays[name]), name)

    def test_tensors_are_aligned(self):
        frame = self.filled()
        for place in frame.layout.places:
            if place.dtype != "U8":
                self.assertEqual(frame.offset(place) % frame.array(place).itemsize, 0)

    def test_another_file_is_refused(self):
        layout = Layout(SPECS)
        data = bytes(self.filled().buffer)
        Frame.read(layout, data)
        for broken in (data[:-1], data + b"x", b"", data[:20] + b"!" + data[21:]):
            with self.assertRaises(SkepError):
                Frame.read(layout, broken)

    def test_what_is_not_finite_is_named(self):
        frame = self.filled()
        self.assertIsNone(frame.unfinite())
        for value in (np.nan, np.inf, -np.inf):
            for place in frame.layout.places:
                if place.dtype != "F32":
                    continue
                frame = self.filled()
                frame.array(place).flat[-1] = value
                self.assertEqual(frame.unfinite(), place.spec.name)

    def test_large_values_are_finite(self):
        frame = self.filled()
        for place in frame.layout.places:
            if place.dtype == "F32":
                frame.array(place)[...] = 3e38
        self.assertIsNone(frame.unfinite())

    def test_halves_round_to_the_nearest_even(self):
        bits = np.array([0x3F800000, 0x3F808000, 0x3F818000, 0x3F808001], dtype=np.uint32)
        self.assertEqual(narrow(bits.view(np.float32)).tolist(), [0x3F80, 0x3F80, 0x3F82, 0x3F81])
        exact = np.array([0.0, 1.0, -2.5, 1e30, -0.0], dtype=np.float32)
        near = widen(narrow(exact))
        self.assertTrue(np.allclose(near, exact, rtol=2**-8))

    def test_a_narrow_frame_is_half_as_large(self):
        frame = self.filled()
        small = frame.narrowed(Layout(SPECS, "bf16"))
        for place in small.layout.places:
            array = small.array(place)
            wide = widen(array) if place.dtype == "BF16" else array
            self.assertEqual(wide.shape, place.spec.shape)
        names = [place.spec.name for place in small.layout.places]
        self.assertEqual(names, ["counter", "a.bias", "b.weight", "grüße", "flags"])


if __name__ == "__main__":
    unittest.main()
