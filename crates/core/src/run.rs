//! A run's state machine: events in, decisions out.
//!
//! Whoever drives it sends one event at a time (a request for a lease, a contribution, a
//! heartbeat, a tick of the clock), then asks [`Run::step_due`]; if a version is due, it does the
//! numbers and reports with [`Run::stepped`]. What happened along the way waits in
//! [`Run::take_notices`].

use std::collections::{BTreeMap, VecDeque};

use serde::{Deserialize, Serialize};

use crate::evaluation::{Evaluation, EvaluationSplit, Measured};
use crate::lease::Lease;
use crate::ledger::{Gap, Ledger, LedgerSnapshot};
use crate::round::Round;
use crate::streak::Streak;
use crate::{Millis, Plan, PlanError};

pub use crate::granting::LeaseDecision;

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
    pub(crate) receipt: Option<(u128, u64)>,
    pub(crate) failures: u32,
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
    pub(crate) former_gaps: Vec<Gap>,
    /// The round under way, where there are rounds.
    pub(crate) round: Option<Round>,
    /// When so many of the round's slots had come that it may close without the others.
    pub(crate) quorum_at: Option<Millis>,
    /// The time of the latest event.
    pub(crate) clock: Millis,
    pub(crate) leases: BTreeMap<u128, Lease>,
    /// No lease lapses before this.
    pub(crate) earliest_lapse: Millis,
    pub(crate) receipts: BTreeMap<(u128, u64), Outcome>,
    pub(crate) receipt_order: VecDeque<(u128, u64)>,
    pub(crate) pending: Vec<Member>,
    /// Positions of `pending`.
    pub(crate) pending_samples: u64,
    pub(crate) evaluation: Option<Evaluation>,
    pub(crate) evaluation_queue: VecDeque<EvaluationSplit>,
    pub(crate) paces: BTreeMap<String, Pace>,
    /// When paces of workers that are gone were last forgotten.
    pub(crate) paces_pruned: Millis,
    pub(crate) status: Status,
    pub(crate) reason: String,
    pub(crate) samples: u64,
    pub(crate) streak: Streak,
    pub(crate) notices: Vec<Notice>,
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
        let ledger = Ledger::restore(&plan, &snapshot.ledger)?;
        let former_gaps = snapshot
            .ledger
            .gaps
            .iter()
            .filter(|gap| gap.epoch != ledger.epoch())
            .cloned()
            .collect();
        let mut run = Self {
            generation,
            number: snapshot.number,
            former_gaps,
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

    pub(crate) fn set_status(&mut self, status: Status, reason: &str) {
        self.status = status.clone();
        self.reason = reason.to_owned();
        self.notices.push(Notice::Status(status));
    }
}
