//! Rounds and epochs: which is under way, when it is over, and what comes next.

use crate::evaluation::EvaluationSplit;
use crate::ledger::Ledger;
use crate::round::Round;
use crate::run::{Notice, Run, Status};
use crate::{Limit, Millis};

impl Run {
    /// When the round may close without those that are missing.
    pub(crate) fn grace_over(&self) -> Option<Millis> {
        Some(self.quorum_at?.saturating_add(self.plan.policy.rounds()?.grace))
    }

    /// Notes when so many slots have come that the round may close. The last round of an epoch
    /// waits for all: what came later would have no round to enter.
    pub(crate) fn note_quorum(&mut self) {
        let (Some(rounds), Some(round)) = (self.plan.policy.rounds(), &self.round) else { return };
        let last = round.window.1 == self.ledger.order().positions();
        if rounds.may_miss() == 0 || last || self.quorum_at.is_some() || self.pending.is_empty() {
            return;
        }
        let missing = self.open_slots(round).count() - self.pending.len();
        if missing as u64 <= rounds.may_miss() {
            self.quorum_at = Some(self.clock);
        }
    }

    /// The slots of a round that are neither applied nor skipped.
    pub(crate) fn open_slots(&self, round: &Round) -> impl Iterator<Item = u64> {
        let is_open = |slot: u64| {
            let place = self.ledger.order().place_of_slot(slot);
            place.is_some_and(|place| self.ledger.open_in((place.start, place.end)) > 0)
        };
        round.all().filter(move |&slot| is_open(slot))
    }

    /// Finds the round under way: that of a position, or the first with something open.
    pub(crate) fn begin_round(&mut self, position: Option<u64>) {
        let Some(rounds) = self.plan.policy.rounds() else { return };
        let order = self.ledger.order();
        let position = position.or_else(|| self.ledger.first_open());
        let round = position.and_then(|at| Round::of(order, rounds.slots, at));
        self.round = round.map(|round| {
            let before = Round {
                first_slot: 0,
                slots: round.first_slot,
                window: (0, round.window.0),
                late: Vec::new(),
                reach: (0, round.window.0),
            };
            self.carry(&before, round)
        });
    }

    pub(crate) fn next_round(&mut self) {
        let (Some(rounds), Some(round)) = (self.plan.policy.rounds(), self.round.take()) else {
            return;
        };
        let next = Round::of(self.ledger.order(), rounds.slots, round.window.1);
        self.round = next.map(|next| self.carry(&round, next));
    }

    /// What is still open of a round that is over belongs to the next.
    pub(crate) fn carry(&self, from: &Round, to: Round) -> Round {
        if self.ledger.open_in(from.reach) == 0 {
            return to;
        }
        let late: Vec<_> = self.open_slots(from).collect();
        let first = late.first().and_then(|&slot| self.ledger.order().place_of_slot(slot));
        to.with_late(late, first.map_or(0, |place| place.start))
    }

    /// Moves on where nothing is left to do: rounds that were skipped whole, epochs, the run.
    pub(crate) fn settle(&mut self) {
        while self.round.as_ref().is_some_and(|round| self.ledger.open_in(round.reach) == 0) {
            self.next_round();
        }
        self.note_quorum();
        if !matches!(self.status, Status::Running | Status::Paused)
            || self.ledger.open() > 0
            || !self.pending.is_empty()
        {
            return;
        }
        let ended = self.ledger.epoch();
        if !self.ledger.any_applied() {
            let reason = self.ledger.skipped().last().map_or("", |gap| gap.reason.as_str());
            let reason =
                format!("no slice of epoch {} counted; the last failed with: {reason}", ended + 1);
            self.fail_run(&reason);
            return;
        }
        self.notices.push(Notice::EpochEnded(ended));
        if matches!(self.plan.limit, Limit::Epochs(epochs) if ended + 1 >= epochs) {
            self.complete("");
            return;
        }
        self.former_gaps.extend(self.ledger.skipped().cloned());
        self.ledger = Ledger::new(&self.plan, ended + 1);
        self.begin_round(None);
        if self.plan.evaluate_every.is_none() {
            self.measure(EvaluationSplit::Validation);
        }
    }
}
