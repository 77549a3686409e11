//! Leased evaluations: which slices of a held-out split of a pinned version are still to be
//! counted. So the hive reports accuracy without ever running a model.

use std::collections::BTreeSet;
use std::ops::Range;

/// Which samples are measured on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EvaluationSplit {
    /// While training.
    Validation,
    /// At the end.
    Test,
}

/// What a worker counted over a slice.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Counts {
    /// Sum of the losses of the samples.
    pub loss_sum: f64,
    /// How many were answered correctly, where the task has a notion of that.
    pub correct: Option<u64>,
}

/// A version that was measured.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Measured {
    /// Its number.
    pub number: u64,
    /// On which samples.
    pub split: EvaluationSplit,
    /// How many.
    pub samples: u64,
    /// Mean loss.
    pub loss: f64,
    /// Share answered correctly.
    pub accuracy: Option<f64>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Slice {
    Open { failures: u32 },
    Leased { failures: u32 },
    Counted(Counts),
}

/// About how many slices an evaluation has at most, beside one for the end of each shard.
const MOST_SLICES: u64 = 65_536;

/// One evaluation under way.
#[derive(Clone, Debug)]
pub(crate) struct Evaluation {
    pub(crate) number: u64,
    pub(crate) split: EvaluationSplit,
    /// Shard, offset in the shard, positions (counted through all shards), and what became of it.
    slices: Vec<(usize, u64, Range<u64>, Slice)>,
}

impl Evaluation {
    pub(crate) fn new(number: u64, split: EvaluationSplit, shards: &[u64]) -> Self {
        let total: u64 = shards.iter().sum();
        // Enough slices that many workers can share them, large enough to be worth a round trip,
        // and never so many that a count which someone only claims costs memory.
        let size = (total / 16).clamp(64, (total / MOST_SLICES).max(1024));
        let mut slices = Vec::new();
        let mut position = 0;
        for (shard, &samples) in shards.iter().enumerate() {
            let mut offset = 0;
            while offset < samples {
                let count = size.min(samples - offset);
                slices.push((
                    shard,
                    offset,
                    position..position + count,
                    Slice::Open { failures: 0 },
                ));
                offset += count;
                position += count;
            }
        }
        Self { number, split, slices }
    }

    /// Takes a slice of a shard that can be read: its shard, offset and positions.
    pub(crate) fn take(
        &mut self,
        only: Option<&BTreeSet<usize>>,
    ) -> Option<(usize, u64, Range<u64>)> {
        let slice = self.slices.iter_mut().find(|(shard, .., state)| {
            matches!(state, Slice::Open { .. }) && only.is_none_or(|only| only.contains(shard))
        })?;
        if let Slice::Open { failures } = slice.3 {
            slice.3 = Slice::Leased { failures };
        }
        Some((slice.0, slice.1, slice.2.clone()))
    }

    /// Whether some slice waits for someone to take it.
    pub(crate) fn is_open(&self) -> bool {
        self.slices.iter().any(|(.., state)| matches!(state, Slice::Open { .. }))
    }

    fn state_of(&mut self, first: u64) -> Option<&mut Slice> {
        let at = self.slices.binary_search_by_key(&first, |slice| slice.2.start).ok()?;
        Some(&mut self.slices[at].3)
    }

    /// Gives a slice back; whether it failed too often now.
    pub(crate) fn release(&mut self, first: u64, failed: bool, attempts: u32) -> bool {
        match self.state_of(first) {
            Some(state) => match *state {
                Slice::Leased { failures } => {
                    let failures = failures + u32::from(failed);
                    *state = Slice::Open { failures };
                    failures >= attempts
                }
                _ => false,
            },
            None => false,
        }
    }

    pub(crate) fn counted(&mut self, first: u64, counts: Counts) {
        if let Some(state) = self.state_of(first) {
            *state = Slice::Counted(counts);
        }
    }

    /// The result, once every slice is counted. Sums run in the order of slices, not of arrival.
    pub(crate) fn measured(&self) -> Option<Measured> {
        let mut samples = 0;
        let mut loss = 0.0;
        let mut correct = Some(0u64);
        for (_, _, range, state) in &self.slices {
            let Slice::Counted(counts) = state else { return None };
            samples += range.end - range.start;
            loss += counts.loss_sum;
            correct = correct.zip(counts.correct).map(|(sum, more)| sum + more);
        }
        let share = |count: u64| count as f64 / samples as f64;
        Some(Measured {
            number: self.number,
            split: self.split,
            samples,
            loss: loss / samples as f64,
            accuracy: correct.map(share),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_sample_is_counted_once() {
        let mut evaluation = Evaluation::new(7, EvaluationSplit::Test, &[100, 30]);
        let mut taken = Vec::new();
        while let Some((_, _, range)) = evaluation.take(None) {
            taken.push(range);
        }
        assert_eq!(taken, [0..64, 64..100, 100..130]);
        assert!(evaluation.measured().is_none());
        for range in taken {
            let count = range.end - range.start;
            evaluation.counted(
                range.start,
                Counts { loss_sum: count as f64 * 0.5, correct: Some(count / 2) },
            );
        }
        let measured = evaluation.measured().expect("all counted");
        assert_eq!((measured.samples, measured.loss, measured.accuracy), (130, 0.5, Some(0.5)));
    }

    #[test]
    fn a_slice_goes_to_who_can_read_it() {
        let mut evaluation = Evaluation::new(0, EvaluationSplit::Test, &[10, 10]);
        assert_eq!(evaluation.take(Some(&[].into())), None);
        assert_eq!(evaluation.take(Some(&[1].into())), Some((1, 0, 10..20)));
        assert_eq!(evaluation.take(Some(&[1].into())), None);
        assert!(evaluation.is_open());
        assert_eq!(evaluation.take(None), Some((0, 0, 0..10)));
        assert!(!evaluation.is_open());
    }

    #[test]
    fn what_is_claimed_costs_no_memory() {
        let evaluation = Evaluation::new(0, EvaluationSplit::Test, &[1 << 40, 5, 1 << 40]);
        assert!((65_000..66_000).contains(&evaluation.slices.len()));
    }

    #[test]
    fn a_slice_that_is_given_back_is_given_out_again_until_it_fails_too_often() {
        let mut evaluation = Evaluation::new(0, EvaluationSplit::Validation, &[10]);
        for attempt in 1..=3 {
            assert_eq!(evaluation.take(None), Some((0, 0, 0..10)));
            assert_eq!(evaluation.take(None), None);
            assert_eq!(evaluation.release(0, true, 3), attempt == 3);
        }
    }
}
