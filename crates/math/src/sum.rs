//! Sums whose bits do not depend on who came first.
//!
//! Floating-point addition is not associative, so "add them as they arrive" gives another result
//! every time. [`TreeSum`] fixes the order of additions by slot index alone and still adds as early
//! as it can, so that a round does not have to keep all of its contributions in memory.

use std::collections::{BTreeMap, BTreeSet};

use crate::error::{MathError, check_length};

/// `into += other`, value by value.
///
/// # Panics
/// When the lengths differ.
pub fn add(into: &mut [f32], other: &[f32]) {
    assert_eq!(into.len(), other.len(), "only buffers of one length can be added");
    for (sum, value) in into.iter_mut().zip(other) {
        *sum += value;
    }
}

/// Adds `other * factor` to `into`, element by element, in one pass.
///
/// # Panics
/// When the lengths differ.
pub fn add_scaled(into: &mut [f32], other: &[f32], factor: f32) {
    assert_eq!(into.len(), other.len(), "both have one value per parameter");
    for (sum, value) in into.iter_mut().zip(other) {
        *sum += value * factor;
    }
}

/// `values *= factor`.
pub fn scale(values: &mut [f32], factor: f32) {
    for value in values {
        *value *= factor;
    }
}

/// The sum of one vector per slot, in a fixed binary tree over the slot index.
///
/// The tree: level 0 has the slots in order. Node `i` of the next level is node `2i` plus node
/// `2i + 1` of the level below; where `2i + 1` does not exist (the odd one at the end), node `2i` is
/// carried up unchanged. This goes on, level by level, until one node is left. Five slots give
/// `((0 + 1) + (2 + 3)) + 4`.
///
/// Slots may be pushed in any order. Siblings are added as soon as both are there, so in-order
/// arrival holds at most about `log2(slots)` vectors at a time.
#[derive(Clone, Debug)]
pub struct TreeSum {
    slots: usize,
    /// What has arrived. Only that takes memory: how many slots there are is a claim from outside.
    seen: BTreeSet<usize>,
    /// Nodes that wait for their sibling, by (level, index); at the end only the root.
    waiting: BTreeMap<(u32, usize), Vec<f32>>,
    /// Every slot's length, known from the first one on.
    length: Option<usize>,
}

impl TreeSum {
    /// An empty sum that needs the slots `0..slots`.
    #[must_use]
    pub fn new(slots: usize) -> Self {
        Self { slots, seen: BTreeSet::new(), waiting: BTreeMap::new(), length: None }
    }

    /// Takes one slot's vector.
    ///
    /// # Errors
    /// When the slot does not exist, is already there, or has another length than the first one;
    /// the sum is then as it was before.
    pub fn push(&mut self, slot: usize, values: Vec<f32>) -> Result<(), MathError> {
        if slot >= self.slots {
            return Err(MathError::NoSuchSlot { slot, slots: self.slots });
        }
        if self.seen.contains(&slot) {
            return Err(MathError::SlotTwice { slot });
        }
        check_length("a slot", *self.length.get_or_insert(values.len()), values.len())?;
        self.seen.insert(slot);

        let mut node = values;
        let mut index = slot;
        let mut level = 0;
        let mut width = self.slots;
        while width > 1 {
            let sibling = index ^ 1;
            if sibling < width {
                match self.waiting.remove(&(level, sibling)) {
                    // The addition of two floats commutes bit for bit, so either side may be the
                    // one that is added into.
                    Some(other) => add(&mut node, &other),
                    None => break,
                }
            }
            index /= 2;
            level += 1;
            width = width.div_ceil(2);
        }
        self.waiting.insert((level, index), node);
        Ok(())
    }

    /// Whether every slot has arrived.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        self.slots > 0 && self.seen.len() == self.slots
    }

    /// How many slots have arrived.
    #[must_use]
    pub fn arrived(&self) -> usize {
        self.seen.len()
    }

    /// How many vectors are held in memory now.
    #[must_use]
    pub fn held(&self) -> usize {
        self.waiting.len()
    }

    /// The sum.
    ///
    /// # Errors
    /// When a slot is missing, or there are none.
    pub fn finish(mut self) -> Result<Vec<f32>, MathError> {
        let incomplete = MathError::Incomplete { arrived: self.seen.len(), slots: self.slots };
        if !self.is_complete() {
            return Err(incomplete);
        }
        self.waiting.pop_first().map(|(_, root)| root).ok_or(incomplete)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The documented tree, evaluated from the top: the left child covers the largest power of two
    /// of slots that is smaller than all of them, which is what "level by level, the odd one carried
    /// up" comes to.
    fn direct(slots: &[Vec<f32>]) -> Vec<f32> {
        if slots.len() == 1 {
            return slots[0].clone();
        }
        let left = slots.len().next_power_of_two() / 2;
        let (left, right) = (direct(&slots[..left]), direct(&slots[left..]));
        left.iter().zip(&right).map(|(a, b)| a + b).collect()
    }

    fn bits(values: &[f32]) -> Vec<u32> {
        values.iter().map(|value| value.to_bits()).collect()
    }

    fn slots_and_order() -> impl Strategy<Value = (Vec<Vec<f32>>, Vec<usize>)> {
        (1_usize..40, 0_usize..5).prop_flat_map(|(slots, length)| {
            (
                prop::collection::vec(prop::collection::vec(-1e3_f32..1e3, length), slots),
                Just((0..slots).collect::<Vec<_>>()).prop_shuffle(),
            )
        })
    }

    proptest! {
        #[test]
        fn any_arrival_order_gives_the_same_bits((slots, order) in slots_and_order()) {
            let mut sum = TreeSum::new(slots.len());
            for &slot in &order {
                prop_assert!(!sum.is_complete());
                sum.push(slot, slots[slot].clone()).unwrap();
            }
            prop_assert!(sum.is_complete());
            prop_assert_eq!(bits(&sum.finish().unwrap()), bits(&direct(&slots)));
        }

        #[test]
        fn refused_slots_change_nothing((slots, order) in slots_and_order()) {
            let mut sum = TreeSum::new(slots.len());
            for &slot in &order {
                sum.push(slot, slots[slot].clone()).unwrap();
                let again = sum.push(slot, slots[slot].clone());
                prop_assert_eq!(again, Err(MathError::SlotTwice { slot }));
            }
            let beyond = sum.push(slots.len(), slots[0].clone());
            prop_assert_eq!(beyond, Err(MathError::NoSuchSlot { slot: slots.len(), slots: slots.len() }));
            prop_assert_eq!(bits(&sum.finish().unwrap()), bits(&direct(&slots)));
        }

        #[test]
        fn in_order_arrival_holds_few_vectors(slots in 1_usize..2000) {
            let mut sum = TreeSum::new(slots);
            let mut most = 0;
            for slot in 0..slots {
                sum.push(slot, vec![1.0]).unwrap();
                most = most.max(sum.held());
            }
            prop_assert!(most <= slots.ilog2() as usize + 1, "{} slots held {}", slots, most);
            prop_assert_eq!(sum.finish().unwrap(), vec![slots as f32]);
        }
    }

    #[test]
    fn five_slots_are_added_as_documented() {
        // Chosen so that every other order of additions rounds differently.
        let slots = [1.0, 2_f32.powi(-24), 2_f32.powi(-24), 2_f32.powi(-25), -1.0];
        let mut sum = TreeSum::new(5);
        for slot in [4, 2, 0, 3, 1] {
            sum.push(slot, vec![slots[slot]]).unwrap();
        }
        let expected = ((slots[0] + slots[1]) + (slots[2] + slots[3])) + slots[4];
        assert_eq!(sum.finish().unwrap(), [expected]);
        let in_a_row: f32 = slots.iter().sum();
        assert_ne!(in_a_row, expected);
    }

    #[test]
    fn a_sum_with_gaps_or_of_nothing_is_refused() {
        let mut sum = TreeSum::new(2);
        sum.push(1, vec![1.0]).unwrap();
        assert_eq!(sum.finish(), Err(MathError::Incomplete { arrived: 1, slots: 2 }));
        assert!(!TreeSum::new(0).is_complete());
        assert_eq!(TreeSum::new(0).finish(), Err(MathError::Incomplete { arrived: 0, slots: 0 }));
    }

    #[test]
    fn another_length_is_refused_and_may_be_pushed_again() {
        let mut sum = TreeSum::new(2);
        sum.push(0, vec![1.0, 2.0]).unwrap();
        assert!(matches!(
            sum.push(1, vec![1.0]),
            Err(MathError::Length { expected: 2, found: 1, .. })
        ));
        sum.push(1, vec![3.0, 4.0]).unwrap();
        assert_eq!(sum.finish().unwrap(), [4.0, 6.0]);
    }

    #[test]
    fn scaling_and_adding_work_value_by_value() {
        let mut values = vec![1.0, -2.0, 0.5];
        scale(&mut values, 2.0);
        add(&mut values, &[1.0, 1.0, 1.0]);
        assert_eq!(values, [3.0, -3.0, 2.0]);
    }
}
