//! The fixed facts of a run that decisions depend on.

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::Millis;

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
}

/// The table `policy` of a job.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct PolicySettings {
    /// `batch`, `async` or `sync`.
    pub kind: Option<String>,
    /// `batch`: contributions per version.
    pub size: Option<u64>,
    /// `async`: exponent of the damping by staleness.
    pub damping: Option<f64>,
    /// `async`: hard bound on staleness.
    pub max_staleness: Option<u64>,
    /// `sync`: slots per round.
    pub slots: Option<u64>,
    /// `sync`: how many of a round's last slots may be leased twice.
    pub backup: Option<u64>,
    /// `sync`: seconds after which a slot is leased again.
    pub deadline: Option<f64>,
}

impl PolicySettings {
    /// Checks the table: settings of another policy are mistakes, not ignored.
    pub fn policy(&self) -> Result<Policy, PlanError> {
        let kind = self.kind.as_deref().unwrap_or("batch");
        let allowed: &[&str] = match kind {
            "batch" => &["size"],
            "async" => &["damping", "max_staleness"],
            "sync" => &["slots", "backup", "deadline"],
            other => return Err(PlanError::Kind(other.to_owned())),
        };
        let given = [
            ("size", self.size.is_some()),
            ("damping", self.damping.is_some()),
            ("max_staleness", self.max_staleness.is_some()),
            ("slots", self.slots.is_some()),
            ("backup", self.backup.is_some()),
            ("deadline", self.deadline.is_some()),
        ];
        for (name, is_given) in given {
            if is_given && !allowed.contains(&name) {
                return Err(PlanError::NotOf { name, kind: kind.to_owned() });
            }
        }
        let at_least_one = |name, value: u64| {
            if value == 0 {
                Err(PlanError::Range { name, allowed: "1 or more" })
            } else {
                Ok(value)
            }
        };
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
                let deadline = self.deadline.unwrap_or(30.0);
                if !(0.001..=1e6).contains(&deadline) {
                    return Err(PlanError::Range {
                        name: "deadline",
                        allowed: "0.001 to 1000000 seconds",
                    });
                }
                Ok(Policy::Sync {
                    slots,
                    backup: self.backup.unwrap_or(slots.div_ceil(2)),
                    deadline: (deadline * 1000.0) as Millis,
                })
            }
            _ => Ok(Policy::Batch { size: at_least_one("size", self.size.unwrap_or(2))? }),
        }
    }
}

/// What is wrong with a plan.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum PlanError {
    /// No such policy.
    #[error("policy.kind is `{0}`; it can be `batch`, `async` or `sync`")]
    Kind(String),
    /// A setting of another policy.
    #[error("policy.{name} is not a setting of the policy `{kind}`")]
    NotOf {
        /// The setting.
        name: &'static str,
        /// The policy.
        kind: String,
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
        if matches!(self.policy, Policy::Sync { slots: 0, .. }) {
            return Err(PlanError::Range { name: "slots", allowed: "1 or more" });
        }
        if self.chunk == 0 {
            return Err(PlanError::NoChunk);
        }
        Ok(())
    }

    /// How old the version may be that a contribution was made on, where that is bounded. With
    /// `sync` it is the round's own: anything else would give other bits.
    pub(crate) fn allowed_staleness(&self) -> Option<u64> {
        match self.policy {
            Policy::Batch { .. } => None,
            Policy::Async { max_staleness, .. } => max_staleness,
            Policy::Sync { .. } => Some(0),
        }
    }

    /// Whether a lease holds a single contribution: then the base version it names is the one its
    /// contribution is made on.
    pub(crate) fn one_chunk_leases(&self) -> bool {
        matches!(self.policy, Policy::Sync { .. } | Policy::Async { max_staleness: Some(_), .. })
    }
}
