//! Tensors that do not train but still differ from worker to worker, such as BatchNorm's running
//! statistics, and averages that trail the parameters, such as a target network.
//!
//! Contributions are merged in the order in which they are pushed. A caller that wants the same
//! bits every time pushes in slot order, never in order of arrival.

use serde::{Deserialize, Serialize};

use crate::error::{MathError, check_length};

/// How a buffer's values from several workers become one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum MergeRule {
    /// The mean, weighted by samples. Not for integers.
    #[default]
    Mean,
    /// The largest, value by value.
    Max,
    /// That of the last contribution in order.
    Last,
}

/// A merge of float buffers.
#[derive(Clone, Debug)]
pub struct FloatMerge {
    rule: MergeRule,
    /// In `f64`: a product of an `f32` and a sample count below 2^29 is then exact, and a maximum or
    /// a copy is exact anyway.
    values: Vec<f64>,
    samples: u64,
}

impl FloatMerge {
    /// A merge of buffers of this length.
    #[must_use]
    pub fn new(rule: MergeRule, length: usize) -> Self {
        Self { rule, values: vec![0.0; length], samples: 0 }
    }

    /// Takes one worker's values, which stand for this many samples. Without samples they say
    /// nothing and change nothing. The values have to be finite; see [`crate::all_finite`].
    ///
    /// # Errors
    /// When the length differs.
    pub fn push(&mut self, values: &[f32], samples: u64) -> Result<(), MathError> {
        check_length("a buffer to merge", self.values.len(), values.len())?;
        if samples == 0 {
            return Ok(());
        }
        let first = self.samples == 0;
        self.samples = self.samples.saturating_add(samples);
        let pairs = self.values.iter_mut().zip(values.iter().map(|&value| f64::from(value)));
        match self.rule {
            MergeRule::Mean => {
                let weight = samples as f64;
                pairs.for_each(|(sum, value)| *sum += weight * value);
            }
            MergeRule::Max if !first => pairs.for_each(|(most, value)| *most = most.max(value)),
            MergeRule::Max | MergeRule::Last => pairs.for_each(|(kept, value)| *kept = value),
        }
        Ok(())
    }

    /// The merged values.
    ///
    /// # Errors
    /// When nothing with samples was pushed.
    pub fn finish(self) -> Result<Vec<f32>, MathError> {
        if self.samples == 0 {
            return Err(MathError::NothingMerged);
        }
        let divisor = match self.rule {
            MergeRule::Mean => self.samples as f64,
            MergeRule::Max | MergeRule::Last => 1.0,
        };
        Ok(self.values.into_iter().map(|value| (value / divisor) as f32).collect())
    }
}

/// A merge of integer buffers, such as a count of batches.
#[derive(Clone, Debug)]
pub struct IntegerMerge {
    rule: MergeRule,
    length: usize,
    values: Option<Vec<i64>>,
}

impl IntegerMerge {
    /// A merge of buffers of this length.
    ///
    /// # Errors
    /// For [`MergeRule::Mean`], which would have to round.
    pub fn new(rule: MergeRule, length: usize) -> Result<Self, MathError> {
        match rule {
            MergeRule::Mean => Err(MathError::MeanOfIntegers),
            MergeRule::Max | MergeRule::Last => Ok(Self { rule, length, values: None }),
        }
    }

    /// Takes one worker's values. Without samples they change nothing.
    ///
    /// # Errors
    /// When the length differs.
    pub fn push(&mut self, values: &[i64], samples: u64) -> Result<(), MathError> {
        check_length("a buffer to merge", self.length, values.len())?;
        if samples == 0 {
            return Ok(());
        }
        match (&mut self.values, self.rule) {
            (Some(kept), MergeRule::Max) => {
                kept.iter_mut().zip(values).for_each(|(most, &value)| *most = value.max(*most));
            }
            (kept, _) => *kept = Some(values.to_vec()),
        }
        Ok(())
    }

    /// The merged values.
    ///
    /// # Errors
    /// When nothing with samples was pushed.
    pub fn finish(self) -> Result<Vec<i64>, MathError> {
        self.values.ok_or(MathError::NothingMerged)
    }
}

/// `into = average + tau * (value - average)`: an exponential moving average of parameters. A `tau`
/// of 0 leaves the average as it was, bit for bit.
///
/// # Panics
/// When the lengths differ.
pub fn ema(average: &[f32], value: &[f32], tau: f32, into: &mut [f32]) {
    assert_eq!(average.len(), value.len(), "an average is as long as what it follows");
    assert_eq!(average.len(), into.len(), "an average is as long as what it becomes");
    for ((into, &average), &value) in into.iter_mut().zip(average).zip(value) {
        *into = average + tau * (value - average);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn merged(rule: MergeRule, parts: &[(&[f32], u64)]) -> Result<Vec<f32>, MathError> {
        let mut merge = FloatMerge::new(rule, 2);
        for (values, samples) in parts {
            merge.push(values, *samples)?;
        }
        merge.finish()
    }

    #[test]
    fn floats_follow_their_rule() {
        let parts: [(&[f32], u64); 3] = [(&[-1.0, 4.0], 1), (&[-3.0, 8.0], 3), (&[9.0, 9.0], 0)];
        assert_eq!(merged(MergeRule::Mean, &parts).unwrap(), [-2.5, 7.0]);
        assert_eq!(merged(MergeRule::Max, &parts).unwrap(), [-1.0, 8.0]);
        assert_eq!(merged(MergeRule::Last, &parts).unwrap(), [-3.0, 8.0]);
    }

    #[test]
    fn integers_follow_their_rule_and_have_no_mean() {
        assert_eq!(IntegerMerge::new(MergeRule::Mean, 1).err(), Some(MathError::MeanOfIntegers));
        for (rule, expected) in [(MergeRule::Max, [-1, 8]), (MergeRule::Last, [-3, 8])] {
            let mut merge = IntegerMerge::new(rule, 2).unwrap();
            merge.push(&[-1, 4], 1).unwrap();
            merge.push(&[-3, 8], 2).unwrap();
            merge.push(&[99, 99], 0).unwrap();
            assert_eq!(merge.finish().unwrap(), expected);
        }
    }

    #[test]
    fn nothing_and_wrong_lengths_are_refused() {
        assert_eq!(merged(MergeRule::Mean, &[(&[1.0, 2.0], 0)]), Err(MathError::NothingMerged));
        assert!(matches!(merged(MergeRule::Max, &[(&[1.0], 1)]), Err(MathError::Length { .. })));
        let mut merge = IntegerMerge::new(MergeRule::Max, 2).unwrap();
        assert!(matches!(merge.push(&[1], 1), Err(MathError::Length { .. })));
        assert_eq!(merge.finish(), Err(MathError::NothingMerged));
    }

    #[test]
    fn a_mean_of_the_largest_values_does_not_overflow() {
        let large: [f32; 2] = [f32::MAX, f32::MIN];
        let mean = merged(MergeRule::Mean, &[(&large, u64::MAX / 2), (&large, u64::MAX / 2)]);
        assert!(crate::all_finite(&mean.unwrap()));
    }

    proptest! {
        #[test]
        fn a_mean_of_equals_is_exact(value in -1e30_f32..1e30, weights in prop::collection::vec(1_u64..1000, 1..20)) {
            let mut merge = FloatMerge::new(MergeRule::Mean, 1);
            for samples in weights {
                merge.push(&[value], samples).unwrap();
            }
            prop_assert_eq!(merge.finish().unwrap(), vec![value]);
        }

        #[test]
        fn an_average_moves_by_tau(average in -10.0_f32..10.0, value in -10.0_f32..10.0, tau in 0.0_f32..1.0) {
            let mut into = [f32::NAN];
            ema(&[average], &[value], tau, &mut into);
            let expected = (1.0 - f64::from(tau)) * f64::from(average) + f64::from(tau) * f64::from(value);
            prop_assert!((f64::from(into[0]) - expected).abs() < 1e-5);
            ema(&[average], &[value], 0.0, &mut into);
            prop_assert_eq!(into[0], average);
        }
    }
}
