//! How the learning rate changes over a run: a factor on every group's rate, a function of the step
//! count alone, so that a run that continues from a checkpoint continues its schedule too.

use serde::{Deserialize, Serialize};

use crate::error::MathError;

/// A factor on the learning rate over the steps of a run.
///
/// Every kind may begin with a linear warm-up: step `s < warm_up` (counted from 0) has the factor
/// `(s + 1) / warm_up`. The kind's own shape begins when the warm-up has ended.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "lowercase", deny_unknown_fields)]
pub enum Schedule {
    /// Always 1.
    Constant {
        /// Steps of linear warm-up.
        #[serde(default)]
        warm_up: u64,
    },
    /// Multiplied by `factor` once every `every` steps, like PyTorch's `StepLR`.
    Step {
        /// Steps between two changes.
        every: u64,
        /// What the rate is multiplied by.
        #[serde(default = "tenth")]
        factor: f64,
        /// Steps of linear warm-up.
        #[serde(default)]
        warm_up: u64,
    },
    /// Half a cosine from 1 down to `floor`, where it stays, like PyTorch's `CosineAnnealingLR` up
    /// to its end (PyTorch's goes up again after that).
    Cosine {
        /// The step at which the floor is reached, warm-up included; without it, the run's end.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        steps: Option<u64>,
        /// The factor at the end.
        #[serde(default)]
        floor: f64,
        /// Steps of linear warm-up.
        #[serde(default)]
        warm_up: u64,
    },
}

fn tenth() -> f64 {
    0.1
}

impl Default for Schedule {
    fn default() -> Self {
        Self::Constant { warm_up: 0 }
    }
}

impl Schedule {
    /// The factor for a step, counted from 0, of a run of `total` steps.
    ///
    /// A cosine that has neither `steps` nor a `total` stays at 1; an [`crate::Optimiser`] refuses
    /// that combination.
    #[must_use]
    pub fn factor(&self, step: u64, total: Option<u64>) -> f64 {
        let (Self::Constant { warm_up }
        | Self::Step { warm_up, .. }
        | Self::Cosine { warm_up, .. }) = *self;
        if step < warm_up {
            return (step as f64 + 1.0) / warm_up as f64;
        }
        let step = step - warm_up;
        match *self {
            Self::Constant { .. } => 1.0,
            Self::Step { every, factor, .. } => power(factor, step / every.max(1)),
            Self::Cosine { steps, floor, .. } => {
                let Some(end) = steps.or(total) else { return 1.0 };
                let length = end.saturating_sub(warm_up);
                if step >= length {
                    return floor;
                }
                let progress = step as f64 / length as f64;
                floor + (1.0 - floor) * (1.0 + (std::f64::consts::PI * progress).cos()) / 2.0
            }
        }
    }

    /// Says which field is outside its range.
    pub(crate) fn validate(&self) -> Result<(), MathError> {
        match *self {
            Self::Constant { .. } => Ok(()),
            Self::Step { every: 0, .. } => {
                Err(MathError::setting("schedule.every", 0, "at least 1 step"))
            }
            Self::Step { factor, .. } if !(factor > 0.0 && factor <= 1.0) => {
                Err(MathError::setting("schedule.factor", factor, "greater than 0 and at most 1"))
            }
            Self::Step { .. } => Ok(()),
            Self::Cosine { floor, .. } if !(0.0..=1.0).contains(&floor) => {
                Err(MathError::setting("schedule.floor", floor, "from 0 to 1"))
            }
            Self::Cosine { steps: Some(steps), warm_up, .. } if steps <= warm_up => {
                Err(MathError::setting(
                    "schedule.steps",
                    steps,
                    format!("more than the {warm_up} steps of warm-up, which it includes"),
                ))
            }
            Self::Cosine { .. } => Ok(()),
        }
    }

    /// Whether this schedule makes sense only when the run's length is known.
    pub(crate) fn needs_total(&self) -> bool {
        matches!(self, Self::Cosine { steps: None, .. })
    }
}

/// `base^exponent` by multiplications alone. The C library's `pow` may differ in the last bit from
/// one build of a hive to another; this cannot.
pub(crate) fn power(base: f64, exponent: u64) -> f64 {
    let (mut result, mut square, mut rest) = (1.0, base, exponent);
    while rest > 0 {
        if rest & 1 == 1 {
            result *= square;
        }
        square *= square;
        rest >>= 1;
    }
    result
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn read(json: &str) -> Result<Schedule, serde_json::Error> {
        serde_json::from_str(json)
    }

    #[test]
    fn is_written_by_kind() {
        assert_eq!(read(r#"{"kind":"constant"}"#).unwrap(), Schedule::default());
        assert_eq!(
            read(r#"{"kind":"cosine","warm_up":100}"#).unwrap(),
            Schedule::Cosine { steps: None, floor: 0.0, warm_up: 100 }
        );
        assert_eq!(
            read(r#"{"kind":"step","every":5,"factor":1}"#).unwrap(),
            Schedule::Step { every: 5, factor: 1.0, warm_up: 0 }
        );
        assert!(read(r#"{"kind":"cosine","warmup":100}"#).is_err());
        assert!(read(r#"{"kind":"constant","floor":0.5}"#).is_err());
        assert!(read(r#"{"kind":"linear"}"#).is_err());
    }

    #[test]
    fn warms_up_to_the_full_rate_and_then_begins() {
        let step = Schedule::Step { every: 2, factor: 0.5, warm_up: 4 };
        let factors: Vec<f64> = (0..9).map(|at| step.factor(at, None)).collect();
        assert_eq!(factors, [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 0.5, 0.5, 0.25]);
    }

    #[test]
    fn a_cosine_ends_at_its_floor_and_stays_there() {
        let cosine = Schedule::Cosine { steps: None, floor: 0.2, warm_up: 0 };
        assert_eq!(cosine.factor(0, Some(10)), 1.0);
        assert!((cosine.factor(5, Some(10)) - 0.6).abs() < 1e-15);
        assert_eq!(cosine.factor(10, Some(10)), 0.2);
        assert_eq!(cosine.factor(u64::MAX, Some(10)), 0.2);
        let own_length = Schedule::Cosine { steps: Some(4), floor: 0.2, warm_up: 0 };
        assert_eq!(own_length.factor(4, Some(10)), 0.2);
    }

    #[test]
    fn refuses_what_makes_no_sense() {
        for bad in [
            Schedule::Step { every: 0, factor: 0.5, warm_up: 0 },
            Schedule::Step { every: 1, factor: 0.0, warm_up: 0 },
            Schedule::Step { every: 1, factor: f64::NAN, warm_up: 0 },
            Schedule::Cosine { steps: None, floor: 1.5, warm_up: 0 },
            Schedule::Cosine { steps: None, floor: f64::NAN, warm_up: 0 },
            Schedule::Cosine { steps: Some(3), floor: 0.0, warm_up: 3 },
        ] {
            assert!(matches!(bad.validate(), Err(MathError::Setting { .. })), "{bad:?}");
        }
        assert_eq!(Schedule::default().validate(), Ok(()));
        assert_eq!(Schedule::Cosine { steps: Some(4), floor: 1.0, warm_up: 3 }.validate(), Ok(()));
    }

    proptest! {
        #[test]
        fn factors_stay_between_zero_and_one(step in any::<u64>(), total in any::<Option<u64>>(), warm_up in 0_u64..100, floor in 0.0_f64..=1.0, every in 1_u64..100) {
            for schedule in [
                Schedule::Constant { warm_up },
                Schedule::Step { every, factor: 0.5, warm_up },
                Schedule::Cosine { steps: None, floor, warm_up },
            ] {
                let factor = schedule.factor(step, total);
                prop_assert!((0.0..=1.0).contains(&factor), "{:?}: {}", schedule, factor);
            }
        }

        #[test]
        fn powers_are_powers(base in 0.0_f64..1.0, exponent in 0_u64..5000) {
            let expected = base.powf(exponent as f64);
            prop_assert!((power(base, exponent) - expected).abs() <= 1e-11 * expected.max(1e-200));
        }
    }
}
