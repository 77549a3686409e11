//! Rounds and slots: which positions make the next version under `sync` and `average`.
//!
//! A slot is `chunk` positions of one shard (fewer at a shard's end), a stretch of the order; a
//! round is the next S of them (fewer at the epoch's end), each of another shard where shards take
//! turns. Both follow from (seed, epoch, round) alone, so that the result does not depend on who
//! works, or how many. Where a round may close without some of its slots, those are late: they
//! belong to the next round too.

use crate::position::Order;

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
    /// The round of so many slots that holds a position.
    pub(crate) fn of(order: &Order, size: u64, position: u64) -> Option<Self> {
        let first_slot = order.place_of(position)?.slot / size * size;
        let start = order.place_of_slot(first_slot)?.start;
        let next = first_slot.checked_add(size).and_then(|slot| order.place_of_slot(slot));
        let (slots, end) = match next {
            Some(next) => (size, next.start),
            None => {
                let last = order.place_of(order.positions().checked_sub(1)?)?;
                (last.slot + 1 - first_slot, last.end)
            }
        };
        let window = (start, end);
        Some(Self { first_slot, slots, window, late: Vec::new(), reach: window })
    }

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
    use crate::position::Turns;

    proptest! {
        #[test]
        fn rounds_tile_the_epoch_and_slots_never_span_shards(
            shards in prop::collection::vec(1u64..40, 1..8), chunk in 1u64..12, size in 1u64..6,
        ) {
            let order = Order::new(1, 2, &shards, Turns { shards: size, chunk });
            let mut at = 0;
            let mut next_slot = 0;
            while at < order.positions() {
                let round = Round::of(&order, size, at).expect("inside the epoch");
                prop_assert_eq!((round.first_slot, round.window.0), (next_slot, at));
                prop_assert!(round.slots >= 1 && round.slots <= size);
                for position in round.window.0..round.window.1 {
                    prop_assert_eq!(Round::of(&order, size, position), Some(round.clone()));
                    let slot = order.place_of(position).expect("inside the epoch").slot;
                    prop_assert!((round.first_slot..round.first_slot + round.slots).contains(&slot));
                }
                next_slot += round.slots;
                at = round.window.1;
            }
        }
    }
}
