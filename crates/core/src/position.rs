//! The order of samples: which sample stands at which position of an epoch.
//!
//! The algorithm, for every language:
//!
//! ```text
//! mix(x):        x ^= x >> 30;  x *= 0xbf58476d1ce4e5b9;
//!                x ^= x >> 27;  x *= 0x94d049bb133111eb;
//!                x ^= x >> 31                                      (all modulo 2^64)
//! key(seed, epoch, stream) = mix(mix(mix(seed + G) + epoch + G) + stream + G)
//!                with G = 0x9e3779b97f4a7c15
//! permute(i, n, key):
//!   b = the smallest number of bits, at least 1, with 2^(2b) >= n
//!   repeat
//!     l = i >> b;  r = i & (2^b - 1)
//!     for k in 0..6:  (l, r) = (r, l ^ (mix(key + k*G + r) & (2^b - 1)))
//!     i = (l << b) | r
//!   until i < n
//! ```
//!
//! The order of an epoch: shard `permute(j, shards, key(seed, epoch, 0))` stands at place `j`;
//! within shard `s` of `n` samples, sample `permute(i, n, key(seed, epoch, s + 1))` stands at
//! offset `i`. A six-round Feistel network with cycle walking: any position can be computed alone,
//! without holding the permutation.

const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

/// Spreads the bits of a number.
pub fn mix(mut x: u64) -> u64 {
    x ^= x >> 30;
    x = x.wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x ^= x >> 27;
    x = x.wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// The key of one stream of an epoch.
pub fn key(seed: u64, epoch: u64, stream: u64) -> u64 {
    let x = mix(seed.wrapping_add(GOLDEN));
    let x = mix(x.wrapping_add(epoch).wrapping_add(GOLDEN));
    mix(x.wrapping_add(stream).wrapping_add(GOLDEN))
}

/// Where `index` goes in a permutation of `0..count`.
///
/// # Panics
/// If `index` is not below `count`.
pub fn permute(index: u64, count: u64, key: u64) -> u64 {
    assert!(index < count, "a position must lie within its range");
    let bits = (64 - (count - 1).leading_zeros()).div_ceil(2).max(1);
    let mask = (1u64 << bits) - 1;
    let mut at = index;
    loop {
        let (mut left, mut right) = (at >> bits, at & mask);
        for round in 0..6u64 {
            let noise = mix(key.wrapping_add(round.wrapping_mul(GOLDEN)).wrapping_add(right));
            (left, right) = (right, left ^ (noise & mask));
        }
        at = (left << bits) | right;
        if at < count {
            return at;
        }
    }
}

/// The sample of a shard that stands at an offset of its order.
pub fn sample(seed: u64, epoch: u64, shard: u64, samples: u64, offset: u64) -> u64 {
    permute(offset, samples, key(seed, epoch, shard + 1))
}

/// The key of one sample's randomness (augmentation, dropout): by (seed, epoch, position).
pub fn noise(seed: u64, epoch: u64, position: u64) -> u64 {
    mix(key(seed, epoch, u64::MAX).wrapping_add(position.wrapping_mul(GOLDEN)))
}

/// The shards of an epoch in order, each with the position at which it starts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Order {
    places: Vec<Place>,
    /// For each shard: its index in `places`.
    of_shard: Vec<usize>,
    positions: u64,
}

/// One shard's stretch of an epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// The shard, by its place in the manifest.
    pub shard: usize,
    /// The first position.
    pub start: u64,
    /// One behind the last position.
    pub end: u64,
}

impl Order {
    /// The order of one epoch.
    pub fn new(seed: u64, epoch: u64, shards: &[u64]) -> Self {
        let count = shards.len() as u64;
        let order_key = key(seed, epoch, 0);
        let mut start = 0;
        let mut of_shard = vec![0; shards.len()];
        let places = (0..count)
            .map(|place| {
                let shard = permute(place, count, order_key) as usize;
                of_shard[shard] = place as usize;
                let end = start + shards[shard];
                let stretch = Place { shard, start, end };
                start = end;
                stretch
            })
            .collect();
        Self { places, of_shard, positions: start }
    }

    /// How many positions the epoch has.
    pub fn positions(&self) -> u64 {
        self.positions
    }

    /// The stretches in order.
    pub fn places(&self) -> &[Place] {
        &self.places
    }

    /// The stretch of a shard.
    pub fn stretch_of(&self, shard: usize) -> Option<Place> {
        self.of_shard.get(shard).map(|&at| self.places[at])
    }

    /// The stretch that holds a position.
    pub fn place_of(&self, position: u64) -> Option<Place> {
        let at = self.places.partition_point(|place| place.end <= position);
        self.places.get(at).copied()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Every client in every language must reproduce these. They were computed by
    /// `scripts/position_vectors.py`, which was written from the description above.
    #[test]
    fn test_vectors() {
        assert_eq!(
            [mix(0), mix(1), mix(u64::MAX)],
            [0, 0x5692_161d_100b_05e5, 0xb4d0_55fc_f2cb_bd7b]
        );
        assert_eq!(
            [key(0, 0, 0), key(1, 2, 3), key(u64::MAX, u64::MAX, u64::MAX)],
            [0x2382_75bc_38fc_be91, 0x6ae5_15c1_c0ac_7e37, 0x40aa_389b_a7cc_36a4]
        );
        for ((seed, epoch, shard, samples), expected) in ORDERS {
            let first = 0..expected.len() as u64;
            let order: Vec<_> =
                first.map(|offset| sample(seed, epoch, shard, samples, offset)).collect();
            assert_eq!(order, expected, "samples of {:?}", (seed, epoch, shard, samples));
        }
        let shards = |seed, epoch, count| -> Vec<_> {
            Order::new(seed, epoch, &vec![5; count]).places().iter().map(|it| it.shard).collect()
        };
        assert_eq!(shards(0, 1, 4), [3, 2, 0, 1]);
        assert_eq!(shards(3, 0, 7), [4, 1, 5, 0, 6, 3, 2]);
    }

    /// Seed, epoch, shard and its sample count.
    type Stretch = (u64, u64, u64, u64);

    /// The samples that come first.
    const ORDERS: [(Stretch, &[u64]); 8] = [
        ((0, 0, 0, 10), &[9, 5, 3, 7, 1, 0, 4, 2, 6, 8]),
        ((7, 3, 1, 10), &[9, 7, 8, 0, 3, 2, 1, 5, 6, 4]),
        ((0, 0, 0, 1), &[0]),
        ((0, 0, 0, 16), &[9, 12, 3, 10, 13, 11, 4, 2, 15, 8, 7, 0, 5, 14, 1, 6]),
        ((42, 1, 5, 17), &[16, 4, 14, 6, 10, 0, 5, 11, 8, 12, 13, 2, 1, 15, 7, 9, 3]),
        ((0, 0, 0, 60_000), &[21848, 46015, 38810, 7613, 59723]),
        ((1 << 63, 9, 11, 60_000), &[35284, 970, 57757, 3531, 20390]),
        (
            (1, 1, 1, (1 << 32) + 1),
            &[56_435_446, 4_253_622_392, 836_207_752, 3_822_321_780, 1_548_214_825],
        ),
    ];

    proptest! {
        #[test]
        fn every_sample_has_one_place(count in 1u64..3000, seed: u64, epoch in 0u64..100) {
            let mut seen = vec![false; count as usize];
            for index in 0..count {
                let at = sample(seed, epoch, 0, count, index) as usize;
                prop_assert!(!seen[at]);
                seen[at] = true;
            }
        }

        #[test]
        fn stretches_tile_the_epoch(shards in prop::collection::vec(1u64..50, 1..20), seed: u64) {
            let order = Order::new(seed, 0, &shards);
            let mut next = 0;
            for place in order.places() {
                prop_assert_eq!(place.start, next);
                prop_assert_eq!(place.end - place.start, shards[place.shard]);
                prop_assert_eq!(order.stretch_of(place.shard), Some(*place));
                for position in place.start..place.end {
                    prop_assert_eq!(order.place_of(position), Some(*place));
                }
                next = place.end;
            }
            prop_assert_eq!(order.place_of(next), None);
            prop_assert_eq!(order.stretch_of(shards.len()), None);
        }
    }
}
