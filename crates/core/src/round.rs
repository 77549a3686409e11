//! Rounds and slots: which positions make the next version under `sync` and `average`.
//!
//! A slot is `chunk` positions of one shard (fewer at a shard's end); a round is the next S slots
//! in the order of the epoch (fewer at the epoch's end). Both follow from (seed, epoch, round)
//! alone, so that the result does not depend on who works, or how many. Where a round may close
//! without some of its slots, those are late: they belong to the next round too.

use crate::position::Order;

/// The slots of one epoch.
#[derive(Clone, Debug)]
pub(crate) struct Slots {
    /// For each stretch of the order: its first slot.
    firsts: Vec<u64>,
    count: u64,
    chunk: u64,
}

impl Slots {
    pub(crate) fn new(order: &Order, chunk: u64) -> Self {
        let mut count = 0;
        let firsts = order
            .places()
            .iter()
            .map(|place| {
                let first = count;
                count += (place.end - place.start).div_ceil(chunk);
                first
            })
            .collect();
        Self { firsts, count, chunk }
    }

    /// The slot that a position belongs to.
    pub(crate) fn of(&self, order: &Order, position: u64) -> Option<u64> {
        let at = order.places().partition_point(|place| place.end <= position);
        let place = order.places().get(at)?;
        Some(self.firsts[at] + (position - place.start) / self.chunk)
    }

    /// The first position of a slot; the end of the epoch for one behind the last.
    pub(crate) fn start(&self, order: &Order, slot: u64) -> u64 {
        if slot >= self.count {
            return order.positions();
        }
        let at = self.firsts.partition_point(|&first| first <= slot) - 1;
        order.places()[at].start + (slot - self.firsts[at]) * self.chunk
    }

    /// The slots and positions of the round that holds a position.
    pub(crate) fn round(&self, order: &Order, size: u64, position: u64) -> Option<Round> {
        let first_slot = self.of(order, position)? / size * size;
        let end_slot = first_slot.saturating_add(size).min(self.count);
        let window = (self.start(order, first_slot), self.start(order, end_slot));
        let slots = end_slot - first_slot;
        Some(Round { first_slot, slots, window, late: Vec::new(), reach: window })
    }

    /// The positions of a slot.
    pub(crate) fn range(&self, order: &Order, slot: u64) -> (u64, u64) {
        (self.start(order, slot), self.start(order, slot + 1))
    }
}

/// The slots and positions of one round.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Round {
    pub(crate) first_slot: u64,
    pub(crate) slots: u64,
    pub(crate) window: (u64, u64),
    /// Slots of rounds before, in order, that had not come home when those were closed.
    pub(crate) late: Vec<u64>,
    /// From the first late position to the window's end: whatever is open in there is the round's.
    pub(crate) reach: (u64, u64),
}

impl Round {
    /// The same round with late slots, the first of which starts at a position.
    pub(crate) fn with_late(mut self, late: Vec<u64>, start: u64) -> Self {
        if !late.is_empty() {
            self.reach.0 = start;
            self.late = late;
        }
        self
    }

    /// A slot's place among all of the round's: late ones come first.
    pub(crate) fn place_of(&self, slot: u64) -> Option<u64> {
        let late = self.late.len() as u64;
        match self.late.binary_search(&slot) {
            Ok(at) => Some(at as u64),
            Err(_) => {
                slot.checked_sub(self.first_slot).filter(|at| *at < self.slots).map(|at| late + at)
            }
        }
    }

    /// How many places it has.
    pub(crate) fn places(&self) -> u64 {
        self.late.len() as u64 + self.slots
    }

    /// All of its slots.
    pub(crate) fn all(&self) -> impl Iterator<Item = u64> {
        self.late.iter().copied().chain(self.first_slot..self.first_slot + self.slots)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn rounds_tile_the_epoch_and_slots_never_span_shards(
            shards in prop::collection::vec(1u64..40, 1..8), chunk in 1u64..12, size in 1u64..6,
        ) {
            let order = Order::new(1, 2, &shards);
            let slots = Slots::new(&order, chunk);
            let mut at = 0;
            let mut next_slot = 0;
            while at < order.positions() {
                let round = slots.round(&order, size, at).expect("inside the epoch");
                prop_assert_eq!((round.first_slot, round.window.0), (next_slot, at));
                prop_assert!(round.slots >= 1 && round.slots <= size);
                for position in round.window.0..round.window.1 {
                    prop_assert_eq!(slots.round(&order, size, position), Some(round.clone()));
                    let slot = slots.of(&order, position).expect("inside the epoch");
                    prop_assert!((round.first_slot..round.first_slot + round.slots).contains(&slot));
                    let place = order.place_of(slots.start(&order, slot));
                    prop_assert_eq!(place, order.place_of(position));
                }
                next_slot += round.slots;
                at = round.window.1;
            }
        }
    }
}
