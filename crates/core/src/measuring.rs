//! Evaluations: when a version is measured, and what came of it.

use crate::Millis;
use crate::evaluation::{Counts, Evaluation, EvaluationSplit};
use crate::run::{Accepted, Contribution, Notice, Outcome, Refusal, Run, Status};

impl Run {
    /// Takes the counts of an evaluation slice.
    pub fn count(
        &mut self,
        now: Millis,
        contribution: Contribution,
        counts: Counts,
    ) -> Result<Accepted, Refusal> {
        self.expire(now);
        if contribution.generation != self.generation {
            return Err(Refusal::OtherGeneration);
        }
        if self.outcome(contribution.lease, contribution.sequence).is_some() {
            return Ok(Accepted::Repeat);
        }
        let gone = Refusal::Gone("the lease lapsed, was given back or was overtaken");
        let lease = self.leases.get(&contribution.lease).filter(|lease| !lease.trains());
        let lease = lease.ok_or(gone.clone())?;
        let whole = contribution.first == lease.cursor
            && contribution.count == lease.end - lease.cursor
            && contribution.base == lease.base
            && contribution.sequence == 0;
        if !whole {
            return Err(Refusal::WrongRange(
                "an evaluation brings home its whole slice, on exactly its base version".to_owned(),
            ));
        }
        if counts.correct.is_some_and(|correct| correct > contribution.count) {
            return Err(Refusal::WrongRange("more correct answers than samples".to_owned()));
        }
        // Whoever else counts the slice is overtaken.
        self.leases.retain(|_, other| other.trains() || other.cursor != contribution.first);
        self.remember(contribution.lease, 0, Outcome::Accepted);
        let evaluation = self.evaluation.as_mut().ok_or(gone)?;
        evaluation.counted(contribution.first, counts);
        if let Some(measured) = evaluation.measured() {
            self.evaluation = None;
            self.notices.push(Notice::Measured(measured));
            self.next_measurement();
        }
        Ok(Accepted::New { slot: 0, slots: None, staleness: 0 })
    }

    pub(crate) fn queue_measurements(&mut self) {
        self.evaluation_queue.clear();
        self.evaluation_queue.push_back(EvaluationSplit::Validation);
        self.evaluation_queue.push_back(EvaluationSplit::Test);
        self.next_measurement();
    }

    /// Starts to measure the version now, unless one is under way.
    pub(crate) fn measure(&mut self, split: EvaluationSplit) {
        let shards = match split {
            EvaluationSplit::Validation => &self.plan.validation,
            EvaluationSplit::Test => &self.plan.test,
        };
        if shards.is_empty() || self.evaluation.is_some() {
            return;
        }
        self.evaluation = Some(Evaluation::new(self.number, split, shards));
        self.notices.push(Notice::MeasuringStarted { number: self.number, split });
    }

    /// Drops the evaluation under way with its leases: a count for it must not land in the next.
    pub(crate) fn give_up_measuring(&mut self) {
        let Some(evaluation) = self.evaluation.take() else { return };
        self.leases.retain(|_, lease| lease.trains());
        let (number, split) = (evaluation.number, evaluation.split);
        self.notices.push(Notice::MeasuringFailed { number, split });
    }

    pub(crate) fn next_measurement(&mut self) {
        while self.evaluation.is_none() {
            let Some(split) = self.evaluation_queue.pop_front() else {
                if self.status == Status::Measuring {
                    let reason = self.reason.clone();
                    self.set_status(Status::Done, &reason);
                }
                return;
            };
            self.measure(split);
        }
    }
}
