//! Leases: the right to work on a slice until a deadline.

use std::collections::BTreeSet;
use std::ops::Range;

use crate::evaluation::EvaluationSplit;
use crate::{LeaseTimes, Millis};

/// What a worker says when it asks for work.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Request {
    /// Its name. One worker holds one lease: asking again gives the former one back.
    pub worker: String,
    /// How much time it has left.
    pub time_left: Option<Millis>,
    /// Training shards it has at hand.
    pub has: Vec<usize>,
    /// The only shards it can read.
    pub only: Option<Readable>,
    /// Which kinds of work it takes.
    pub takes: Takes,
}

/// Which kinds of work a worker takes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Takes {
    /// All.
    #[default]
    Anything,
    /// No evaluations.
    Training,
    /// Nothing but evaluations.
    Evaluations,
}

/// Shards that a worker can read, by their places in the plan.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Readable {
    /// Of the training set.
    pub train: Vec<usize>,
    /// Of the validation set.
    pub validation: Vec<usize>,
    /// Of the test set.
    pub test: Vec<usize>,
}

impl Request {
    /// The only training shards it can read.
    pub(crate) fn readable(&self) -> Option<BTreeSet<usize>> {
        self.only.as_ref().map(|only| only.train.iter().copied().collect())
    }

    /// The only shards it can read of a split that is measured on.
    pub(crate) fn measurable(&self, split: EvaluationSplit) -> Option<BTreeSet<usize>> {
        let only = self.only.as_ref()?;
        let shards = match split {
            EvaluationSplit::Validation => &only.validation,
            EvaluationSplit::Test => &only.test,
        };
        Some(shards.iter().copied().collect())
    }
}

/// What a lease is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Assignment {
    /// Gradients of a slice of training positions.
    Train {
        /// The epoch.
        epoch: u64,
        /// The shard.
        shard: usize,
        /// Where the slice lies in the shard's own order.
        offset: u64,
    },
    /// Counts over a slice of a held-out split.
    Evaluate {
        /// Which split.
        split: EvaluationSplit,
        /// The shard.
        shard: usize,
        /// Where the slice lies in the shard.
        offset: u64,
    },
}

/// A lease that was given out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Grant {
    /// The nonce it was asked with.
    pub id: u128,
    /// What it is for.
    pub assignment: Assignment,
    /// The positions.
    pub range: Range<u64>,
    /// Positions per contribution.
    pub chunk: u64,
    /// The number of the version to use: at least this one to train, exactly this one to evaluate.
    pub base: u64,
    /// Time between heartbeats.
    pub renew: Millis,
}

/// How a lease ends before it is used up.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Ending<'reason> {
    /// Nobody is to blame.
    Returned,
    /// Its worker is gone or hung.
    Lapsed(&'static str),
    /// Its worker says that it cannot be done.
    Failed(&'reason str),
}

/// A lease that is out.
#[derive(Clone, Debug)]
pub(crate) struct Lease {
    pub(crate) worker: String,
    pub(crate) assignment: Assignment,
    pub(crate) cursor: u64,
    pub(crate) end: u64,
    /// How often the slice failed before.
    pub(crate) failures: u32,
    /// The version it was given out with.
    pub(crate) base: u64,
    pub(crate) next_sequence: u64,
    pub(crate) silence_deadline: Millis,
    pub(crate) progress_deadline: Millis,
    /// When it was given out or last accepted from.
    pub(crate) last_progress: Millis,
}

impl Lease {
    pub(crate) fn range(&self) -> Range<u64> {
        self.cursor..self.end
    }

    pub(crate) fn lapsed(&self, now: Millis) -> Option<&'static str> {
        if now > self.silence_deadline {
            Some("no heartbeat")
        } else if now > self.progress_deadline {
            Some("no progress")
        } else {
            None
        }
    }

    pub(crate) fn deadline(&self) -> Millis {
        self.silence_deadline.min(self.progress_deadline)
    }

    pub(crate) fn renew(&mut self, now: Millis, times: &LeaseTimes) {
        self.silence_deadline = now + times.silence;
    }

    pub(crate) fn trains(&self) -> bool {
        matches!(self.assignment, Assignment::Train { .. })
    }
}
