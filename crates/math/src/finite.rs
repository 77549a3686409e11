//! Is there a NaN or an infinity in here? Asked of every contribution and of every version that one
//! would make, so it has to run at the speed of memory.

/// All exponent bits set: exactly the NaNs and the two infinities.
const EXPONENT: u32 = 0x7f80_0000;

/// Long enough for vector loops, short enough that a bad buffer is found early.
const CHUNK: usize = 4096;

/// Whether no value is NaN or infinite.
///
/// Within a chunk there is no branch, only an OR over an integer comparison, which vectorises; a
/// floating-point reduction would not.
#[must_use]
pub fn all_finite(values: &[f32]) -> bool {
    values.chunks(CHUNK).all(|chunk| {
        let bad = chunk
            .iter()
            .fold(0_u32, |bad, value| bad | u32::from(value.to_bits() & EXPONENT == EXPONENT));
        bad == 0
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn knows_every_kind_of_value() {
        for finite in [0.0, -0.0, 1.0, f32::MAX, f32::MIN, f32::MIN_POSITIVE, f32::from_bits(1)] {
            assert!(all_finite(&[finite]), "{finite}");
        }
        for bad in [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            assert!(!all_finite(&[bad]), "{bad}");
        }
        assert!(all_finite(&[]));
    }

    proptest! {
        #[test]
        fn agrees_with_the_standard_library_on_any_bits(
            bits in prop::collection::vec(prop_oneof![
                20 => any::<u32>(),
                1 => (any::<bool>(), 0_u32..3).prop_map(|(sign, low)| EXPONENT | low | u32::from(sign) << 31),
            ], 0..40),
        ) {
            let values: Vec<f32> = bits.into_iter().map(f32::from_bits).collect();
            prop_assert_eq!(all_finite(&values), values.iter().all(|value| value.is_finite()));
        }

        #[test]
        fn finds_one_bad_value_anywhere(length in 1_usize..10_000, place in any::<prop::sample::Index>()) {
            let mut values = vec![1.0_f32; length];
            prop_assert!(all_finite(&values));
            values[place.index(length)] = f32::NAN;
            prop_assert!(!all_finite(&values));
        }
    }
}
