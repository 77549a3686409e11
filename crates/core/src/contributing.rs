//! Contributions: which of them count, and when they make a version.

use std::ops::Range;

use crate::evaluation::EvaluationSplit;
use crate::lease::Ending;
use crate::round::Round;
use crate::run::{Accepted, Contribution, Member, Outcome, Refusal, Run, Status, Step};
use crate::{Limit, Millis, Policy};

/// How many contributions are remembered, so that a repeated push gets its first outcome.
const RECEIPTS: usize = 65_536;

impl Run {
    /// Checks a contribution and, if it counts, makes its positions pending.
    pub fn contribute(
        &mut self,
        now: Millis,
        contribution: Contribution,
    ) -> Result<Accepted, Refusal> {
        self.expire(now);
        if contribution.generation != self.generation {
            return Err(Refusal::OtherGeneration);
        }
        let Contribution { lease: id, sequence, first, count, base, .. } = contribution;
        if self.outcome(id, sequence).is_some() {
            return Ok(Accepted::Repeat);
        }
        let chunk = self.plan.chunk;
        let whole = self.plan.one_chunk_leases();
        let progress_time = self.progress_time();
        self.takes_work()?;
        let number = self.number;
        let Some(lease) = self.leases.get_mut(&id).filter(|lease| lease.trains()) else {
            return Err(Refusal::Gone("the lease lapsed, was given back or was overtaken"));
        };
        if sequence != lease.next_sequence || first != lease.cursor {
            return Err(Refusal::WrongRange(format!(
                "sequence {sequence} at position {first}; the lease stands at sequence {} and \
                 position {}",
                lease.next_sequence, lease.cursor
            )));
        }
        let most = chunk.min(lease.end - lease.cursor);
        if count == 0 || count > most || (whole && count != most) {
            return Err(Refusal::WrongRange(format!(
                "{count} positions; the lease has {most} for one contribution"
            )));
        }
        if base > number {
            return Err(Refusal::WrongRange(format!(
                "made on version {base}, but the newest is {number}"
            )));
        }
        let staleness = number - base;
        if let Some(allowed) = self.plan.allowed_staleness()
            && staleness > allowed
        {
            self.release(id, Ending::Returned);
            return Err(Refusal::TooStale { staleness, allowed });
        }
        let elapsed = now.saturating_sub(lease.last_progress).max(1);
        lease.cursor += count;
        lease.next_sequence += 1;
        lease.last_progress = now;
        lease.renew(now, &self.plan.lease);
        lease.progress_deadline = now + progress_time;
        let (worker, failures, ended) = {
            let lease = &self.leases[&id];
            (lease.worker.clone(), lease.failures, lease.cursor == lease.end)
        };
        self.note_pace(&worker, now, count as f64 / elapsed as f64);
        if ended {
            self.leases.remove(&id);
        }
        self.remember(id, sequence, Outcome::Accepted);
        self.overtake(id, first..first + count);
        let (slot, slots) = match &self.round {
            Some(round) => {
                let place = self.ledger.order().place_of(first);
                let place = place.and_then(|place| round.place_of(place.slot));
                (place.unwrap_or_default(), Some(round.places()))
            }
            None => (self.pending.len() as u64, None),
        };
        self.streak.accepted();
        let receipt = Some((id, sequence));
        self.pend(Member { slot, first, count, staleness, receipt, failures });
        Ok(Accepted::New { slot, slots, staleness })
    }

    /// Takes over what was accepted before a crash, if it is a whole slot of the round under way
    /// that nobody has yet, and made on a version that the policy allows.
    pub fn replay(&mut self, first: u64, count: u64, base: u64) -> Option<Accepted> {
        self.takes_work().ok()?;
        let round = self.round.as_ref()?;
        let slot = self.ledger.order().place_of(first)?;
        let place = round.place_of(slot.slot)?;
        let places = round.places();
        let staleness = self.number.checked_sub(base)?;
        if self.plan.allowed_staleness().is_some_and(|allowed| staleness > allowed)
            || (slot.start, slot.end) != (first, first.checked_add(count)?)
            || !self.ledger.claim(first..first + count)
        {
            return None;
        }
        let member = Member { slot: place, first, count, staleness, receipt: None, failures: 0 };
        self.pend(member);
        Some(Accepted::New { slot: place, slots: Some(places), staleness })
    }

    pub(crate) fn pend(&mut self, member: Member) {
        self.pending_samples += member.count;
        self.pending.push(member);
        self.note_quorum();
    }

    /// The version that is due, if one is.
    pub fn step_due(&self) -> Option<Step> {
        if self.pending.is_empty() || !matches!(self.status, Status::Running | Status::Paused) {
            return None;
        }
        let pending = self.pending_samples;
        let due = match self.plan.policy {
            Policy::Async { .. } => true,
            Policy::Batch { size } => {
                self.pending.len() as u64 >= size || pending == self.ledger.open()
            }
            Policy::Sync { .. } | Policy::Average { .. } => {
                let open = self.round.as_ref().map(|round| self.ledger.open_in(round.reach));
                open == Some(pending) || self.grace_over().is_some_and(|over| self.clock >= over)
            }
        };
        if !due {
            return None;
        }
        let mut members = self.pending.clone();
        members.sort_by_key(|member| member.slot);
        let slots = self.round.as_ref().map_or(0, Round::places);
        let missing = (0..slots)
            .filter(|slot| members.binary_search_by_key(slot, |member| member.slot).is_err())
            .collect();
        Some(Step { members, missing, samples: pending, number: self.number + 1 })
    }

    /// What became of the version that was due.
    pub fn stepped(&mut self, result: Result<(), String>) {
        let members = std::mem::take(&mut self.pending);
        self.pending_samples = 0;
        self.quorum_at = None;
        // Whoever ended the run in between also dropped what the version was made of.
        if members.is_empty() {
            return;
        }
        let closer = members.last().and_then(|member| member.receipt);
        match result {
            Ok(()) => {
                self.number += 1;
                self.streak.stepped();
                for member in &members {
                    self.samples += member.count;
                    let range = member.first..member.first + member.count;
                    self.ledger.applied(range, self.number);
                }
                if let Some((lease, sequence)) = closer {
                    self.remember(lease, sequence, Outcome::Stepped);
                }
                self.next_round();
                let every = self.plan.evaluate_every;
                if matches!(self.plan.limit, Limit::Steps(steps) if self.number >= steps) {
                    self.complete("");
                } else if every.is_some_and(|every| self.number.is_multiple_of(every)) {
                    self.measure(EvaluationSplit::Validation);
                }
            }
            Err(reason) => {
                self.streak.refused();
                for member in &members {
                    let range = member.first..member.first + member.count;
                    self.fail(range, member.failures, &reason);
                    if member.failures == 0 {
                        self.streak.failed();
                    }
                }
                if let Some((lease, sequence)) = closer {
                    self.remember(lease, sequence, Outcome::Refused);
                }
                self.give_up_if_diverged(&reason);
            }
        }
        self.settle();
    }

    /// What became of a contribution, if it is remembered.
    pub fn outcome(&self, lease: u128, sequence: u64) -> Option<Outcome> {
        self.receipts.get(&(lease, sequence)).copied()
    }

    pub(crate) fn remember(&mut self, lease: u128, sequence: u64, outcome: Outcome) {
        let contribution = (lease, sequence);
        if self.receipts.insert(contribution, outcome).is_none() {
            self.receipt_order.push_back(contribution);
            if self.receipt_order.len() > RECEIPTS
                && let Some(old) = self.receipt_order.pop_front()
            {
                self.receipts.remove(&old);
            }
        }
    }

    /// The first contribution for a position wins: another lease on it is void. Leases on the same
    /// positions always stand at the same cursor, because each contribution ends the others.
    pub(crate) fn overtake(&mut self, winner: u128, range: Range<u64>) {
        let overtaken: Vec<_> = self
            .leases
            .iter_mut()
            .filter(|(id, lease)| **id != winner && lease.trains() && lease.cursor == range.start)
            .map(|(&id, lease)| {
                // What lies behind the accepted range is still the loser's to give back.
                lease.cursor = range.end.min(lease.end);
                id
            })
            .collect();
        for id in overtaken {
            self.release(id, Ending::Returned);
        }
    }
}
