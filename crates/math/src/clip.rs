//! Clipping by norm, as PyTorch's `clip_grad_norm_` does it, and the norm itself.

/// Independent accumulators: enough to fill vector registers without asking the compiler to
/// reorder floating-point additions, which it must not.
const LANES: usize = 8;

/// Values whose lanes are added up before the next ones begin.
const BLOCK: usize = 1024;

/// Keeps a gradient of norm 0 from dividing by zero; PyTorch's own constant.
const EPSILON: f64 = 1e-6;

/// The sum of squares of a stream of values, in `f64` and in an order that depends only on each
/// value's place in the stream, not on how the stream was cut into slices.
#[derive(Default)]
pub(crate) struct NormSum {
    total: f64,
    lanes: [f64; LANES],
    /// Values in the present block.
    filled: usize,
}

impl NormSum {
    /// Adds the squares of `values * scale`.
    pub(crate) fn push(&mut self, values: &[f32], scale: f32) {
        let mut rest = values;
        while !rest.is_empty() {
            let (now, later) = rest.split_at(rest.len().min(BLOCK - self.filled));
            self.push_within_block(now, scale);
            rest = later;
        }
    }

    fn push_within_block(&mut self, values: &[f32], scale: f32) {
        let square = |value: f32| {
            let scaled = f64::from(value * scale);
            scaled * scaled
        };
        let lane = self.filled % LANES;
        let (head, aligned) = values.split_at(values.len().min((LANES - lane) % LANES));
        for (sum, &value) in self.lanes[lane..].iter_mut().zip(head) {
            *sum += square(value);
        }
        let mut lanes = self.lanes;
        let (groups, tail) = aligned.as_chunks::<LANES>();
        for group in groups {
            for (sum, &value) in lanes.iter_mut().zip(group) {
                *sum += square(value);
            }
        }
        for (sum, &value) in lanes.iter_mut().zip(tail) {
            *sum += square(value);
        }
        self.lanes = lanes;
        self.filled += values.len();
        if self.filled == BLOCK {
            self.total += lanes.iter().sum::<f64>();
            self.lanes = [0.0; LANES];
            self.filled = 0;
        }
    }

    /// The sum of all squares.
    pub(crate) fn finish(self) -> f64 {
        self.total + self.lanes.iter().sum::<f64>()
    }
}

/// What a gradient of this norm is multiplied by so that it is no longer than `limit`; 1 for one
/// that is short enough.
pub(crate) fn coefficient(norm: f64, limit: f64) -> f64 {
    (limit / (norm + EPSILON)).min(1.0)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn short_gradients_are_left_alone() {
        assert_eq!(coefficient(0.5, 1.0), 1.0);
        assert_eq!(coefficient(0.0, 1e-3), 1.0);
        assert!((coefficient(4.0, 1.0) - 1.0 / 4.000_001).abs() < 1e-15);
    }

    proptest! {
        #[test]
        fn the_cuts_of_a_stream_do_not_matter(
            values in prop::collection::vec(-100.0_f32..100.0, 0..3000),
            cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..20),
            scale in 0.1_f32..10.0,
        ) {
            let mut whole = NormSum::default();
            whole.push(&values, scale);
            let whole = whole.finish();

            let mut cuts: Vec<usize> = cuts.iter().map(|cut| cut.index(values.len() + 1)).collect();
            cuts.extend([0, values.len()]);
            cuts.sort_unstable();
            let mut pieces = NormSum::default();
            for pair in cuts.windows(2) {
                pieces.push(&values[pair[0]..pair[1]], scale);
            }
            prop_assert_eq!(whole.to_bits(), pieces.finish().to_bits());

            let plain: f64 = values.iter().map(|&value| f64::from(value * scale).powi(2)).sum();
            prop_assert!((whole - plain).abs() <= 1e-12 * plain);
        }
    }
}
