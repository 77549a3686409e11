//! The control decisions of a run: who works on which samples, what counts, and when the next
//! version is made.
//!
//! Pure: state, event, now and a random nonce go in; a decision and its reason come out. There is
//! no clock, no socket, no file, no random generator and no tensor here; whoever calls keeps the
//! buffers and does the numbers. So the whole of it runs in property tests under dropped,
//! duplicated, reordered and late events (`tests/chaos.rs`).

mod audit;
mod contributing;
mod evaluation;
mod granting;
mod lapsing;
mod lease;
mod ledger;
mod measuring;
mod plan;
pub mod position;
mod round;
mod run;
mod settling;
mod streak;

pub use evaluation::{Counts, EvaluationSplit, Measured};
pub use lease::{Assignment, Grant, Readable, Request, Takes};
pub use ledger::{Gap, Interval, LedgerSnapshot};
pub use plan::{LeaseTimes, Limit, Plan, PlanError, Policy, PolicySettings};
pub use run::{
    Accepted, Contribution, LeaseDecision, Member, Notice, Outcome, Refusal, Run, RunSnapshot,
    Status, Step,
};

/// Milliseconds since some start that only the caller knows.
pub type Millis = u64;
