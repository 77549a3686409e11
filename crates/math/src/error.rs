//! What can be refused. Variants are named by what the caller got wrong, so that a hive can tell a
//! user's setting from a worker's contribution from a damaged checkpoint.

/// Everything this crate refuses to do.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MathError {
    /// A setting is outside its range, or makes no sense together with another one.
    #[error("optimiser setting `{field}` is {found}, but must be {allowed}")]
    Setting {
        /// The setting's path below the optimiser's table, such as `groups.head.rate`.
        field: String,
        /// The value that was given.
        found: String,
        /// What would have been accepted.
        allowed: String,
    },
    /// A buffer has another length than the work needs.
    #[error("{what} has {found} values, expected {expected}")]
    Length {
        /// Which buffer.
        what: String,
        /// How many values it should have.
        expected: usize,
        /// How many it has.
        found: usize,
    },
    /// A segment's ranges differ in length or overlap another segment's.
    #[error("segment {index}: {reason}")]
    Segment {
        /// Its place in the list of segments.
        index: usize,
        /// What is wrong with it.
        reason: String,
    },
    /// A slot that the round does not have.
    #[error("slot {slot} does not exist in a sum of {slots} slots")]
    NoSuchSlot {
        /// The slot that was pushed.
        slot: usize,
        /// How many there are.
        slots: usize,
    },
    /// A slot that is already part of the sum.
    #[error("slot {slot} is already in the sum")]
    SlotTwice {
        /// The slot that was pushed.
        slot: usize,
    },
    /// A sum was asked for before all of its slots had arrived.
    #[error("the sum has {arrived} of its {slots} slots")]
    Incomplete {
        /// How many slots were pushed.
        arrived: usize,
        /// How many there are.
        slots: usize,
    },
    /// Integers have no mean that is an integer.
    #[error("integer buffers can be merged by max or last, not by mean")]
    MeanOfIntegers,
    /// A merge without a single sample.
    #[error("nothing to merge: no contribution with at least one sample")]
    NothingMerged,
    /// A saved optimiser state lacks a buffer that these settings need.
    #[error("the optimiser state has no buffer `{name}`")]
    MissingBuffer {
        /// The buffer's name.
        name: String,
    },
    /// A saved optimiser state has a buffer that these settings do not use: it belongs to another
    /// optimiser, and continuing from it would not be a continuation.
    #[error("the optimiser state has a buffer `{name}` that these settings do not use")]
    UnknownBuffer {
        /// The buffer's name.
        name: String,
    },
    /// A saved optimiser state holds NaN or infinity.
    #[error("the optimiser state's buffer `{name}` is not finite")]
    BufferNotFinite {
        /// The buffer's name.
        name: String,
    },
}

impl MathError {
    pub(crate) fn setting(
        field: impl Into<String>,
        found: impl ToString,
        allowed: impl Into<String>,
    ) -> Self {
        Self::Setting { field: field.into(), found: found.to_string(), allowed: allowed.into() }
    }
}

/// Checks one buffer's length.
pub(crate) fn check_length(what: &str, expected: usize, found: usize) -> Result<(), MathError> {
    if expected == found {
        Ok(())
    } else {
        Err(MathError::Length { what: what.to_owned(), expected, found })
    }
}
