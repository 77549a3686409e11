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
//!
//! Where a version is made of slots and shards may differ, as many shards as a round has slots take
//! turns, a slot of each: so a round draws on several shards, which matters if each has labels of
//! its own, and a worker can stay with one. Leases name the shard and the offset within it, so no worker needs to
//! know of turns.

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

/// How shards take turns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Turns {
    /// So many shards, in order, take turns until they are through; then the next.
    pub shards: u64,
    /// How many samples a shard gives in a turn.
    pub chunk: u64,
}

impl Turns {
    /// One shard after the other.
    pub const NONE: Self = Self { shards: 1, chunk: u64::MAX };
}

/// Which samples stand at which positions of an epoch. What it holds grows with the number of
/// shards, never with that of samples.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Order {
    groups: Vec<Group>,
    /// For each shard: its group, and its place in it.
    of_shard: Vec<(usize, usize)>,
    chunk: u64,
    positions: u64,
}

/// Shards that take turns.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Group {
    /// The first position.
    start: u64,
    /// The first slot.
    first_slot: u64,
    /// Each with its samples, in the order of their turns.
    shards: Vec<(usize, u64)>,
    /// How many turns the longest shard has.
    turns: u64,
    /// In how many of them all shards give a whole chunk: there a place is worked out at once.
    whole: u64,
}

/// One turn of one shard: a stretch of positions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// The shard, by its place in the manifest.
    pub shard: usize,
    /// The first position.
    pub start: u64,
    /// One behind the last position.
    pub end: u64,
    /// How many samples of the shard come before.
    pub offset: u64,
    /// Its number among all of the epoch's stretches.
    pub slot: u64,
}

impl Group {
    /// The stretch of a shard, by its place in the group, in a turn in which all give a whole chunk.
    fn whole_place(&self, turn: u64, at: usize, chunk: u64) -> Place {
        let before = turn * self.shards.len() as u64 + at as u64;
        let start = self.start + before * chunk;
        Place {
            shard: self.shards[at].0,
            start,
            end: start + chunk,
            offset: turn * chunk,
            slot: self.first_slot + before,
        }
    }

    /// The same by how many stretches of the group come before it, if it is such a turn.
    fn nth_whole(&self, before: u64, chunk: u64) -> Option<Place> {
        let count = self.shards.len() as u64;
        let turn = before / count;
        (turn < self.whole).then(|| self.whole_place(turn, (before % count) as usize, chunk))
    }

    /// How many positions lie before a turn.
    fn before(&self, turn: u64, chunk: u64) -> u64 {
        let reach = turn.saturating_mul(chunk);
        self.shards.iter().map(|&(_, samples)| samples.min(reach)).sum()
    }

    /// How many slots lie before a turn.
    fn slots_before(&self, turn: u64, chunk: u64) -> u64 {
        self.shards.iter().map(|&(_, samples)| samples.div_ceil(chunk).min(turn)).sum()
    }

    /// The last turn that what is looked for has reached.
    fn last_turn(&self, is_reached: impl Fn(u64) -> bool) -> u64 {
        let (mut from, mut until) = (0, self.turns);
        while until - from > 1 {
            let middle = from + (until - from) / 2;
            if is_reached(middle) { from = middle } else { until = middle }
        }
        from
    }

    fn turn_of(&self, position: u64, chunk: u64) -> u64 {
        let turn = (position - self.start) / chunk / self.shards.len() as u64;
        if turn < self.whole {
            return turn;
        }
        self.last_turn(|turn| self.start + self.before(turn, chunk) <= position)
    }

    /// The stretches of one turn.
    fn turn(&self, turn: u64, chunk: u64) -> impl Iterator<Item = Place> {
        let offset = turn.saturating_mul(chunk);
        let mut start = self.start + self.before(turn, chunk);
        let mut slot = self.first_slot + self.slots_before(turn, chunk);
        let takes_part = self.shards.iter().filter(move |&&(_, samples)| samples > offset);
        takes_part.map(move |&(shard, samples)| {
            let end = start + (samples - offset).min(chunk);
            let place = Place { shard, start, end, offset, slot };
            (start, slot) = (end, slot + 1);
            place
        })
    }
}

impl Order {
    /// The order of one epoch.
    pub fn new(seed: u64, epoch: u64, shards: &[u64], turns: Turns) -> Self {
        let (count, chunk) = (shards.len() as u64, turns.chunk.max(1));
        let order_key = key(seed, epoch, 0);
        let order: Vec<_> = (0..count).map(|at| permute(at, count, order_key) as usize).collect();
        let (mut start, mut first_slot) = (0, 0);
        let mut of_shard = vec![(0, 0); shards.len()];
        let together = turns.shards.clamp(1, count.max(1)) as usize;
        let groups = order
            .chunks(together)
            .enumerate()
            .map(|(at, members)| {
                let members: Vec<_> = members.iter().map(|&it| (it, shards[it])).collect();
                let turns = members.iter().map(|&(_, samples)| samples.div_ceil(chunk)).max();
                let whole = members.iter().map(|&(_, samples)| samples / chunk).min();
                for (place, &(shard, _)) in members.iter().enumerate() {
                    of_shard[shard] = (at, place);
                }
                let (turns, whole) = (turns.unwrap_or_default(), whole.unwrap_or_default());
                let group = Group { start, first_slot, shards: members, turns, whole };
                start += group.before(turns, chunk);
                first_slot += group.slots_before(turns, chunk);
                group
            })
            .collect();
        Self { groups, of_shard, chunk, positions: start }
    }

    /// How many positions the epoch has.
    pub fn positions(&self) -> u64 {
        self.positions
    }

    /// The stretches of a shard that reach into a window.
    pub fn places_of(&self, shard: usize, window: (u64, u64)) -> impl Iterator<Item = Place> {
        let group = self.of_shard.get(shard).map(|&(at, place)| (&self.groups[at], place));
        let found = group.and_then(|(group, at)| {
            let end = group.start + group.before(group.turns, self.chunk);
            let (from, until) = (window.0.max(group.start), window.1.min(end));
            let turn_of = |position| group.turn_of(position, self.chunk);
            (from < until).then(|| (group, at, turn_of(from)..=turn_of(until - 1)))
        });
        let places = found.into_iter().flat_map(move |(group, at, turns)| {
            turns.filter_map(move |turn| match turn < group.whole {
                true => Some(group.whole_place(turn, at, self.chunk)),
                false => group.turn(turn, self.chunk).find(|place| place.shard == shard),
            })
        });
        places.filter(move |place| place.start < window.1 && place.end > window.0)
    }

    /// The stretch that holds a position.
    pub fn place_of(&self, position: u64) -> Option<Place> {
        if position >= self.positions {
            return None;
        }
        let group = self.group(|group| group.start <= position)?;
        let before = (position - group.start) / self.chunk;
        if let Some(place) = group.nth_whole(before, self.chunk) {
            return Some(place);
        }
        let turn = group.turn_of(position, self.chunk);
        group.turn(turn, self.chunk).find(|place| position < place.end)
    }

    /// The stretch that has a number.
    pub fn place_of_slot(&self, slot: u64) -> Option<Place> {
        let group = self.group(|group| group.first_slot <= slot)?;
        if let Some(place) = group.nth_whole(slot - group.first_slot, self.chunk) {
            return Some(place);
        }
        let before = |turn| group.first_slot + group.slots_before(turn, self.chunk);
        let turn = group.last_turn(|turn| before(turn) <= slot);
        group.turn(turn, self.chunk).find(|place| place.slot == slot)
    }

    /// The last group that begins early enough.
    fn group(&self, begins: impl Fn(&Group) -> bool) -> Option<&Group> {
        self.groups[..self.groups.partition_point(begins)].last()
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
            let order = Order::new(seed, epoch, &vec![5; count], Turns::NONE);
            (0..count as u64).filter_map(|at| Some(order.place_of(at * 5)?.shard)).collect()
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
        fn stretches_tile_the_epoch_and_every_shard(
            shards in prop::collection::vec(1u64..50, 1..20),
            seed: u64,
            together in 1u64..9,
            chunk in prop::sample::select(vec![1, 3, 7, 50, u64::MAX]),
        ) {
            let order = Order::new(seed, 0, &shards, Turns { shards: together, chunk });
            let (mut next, mut slot) = (0, 0);
            let mut given = vec![0; shards.len()];
            let mut all = Vec::new();
            while let Some(place) = order.place_of(next) {
                prop_assert_eq!((place.start, place.slot), (next, slot));
                prop_assert_eq!(place.offset, given[place.shard], "a shard goes on where it was");
                given[place.shard] += place.end - place.start;
                let rest = shards[place.shard] - given[place.shard];
                prop_assert!(place.end - place.start == chunk || rest == 0);
                prop_assert_eq!(order.place_of_slot(slot), Some(place));
                for position in place.start..place.end {
                    prop_assert_eq!(order.place_of(position), Some(place));
                }
                all.push(place);
                (next, slot) = (place.end, slot + 1);
            }
            prop_assert_eq!(next, order.positions());
            prop_assert_eq!(&given, &shards);
            prop_assert_eq!(order.place_of_slot(slot), None);
            let window = (next / 4, next - next / 3);
            for shard in 0..=shards.len() {
                let inside = |place: &&Place| place.start < window.1 && place.end > window.0;
                let expected = all.iter().filter(|place| place.shard == shard).filter(inside);
                let found: Vec<_> = order.places_of(shard, window).collect();
                prop_assert_eq!(found, expected.copied().collect::<Vec<_>>());
            }
        }

        /// A round of as many slots as shards take turns has each of them, while they last.
        #[test]
        fn shards_take_turns(together in 1u64..9, groups in 1u64..4, turns in 1u64..5) {
            let shards = vec![turns * 3; (together * groups) as usize];
            let order = Order::new(1, 2, &shards, Turns { shards: together, chunk: 3 });
            for round in 0..groups * turns {
                let slots = round * together..(round + 1) * together;
                let seen = slots.filter_map(|slot| Some(order.place_of_slot(slot)?.shard));
                let seen: std::collections::BTreeSet<_> = seen.collect();
                prop_assert_eq!(seen.len() as u64, together);
            }
        }
    }

    /// Nobody can check how many samples a shard that is only named has.
    #[test]
    fn what_is_worked_out_takes_no_memory() {
        let shards = [u64::MAX / 4, 5, u64::MAX / 4];
        let order = Order::new(0, 0, &shards, Turns { shards: 3, chunk: 1 });
        let last = order.place_of(order.positions() - 1).expect("the last position");
        assert_eq!(last.end, order.positions());
        assert_eq!(order.place_of_slot(last.slot), Some(last));
    }
}
