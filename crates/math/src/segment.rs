//! Where the trainable tensors lie in the flat buffers.
//!
//! A model has hundreds of small tensors, most of them neighbours with the same settings. Joining
//! neighbours makes the loops long; everything else sees only the joined runs.

use std::ops::Range;

use crate::error::MathError;

/// One trainable tensor's place in the flat parameter buffer and in the flat gradient buffer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Its values in the parameter buffer.
    pub parameter: Range<usize>,
    /// Its values in the gradient buffer; as many.
    pub gradient: Range<usize>,
    /// The group whose settings it follows.
    pub group: String,
}

/// Neighbouring segments with equal settings, as one.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Run<T> {
    pub(crate) parameter: Range<usize>,
    pub(crate) gradient: Range<usize>,
    /// Where the optimiser's own state begins: state has the trainable values only, in the order of
    /// the segments.
    pub(crate) state: usize,
    pub(crate) settings: T,
}

/// Checks segments and joins neighbours whose settings are equal.
pub(crate) fn join<T: PartialEq>(
    segments: &[Segment],
    settings: impl Fn(&str) -> T,
) -> Result<Vec<Run<T>>, MathError> {
    for (index, Segment { parameter, gradient, .. }) in segments.iter().enumerate() {
        if parameter.start > parameter.end || gradient.start > gradient.end {
            let reason = "a range ends before it begins".to_owned();
            return Err(MathError::Segment { index, reason });
        }
        if parameter.len() != gradient.len() {
            let (parameters, gradients) = (parameter.len(), gradient.len());
            let reason = format!("{parameters} parameters, but {gradients} gradient values");
            return Err(MathError::Segment { index, reason });
        }
    }
    refuse_overlap(segments, "parameters", |segment| &segment.parameter)?;
    refuse_overlap(segments, "gradients", |segment| &segment.gradient)?;

    let mut runs: Vec<Run<T>> = Vec::new();
    let mut state = 0;
    for Segment { parameter, gradient, group } in segments {
        if parameter.is_empty() {
            continue;
        }
        let settings = settings(group);
        match runs.last_mut() {
            Some(last)
                if last.settings == settings
                    && last.parameter.end == parameter.start
                    && last.gradient.end == gradient.start =>
            {
                last.parameter.end = parameter.end;
                last.gradient.end = gradient.end;
            }
            _ => runs.push(Run {
                parameter: parameter.clone(),
                gradient: gradient.clone(),
                state,
                settings,
            }),
        }
        state += parameter.len();
    }
    Ok(runs)
}

/// A value that two segments share would be stepped twice.
fn refuse_overlap(
    segments: &[Segment],
    what: &str,
    range: impl Fn(&Segment) -> &Range<usize>,
) -> Result<(), MathError> {
    let mut order: Vec<usize> =
        (0..segments.len()).filter(|&index| !range(&segments[index]).is_empty()).collect();
    order.sort_unstable_by_key(|&index| range(&segments[index]).start);
    for pair in order.windows(2) {
        if range(&segments[pair[0]]).end > range(&segments[pair[1]]).start {
            let reason = format!("its {what} overlap those of segment {}", pair[0]);
            return Err(MathError::Segment { index: pair[1], reason });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn segment(parameter: Range<usize>, gradient: Range<usize>, group: &str) -> Segment {
        Segment { parameter, gradient, group: group.to_owned() }
    }

    fn joined(segments: &[Segment]) -> Vec<Run<String>> {
        join(segments, str::to_owned).unwrap()
    }

    #[test]
    fn neighbours_of_one_group_become_one_run() {
        let runs = joined(&[
            segment(2..5, 0..3, "body"),
            segment(5..5, 3..3, "head"),
            segment(5..9, 3..7, "body"),
            segment(9..10, 7..8, "head"),
            segment(12..13, 8..9, "head"),
            segment(13..14, 10..11, "head"),
        ]);
        let places: Vec<_> = runs
            .iter()
            .map(|run| (run.parameter.clone(), run.gradient.clone(), run.state))
            .collect();
        assert_eq!(
            places,
            [(2..9, 0..7, 0), (9..10, 7..8, 7), (12..13, 8..9, 8), (13..14, 10..11, 9)]
        );
        assert_eq!(runs[1].settings, "head");
    }

    #[test]
    fn unequal_or_overlapping_ranges_are_refused() {
        let refused = |segments: &[Segment], bad: usize| {
            let error = join(segments, str::to_owned).unwrap_err();
            assert!(matches!(error, MathError::Segment { index, .. } if index == bad), "{error}");
        };
        refused(&[segment(0..3, 0..2, "")], 0);
        #[allow(clippy::reversed_empty_ranges, reason = "it is what has to be refused")]
        refused(&[segment(3..0, 3..0, "")], 0);
        refused(&[segment(0..3, 0..3, ""), segment(2..4, 3..5, "")], 1);
        refused(&[segment(4..6, 1..3, ""), segment(0..2, 0..2, "")], 0);
    }
}
