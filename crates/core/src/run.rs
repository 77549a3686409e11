//! A run's state machine: events in, decisions out.
//!
//! Whoever drives it sends one event at a time (a request for a lease, a contribution, a
//! heartbeat, a tick of the clock), then asks [`Run::step_due`]; if a version is due, it does the
//! numbers and reports with [`Run::stepped`]. What happened along the way waits in
//! [`Run::take_notices`].

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::evaluation::{Counts, Evaluation, EvaluationSplit, Measured};
use crate::lease::{Assignment, Ending, Lease};
use crate::ledger::{Gap, Ledger, LedgerSnapshot};
use crate::round::{Round, Slots};
use crate::streak::{Streak, TOO_MANY};
use crate::{Limit, Millis, Plan, PlanError, Policy};

pub use crate::granting::LeaseDecision;

/// How many contributions are remembered, so that a repeated push gets its first outcome.
const RECEIPTS: usize = 65_536;

/// How long a slot of local training may take as long as nobody has finished one.
const UNMEASURED: Millis = 3_600_000;

/// What a run is doing.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Status {
    /// Handing out work.
    Running,
    /// Handing out none until resumed.
    Paused,
    /// Trained; the final version is being measured.
    Measuring,
    /// Complete.
    Done,
    /// Ended before its time.
    Stopped,
    /// It cannot go on.
    Failed,
}

/// What a worker brings home under a training lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Contribution {
    /// The lease.
    pub lease: u128,
    /// Its number under the lease.
    pub sequence: u64,
    /// The first position.
    pub first: u64,
    /// How many positions.
    pub count: u64,
    /// The generation of the version it was computed on.
    pub generation: u64,
    /// The number of the version it was computed on.
    pub base: u64,
}

/// A contribution that counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Accepted {
    /// Add it at this place of the round.
    New {
        /// The place.
        slot: u64,
        /// How many places the round has, where that is fixed.
        slots: Option<u64>,
        /// Versions between its base and now.
        staleness: u64,
    },
    /// It was accepted before: change nothing.
    Repeat,
}

/// Why something does not count.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// It belongs to another start of the hive.
    OtherGeneration,
    /// The lease is not there any more.
    Gone(&'static str),
    /// The run does not take work.
    NotRunning(&'static str),
    /// It does not start at the lease's cursor or leaves its slice.
    WrongRange(String),
    /// Its base version is too old.
    TooStale {
        /// How old.
        staleness: u64,
        /// How old it may be.
        allowed: u64,
    },
}

/// One contribution of a version.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Member {
    /// Its place in the round.
    pub slot: u64,
    /// The first position.
    pub first: u64,
    /// How many positions.
    pub count: u64,
    /// Versions between its base and its acceptance.
    pub staleness: u64,
    /// Under which lease and sequence number it came; none if it was replayed.
    receipt: Option<(u128, u64)>,
    failures: u32,
}

/// A version that is due.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Step {
    /// What it is made of.
    pub members: Vec<Member>,
    /// Places of the round that were given up.
    pub missing: Vec<u64>,
    /// Positions in all.
    pub samples: u64,
    /// The number it will have.
    pub number: u64,
}

/// Something that happened and that people or programs may want to know.
#[derive(Clone, Debug, PartialEq)]
pub enum Notice {
    /// A version is being measured: keep it until the result is there.
    MeasuringStarted {
        /// Its number.
        number: u64,
        /// On which samples.
        split: EvaluationSplit,
    },
    /// A version was measured.
    Measured(Measured),
    /// A measurement failed too often, or training ended meanwhile: it was given up.
    MeasuringFailed {
        /// Its number.
        number: u64,
        /// On which samples.
        split: EvaluationSplit,
    },
    /// A lease lapsed or failed.
    Lapsed {
        /// Whose.
        worker: String,
        /// Why.
        reason: String,
    },
    /// Positions were given up.
    Skipped(Gap),
    /// An epoch is complete.
    EpochEnded(u64),
    /// The status changed.
    Status(Status),
}

/// What became of a contribution.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// It counts.
    Accepted,
    /// It counts, and completed a version.
    Stepped,
    /// It counted, but the version it completed was refused.
    Refused,
}

/// What a checkpoint keeps of a run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunSnapshot {
    /// The number of the version.
    pub number: u64,
    /// What was applied and skipped.
    pub ledger: LedgerSnapshot,
    /// Positions applied since version 0.
    pub samples: u64,
    /// What the run was doing.
    pub status: Status,
    /// Why, where that needs saying.
    pub reason: String,
    /// The first position of the round under way, where there are rounds. Late slots lie before it,
    /// so it does not follow from the ledger.
    #[serde(default)]
    pub round: Option<u64>,
}

/// What is known of a worker's pace.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pace {
    pub(crate) seen: Millis,
    /// Positions per millisecond.
    pub(crate) rate: Option<f64>,
}

/// A run's control state.
#[derive(Clone, Debug)]
pub struct Run {
    pub(crate) plan: Plan,
    pub(crate) generation: u64,
    pub(crate) number: u64,
    pub(crate) ledger: Ledger,
    former_gaps: Vec<Gap>,
    slots: Slots,
    /// The round under way, where there are rounds.
    pub(crate) round: Option<Round>,
    /// When so many of the round's slots had come that it may close without the others.
    quorum_at: Option<Millis>,
    /// The time of the latest event.
    clock: Millis,
    pub(crate) leases: BTreeMap<u128, Lease>,
    /// No lease lapses before this.
    pub(crate) earliest_lapse: Millis,
    receipts: BTreeMap<(u128, u64), Outcome>,
    receipt_order: VecDeque<(u128, u64)>,
    pub(crate) pending: Vec<Member>,
    /// Positions of `pending`.
    pending_samples: u64,
    pub(crate) evaluation: Option<Evaluation>,
    evaluation_queue: VecDeque<EvaluationSplit>,
    pub(crate) paces: BTreeMap<String, Pace>,
    /// When paces of workers that are gone were last forgotten.
    paces_pruned: Millis,
    pub(crate) status: Status,
    pub(crate) reason: String,
    samples: u64,
    streak: Streak,
    notices: Vec<Notice>,
}

impl Run {
    /// A run at version 0.
    pub fn new(plan: Plan, generation: u64) -> Result<Self, PlanError> {
        let snapshot = RunSnapshot {
            number: 0,
            ledger: LedgerSnapshot::default(),
            samples: 0,
            status: Status::Running,
            reason: String::new(),
            round: None,
        };
        Self::restore(plan, generation, &snapshot)
    }

    /// A run as a checkpoint left it, in a new generation: no leases, nothing pending.
    pub fn restore(
        mut plan: Plan,
        generation: u64,
        snapshot: &RunSnapshot,
    ) -> Result<Self, PlanError> {
        plan.check()?;
        // No contribution is longer than a shard; how long one takes is judged by what it can be.
        plan.chunk = plan.chunk.min(plan.shards.iter().copied().max().unwrap_or(plan.chunk));
        let ledger = Ledger::restore(plan.seed, &plan.shards, &snapshot.ledger)?;
        let former_gaps = snapshot
            .ledger
            .gaps
            .iter()
            .filter(|gap| gap.epoch != ledger.epoch())
            .cloned()
            .collect();
        let slots = Slots::new(ledger.order(), plan.chunk);
        let mut run = Self {
            generation,
            number: snapshot.number,
            former_gaps,
            slots,
            round: None,
            quorum_at: None,
            clock: 0,
            leases: BTreeMap::new(),
            earliest_lapse: Millis::MAX,
            receipts: BTreeMap::new(),
            receipt_order: VecDeque::new(),
            pending: Vec::new(),
            pending_samples: 0,
            evaluation: None,
            evaluation_queue: VecDeque::new(),
            paces: BTreeMap::new(),
            paces_pruned: 0,
            status: snapshot.status.clone(),
            reason: snapshot.reason.clone(),
            samples: snapshot.samples,
            streak: Streak::default(),
            notices: Vec::new(),
            ledger,
            plan,
        };
        if snapshot.round.is_some_and(|position| position >= run.ledger.order().positions()) {
            return Err(PlanError::Ledger("its round lies outside of the epoch".to_owned()));
        }
        run.begin_round(snapshot.round);
        if run.status == Status::Measuring {
            run.queue_measurements();
        }
        run.settle();
        Ok(run)
    }

    /// What a checkpoint keeps.
    pub fn snapshot(&self) -> RunSnapshot {
        RunSnapshot {
            number: self.number,
            ledger: self.ledger.snapshot(&self.former_gaps),
            samples: self.samples,
            status: self.status.clone(),
            reason: self.reason.clone(),
            round: self.round.as_ref().map(|round| round.window.0),
        }
    }

    /// The number of the version now.
    pub fn number(&self) -> u64 {
        self.number
    }

    /// The generation.
    pub fn generation(&self) -> u64 {
        self.generation
    }

    /// The epoch under way.
    pub fn epoch(&self) -> u64 {
        self.ledger.epoch()
    }

    /// Positions applied or skipped in the epoch under way.
    pub fn epoch_settled(&self) -> u64 {
        self.ledger.settled()
    }

    /// Positions applied since version 0.
    pub fn samples(&self) -> u64 {
        self.samples
    }

    /// What the run is doing, and why.
    pub fn status(&self) -> (&Status, &str) {
        (&self.status, &self.reason)
    }

    /// What was given up, in any epoch.
    pub fn gaps(&self) -> impl Iterator<Item = &Gap> {
        self.former_gaps.iter().chain(self.ledger.skipped())
    }

    /// The fixed facts.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// What happened since the last call.
    pub fn take_notices(&mut self) -> Vec<Notice> {
        std::mem::take(&mut self.notices)
    }

    /// Which worker holds a lease.
    pub fn holder(&self, lease: u128) -> Option<&str> {
        self.leases.get(&lease).map(|lease| lease.worker.as_str())
    }

    /// With rounds: whether somebody has each slot of the round, so that whoever brings one home now
    /// has nothing to do until the version is out.
    pub fn round_is_taken(&self) -> bool {
        self.round.as_ref().is_some_and(|round| !self.ledger.window_unclaimed(round.reach))
    }

    /// When something will have to be decided even if nobody calls: the next deadline.
    pub fn next_deadline(&self) -> Option<Millis> {
        let lapse = self.leases.values().map(|lease| lease.deadline() + 1).min();
        lapse.into_iter().chain(self.grace_over()).min()
    }

    /// When the round may close without those that are missing.
    fn grace_over(&self) -> Option<Millis> {
        Some(self.quorum_at?.saturating_add(self.plan.policy.rounds()?.grace))
    }

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
                let slot = self.slots.of(self.ledger.order(), first);
                let place = slot.and_then(|slot| round.place_of(slot));
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
        let slot = self.slots.of(self.ledger.order(), first)?;
        let place = round.place_of(slot)?;
        let places = round.places();
        let staleness = self.number.checked_sub(base)?;
        if self.plan.allowed_staleness().is_some_and(|allowed| staleness > allowed)
            || self.slots.range(self.ledger.order(), slot) != (first, first.checked_add(count)?)
            || !self.ledger.claim(first..first + count)
        {
            return None;
        }
        let member = Member { slot: place, first, count, staleness, receipt: None, failures: 0 };
        self.pend(member);
        Some(Accepted::New { slot: place, slots: Some(places), staleness })
    }

    fn pend(&mut self, member: Member) {
        self.pending_samples += member.count;
        self.pending.push(member);
        self.note_quorum();
    }

    /// Notes when so many slots have come that the round may close. The last round of an epoch
    /// waits for all: what came later would have no round to enter.
    fn note_quorum(&mut self) {
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
    fn open_slots(&self, round: &Round) -> impl Iterator<Item = u64> {
        round
            .all()
            .filter(|&slot| self.ledger.open_in(self.slots.range(self.ledger.order(), slot)) > 0)
    }

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

    /// A heartbeat: keeps a lease alive. A lapsed lease is never revived.
    pub fn renew(&mut self, now: Millis, lease: u128) -> Result<Millis, Refusal> {
        self.expire(now);
        let times = self.plan.lease;
        let lease = self.leases.get_mut(&lease).ok_or(Refusal::Gone("the lease lapsed"))?;
        lease.renew(now, &times);
        let worker = lease.worker.clone();
        self.saw(&worker, now);
        Ok(times.silence / 3)
    }

    /// A worker gives its lease back; with a reason where the slice could not be worked on.
    pub fn give_back(
        &mut self,
        now: Millis,
        lease: u128,
        failure: Option<&str>,
    ) -> Result<(), Refusal> {
        self.expire(now);
        if !self.leases.contains_key(&lease) {
            return Err(Refusal::Gone("the lease lapsed"));
        }
        self.release(lease, failure.map_or(Ending::Returned, Ending::Failed));
        self.settle();
        Ok(())
    }

    /// Lets leases lapse.
    pub fn tick(&mut self, now: Millis) {
        self.expire(now);
        self.settle();
    }

    /// Hands out no more work.
    pub fn pause(&mut self) -> Result<(), Refusal> {
        match self.status {
            Status::Running => self.set_status(Status::Paused, "paused"),
            Status::Paused => {}
            _ => return Err(Refusal::NotRunning("the run has ended")),
        }
        Ok(())
    }

    /// Hands out work again.
    pub fn resume(&mut self) -> Result<(), Refusal> {
        match self.status {
            Status::Paused => self.set_status(Status::Running, ""),
            Status::Running | Status::Measuring => {}
            _ => return Err(Refusal::NotRunning("the run has ended")),
        }
        Ok(())
    }

    /// Ends the run before its time, keeping what there is.
    pub fn stop(&mut self, reason: &str) -> Result<(), Refusal> {
        if !matches!(self.status, Status::Running | Status::Paused | Status::Measuring) {
            return Err(Refusal::NotRunning("the run has ended"));
        }
        self.drop_work();
        self.set_status(Status::Stopped, reason);
        Ok(())
    }

    /// Ends the run because it cannot go on.
    pub fn fail_run(&mut self, reason: &str) {
        self.drop_work();
        self.set_status(Status::Failed, reason);
    }

    /// Training is over: measure the final version, then be done.
    pub fn complete(&mut self, reason: &str) {
        if !matches!(self.status, Status::Running | Status::Paused) {
            return;
        }
        self.drop_work();
        self.set_status(Status::Measuring, reason);
        self.queue_measurements();
        self.settle();
    }

    pub(crate) fn takes_work(&self) -> Result<(), Refusal> {
        match self.status {
            Status::Running | Status::Paused => Ok(()),
            Status::Measuring => Err(Refusal::NotRunning("training is over")),
            Status::Done => Err(Refusal::NotRunning("the run is done")),
            Status::Stopped => Err(Refusal::NotRunning("the run was stopped")),
            Status::Failed => Err(Refusal::NotRunning("the run failed")),
        }
    }

    fn set_status(&mut self, status: Status, reason: &str) {
        self.status = status.clone();
        self.reason = reason.to_owned();
        self.notices.push(Notice::Status(status));
    }

    fn drop_work(&mut self) {
        self.leases.clear();
        self.pending.clear();
        self.pending_samples = 0;
        self.quorum_at = None;
        self.give_up_measuring();
        self.evaluation_queue.clear();
    }

    fn queue_measurements(&mut self) {
        self.evaluation_queue.clear();
        self.evaluation_queue.push_back(EvaluationSplit::Validation);
        self.evaluation_queue.push_back(EvaluationSplit::Test);
        self.next_measurement();
    }

    /// Starts to measure the version now, unless one is under way.
    fn measure(&mut self, split: EvaluationSplit) {
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
    fn give_up_measuring(&mut self) {
        let Some(evaluation) = self.evaluation.take() else { return };
        self.leases.retain(|_, lease| lease.trains());
        let (number, split) = (evaluation.number, evaluation.split);
        self.notices.push(Notice::MeasuringFailed { number, split });
    }

    fn next_measurement(&mut self) {
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

    pub(crate) fn saw(&mut self, worker: &str, now: Millis) {
        match self.paces.get_mut(worker) {
            Some(pace) => pace.seen = now,
            None => {
                self.paces.insert(worker.to_owned(), Pace { seen: now, rate: None });
            }
        }
        let silence = self.plan.lease.silence;
        if now.saturating_sub(self.paces_pruned) > silence {
            self.paces_pruned = now;
            self.paces.retain(|_, pace| now.saturating_sub(pace.seen) < 6 * silence);
        }
    }

    fn note_pace(&mut self, worker: &str, now: Millis, rate: f64) {
        self.saw(worker, now);
        if let Some(pace) = self.paces.get_mut(worker) {
            pace.rate = Some(pace.rate.map_or(rate, |known| known * 0.7 + rate * 0.3));
        }
    }

    fn remember(&mut self, lease: u128, sequence: u64, outcome: Outcome) {
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

    pub(crate) fn progress_time(&self) -> Millis {
        let Some(rounds) = self.plan.policy.rounds() else { return self.plan.lease.progress };
        let slowest = self.paces.values().filter_map(|pace| pace.rate).reduce(f64::min);
        let by_pace = |rate: f64| (10.0 * self.plan.chunk as f64 / rate) as Millis;
        // Nothing is known of how long local training takes until somebody has done it: a deadline
        // that is too short would never let anybody finish.
        rounds
            .deadline
            .unwrap_or_else(|| slowest.map_or(UNMEASURED, by_pace).max(self.plan.lease.progress))
    }

    pub(crate) fn expire(&mut self, now: Millis) {
        self.clock = self.clock.max(now);
        if now <= self.earliest_lapse {
            return;
        }
        let lapsed: Vec<_> =
            self.leases.iter().filter_map(|(&id, lease)| Some((id, lease.lapsed(now)?))).collect();
        for (id, reason) in lapsed {
            self.release(id, Ending::Lapsed(reason));
        }
        let deadlines = self.leases.values().map(Lease::deadline);
        self.earliest_lapse = deadlines.min().unwrap_or(Millis::MAX);
        // What lapsed may have been skipped, and that may have been the last of the epoch.
        self.settle();
    }

    /// Ends a lease and frees what it holds and nobody else does.
    pub(crate) fn release(&mut self, id: u128, ending: Ending<'_>) {
        let Some(lease) = self.leases.remove(&id) else { return };
        let failure = match ending {
            Ending::Returned => None,
            Ending::Lapsed(reason) | Ending::Failed(reason) => Some(reason),
        };
        let failure: Option<String> = failure.map(|reason| reason.chars().take(300).collect());
        if let Some(reason) = failure.clone() {
            self.notices.push(Notice::Lapsed { worker: lease.worker.clone(), reason });
        }
        match lease.assignment {
            Assignment::Evaluate { .. } => {
                let mut others = self.leases.values().filter(|other| !other.trains());
                if others.any(|other| other.cursor == lease.cursor) {
                    return;
                }
                let attempts = self.plan.attempts;
                let Some(evaluation) = &mut self.evaluation else { return };
                if evaluation.release(lease.cursor, failure.is_some(), attempts) {
                    self.give_up_measuring();
                    if self.status == Status::Measuring {
                        self.reason = "the final version could not be measured".to_owned();
                    }
                    self.next_measurement();
                }
            }
            Assignment::Train { .. } => {
                let others = self.leases.values().filter(|other| other.trains());
                let repeats = others.filter(|other| other.cursor == lease.cursor);
                let held = repeats.map(|other| other.end).max().unwrap_or(lease.cursor);
                let mut free = held..lease.end;
                // It failed at its cursor; if someone else still works there, they will tell.
                if let Some(reason) = failure.filter(|_| held == lease.cursor) {
                    let failed = held..lease.end.min(held.saturating_add(self.plan.chunk));
                    free.start = failed.end;
                    let reason = format!("{reason} ({})", lease.worker);
                    self.fail(failed, lease.failures, &reason);
                    self.ledger.release(free, lease.failures);
                    // Workers that are killed say nothing about the run.
                    if lease.failures == 0 && matches!(ending, Ending::Failed(_)) {
                        self.streak.failed();
                        self.give_up_if_diverged(&reason);
                    }
                    return;
                }
                self.ledger.release(free, lease.failures);
            }
        }
    }

    /// Positions failed: they are free again, or skipped after too many times.
    fn fail(&mut self, range: Range<u64>, failures: u32, reason: &str) {
        if range.is_empty() {
            return;
        }
        if failures + 1 >= self.plan.attempts {
            let gap = self.ledger.skip(range, reason);
            self.notices.push(Notice::Skipped(gap));
        } else {
            self.ledger.release(range, failures + 1);
        }
    }

    /// A run of which nothing comes any more ends, before each of its slices has failed five times.
    fn give_up_if_diverged(&mut self, reason: &str) {
        if self.streak.is_too_long() && self.takes_work().is_ok() {
            self.fail_run(&format!(
                "{TOO_MANY} slices in a row failed, the last with: {reason}; the run has probably \
                 diverged: lower the rate"
            ));
        }
    }

    /// The first contribution for a position wins: another lease on it is void. Leases on the same
    /// positions always stand at the same cursor, because each contribution ends the others.
    fn overtake(&mut self, winner: u128, range: Range<u64>) {
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

    /// Finds the round under way: that of a position, or the first with something open.
    fn begin_round(&mut self, position: Option<u64>) {
        let Some(rounds) = self.plan.policy.rounds() else { return };
        let order = self.ledger.order();
        let position = position.or_else(|| self.ledger.first_open());
        let round = position.and_then(|at| self.slots.round(order, rounds.slots, at));
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

    fn next_round(&mut self) {
        let (Some(rounds), Some(round)) = (self.plan.policy.rounds(), self.round.take()) else {
            return;
        };
        let next = self.slots.round(self.ledger.order(), rounds.slots, round.window.1);
        self.round = next.map(|next| self.carry(&round, next));
    }

    /// What is still open of a round that is over belongs to the next.
    fn carry(&self, from: &Round, to: Round) -> Round {
        if self.ledger.open_in(from.reach) == 0 {
            return to;
        }
        let late: Vec<_> = self.open_slots(from).collect();
        let start = late.first().map_or(0, |&slot| self.slots.start(self.ledger.order(), slot));
        to.with_late(late, start)
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
        self.ledger = Ledger::new(self.plan.seed, ended + 1, &self.plan.shards);
        self.slots = Slots::new(self.ledger.order(), self.plan.chunk);
        self.begin_round(None);
        if self.plan.evaluate_every.is_none() {
            self.measure(EvaluationSplit::Validation);
        }
    }
}
