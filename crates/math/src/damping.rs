//! How much less a gradient counts that was taken on older parameters.

/// `1 / (1 + staleness)^exponent`: exactly 1 for a fresh gradient or an exponent of 0, so that
/// damping that is off leaves every bit as it was.
#[must_use]
pub fn damping(staleness: u64, exponent: f64) -> f64 {
    if staleness == 0 || exponent == 0.0 {
        return 1.0;
    }
    (1.0 + staleness as f64).powf(-exponent)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn follows_the_formula() {
        assert!((damping(1, 1.0) - 0.5).abs() < 1e-15);
        assert!((damping(3, 0.5) - 0.5).abs() < 1e-15);
        assert!((damping(9, 2.0) - 0.01).abs() < 1e-15);
    }

    proptest! {
        #[test]
        fn off_or_fresh_is_exactly_one(staleness in any::<u64>(), exponent in 0.0_f64..4.0) {
            prop_assert_eq!(damping(staleness, 0.0).to_bits(), 1.0_f64.to_bits());
            prop_assert_eq!(damping(0, exponent).to_bits(), 1.0_f64.to_bits());
        }

        #[test]
        fn older_counts_less(staleness in 0_u64..1000, exponent in 0.01_f64..4.0) {
            prop_assert!(damping(staleness + 1, exponent) < damping(staleness, exponent));
            prop_assert!(damping(staleness + 1, exponent) > 0.0);
        }
    }
}
