"""The order of samples: the vectors of docs/wire.md, which the Rust side has as well."""

import unittest

import numpy as np

from skep import position

FULL = 2**64 - 1


class Order(unittest.TestCase):
    def order(self, seed, epoch, shard, count, first):
        return position.samples(seed, epoch, shard, count, 0, first).tolist()

    def test_keys(self):
        self.assertEqual(position.key(0, 0, 0), 0x238275BC38FCBE91)
        self.assertEqual(position.key(1, 2, 3), 0x6AE515C1C0AC7E37)
        self.assertEqual(position.key(FULL, FULL, FULL), 0x40AA389BA7CC36A4)

    def test_samples(self):
        self.assertEqual(self.order(0, 0, 0, 10, 10), [9, 5, 3, 7, 1, 0, 4, 2, 6, 8])
        self.assertEqual(self.order(7, 3, 1, 10, 10), [9, 7, 8, 0, 3, 2, 1, 5, 6, 4])
        self.assertEqual(self.order(0, 0, 0, 1, 1), [0])
        self.assertEqual(
            self.order(0, 0, 0, 16, 16), [9, 12, 3, 10, 13, 11, 4, 2, 15, 8, 7, 0, 5, 14, 1, 6]
        )
        self.assertEqual(
            self.order(42, 1, 5, 17, 17),
            [16, 4, 14, 6, 10, 0, 5, 11, 8, 12, 13, 2, 1, 15, 7, 9, 3],
        )
        self.assertEqual(self.order(0, 0, 0, 60_000, 5), [21848, 46015, 38810, 7613, 59723])
        self.assertEqual(self.order(2**63, 9, 11, 60_000, 5), [35284, 970, 57757, 3531, 20390])
        self.assertEqual(
            self.order(1, 1, 1, 2**32 + 1, 5),
            [56435446, 4253622392, 836207752, 3822321780, 1548214825],
        )

    def test_every_order_is_a_permutation(self):
        for count in (1, 2, 3, 5, 64, 65, 1000, 4097):
            order = position.samples(5, 6, 7, count, 0, count)
            self.assertTrue(np.array_equal(np.sort(order), np.arange(count)), count)

    def test_a_part_of_an_order_is_that_part(self):
        whole = position.samples(3, 1, 4, 1000, 0, 1000)
        self.assertTrue(np.array_equal(position.samples(3, 1, 4, 1000, 123, 45), whole[123:168]))


if __name__ == "__main__":
    unittest.main()
