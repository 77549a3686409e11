//! The fixed facts of a run that decisions depend on.

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::Millis;
use crate::position::{Order, Turns};

/// What a run is bounded by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Limit {
    /// Every sample so many times.
    Epochs(u64),
    /// So many versions.
    Steps(u64),
    /// Until someone stops it.
    Endless,
}

/// How long leases live.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LeaseTimes {
    /// Without a heartbeat.
    pub silence: Millis,
    /// Without an accepted contribution.
    pub progress: Millis,
    /// How much work a lease should hold.
    pub target: Millis,
}

impl Default for LeaseTimes {
    fn default() -> Self {
        Self { silence: 10_000, progress: 120_000, target: 2_000 }
    }
}

/// How contributions become the next version.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Policy {
    /// So many contributions, weighted by samples, make a version.
    Batch {
        /// How many.
        size: u64,
    },
    /// Each contribution makes a version, damped by staleness.
    Async {
        /// The exponent of `1 / (1 + staleness)`; 0 is no damping.
        damping: f64,
        /// No contribution on parameters older than this is ever applied, and nobody is given
        /// work that could make a slower one's too old.
        max_staleness: Option<u64>,
    },
    /// All slots of a round make a version: the same bits whoever works.
    Sync {
        /// How many slots.
        slots: u64,
        /// How many of a round's last open slots may be leased twice.
        backup: u64,
        /// How long a slot may take before it is leased again.
        deadline: Millis,
    },
    /// The slots of a round, each a model that was trained locally, make a version; a few may come
    /// late and enter the next.
    Average {
        /// How many slots.
        slots: u64,
        /// How many of them a round waits for; the same bits whoever works if it is all of them.
        quorum: u64,
        /// How long those that are still out have once the quorum is there.
        grace: Millis,
        /// How many of a round's last open slots may be leased twice.
        backup: u64,
        /// How long a slot may take before it is leased again; by measured time where it is left
        /// out.
        deadline: Option<Millis>,
    },
}

/// What the policies with rounds have in common.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Rounds {
    pub(crate) slots: u64,
    pub(crate) quorum: u64,
    pub(crate) grace: Millis,
    pub(crate) backup: u64,
    pub(crate) deadline: Option<Millis>,
}

impl Rounds {
    /// How many slots may be missing when a round closes.
    pub(crate) fn may_miss(&self) -> u64 {
        self.slots.saturating_sub(self.quorum)
    }
}

impl Policy {
    /// How rounds go, where there are rounds.
    pub(crate) fn rounds(&self) -> Option<Rounds> {
        match *self {
            Self::Batch { .. } | Self::Async { .. } => None,
            Self::Sync { slots, backup, deadline } => {
                Some(Rounds { slots, quorum: slots, grace: 0, backup, deadline: Some(deadline) })
            }
            Self::Average { slots, quorum, grace, backup, deadline } => {
                Some(Rounds { slots, quorum, grace, backup, deadline })
            }
        }
    }

    /// How many versions an epoch makes of so many contributions.
    fn versions(&self, contributions: u64) -> u64 {
        match *self {
            Self::Batch { size } => contributions.div_ceil(size),
            Self::Async { .. } => contributions,
            Self::Sync { slots, .. } | Self::Average { slots, .. } => contributions.div_ceil(slots),
        }
    }
}

/// The table `policy` of a job.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct PolicySettings {
    /// `batch`, `async`, `sync` or `average`.
    pub kind: Option<String>,
    /// `batch`: contributions per version.
    pub size: Option<u64>,
    /// `async`: exponent of the damping by staleness.
    pub damping: Option<f64>,
    /// `async`: hard bound on staleness.
    pub max_staleness: Option<u64>,
    /// `sync`, `average`: slots per round.
    pub slots: Option<u64>,
    /// `sync`, `average`: how many of a round's last slots may be leased twice.
    pub backup: Option<u64>,
    /// `sync`, `average`: seconds after which a slot is leased again.
    pub deadline: Option<f64>,
    /// `average`: how many models a round waits for.
    pub quorum: Option<u64>,
    /// `average`: seconds that the others have once the quorum is there.
    pub grace: Option<f64>,
    /// `average`: `many`, or `once`: one round, in which each slot is a whole shard.
    pub rounds: Option<String>,
}

impl PolicySettings {
    /// Checks the table: settings of another policy are mistakes, not ignored.
    pub fn policy(&self) -> Result<Policy, PlanError> {
        let kind = self.kind.as_deref().unwrap_or("batch");
        let allowed: &[&str] = match kind {
            "batch" => &["size"],
            "async" => &["damping", "max_staleness"],
            "sync" => &["slots", "backup", "deadline"],
            "average" if self.is_once() => &["rounds", "backup", "deadline"],
            "average" => &["slots", "quorum", "grace", "rounds", "backup", "deadline"],
            other => return Err(PlanError::Kind(other.to_owned())),
        };
        let given = [
            ("size", self.size.is_some()),
            ("damping", self.damping.is_some()),
            ("max_staleness", self.max_staleness.is_some()),
            ("slots", self.slots.is_some()),
            ("backup", self.backup.is_some()),
            ("deadline", self.deadline.is_some()),
            ("quorum", self.quorum.is_some()),
            ("grace", self.grace.is_some()),
            ("rounds", self.rounds.is_some()),
        ];
        for (name, is_given) in given {
            if is_given && !allowed.contains(&name) {
                let once = if self.is_once() { " with one round" } else { "" };
                return Err(PlanError::NotOf { name, kind: kind.to_owned(), once });
            }
        }
        match kind {
            "async" => {
                let damping = self.damping.unwrap_or(0.5);
                if !(0.0..=4.0).contains(&damping) {
                    return Err(PlanError::Range { name: "damping", allowed: "0 to 4" });
                }
                Ok(Policy::Async { damping, max_staleness: self.max_staleness })
            }
            "sync" => {
                let slots = at_least_one("slots", self.slots.unwrap_or(2))?;
                Ok(Policy::Sync {
                    slots,
                    backup: self.backup.unwrap_or(slots.div_ceil(2)),
                    deadline: millis("deadline", self.deadline.unwrap_or(30.0))?,
                })
            }
            "average" => self.average(),
            _ => Ok(Policy::Batch { size: at_least_one("size", self.size.unwrap_or(2))? }),
        }
    }

    fn average(&self) -> Result<Policy, PlanError> {
        if !matches!(self.rounds.as_deref(), None | Some("many" | "once")) {
            return Err(PlanError::Range { name: "rounds", allowed: "`many` or `once`" });
        }
        // One round holds all the slots there are.
        let usual = if self.is_once() { u64::MAX } else { 2 };
        let slots = at_least_one("slots", self.slots.unwrap_or(usual))?;
        let quorum = at_least_one("quorum", self.quorum.unwrap_or(slots))?;
        if quorum > slots {
            return Err(PlanError::Range { name: "quorum", allowed: "at most `slots`" });
        }
        let grace = match self.grace {
            Some(0.0) => 0,
            grace => millis("grace", grace.unwrap_or(10.0))?,
        };
        let backup = self.backup.unwrap_or(slots.div_ceil(2));
        let deadline = self.deadline.map(|seconds| millis("deadline", seconds)).transpose()?;
        Ok(Policy::Average { slots, quorum, grace, backup, deadline })
    }

    /// Whether models are averaged once, at the end.
    pub fn is_once(&self) -> bool {
        self.rounds.as_deref() == Some("once")
    }
}

fn at_least_one(name: &'static str, value: u64) -> Result<u64, PlanError> {
    if value == 0 { Err(PlanError::Range { name, allowed: "1 or more" }) } else { Ok(value) }
}

fn millis(name: &'static str, seconds: f64) -> Result<Millis, PlanError> {
    if !(0.001..=1e6).contains(&seconds) {
        return Err(PlanError::Range { name, allowed: "0.001 to 1000000 seconds" });
    }
    Ok((seconds * 1000.0) as Millis)
}

/// What is wrong with a plan.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum PlanError {
    /// No such policy.
    #[error("policy.kind is `{0}`; it can be `batch`, `async`, `sync` or `average`")]
    Kind(String),
    /// A setting of another policy.
    #[error("policy.{name} is not a setting of the policy `{kind}`{once}")]
    NotOf {
        /// The setting.
        name: &'static str,
        /// The policy.
        kind: String,
        /// More about the policy, where that matters.
        once: &'static str,
    },
    /// A value out of range.
    #[error("policy.{name} must be {allowed}")]
    Range {
        /// The setting.
        name: &'static str,
        /// What it can be.
        allowed: &'static str,
    },
    /// Nothing to train on.
    #[error("the training set has no samples")]
    Empty,
    /// More samples than can be counted.
    #[error("a split's sample counts add up to 2^64 or more")]
    TooMany,
    /// A contribution of nothing.
    #[error("train.batch and train.every must be 1 or more")]
    NoChunk,
    /// A checkpoint's ledger that is not this run's.
    #[error("the checkpoint's ledger does not fit the run: {0}")]
    Ledger(String),
}

/// The fixed facts of a run.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    /// From which all randomness comes.
    pub seed: u64,
    /// Samples of each training shard.
    pub shards: Vec<u64>,
    /// Samples of each validation shard.
    pub validation: Vec<u64>,
    /// Samples of each test shard.
    pub test: Vec<u64>,
    /// Positions per contribution.
    pub chunk: u64,
    /// How contributions become versions.
    pub policy: Policy,
    /// When the run is complete.
    pub limit: Limit,
    /// How long leases live.
    pub lease: LeaseTimes,
    /// Versions between evaluations; at ends of epochs where there is none.
    pub evaluate_every: Option<u64>,
    /// How often a slice may fail before it is skipped.
    pub attempts: u32,
    /// Whether shards take turns where versions are made of slots: wanted where they differ.
    pub turns: bool,
}

impl Plan {
    pub(crate) fn check(&self) -> Result<(), PlanError> {
        for split in [&self.shards, &self.validation, &self.test] {
            let total = split.iter().try_fold(0u64, |sum, &shard| sum.checked_add(shard));
            total.ok_or(PlanError::TooMany)?;
        }
        if self.shards.is_empty() || self.shards.contains(&0) {
            return Err(PlanError::Empty);
        }
        if let Some(rounds) = self.policy.rounds() {
            at_least_one("slots", rounds.slots)?;
            at_least_one("quorum", rounds.quorum)?;
        }
        if self.chunk == 0 {
            return Err(PlanError::NoChunk);
        }
        Ok(())
    }

    /// Which samples stand where in an epoch.
    pub fn order(&self, epoch: u64) -> Order {
        let turns = match self.policy.rounds() {
            Some(rounds) if self.turns => Turns { shards: rounds.slots, chunk: self.chunk },
            Some(_) => Turns { shards: 1, chunk: self.chunk },
            None => Turns::NONE,
        };
        Order::new(self.seed, epoch, &self.shards, turns)
    }

    /// How many versions the run will make, where that is known: schedules depend on it.
    pub fn versions(&self) -> Option<u64> {
        let chunks: u64 = self.shards.iter().map(|samples| samples.div_ceil(self.chunk)).sum();
        match self.limit {
            Limit::Epochs(epochs) => Some(epochs.saturating_mul(self.policy.versions(chunks))),
            Limit::Steps(steps) => Some(steps),
            Limit::Endless => None,
        }
    }

    /// Whether a version follows from the plan alone, whoever works: a round waits for all of its
    /// slots.
    pub fn same_bits(&self) -> bool {
        self.policy.rounds().is_some_and(|rounds| rounds.may_miss() == 0)
    }

    /// How old the version may be that a contribution was made on, where that is bounded. Where a
    /// round waits for all of its slots it is the round's own: anything else would give other bits.
    pub(crate) fn allowed_staleness(&self) -> Option<u64> {
        match self.policy {
            Policy::Async { max_staleness, .. } => max_staleness,
            _ => self.same_bits().then_some(0),
        }
    }

    /// Whether a lease holds a single contribution: then the base version it names is the one its
    /// contribution is made on.
    pub(crate) fn one_chunk_leases(&self) -> bool {
        self.policy.rounds().is_some()
            || matches!(self.policy, Policy::Async { max_staleness: Some(_), .. })
    }
}
