//! Failures in a row: what tells a run that has diverged from one with a few bad slices.
//!
//! After the parameters have become useless every slice fails, each with its own five attempts;
//! a bad slice among good ones fails alone. So what is counted is how many *different* slices
//! failed, one after the other, with nothing accepted in between.

/// So many slices in a row are no accident.
pub(crate) const TOO_MANY: u64 = 20;

/// Slices in a row that failed at their first attempt.
#[derive(Clone, Debug, Default)]
pub(crate) struct Streak {
    failed: u64,
    /// What the contributions that are pending have interrupted. If the version they lead to is
    /// refused, they have interrupted nothing.
    interrupted: u64,
}

impl Streak {
    /// A slice failed for the first time.
    pub(crate) fn failed(&mut self) {
        self.failed += 1;
    }

    /// A contribution counts, for now.
    pub(crate) fn accepted(&mut self) {
        self.interrupted += std::mem::take(&mut self.failed);
    }

    /// What was accepted is in a version.
    pub(crate) fn stepped(&mut self) {
        self.interrupted = 0;
    }

    /// What was accepted led to nothing.
    pub(crate) fn refused(&mut self) {
        self.failed += std::mem::take(&mut self.interrupted);
    }

    pub(crate) fn is_too_long(&self) -> bool {
        self.failed >= TOO_MANY
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_accepted_for_good_ends_a_streak() {
        let mut streak = Streak::default();
        let fail = |streak: &mut Streak, times| (0..times).for_each(|_| streak.failed());
        fail(&mut streak, 19);
        streak.accepted();
        fail(&mut streak, 19);
        assert!(!streak.is_too_long());
        streak.stepped();
        streak.accepted();
        streak.refused();
        assert!(!streak.is_too_long(), "what a version interrupted is over");
        streak.failed();
        assert!(streak.is_too_long());
    }
}
